"""Matrix multiplication on the CPU: tiles of packed panels, with the epilogue in cache (cpp/host/matmul_call.h)."""

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from jaxdnn.device import Target
from jaxdnn.engines.product import Matrix, Product, ProductEngine, Reduced
from jaxdnn.plan import Argument, Constant, Launch, Plan, Scalar, Scratch
from jaxdnn.pointwise import bytecode
from jaxdnn.pointwise.bytecode import register_type
from jaxdnn.pointwise.operations import DTYPES

_FLOATS = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
_STREAMED = ("float64", "float32", "bfloat16", "float16", "int8")  # what is multiplied where it lies
_REDUCTIONS = (None, "sum", "max", "min")

MAX_ARRAYS = 32  # kMaxArrays in cpp/host/matmul_call.h
# What a block's rows, columns and elements along k are padded to at most, on any processor.
_ROW_STEP, _COLUMN_STEP, _DEPTH_STEP = 16, 32, 64
_REDUCE_SPAN = 256  # elements of a reduced result that a task of pointwise_reduce owns


@dataclass(frozen=True)
class _Shape:
    """What suits an instruction set and a dtype: the largest tile, elements along k, what rows are a multiple of."""

    rows: int
    columns: int
    depth: int
    step: int = 1


# A block of a, of `rows` rows, stays in the L2 cache, and a panel of b, of `depth` steps, in L1. With AVX2 the size
# hardly matters: 1024 x 1024 x 1024 in float32 takes 23.5 ms on a Zen 3 core with tiles of 192 x 256, 96 x 128,
# 48 x 256 or 96 x 1024. With AVX-512 and two Zen cores, packed ahead and by the tiles: 11.2 and 12.0 ms with 94 x 256,
# 10.9 and 11.2 with 47 x 512, whose a is packed half as often; with depth 384 1% less, with 192 1% more. Epilogues are
# fastest on rows as long as the interpreter's blocks.
_SHAPES = {
    "avx512": _Shape(192, 512, 256),
    # Dtypes for which the processor may have tiles, whose sums wait in them longer. 1024 x 1024 x 1024 in bfloat16, two
    # cores with AMX: 1.3 ms with depth 1024 and 128 rows, 1.4 with 512, 1.9 with 512 and 256 rows.
    "avx512, narrow": _Shape(128, 256, 1024, step=32),
    "avx2": _Shape(192, 512, 256),
    "baseline": _Shape(96, 512, 256),
}
# Tiles that a large result is to have at least, so that many threads share it evenly; a result must not depend on how
# many there are. Few rows wait for memory, some threads longer than others, and want more: 64 x 4096 x 4096 in float32
# with AVX-512, 16 threads: 2.4 ms with 64, 2.9 with 32; two threads: 11.0 and 11.7 ms.
_ENOUGH_TILES = 32
_ENOUGH_TILES_OF_FEW_ROWS = 64
# Tiles of a thread for which matrices are packed ahead. With fewer, each tile packs what it needs: that is in a cache
# of its own core, and no thread waits for another. 1024 x 1024 x 1024 with AVX-512, packed by the tiles and ahead:
# 16 threads 1.9 and 2.3 ms, 8 threads 3.4 and 3.5, 4 threads 5.4 and 5.2; in bfloat16, 16 threads, 0.65 and 0.95 ms.
_AHEAD_TILES = 8
# With more rows, multiplying panels makes up for packing them.
_STREAM_ROWS = 12
_STREAM_ROWS_INT8 = 4
# Sums of a tile that streams, which stay in the L1 cache. Memory gives long rows of b fastest: of 1 x 4096 x 4096 in
# float32 a Zen 3 core multiplies 128 columns at a time in 4.6 ms, 1024 in 3.5, all in 2.4.
_STREAM_SUMS = 4096
# Multiplications of one task: enough to drown the start of a task.
_TASK_WORK = 2**18


@dataclass(frozen=True)
class HostMatmulConfig:
    """Knobs of the CPU matmul.

    Attributes:
      rows, columns: of the result's tile that is summed and finished in cache.
      depth: elements along k that are packed and multiplied together; a multiple of 64.
      splits: parts of k that are summed apart, by different tasks.
      tiles_per_task: consecutive tiles that one task works on.
      pack_a, pack_b: whether a launch before packs the whole matrix, or each tile its own part.
      streams: whether b is not packed at all but multiplied where it lies, which pays for a few rows.
    """

    rows: int
    columns: int
    depth: int
    splits: int = 1
    tiles_per_task: int = 1
    pack_a: bool = False
    pack_b: bool = False
    streams: bool = False

    def __post_init__(self) -> None:
        for name in ("rows", "columns", "depth", "splits", "tiles_per_task"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"HostMatmulConfig: {name} must be an int of at least 1; got {value!r}")
        if self.depth % _DEPTH_STEP:
            raise ValueError(f"HostMatmulConfig: depth must be a multiple of {_DEPTH_STEP}; got {self.depth}")


class Host(ProductEngine):
    """Panels in registers, tiles in cache, XLA's own threads."""

    name = "host"
    platform = "cpu"
    notes = ("deterministic",)

    def reason(self, product: Product, target: Target) -> str | None:
        del target
        a, b = product.a.dtype, {matrix.dtype for matrix in product.b}
        same = b == {a}
        if not (same and a in ("float64", "int8")) and not {a, *b} <= set(_FLOATS):
            return f"its kernels don't multiply {a} by {' and '.join(sorted(b))}"
        if len(b) > 1:
            return f"its kernels take matrices b of one dtype; these are {' and '.join(sorted(b))}"
        expected = {"float64": "float64", "int8": "int32"}.get(a, "float32")
        if product.accumulator != expected:
            return f"its kernels sum {a} in {expected}; {product.accumulator} is asked for"
        if len(product.operands) + len(product.results) > MAX_ARRAYS:
            return f"the epilogue has more than {MAX_ARRAYS} operands and results"
        if unknown := {array.dtype for array in (*product.operands, *product.results)} - set(DTYPES):
            return f"its epilogues don't have arrays of {' and '.join(sorted(unknown))}"
        return None

    def configurations(self, product: Product, target: Target) -> Iterable[HostMatmulConfig]:
        best = _heuristic(product, target)
        # For less workspace. Only packing depends on how many threads there are, so it goes before the splits.
        unpacked = replace(best, pack_a=False, pack_b=False)
        frugal = (replace(best, pack_b=False), unpacked, replace(unpacked, splits=1))
        return dict.fromkeys((best, *frugal, *_variants(best, product)))

    def build(self, config: HostMatmulConfig, product: Product, target: Target, title: str) -> Plan:
        del target
        call = _Call(config, product)
        return Plan(op=title, unit="", arch="", launches=tuple(call.launches()), scratch=call.scratch)


def streams(product: Product) -> bool:
    """Whether b can be multiplied where it lies: of other dtypes it is converted, which packing does."""
    return {product.a.dtype, product.b[0].dtype} <= set(_STREAMED)


def _copied(product: Product) -> bool:
    """Whether panels of b are copies of rows, which its multiplications make (`packs_multiplying` in matmul_call.h)."""
    return not product.b_transposed and product.b[0].dtype in ("float32", "float64")


def _up(value: int, multiple: int) -> int:
    return math.ceil(value / multiple) * multiple


def _tiles(product: Product, shape: _Shape) -> Iterator[tuple[int, int]]:
    """Rows and columns of tiles, the largest first, cut evenly."""
    if product.m <= shape.rows:
        parts = ((1, 1), (1, 2), (1, 4), (1, 8), (2, 8))
    elif _copied(product):
        # Packing b costs next to nothing, and a is packed for each column of tiles.
        parts = ((1, 1), (2, 1), (4, 1), (4, 2), (4, 4), (4, 8))
    else:
        parts = ((1, 1), (2, 1), (2, 2), (4, 2), (4, 4), (4, 8))
    for rows, columns in parts:
        yield (
            _even(product.m, shape.rows // rows, shape.step),
            _even(product.n, shape.columns // columns, _COLUMN_STEP),
        )


def _even(size: int, most: int, multiple: int) -> int:
    """The length of equal parts of at most `most`, but for their being a multiple."""
    return min(size, _up(math.ceil(size / math.ceil(size / most)), multiple))


def _heuristic(product: Product, target: Target) -> HostMatmulConfig:
    narrow = target.arch == "avx512" and product.a.itemsize < 4
    shape = _SHAPES["avx512, narrow" if narrow else target.arch if target.arch in _SHAPES else "baseline"]

    def count(rows: int, columns: int) -> int:
        return product.batch * math.ceil(product.m / rows) * math.ceil(product.n / columns)

    depth = min(shape.depth, _up(product.k, _DEPTH_STEP))
    work = product.batch * product.m * product.n * product.k * len(product.b)
    few = _STREAM_ROWS_INT8 if product.a.dtype == "int8" else _STREAM_ROWS
    streamed = product.m <= few and streams(product)
    # Where a tile has all rows, b is packed where it is used, and once.
    whole = product.m <= shape.rows and not streamed
    enough = min(_ENOUGH_TILES_OF_FEW_ROWS if whole else _ENOUGH_TILES, max(1, work // _TASK_WORK))
    # Each split leaves sums in memory, for which its part of k must be long.
    splits = max(1, product.k // (depth if streamed else 4 * depth if whole else 8 * depth))
    if streamed and not product.b_transposed:
        columns = max(_STREAM_SUMS // (product.m * len(product.b)), 128)
        rows, columns = product.m, min(columns, product.n)
    else:
        tiles = list(_tiles(product, shape))
        wide = (tile for tile in tiles if count(*tile) >= enough and not whole)
        deep = (tile for tile in tiles if count(*tile) * splits >= (enough if whole else enough // 2))
        rows, columns = next(itertools.chain(wide, deep), tiles[-1])
    found = count(rows, columns)
    splits = max(1, min(splits, enough // found))
    tile_work = rows * columns * math.ceil(product.k / splits) * len(product.b)
    group = max(1, min(_TASK_WORK // tile_work, found))
    many = found > group and not streamed
    ahead = found * splits >= _AHEAD_TILES * target.sm_count
    return HostMatmulConfig(
        rows,
        columns,
        depth,
        splits=splits,
        tiles_per_task=group,
        pack_a=many and columns < product.n and (ahead or whole),
        pack_b=many and rows < product.m and ahead,
        streams=streamed,
    )


def _variants(best: HostMatmulConfig, product: Product) -> Iterator[HostMatmulConfig]:
    """Other configurations, for the autotuner."""
    if not best.streams:
        yield replace(best, pack_a=best.columns < product.n, pack_b=best.rows < product.m)
    for factor in (2, 4):
        yield replace(best, columns=min(best.columns * factor, product.n))
        yield replace(best, rows=max(1, best.rows // factor))
    yield replace(best, depth=min(2 * best.depth, _up(product.k, _DEPTH_STEP)))


@dataclass(frozen=True)
class _Call:
    """One call's launches. The order of the words is that of `CallWords` in cpp/host/matmul_call.h."""

    config: HostMatmulConfig
    product: Product

    @property
    def row_tiles(self) -> int:
        return math.ceil(self.product.m / self.config.rows)

    @property
    def column_tiles(self) -> int:
        return math.ceil(self.product.n / self.config.columns)

    @property
    def blocks(self) -> int:
        return math.ceil(self.product.k / self.config.depth)

    @property
    def splits(self) -> int:
        return min(self.config.splits, self.blocks)

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return (self.product.a, *self.product.b)

    @property
    def streams(self) -> bool:
        return self.config.streams and streams(self.product)

    @property
    def packed(self) -> tuple[bool, ...]:
        flags = (self.config.pack_a, *(self.config.pack_b for _ in self.product.b))
        return tuple(flag and not self.streams for flag in flags)

    @property
    def reduced(self) -> tuple[Reduced, ...]:
        return tuple(result for result in self.product.results if isinstance(result, Reduced))

    def parts(self, result: Reduced) -> tuple[int, int, int]:
        """What tiles leave of a reduced result: along each axis one for each tile, or all that the result keeps."""
        kept = (self.product.batch, self.product.m, self.product.n)
        tiles = (self.product.batch, self.row_tiles, self.column_tiles)
        return tuple(t if axis in result.axes else k for axis, (k, t) in enumerate(zip(kept, tiles, strict=True)))  # type: ignore[return-value]

    def part_type(self, result: Reduced) -> str:
        """What parts of a reduced result are in: the program's own type."""
        output = self.product.program.outputs[self.product.results.index(result)]
        return register_type(self.product.program.instructions[output.value].dtype)

    def pack_blocks(self, index: int) -> int:
        """The blocks of a matrix that a launch packs."""
        if not self.packed[index]:
            return 0
        count = self.product.batch if self.matrices[index].batch_stride else 1
        return count * (self.column_tiles if index else self.row_tiles) * self.blocks

    @property
    def scratch(self) -> tuple[int, ...]:
        """Sizes: packed matrices, then sums of splits, then parts of reduced results."""
        product, sizes = self.product, []
        for index, matrix in enumerate(self.matrices):
            if count := self.pack_blocks(index):
                lines = _up(self.config.columns, _COLUMN_STEP) if index else _up(self.config.rows, _ROW_STEP)
                element = 8 if matrix.dtype == "float64" else 2 if matrix.dtype == "int8" else 4
                sizes.append(count * lines * self.config.depth * element)
        if self.splits > 1:
            sums = self.splits * len(product.b) * product.batch * product.m * product.n
            sizes.append(sums * np.dtype(product.accumulator).itemsize)
        sizes += [math.prod(self.parts(result)) * _size(self.part_type(result)) for result in self.reduced]
        return tuple(sizes)

    def launches(self) -> Iterator[Launch]:
        arguments = self.arguments()
        if blocks := sum(self.pack_blocks(index) for index in range(len(self.matrices))):
            yield Launch("matmul_pack", arguments, (blocks, 1, 1))
        tiles = self.product.batch * self.row_tiles * self.column_tiles
        group = self.config.tiles_per_task
        yield Launch("matmul_multiply", arguments, (math.ceil(tiles * self.splits / group), 1, 1))
        if self.splits > 1:
            yield Launch("matmul_finish", arguments, (math.ceil(tiles / group), 1, 1))
        first = len(self.scratch) - len(self.reduced)
        for index, result in enumerate(self.reduced):
            yield self.reduce(result, Scratch(first + index))

    def arguments(self) -> tuple[Argument, ...]:
        product, config = self.product, self.config
        none = Scalar("int64", 0)
        scratch = iter(Scratch(index) for index in range(len(self.scratch)))
        words = [product.batch, product.m, product.n, product.k, config.rows, config.columns, config.depth]
        words += [self.splits, int(self.streams), config.tiles_per_task]
        words += [len(product.b), len(product.operands), len(product.results)]
        buffers: list[Argument] = []
        for index, matrix in enumerate(self.matrices):
            along = product.b_transposed if index else not product.a_transposed
            strides = (matrix.row_stride, 1) if along else (1, matrix.row_stride)
            words += [DTYPES.index(matrix.dtype), *strides, matrix.batch_stride, int(self.packed[index])]
            buffers += [matrix.buffer, next(scratch) if self.packed[index] else none]
        words += [0] * (5 * (3 - len(self.matrices)))
        buffers.append(next(scratch) if self.splits > 1 else none)
        for operand in product.operands:
            words += [operand.batch_stride, operand.row_stride, operand.column_stride, 0, 0]
            buffers.append(operand.buffer)
        for result in product.results:
            if isinstance(result, Matrix):
                words += [result.batch_stride, result.row_stride, 1, 0, 0]
                buffers.append(result.buffer)
                continue
            sizes, size = self.parts(result), _size(self.part_type(result))
            batch, row, column = sizes[1] * sizes[2], sizes[2], 1
            by_row, by_column = 1 in result.axes, 2 in result.axes
            words += [batch, 0 if by_row else row, 0 if by_column else column]
            words += [row * size if by_row else 0, column * size if by_column else 0]
            buffers.append(next(scratch))
        return (Constant(tuple(words)), Constant(bytecode(product.program)), *buffers)

    def reduce(self, result: Reduced, parts: Scratch) -> Launch:
        """Combines what tiles have left of a result, in the order of the tiles."""
        sizes = self.parts(result)
        strides = (result.batch_stride, result.row_stride, result.column_stride)
        kept = [1 if axis in result.axes else size for axis, size in enumerate(sizes)]
        types = (DTYPES.index(self.part_type(result)), DTYPES.index(result.dtype))
        words = (*types, _REDUCTIONS.index(result.reduction), _REDUCE_SPAN, *sizes, *kept, *strides)
        tasks = math.ceil(math.prod(kept) / _REDUCE_SPAN)
        return Launch("pointwise_reduce", (Constant(words), parts, result.buffer), (tasks, 1, 1))


def _size(dtype: str) -> int:
    return np.dtype(dtype).itemsize
