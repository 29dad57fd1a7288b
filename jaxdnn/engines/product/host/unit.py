"""The launches of a product on the CPU."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from jaxdnn.engines.product.host.knobs import COLUMN_STEP, ROW_STEP, HostKnobs, packed, streams, up
from jaxdnn.engines.product.problem import Matrix, Product, Reduced
from jaxdnn.plan import Argument, Constant, Launch, Scalar, Scratch
from jaxdnn.pointwise import bytecode
from jaxdnn.pointwise.bytecode import register_type
from jaxdnn.pointwise.operations import DTYPES

_REDUCTIONS = (None, "sum", "max", "min")
_PACKING = ("by_tile", "ahead", "multiplying")  # `Packing` in cpp/host/product/call.h
_REDUCE_SPAN = 256  # elements of a reduced result that a task of pointwise_reduce owns


@dataclass(frozen=True)
class Call:
    """One call's launches. The order of the words is that of `CallWords` in cpp/host/product/call.h.

    Attributes:
      groups: of columns, which tiles don't cross.
    """

    config: HostKnobs
    product: Product
    groups: int = 1

    @property
    def row_tiles(self) -> int:
        return math.ceil(self.product.m / self.config.rows)

    @property
    def column_tiles(self) -> int:
        return self.groups * math.ceil(self.product.n // self.groups / self.config.columns)

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
    def plain(self) -> bool:
        """Whether the result is the accumulators, in their own type."""
        program, (result, *others) = self.product.program, self.product.results
        stored = program.instructions[program.outputs[0].value].operation == "accumulator"
        return not others and stored and isinstance(result, Matrix) and result.dtype == program.accumulators[0].dtype

    def packing(self, index: int) -> str:
        """When a matrix is packed."""
        if self.streams:
            return "by_tile"
        if self.config.pack_b if index else self.config.pack_a:
            return "ahead"
        return "multiplying" if index and packed(self.product) else "by_tile"

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
        if self.packing(index) != "ahead":
            return 0
        count = self.product.batch if self.matrices[index].batch_stride else 1
        return count * (self.column_tiles if index else self.row_tiles) * self.blocks

    @property
    def scratch(self) -> tuple[int, ...]:
        """Sizes: packed matrices, then accumulators of splits, then parts of reduced results."""
        product, sizes = self.product, []
        for index, matrix in enumerate(self.matrices):
            if count := self.pack_blocks(index):
                lines = up(self.config.columns, COLUMN_STEP) if index else up(self.config.rows, ROW_STEP)
                element = 8 if matrix.dtype == "float64" else 2 if matrix.dtype == "int8" else 4
                sizes.append(count * lines * self.config.depth * element)
        if self.splits > 1:
            accumulators = self.splits * len(product.b) * product.batch * product.m * product.n
            sizes.append(accumulators * np.dtype(product.accumulator).itemsize)
        sizes += [math.prod(self.parts(result)) * _size(self.part_type(result)) for result in self.product.reduced]
        return tuple(sizes)

    def launches(self) -> Iterator[Launch]:
        arguments = self.arguments()
        if blocks := sum(self.pack_blocks(index) for index in range(len(self.matrices))):
            yield Launch("product_pack", arguments, (blocks, 1, 1))
        tiles = self.product.batch * self.row_tiles * self.column_tiles
        group = self.config.tiles_per_task
        yield Launch("product_multiply", arguments, (math.ceil(tiles * self.splits / group), 1, 1))
        if self.splits > 1:
            yield Launch("product_finish", arguments, (math.ceil(tiles / group), 1, 1))
        first = len(self.scratch) - len(self.product.reduced)
        for index, result in enumerate(self.product.reduced):
            yield self.reduce(result, Scratch(first + index))

    def arguments(self) -> tuple[Argument, ...]:
        product, config = self.product, self.config
        none = Scalar("int64", 0)
        scratch = iter(Scratch(index) for index in range(len(self.scratch)))
        words = [product.batch, product.m, product.n, product.k, self.groups, config.rows, config.columns, config.depth]
        words += [self.splits, int(self.streams), int(self.plain), config.tiles_per_task]
        words += [len(product.b), len(product.operands), len(product.results)]
        buffers: list[Argument] = []
        for index, matrix in enumerate(self.matrices):
            along = product.b_transposed if index else not product.a_transposed
            strides = (matrix.row_stride, 1) if along else (1, matrix.row_stride)
            words += [DTYPES.index(matrix.dtype), *strides, matrix.batch_stride]
            words.append(_PACKING.index(self.packing(index)))
            buffers += [matrix.buffer, next(scratch) if self.pack_blocks(index) else none]
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
