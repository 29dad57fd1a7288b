"""What an epilogue reduces, on its way through scratch memory: warps leave parts of it there
(cpp/kernels/core/epilogue_reductions.cuh), and another kernel ends it (cpp/kernels/product/reduce.cuh).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from jaxdnn.engines.product.element_epilogue import ctype
from jaxdnn.engines.product.problem import Product, Reduced
from jaxdnn.engines.product.reduce import reduce_together, reduction
from jaxdnn.engines.unit import Stage, joined
from jaxdnn.plan import Scratch
from jaxdnn.pointwise.operations import kind

PARTIAL_BYTES = 4  # of each value, whatever its type


def reduced_type(register: str) -> str:
    """The C++ type that values which a register of this type holds are reduced in."""
    if register == "float":
        return "float"
    return "int32" if kind(register) == "i" else "uint32"


def reduced_text(result: Reduced, register: str) -> str:
    """The C++ type that stands for a result that is reduced."""
    over = ", ".join(str(axis in result.axes).lower() for axis in (1, 2))
    return f"Reduced<Reduction::{result.reduction}, {register}, {over}>"


def reduced_axis(product: Product) -> int | None:
    """Over which of the rows, 1, and the columns, 2, results are reduced, if all that are reduced are so over one."""
    axes = {axis for result in product.reduced for axis in result.axes if axis > 0}
    return axes.pop() if len(axes) == 1 else None


@dataclass(frozen=True)
class Reductions:
    """The partial reductions that a product's kernel leaves.

    Attributes:
      warp_rows, tile_n: rows that a warp works on at once, and columns of a tile.
      warps: that multiply, of the whole grid.
      straight: whether rows of tiles are those of the results, one after the other.
      blocks: of those that have the same columns of the result, or rows if columns are reduced, where each one's tiles
        are all of the same; or 0.
    """

    product: Product
    warp_rows: int
    tile_n: int
    warps: int
    straight: bool
    blocks: int = 0

    @property
    def own_lines(self) -> bool:
        """Whether each warp, or each block, has a line of its own of what is reduced: where tiles would leave more, or
        their rows are no neighbours.
        """
        over_rows = any(1 in result.axes for result in self.product.reduced)
        lines, parts = self.blocks or self.warps, self._row_parts if over_rows else self._column_parts
        return (over_rows or self.blocks > 0) and (not self.straight or lines < parts)

    @property
    def block_lines(self) -> bool:
        """Whether a line is a block's."""
        return self.own_lines and self.blocks > 0

    @property
    def _row_parts(self) -> int:
        return ceil(self.product.m / self.warp_rows)

    @property
    def _column_parts(self) -> int:
        return ceil(self.product.n / self.tile_n)

    def extents(self, result: Reduced) -> tuple[int, int, int]:
        """Those of a result, as an array of [outer, parts, kept]."""
        product = self.product
        rows, columns = (axis in result.axes for axis in (1, 2))
        kept = 1 if rows and columns else product.n if rows else product.m
        parts = (self._row_parts if rows else 1) * (self._column_parts if columns else 1)
        if self.block_lines:
            parts = self.blocks
        elif rows and self.own_lines:
            parts = self.warps
        return (1, product.batch * parts, kept) if 0 in result.axes else (product.batch, parts, kept)

    def end(self, partials: Mapping[int, tuple[str, Scratch]]) -> Stage:
        """The launches that end the reductions of these results, one for all that are alike. Of each there are the type
        of its partial reductions, and where they are.
        """
        alike: dict[tuple[str, str, tuple[int, int, int]], list[tuple[int, Reduced]]] = {}
        for i, (register, _) in partials.items():
            result = self.product.results[i]
            assert isinstance(result, Reduced)
            key = reduction(result, ctype(register)), ctype(result.dtype), self.extents(result)
            alike.setdefault(key, []).append((i, result))
        return joined(
            [
                reduce_together(of, [(partials[i][1], one.buffer) for i, one in found], to, extents, found[0][0])
                for (of, to, extents), found in alike.items()
            ]
        )
