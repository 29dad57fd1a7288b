"""The grid of the kernel for Hopper's tensor cores: how many tiles clusters have, and which columns each keeps to."""

from math import ceil

from jaxdnn.device import fewest_clusters
from jaxdnn.engines.product.problem import Product
from jaxdnn.engines.product.reductions import PARTIAL_BYTES, reduced_axis
from jaxdnn.engines.product.sm90.knobs import Sm90Knobs, epilogue_bytes

FEW = 4  # columns, or rows, of tiles of which each block keeps to one that it has sums of


def cluster_tiles(product: Product, knobs: Sm90Knobs) -> int:
    """Clusters' tiles of one matrix."""
    return row_tiles(product, knobs) * column_tiles(product, knobs)


def row_tiles(product: Product, knobs: Sm90Knobs) -> int:
    """Likewise those below each other."""
    return ceil(product.m / (knobs.tile_m * knobs.cluster_m))


def column_tiles(product: Product, knobs: Sm90Knobs) -> int:
    """Likewise those side by side."""
    return ceil(product.n / (knobs.columns * knobs.cluster_n))


def summed_columns(product: Product, knobs: Sm90Knobs) -> int:
    """How many clusters' tiles lie side by side, if each cluster keeps to one of these columns, of which it has sums;
    or 1. Of many columns, tiles that are worked through together would share too little.
    """
    columns = column_tiles(product, knobs)
    summed = knobs.split_k == 1 and any(1 in result.axes for result in product.reduced)
    return columns if summed and columns <= FEW else 1


def summed_rows(product: Product, knobs: Sm90Knobs) -> int:
    """Likewise below each other, if each cluster keeps to one of these rows."""
    rows = row_tiles(product, knobs)
    summed = knobs.split_k == product.batch == 1 and reduced_axis(product) == 2
    return rows if summed and rows <= FEW else 1


def kept_tiles(product: Product, knobs: Sm90Knobs, tiles: int, sm_count: int) -> int:
    """Of how many columns, or rows, of so many tiles of clusters each one keeps to one: 1 if that would take more
    rounds. Where columns of b stay, each one keeps to these.
    """
    if knobs.stationary:
        return column_tiles(product, knobs)
    columns = summed_columns(product, knobs) if knobs.swizzle == 1 else 1
    rows = summed_rows(product, knobs)
    kept = max(columns, rows if knobs.swizzle >= rows else 1)
    cluster = knobs.cluster_m * knobs.cluster_n
    rounds, more = (ceil(tiles / fewest_clusters(tiles, cluster, sm_count, count)) for count in (1, kept))
    return kept if more <= rounds else 1


def lines_of_blocks(product: Product, knobs: Sm90Knobs, blocks: int, kept: int) -> int:
    """How many blocks of the grid have the same columns of the result, or rows if columns are reduced, where each one's
    tiles are all of the same, and its warps can meet in the shared memory that they store results from; or 0. `kept`
    says of how many columns, or rows, of tiles each cluster keeps to one.
    """
    axis = reduced_axis(product)
    if axis is None or product.batch > 1 or knobs.views > 1 or knobs.split_k > 1:
        return 0
    if axis == 1:
        tiles, others, in_order = column_tiles(product, knobs), knobs.cluster_n, knobs.swizzle == 1
    else:
        tiles, others = row_tiles(product, knobs), knobs.cluster_m
        in_order = knobs.swizzle >= tiles
    held = knobs.tile_n if axis == 1 else knobs.consumer_rows // 4  # of a result, by a warp
    keeps = tiles == 1 or (kept == tiles and in_order)
    room = len(product.reduced) * PARTIAL_BYTES * held <= epilogue_bytes(product, knobs)
    return blocks // (tiles * others) if keeps and room else 0
