"""Knobs of the kernel for any GPU (cpp/kernels/product/simt.cuh), and what a product lets them be."""

import math
from dataclasses import dataclass

from jaxdnn.device import Target
from jaxdnn.engines.base import check_least, check_powers_of_two
from jaxdnn.engines.product.element_epilogue import MAX_GRID
from jaxdnn.engines.product.problem import Matrix, Product

COPY_BYTES = 16  # that one instruction may copy
REALIGNED = 2  # 16-bit elements that rows are aligned to at most, which wait in registers as the chunks they lie in
TRANSPOSED = 4  # elements that one thread transposes together: stages of 8 rows are then free of bank conflicts
HALF = ("bfloat16", "float16")


@dataclass(frozen=True)
class SimtKnobs:
    """How a product is cut into tiles; cpp/kernels/product/simt.cuh draws it.

    Attributes:
      tile_m, tile_n: rows and columns of accumulators of a thread block.
      thread_m, thread_n: rows and columns of accumulators of a thread; of a warp, on tensor cores.
      depth: of K in a stage.
      stages: in flight.
      swizzle: of the rasterization: rows of tiles that are worked through together, for the L2 cache.
      split_k: parts of K that are summed apart, into scratch memory, and added by a second kernel.
      resident: thread blocks that a multiprocessor has registers for.
    """

    tile_m: int = 128
    tile_n: int = 128
    thread_m: int = 8
    thread_n: int = 16
    depth: int = 16
    stages: int = 3
    swizzle: int = 8
    split_k: int = 1
    resident: int = 2

    def __post_init__(self) -> None:
        check_powers_of_two(self, "tile_m", "tile_n", "depth")
        check_least(self, 1, "thread_m", "thread_n", "swizzle", "split_k", "resident")
        check_least(self, 2, "stages")

    def threads(self, unit: "Unit") -> int:
        return unit.lanes * self.tile_m * self.tile_n // (self.thread_m * self.thread_n)


@dataclass(frozen=True)
class Unit:
    """What multiplies.

    Attributes:
      lanes: threads that hold `thread_m` x `thread_n` accumulators together.
      block: rows and columns that those are multiples of.
      warp: how many of them, along rows and columns, a warp holds.
      step: rows of K that are multiplied at once.
      itemsize: bytes of an element of a tile in shared memory.
      padding: elements after each row of a tile.
    """

    lanes: int
    block: tuple[int, int]
    warp: tuple[int, int]
    step: int
    itemsize: int
    padding: int


FMA = Unit(lanes=1, block=(4, 4), warp=(8, 4), step=1, itemsize=4, padding=4)
DOUBLE = Unit(lanes=32, block=(16, 8), warp=(1, 1), step=4, itemsize=8, padding=4)
TENSOR = Unit(lanes=32, block=(16, 16), warp=(1, 1), step=16, itemsize=2, padding=8)


def unit_of(product: Product) -> Unit:
    """What multiplies the product's elements."""
    if product.accumulator == "float64":
        return DOUBLE
    return TENSOR if product.a.dtype in HALF and product.a.dtype == product.b[0].dtype else FMA


def transposes(unit: Unit, along: bool) -> bool:
    """Whether elements are transposed on their way to shared memory (product/simt/tile.cuh)."""
    return unit is FMA and not along


def neighbours(unit: Unit, matrix: Matrix, along: bool) -> int:
    """Neighbours that a thread handles together: of unaligned 16-bit rows as many as of aligned ones."""
    aligned = vector(unit, matrix, along)
    return COPY_BYTES // matrix.itemsize if unit is TENSOR and aligned <= REALIGNED else aligned


def vector(unit: Unit, matrix: Matrix, along: bool) -> int:
    """Neighbours that one copy takes, where all rows are so aligned."""
    most = COPY_BYTES // matrix.itemsize
    if transposes(unit, along):
        most = min(most, TRANSPOSED)
    elif unit is FMA and matrix.itemsize < 4:
        return 1  # converted one by one
    offset = matrix.buffer.offset // matrix.itemsize
    return math.gcd(most, matrix.columns, matrix.row_stride, matrix.batch_stride, offset)


def knobs_reason(product: Product, knobs: SimtKnobs, target: Target) -> str | None:
    """Why the knobs don't fit the product, or None."""
    unit, accumulators = unit_of(product), len(product.b)
    for axis, tile, part, block, across in zip(
        "mn", (knobs.tile_m, knobs.tile_n), (knobs.thread_m, knobs.thread_n), unit.block, unit.warp, strict=True
    ):
        if part % block or tile % (part * across):
            return f"tile_{axis} is {tile} and thread_{axis} {part}; expected multiples of {part * across} and {block}"
    threads = knobs.threads(unit)
    if not 32 <= threads <= 1024:
        return f"a block would have {threads} threads; expected 32 to 1024"
    sides = (
        (product.a, product.a_transposed, knobs.tile_m),
        (product.b[0], not product.b_transposed, knobs.tile_n // accumulators),
    )
    for name, (matrix, along, extent) in zip("ab", sides, strict=True):
        together = neighbours(unit, matrix, along)
        run = (extent if along else knobs.depth) // together
        if run == 0 or threads % run or (extent * knobs.depth) % (threads * together):
            return f"{threads} threads can't share tiles of {extent} x {knobs.depth} of {name} evenly"
    if knobs.depth % (2 * unit.step):
        return f"depth is {knobs.depth}; expected a multiple of {2 * unit.step}"
    if knobs.split_k > math.ceil(product.k / knobs.depth):
        return f"split_k is {knobs.split_k}; k has {math.ceil(product.k / knobs.depth)} parts of {knobs.depth}"
    if blocks(product, knobs) > MAX_GRID:
        return f"it would take {blocks(product, knobs)} thread blocks, and a grid has at most {MAX_GRID}"
    if (needed := shared_memory(product, knobs)) > target.shared_memory:
        return f"it would use {needed} bytes of shared memory, and a block has {target.shared_memory}"
    return None


def blocks(product: Product, knobs: SimtKnobs) -> int:
    """Thread blocks of the grid."""
    rows = math.ceil(product.m / knobs.tile_m)
    columns = math.ceil(product.n * len(product.b) / knobs.tile_n)
    return rows * columns * product.batch * knobs.split_k


def shared_memory(product: Product, knobs: SimtKnobs) -> int:
    """Bytes of shared memory; what the kernel's own `kSharedBytes` says, which the unit asserts."""
    unit, stage = unit_of(product), 0
    for along, extent in ((product.a_transposed, knobs.tile_m), (not product.b_transposed, knobs.tile_n)):
        rows_of_k = along or transposes(unit, along)
        rows, columns = (knobs.depth, extent) if rows_of_k else (extent, knobs.depth)
        stage += rows * (columns + unit.padding)
    pieces = knobs.thread_m if unit is FMA else knobs.thread_m // 8
    piece = knobs.tile_m // pieces * (knobs.tile_n + 4) * (8 if unit is DOUBLE else 4)
    return max(unit.itemsize * knobs.stages * stage, piece)
