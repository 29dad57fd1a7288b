"""Last tiles of operands whose rows run along K, of which the matrix has only some lines: what is loaded of them
(`EdgeLoad` of cpp/kernels/core/tile.cuh).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from jaxdnn.engines.base import MAX_TENSOR_MAPS
from jaxdnn.engines.product.problem import Matrix, Product
from jaxdnn.engines.product.tma import DEPTH_BYTES, operand_map
from jaxdnn.engines.unit import Constant, Parameter, map_parameter, numbers

GROUP = 8  # lines that TMA swizzles together


@dataclass(frozen=True)
class Edge:
    """Of an operand, a or b.

    Attributes:
      matrices: one of a, or each b.
      lines: that a block loads of its share of a tile, where that is not all there.
      less: lines than of a whole share.
    """

    name: str
    matrices: tuple[Matrix, ...]
    lines: int
    less: int


def edges(product: Product, tile: tuple[int, int], cluster: tuple[int, int], views: int) -> list[Edge]:
    """Of tiles of so many rows and columns, in clusters of so many, the operands whose rows run along K, whether or not
    these end with a tile: kernels do not depend on sizes. None where so many views of each b leave no tensor map.
    """
    found = []
    if len(product.b) * views >= MAX_TENSOR_MAPS - 1:
        return []
    if not product.a_transposed:
        found.append(Edge("a", (product.a,), *_lines(product.m, tile[0], *cluster)))
    if product.b_transposed:
        found.append(Edge("b", product.b, *_lines(product.n, tile[1], *reversed(cluster))))
    return found


def edge_parameters(product: Product, tile: tuple[int, int], cluster: tuple[int, int], views: int) -> list[Parameter]:
    """The maps of their boxes, and how many bytes these are smaller by."""
    found = []
    for edge in edges(product, tile, cluster, views):
        for i, matrix in enumerate(edge.matrices):
            member = f"{edge.name}_edge" + (f"[{i}]" if edge.name == "b" else "")
            boxes = operand_map(matrix, product.batch, False, edge.lines)
            found.append(map_parameter(f"{edge.name}_edge{i}", member, boxes))
        found += numbers("int", **{f"{edge.name}_edge_less": edge.less * DEPTH_BYTES})
    return found


def edge_constants(found: Sequence[Parameter]) -> dict[str, Constant]:
    """What the kernel is compiled with, that has these parameters."""
    names = {parameter.name for parameter in found}
    return {f"Edge{name.upper()}": True for name in ("a", "b") if f"{name}_edge0" in names}


def _lines(rows: int, extent: int, tiles: int, sharers: int) -> tuple[int, int]:
    """Those of a box, and how many less than of a whole one, of tiles of `extent` rows, so many of a cluster, each of
    which `sharers` load: of a share that is there in part what is there, in groups; at least one, which others wait
    for.
    """
    share = extent // sharers
    if rows % (extent * tiles) == 0:
        return share, 0
    lines = max(1, ceil(rows % share / GROUP)) * GROUP
    return lines, share - lines
