"""matmul with few rows (or few columns) on Hopper, at the speed at which memory delivers the larger operand.

The kernel is cpp/kernels/matmul_skinny.cuh.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from jaxdnn.device import Target
from jaxdnn.engines.element_epilogue import (
    MAX_GRID,
    ElementEpilogue,
    Stage,
    ctype,
    element_epilogue,
    joined,
    reductions_reason,
)
from jaxdnn.engines.entry import Parameter, arguments, entry_text, map_parameter, numbers, struct_text
from jaxdnn.engines.product import Matrix, Product, ProductEngine, arguments_reason
from jaxdnn.plan import Launch, Plan, TensorMap
from jaxdnn.pointwise.cuda import register_type

DEPTH_BYTES = 128  # of K in a stage
CHUNK = 64  # elements of a row that runs along M or N, in one box
LARGEST_SIZE = 2**31 - 1024  # of a dimension, which the copy engine indexes with 32 bits
NARROW_WIDTHS = (8, 16, 32, 64)  # columns of a multiply that core/wgmma_narrow.cuh has
# Of matrices that are left to sm90, if there are many: 4096 of 128 x 64 x 128 took 77 us, and 67 there.
SMALL_ROWS = 128
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
MULTIPLIES = {("bfloat16", "bfloat16"), ("float16", "float16"), ("float32", "float32"), ("int8", "int8")} | {
    (a, b) for a in FLOAT8 for b in FLOAT8
}

# Values of CUtensorMapDataType, CUtensorMapSwizzle and CUtensorMapL2promotion.
_MAP_DTYPE = {"float16": 6, "bfloat16": 9, "float32": 11}  # float32 as tf32; bytes else
_BYTE = 0
_SWIZZLE_128 = 3
_PROMOTE_128 = 2  # 57.0 against 59.4 us with 256 bytes, at 16 x 28672 x 4096


@dataclass(frozen=True)
class SkinnyKnobs:
    """How a product is cut into tiles; cpp/kernels/matmul_skinny.cuh draws it.

    Attributes:
      tile: rows of the wide operand of a thread block (of each, where there are two).
      stages: parts of K in flight, 128 bytes of each row.
      split_k: parts of K, each a block of a cluster.
    """

    tile: int = 128
    stages: int = 5
    split_k: int = 1

    def __post_init__(self) -> None:
        if self.tile not in (64, 128, 256):
            raise ValueError(f"skinny matmul: tile is {self.tile}; expected 64, 128 or 256")
        if self.stages < 2:
            raise ValueError(f"skinny matmul: stages is {self.stages}; expected at least 2")
        if self.split_k not in (1, 2, 4, 8):
            raise ValueError(f"skinny matmul: split_k is {self.split_k}; expected 1, 2, 4 or 8")


@dataclass(frozen=True)
class SkinnyProduct:
    """A product with its operands by their roles.

    Attributes:
      wide, narrow: the operands; `wide` has two where there are two sums.
      rows, columns: of wide and of narrow, along M or N.
      width: columns of a multiply.
      along_wide, along_narrow: whether memory runs along M or N, and not along K.
      swapped: whether b is the narrow one.
    """

    product: Product
    wide: tuple[Matrix, ...]
    narrow: Matrix
    rows: int
    columns: int
    along_wide: bool
    along_narrow: bool
    swapped: bool

    @property
    def depth(self) -> int:
        """Elements of K in a stage."""
        return DEPTH_BYTES // self.narrow.itemsize

    @property
    def width(self) -> int:
        if self.along_narrow:
            return CHUNK
        return next(width for width in NARROW_WIDTHS if width >= self.columns)

    def stage_bytes(self, knobs: SkinnyKnobs) -> int:
        return DEPTH_BYTES * (knobs.tile * len(self.wide) + self.width)

    def shared_memory(self, knobs: SkinnyKnobs) -> int:
        """Bytes of shared memory; what the kernel's own `kSharedBytes` says, which the unit asserts."""
        sums = self.width * (knobs.tile * len(self.wide) + 4) * 4
        return max(knobs.stages * self.stage_bytes(knobs), math.ceil(sums / 1024) * 1024) + knobs.stages * 16

    def threads(self, knobs: SkinnyKnobs) -> int:
        """A warp group for each 64 rows, and a warp that copies."""
        return 2 * knobs.tile * len(self.wide) + 32

    def tiles(self, knobs: SkinnyKnobs) -> int:
        return math.ceil(self.rows / knobs.tile)


def skinny(product: Product) -> SkinnyProduct | str:
    """The product by roles, or why none of its operands is narrow."""
    most = NARROW_WIDTHS[-1]
    if product.m <= most:
        return SkinnyProduct(
            product, product.b, product.a, product.n, product.m, not product.b_transposed, product.a_transposed, False
        )
    if product.n > most:
        return f"it serves at most {most} rows or columns, and the product has {product.m} x {product.n}"
    if len(product.b) != 1:
        return f"it serves two sums of at most {most} rows, and the product has {product.m}"
    return SkinnyProduct(
        product, (product.a,), product.b[0], product.m, product.n, product.a_transposed, not product.b_transposed, True
    )


def tma_reason(matrix: Matrix, name: str) -> str | None:
    """Why the copy engine can't read it, or None."""
    if matrix.buffer.offset % 16:
        return f"{name} starts at byte {matrix.buffer.offset} of its buffer, and TMA needs a multiple of 16"
    for kind, stride in (("row", matrix.row_stride), ("batch", matrix.batch_stride)):
        size = stride * matrix.itemsize
        if size % 16 or size >= 2**40:
            return f"the {kind} stride of {name} is {size} bytes, and TMA needs a multiple of 16 below 2^40"
    return None


class Skinny(ProductEngine):
    """Products with at most 64 rows (or columns): the larger operand streams through the tensor cores once."""

    name = "skinny"
    platform = "cuda"
    notes = ("tensor cores", "deterministic")

    def reason(self, product: Product, target: Target) -> str | None:
        if target.compute_capability != 90:
            return f"it needs Hopper's tensor cores (sm_90), and {target.name} is {target.arch}"
        pair = (product.a.dtype, product.b[0].dtype)
        if pair not in MULTIPLIES or product.accumulator not in ("float32", "int32"):
            return f"Hopper's tensor cores don't multiply {pair[0]} by {pair[1]} into {product.accumulator}"
        if pair[0] == "float32" and product.precision != "default":
            return "Hopper's tensor cores round float32 operands to tf32, and the precision is above the default"
        one = skinny(product)
        if isinstance(one, str):
            return one
        small = one.rows <= SMALL_ROWS and one.columns > NARROW_WIDTHS[-2]
        if small and product.batch >= target.sm_count:
            return f"{product.batch} matrices of one tile each take less time in blocks that work through many"
        if product.a.itemsize != 2 and (one.along_wide or one.along_narrow):
            return f"Hopper's tensor cores want the rows of {product.a.dtype} operands to run along k"
        if max(product.m, product.n, product.k, product.batch) >= LARGEST_SIZE:
            return "a dimension is longer than its 32-bit index"
        for name, matrices in (("a", (product.a,)), ("b", product.b)):
            for matrix in matrices:
                if reason := tma_reason(matrix, name):
                    return reason
        if reason := arguments_reason(product.operands, product.results) or reductions_reason(product):
            return reason
        if not any(True for _ in self.configurations(product, target)):
            return "it has no configuration of as few thread blocks as a grid may have"
        return None

    def configurations(self, product: Product, target: Target) -> Iterable[SkinnyKnobs]:
        one = skinny(product)
        assert not isinstance(one, str), "the product is served"
        return candidates(one, target)

    def build(self, config: SkinnyKnobs, product: Product, target: Target, title: str) -> Plan:  # noqa: ARG002
        one = skinny(product)
        assert not isinstance(one, str), "the product is served"
        epilogue, after = element_epilogue(product, 0)
        plan = joined([_multiply(one, config, epilogue), after])
        unit = "".join(f'#include "{header}"\n' for header in plan.headers) + plan.text
        return Plan(title, unit, "sm_90a", plan.launches, plan.scratch)


def knobs_reason(one: SkinnyProduct, knobs: SkinnyKnobs, target: Target) -> str | None:
    """Why the knobs don't fit the product, or None."""
    width = knobs.tile * len(one.wide)
    if width > 256:
        return f"a block would multiply {width} rows; expected at most 256"
    if knobs.split_k > math.ceil(one.product.k / one.depth):
        return f"split_k is {knobs.split_k}; k has {math.ceil(one.product.k / one.depth)} parts of {one.depth}"
    blocks = one.tiles(knobs) * one.product.batch * knobs.split_k
    if blocks > MAX_GRID:
        return f"it would take {blocks} thread blocks, and a grid has at most {MAX_GRID}"
    if (needed := one.shared_memory(knobs)) > target.shared_memory:
        return f"it would use {needed} bytes of shared memory, and a block has {target.shared_memory}"
    return None


def _tensor_map(matrix: Matrix, batch: int, box: tuple[int, int]) -> TensorMap:
    batched = matrix.batch_stride != 0 and batch > 1
    row = matrix.row_stride * matrix.itemsize
    return TensorMap(
        buffer=matrix.buffer,
        dtype=_MAP_DTYPE.get(matrix.dtype, _BYTE),
        dimensions=(matrix.columns, matrix.rows, batch if batched else 1),
        strides=(row, matrix.batch_stride * matrix.itemsize if batched else row * matrix.rows),
        box=(*box, 1),
        element_strides=(1, 1, 1),
        swizzle=_SWIZZLE_128,
        l2_promotion=_PROMOTE_128,
    )


def _multiply(one: SkinnyProduct, knobs: SkinnyKnobs, epilogue: ElementEpilogue) -> Stage:
    product = one.product
    types = {
        **epilogue.types(),
        "Wide": ctype(one.wide[0].dtype),
        "Narrow": ctype(one.narrow.dtype),
        "Sum": ctype(register_type(product.accumulator)),
    }
    constants = {
        "AlongWide": one.along_wide,
        "AlongNarrow": one.along_narrow,
        "Swapped": one.swapped,
        "Sums": len(one.wide),
        "Tile": knobs.tile,
        "Narrow": one.width,
        "Stages": knobs.stages,
        "Splits": knobs.split_k,
        "Once": product.batch == 1 or one.wide[0].batch_stride != 0,
    }

    def parameter(name: str, field: str, matrix: Matrix, along: bool, extent: int) -> Parameter:
        box = (CHUNK, one.depth) if along else (one.depth, extent)
        return map_parameter(name, field, _tensor_map(matrix, product.batch, box))

    found = [
        parameter(f"wide{i}", f"wide[{i}]", matrix, one.along_wide, knobs.tile) for i, matrix in enumerate(one.wide)
    ]
    found.append(parameter("narrow", "narrow", one.narrow, one.along_narrow, one.width))
    found += epilogue.parameters()
    found += numbers(rows=one.rows, columns=one.columns, k=product.k, tiles=one.tiles(knobs))
    if product.batch > 1:
        wide, narrow = (int(matrix.batch_stride != 0) for matrix in (one.wide[0], one.narrow))
        found += numbers(wide_batched=wide, narrow_batched=narrow)
    call, needed = "jaxdnn::MatmulSkinny<Config>", one.shared_memory(knobs)
    text = (
        f"\n{epilogue.text()}\n{struct_text('Config', types, constants)}\n"
        f"static_assert({call}::kSharedBytes == {needed}, "
        '"the plan and the kernel disagree about shared memory");\n\n'
        + entry_text("matmul_skinny", call, str(one.threads(knobs)), found)
    )
    launch = Launch(
        "matmul_skinny",
        arguments(found),
        (one.tiles(knobs) * product.batch * knobs.split_k, 1, 1),
        (one.threads(knobs), 1, 1),
        (knobs.split_k, 1, 1),
        needed,
    )
    return Stage(("matmul_skinny.cuh",), text, (launch,))


# ---- Heuristic -------------------------------------------------------------------------------------------------------

# All numbers were measured on an H200: bfloat16, 1 to 64 rows, b of 4096 x 1024 to 4096 x 28672 and 14336 x 4096.
BANDWIDTH = 4.3e12  # bytes a second where a target's is not known
L2_BANDWIDTH = 8e12  # bytes a second from the L2 cache to the multiprocessors
SM_BANDWIDTH = 110e9  # of which one multiprocessor takes at most so many
MEMORY_BANDWIDTH = 66e9  # bytes a second from memory to one multiprocessor: 64 of them had all there is
IN_FLIGHT = 4.3e6  # bytes that must have been asked for at any time, or bandwidth falls in proportion
# With more than this for each multiprocessor, neighbours in memory are fetched too far apart: 57.0 us with 90 KiB, 57.8
# with 120 KiB, at 16 x 28672 x 4096.
MOST_IN_FLIGHT = 92 * 1024
START = 2.3e-6  # seconds before the first bytes, and after the last
EXCHANGE = {1: 0.0, 2: 0.3e-6, 4: 1.0e-6, 8: 1.3e-6}  # seconds that a cluster takes to meet, with 16 columns
TOGETHER = 4  # elements of a thread that are finished together
FINISH = {False: 0.1e-6, True: 0.6e-6}  # seconds that they take, without and with sums of other blocks


def candidates(one: SkinnyProduct, target: Target) -> Iterator[SkinnyKnobs]:
    """Knobs that work for the product, by the time that is expected of them."""
    found: dict[SkinnyKnobs, float] = {}
    for tile in (128, 256, 64):
        for split in (1, 2, 4, 8):
            knobs = SkinnyKnobs(tile, 2, split)
            blocks = one.tiles(knobs) * one.product.batch * split
            parts = math.ceil(math.ceil(one.product.k / one.depth) / split)
            if blocks < target.sm_count:
                each = tile * len(one.wide) * DEPTH_BYTES
            else:
                each = one.stage_bytes(knobs) * blocks / target.sm_count
            stages = max(3, min(round(MOST_IN_FLIGHT / each), 12))
            knobs = SkinnyKnobs(tile, max(2, min(stages, parts)), split)
            if knobs_reason(one, knobs, target) is None:
                found[knobs] = seconds(one, knobs, target)
    return iter(sorted(found, key=found.__getitem__))


def seconds(one: SkinnyProduct, knobs: SkinnyKnobs, target: Target) -> float:
    """An estimate of the time, for comparing knobs with each other."""
    rows = knobs.tile * len(one.wide)
    blocks = one.tiles(knobs) * one.product.batch * knobs.split_k
    resident = min(target.shared_memory // one.shared_memory(knobs), math.ceil(blocks / target.sm_count))
    at_once = min(blocks, resident * target.sm_count)
    of_block = math.ceil(one.product.k / knobs.split_k) * one.narrow.itemsize * rows
    wide, both = of_block * at_once, of_block * at_once * (rows + one.width) / rows
    share = min(1.0, at_once * knobs.stages * rows * DEPTH_BYTES / IN_FLIGHT)
    busy = min(at_once, target.sm_count)
    from_memory = wide / min((target.bandwidth or BANDWIDTH) * share, busy * MEMORY_BANDWIDTH)
    from_cache = both / min(L2_BANDWIDTH, busy * SM_BANDWIDTH)
    finished = one.columns * knobs.tile / (knobs.split_k * 2 * rows * TOGETHER)
    rounds = math.ceil(blocks / at_once)
    return (
        START
        + rounds * max(from_memory, from_cache)
        + EXCHANGE[knobs.split_k] * max(1.0, one.columns / 16)
        + FINISH[knobs.split_k > 1] * math.ceil(finished)
    )
