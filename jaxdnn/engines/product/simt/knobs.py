"""Knobs of the kernel for any GPU (cpp/kernels/product/simt.cuh), and what a product lets them be."""

import math
from dataclasses import dataclass

from jaxdnn.device import Target
from jaxdnn.engines.base import check_least, check_powers_of_two
from jaxdnn.engines.product.atom import FMA, TENSOR, Atom, Loads, atom_of, shared_memory, tiles_reason, transposes
from jaxdnn.engines.product.element_epilogue import MAX_GRID
from jaxdnn.engines.product.problem import Matrix, Product
from jaxdnn.engines.product.split_k import MAX_GRID_YZ

COPY_BYTES = 16  # that one instruction may copy
REALIGNED = 2  # 16-bit elements that rows are aligned to at most, which wait in registers as the chunks they lie in
FEW_ELEMENTS = 8  # accumulators of a lane; `kFewElements` in product/simt/epilogue.cuh
TRANSPOSED = 4  # elements that one thread transposes together: stages of 8 rows are then free of bank conflicts


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
      slice_k: parts of a stage, each of which is multiplied by warps of its own, on tensor cores.
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
    slice_k: int = 1
    resident: int = 2

    def __post_init__(self) -> None:
        check_powers_of_two(self, "tile_m", "tile_n", "depth", "slice_k")
        check_least(self, 1, "thread_m", "thread_n", "swizzle", "split_k", "resident")
        check_least(self, 2, "stages")


def product_atom(product: Product) -> Atom:
    """What multiplies the product's elements."""
    return atom_of(product.accumulator, product.a.dtype, product.b[0].dtype)


def runs_of(product: Product) -> tuple[bool, bool]:
    """Whether memory runs along M in a, and along N in b."""
    return product.a_transposed, not product.b_transposed


def neighbours(atom: Atom, matrix: Matrix, along: bool) -> int:
    """Neighbours that a thread handles together: of unaligned 16-bit rows as many as of aligned ones."""
    aligned = vector(atom, matrix, along)
    return COPY_BYTES // matrix.itemsize if atom is TENSOR and aligned <= REALIGNED else aligned


def vector(atom: Atom, matrix: Matrix, along: bool) -> int:
    """Neighbours that one copy takes, where all rows are so aligned."""
    most = COPY_BYTES // matrix.itemsize
    if transposes(atom, along):
        most = min(most, TRANSPOSED)
    elif atom is FMA and matrix.itemsize < 4:
        return 1  # converted one by one
    offset = matrix.buffer.offset // matrix.itemsize
    return math.gcd(most, matrix.columns, matrix.row_stride, matrix.batch_stride, offset)


def knobs_reason(product: Product, knobs: SimtKnobs, target: Target) -> str | None:
    """Why the knobs don't fit the product, or None."""
    atom = product_atom(product)
    loads = [
        Loads(extent, runs, neighbours(atom, matrix, runs))
        for matrix, runs, extent in zip(
            (product.a, product.b[0]), runs_of(product), (knobs.tile_m, knobs.tile_n // len(product.b)), strict=True
        )
    ]
    if reason := tiles_reason(atom, knobs, loads, knobs.slice_k):
        return reason
    if knobs.slice_k > 1 and not (few_elements(product, knobs) and knobs.slice_k <= FEW_ELEMENTS // len(product.b)):
        few = f"few accumulators a lane of tensor cores, and at most {FEW_ELEMENTS // len(product.b)}"
        return f"slice_k is {knobs.slice_k}; expected 1, or {few}"
    if knobs.depth % (2 * atom.step * knobs.slice_k):
        return f"depth is {knobs.depth}; expected a multiple of {2 * atom.step * knobs.slice_k}"
    if knobs.split_k > math.ceil(product.k / knobs.depth):
        return f"split_k is {knobs.split_k}; k has {math.ceil(product.k / knobs.depth)} parts of {knobs.depth}"
    if blocks(product, knobs) > MAX_GRID:
        return f"it would take {blocks(product, knobs)} thread blocks, and a grid has at most {MAX_GRID}"
    if (needed := shared_bytes(product, knobs)) > target.shared_memory:
        return f"it would use {needed} bytes of shared memory, and a block has {target.shared_memory}"
    return None


def blocks(product: Product, knobs: SimtKnobs) -> int:
    """Thread blocks of the grid."""
    return math.prod(_tiles(product, knobs))


def grid_of(product: Product, knobs: SimtKnobs) -> tuple[int, tuple[int, int, int]]:
    """The dimensions of the grid, and the grid: that of few accumulators a lane is as tiles lie, if there is room;
    others are in the order of core/scheduler.cuh.
    """
    rows, columns, matrices = _tiles(product, knobs)
    if not few_elements(product, knobs) or max(columns, matrices) > MAX_GRID_YZ:
        return 1, (rows * columns * matrices, 1, 1)
    return 2 if matrices == 1 else 3, (rows, columns, matrices)


def few_elements(product: Product, knobs: SimtKnobs) -> bool:
    """Whether a lane of tensor cores has so few accumulators that the epilogue is applied to all of them at once."""
    return product_atom(product) is TENSOR and knobs.thread_m * knobs.thread_n <= 32 * FEW_ELEMENTS


def _tiles(product: Product, knobs: SimtKnobs) -> tuple[int, int, int]:
    """Tiles along rows and columns, and matrices: each split of K is one."""
    rows = math.ceil(product.m / knobs.tile_m)
    columns = math.ceil(product.n * len(product.b) / knobs.tile_n)
    return rows, columns, product.batch * knobs.split_k


def shared_bytes(product: Product, knobs: SimtKnobs) -> int:
    """Bytes of shared memory of a thread block."""
    return shared_memory(product_atom(product), knobs, runs_of(product), knobs.stages)
