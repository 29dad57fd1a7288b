"""Knobs of the skinny kernel (cpp/kernels/product/skinny.cuh), and what a product lets them be."""

import math
from dataclasses import dataclass

from jaxdnn.device import Target
from jaxdnn.engines.base import check_least
from jaxdnn.engines.product.element_epilogue import MAX_GRID
from jaxdnn.engines.product.problem import Matrix, Product
from jaxdnn.engines.product.tma import CHUNK, DEPTH_BYTES, stage_depth

STATIONARY_WIDTHS = (8, 16, 32, 64)  # columns of a multiply that ptx/wgmma.cuh has


@dataclass(frozen=True)
class SkinnyKnobs:
    """How a product is cut into tiles; cpp/kernels/product/skinny.cuh draws it.

    Attributes:
      tile: rows of the streamed operand of a thread block (of each, where there are two).
      stages: parts of K in flight, 128 bytes of each row.
      split_k: splits of K, each a block of a cluster.
    """

    tile: int = 128
    stages: int = 5
    split_k: int = 1

    def __post_init__(self) -> None:
        if self.tile not in (64, 128, 256):
            raise ValueError(f"SkinnyKnobs: tile must be 64, 128 or 256; got {self.tile}")
        check_least(self, 2, "stages")
        if self.split_k not in (1, 2, 4, 8):
            raise ValueError(f"SkinnyKnobs: split_k must be 1, 2, 4 or 8; got {self.split_k}")


@dataclass(frozen=True)
class SkinnyProduct:
    """A product with its operands by their roles.

    Attributes:
      streamed, stationary: the operands; `streamed` has two where there are two accumulators.
      rows, columns: of streamed and of stationary, along M or N.
      width: columns of a multiply.
      streamed_mn_major, stationary_mn_major: whether memory runs along M or N, and not along K.
      swapped: whether b is the stationary one.
    """

    product: Product
    streamed: tuple[Matrix, ...]
    stationary: Matrix
    rows: int
    columns: int
    streamed_mn_major: bool
    stationary_mn_major: bool
    swapped: bool

    @property
    def depth(self) -> int:
        """Elements of K in a stage."""
        return stage_depth(self.stationary)

    @property
    def width(self) -> int:
        if self.stationary_mn_major:
            return CHUNK
        return next(width for width in STATIONARY_WIDTHS if width >= self.columns)

    def stage_bytes(self, knobs: SkinnyKnobs) -> int:
        return DEPTH_BYTES * (knobs.tile * len(self.streamed) + self.width)

    def shared_memory(self, knobs: SkinnyKnobs) -> int:
        """Bytes of shared memory; what the kernel's own `kSharedBytes` says, which the unit asserts."""
        accumulators = self.width * (knobs.tile * len(self.streamed) + 4) * 4
        return max(knobs.stages * self.stage_bytes(knobs), math.ceil(accumulators / 1024) * 1024) + knobs.stages * 16

    def threads(self, knobs: SkinnyKnobs) -> int:
        """A warp group for each 64 rows, and a warp that copies."""
        return 2 * knobs.tile * len(self.streamed) + 32

    def tiles(self, knobs: SkinnyKnobs) -> int:
        return math.ceil(self.rows / knobs.tile)


def skinny(product: Product) -> SkinnyProduct | str:
    """The product by roles, or why none of its operands has few rows."""
    most = STATIONARY_WIDTHS[-1]
    if product.m <= most:
        return SkinnyProduct(
            product, product.b, product.a, product.n, product.m, not product.b_transposed, product.a_transposed, False
        )
    if product.n > most:
        return f"it serves at most {most} rows or columns, and the product has {product.m} x {product.n}"
    if len(product.b) != 1:
        return f"it serves two accumulators of at most {most} rows, and the product has {product.m}"
    return SkinnyProduct(
        product, (product.a,), product.b[0], product.m, product.n, product.a_transposed, not product.b_transposed, True
    )


def knobs_reason(one: SkinnyProduct, knobs: SkinnyKnobs, target: Target) -> str | None:
    """Why the knobs don't fit the product, or None."""
    width = knobs.tile * len(one.streamed)
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
