"""The grid of the kernel for Hopper's tensor cores: how many tiles clusters have, and which columns each keeps to."""

from math import ceil

from jaxdnn.device import fewest_clusters
from jaxdnn.engines.product.problem import Product
from jaxdnn.engines.product.sm90.knobs import Sm90Knobs, epilogue_bytes

FEW = 4  # columns, or rows, of tiles of which each block keeps to one that it has sums of
PARTIAL_BYTES = 4  # of what is reduced


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


def reduced_axis(product: Product) -> int | None:
    """Over which of the rows, 1, and the columns, 2, results are reduced, if all that are reduced are so over one."""
    axes = {axis for result in product.reduced for axis in result.axes if axis > 0}
    return axes.pop() if len(axes) == 1 else None


def kept_tiles(product: Product, knobs: Sm90Knobs, tiles: int, sm_count: int) -> int:
    """Of how many columns, or rows, of so many tiles of clusters each one keeps to one: 1 if that would take more
    rounds.
    """
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
    over_rows = reduced_axis(product) == 1
    if over_rows:
        tiles, others, held, kept_order = (
            column_tiles(product, knobs),
            knobs.cluster_n,
            knobs.tile_n,
            knobs.swizzle == 1,
        )
    else:
        tiles, others, held = row_tiles(product, knobs), knobs.cluster_m, knobs.consumer_rows // 4
        kept_order = knobs.swizzle >= tiles
    keeps = tiles == 1 or (kept == tiles and kept_order)
    room = len(product.reduced) * PARTIAL_BYTES * held <= epilogue_bytes(product, knobs)
    if (
        reduced_axis(product) is None
        or product.batch > 1
        or knobs.views > 1
        or knobs.split_k > 1
        or not (keeps and room)
    ):
        return 0
    return blocks // (tiles * others)
