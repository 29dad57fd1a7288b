"""A matrix b whose rows run along N, as far apart as TMA refuses, loaded as it lies (cpp/kernels/core/views.cuh)."""

from dataclasses import replace
from math import ceil, gcd

from jaxdnn.engines.product.problem import Matrix, Product
from jaxdnn.engines.product.tma import operand_map, stage_depth
from jaxdnn.plan import TensorMap

OVERLAP = 8  # columns of a tile that are the next one's, too
# Seconds that an element of the accumulators takes on its way through so many views: an exchange of lanes is one a
# clock for 32 of them, and of eight views seven exchange one half.
MOVE = {1: 0.0, 2: 1 / 32 / 1.7e9, 4: 3 / 32 / 1.7e9, 8: 3.5 / 32 / 1.7e9}


def row_views(product: Product) -> int:
    """How many views there are of each matrix b whose rows are as far apart as TMA refuses; 1 where there is no need of
    them, or no way.
    """
    distances = {matrix.row_stride * matrix.itemsize for matrix in product.b}
    distance = max(distances)
    views = 16 // gcd(16, distance)
    if views == 1 or len({one % 16 for one in distances}) > 1 or distance * views >= 2**40:
        return 1
    if product.a_transposed or product.b_transposed or product.a.itemsize != 2 or product.k < views:
        return 1
    if any(b.buffer.offset % 16 or b.batch_stride * b.itemsize % 16 for b in product.b):
        return 1
    return views


def view_k(product: Product, views: int) -> int:
    """K, of so many views in whole stages."""
    depth = stage_depth(product.a)
    return product.k if views == 1 else views * ceil(ceil(product.k / views) / depth) * depth


def view_step(matrix: Matrix, views: int) -> int:
    """From a view's first row to that of the next one that is less far to the right (cpp/kernels/core/views.cuh): what
    is that many times the distance of rows is a view's distance, modulo 16 bytes.
    """
    return matrix.row_stride * matrix.itemsize % 16 * views // 16  # odd, and so its own inverse modulo 2, 4 and 8


def view_maps(matrix: Matrix, batch: int, views: int, extent: int, *, sharers: int = 1) -> list[TensorMap]:
    """The maps of an operand's views, the one farthest to the right first; of tiles as `operand_map` has."""
    maps = []
    for view in range(views):
        first = (views - 1 - view) * view_step(matrix, views) % views
        byte = first * matrix.row_stride * matrix.itemsize
        rows = ceil((matrix.rows - first) / views)
        columns = matrix.columns + byte % 16 // matrix.itemsize
        buffer = replace(matrix.buffer, offset=matrix.buffer.offset + byte - byte % 16)
        one = replace(matrix, buffer=buffer, rows=rows, columns=columns, row_stride=matrix.row_stride * views)
        maps.append(operand_map(one, batch, True, extent, sharers=sharers))
    return maps
