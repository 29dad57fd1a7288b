"""Which knobs of products on the CPU to try, best first.

Numbers in brackets are those of the notes on host in benchmarks/results/product_kernels.md.
"""

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from jaxdnn.device import Target
from jaxdnn.engines.product.host.knobs import COLUMN_STEP, DEPTH_STEP, HostKnobs, packed, streams, up
from jaxdnn.engines.product.problem import Product


@dataclass(frozen=True)
class Shape:
    """What suits an instruction set and a dtype: the largest tile, elements along k, what rows are a multiple of."""

    rows: int
    columns: int
    depth: int
    step: int = 1


# A block of a, of `rows` rows, stays in the L2 cache, and a panel of b, of `depth` steps, in L1; the size
# hardly matters [1]. Epilogues are fastest on rows as long as the interpreter's blocks.
_SHAPES = {
    "avx512": Shape(168, 512, 256),
    # Dtypes for which the processor may have tiles, whose accumulators wait in them longer [2].
    "avx512, narrow": Shape(128, 256, 1024, step=32),
    "avx2": Shape(192, 512, 256),
    "baseline": Shape(96, 512, 256),
}
# Tiles that a large result is to have at least, so that many threads share it evenly; a result must not depend on how
# many there are. Few rows wait for memory, some threads longer than others, and want more [3].
_ENOUGH_TILES = 32
_ENOUGH_TILES_OF_FEW_ROWS = 64
# Tiles of a thread where their shape may depend on threads, but half of those above at least [4].
_ENOUGH_TILES_OF_A_THREAD = 4
_WIDE = 256  # columns of these tiles, but for their being even: a is packed for each column of tiles
# Tiles of a thread for which matrices are packed ahead. With fewer, each tile packs what it needs: that is in a cache
# of its own core, and no thread waits for another [5].
_AHEAD_TILES = 8
# With more rows, multiplying panels makes up for packing them.
_STREAM_ROWS = 12
_STREAM_ROWS_INT8 = 4
# Sums of a tile that streams, which stay in the L1 cache. Memory gives long rows of b fastest [6].
_STREAM_SUMS = 4096
# Parts of the largest tile's rows and columns, by what is cut first, the largest tile first.
_CUTS = {
    "columns": ((1, 1), (1, 2), (1, 4), (1, 8), (2, 8)),
    "rows": ((1, 1), (2, 1), (4, 1), (4, 2), (4, 4), (4, 8)),
    "both": ((1, 1), (2, 1), (2, 2), (4, 2), (4, 4), (4, 8)),
}
# Multiplications of one task: enough to drown the start of a task.
_TASK_WORK = 2**18


def candidates(product: Product, target: Target) -> Iterable[HostKnobs]:
    """Of any product, best first; the second to the fourth need ever less workspace."""
    best = _heuristic(product, target)
    # Only packing depends on how many threads there are, so it goes before the splits.
    unpacked = replace(best, pack_a=False, pack_b=False)
    frugal = (replace(best, pack_b=False), unpacked, replace(unpacked, splits=1))
    return dict.fromkeys((best, *frugal, *_variants(best, product)))


def shape_of(product: Product, target: Target) -> Shape:
    """What suits the product's dtype, and the processor."""
    narrow = target.arch == "avx512" and product.a.itemsize < 4
    return _SHAPES["avx512, narrow" if narrow else target.arch if target.arch in _SHAPES else "baseline"]


def even(size: int, most: int, multiple: int) -> int:
    """The length of equal parts of at most `most`, but for their being a multiple."""
    return min(size, up(math.ceil(size / math.ceil(size / most)), multiple))


def _heuristic(product: Product, target: Target) -> HostKnobs:
    shape = shape_of(product, target)

    def count(tile: tuple[int, int]) -> int:
        rows, columns = tile
        return product.batch * math.ceil(product.m / rows) * math.ceil(product.n / columns)

    depth = min(shape.depth, up(product.k, DEPTH_STEP))
    work = product.batch * product.m * product.n * product.k * len(product.b)
    few = _STREAM_ROWS_INT8 if product.a.dtype == "int8" else _STREAM_ROWS
    streamed = product.m <= few and streams(product)
    # Where a tile has all rows, b is packed where it is used, and once.
    whole = product.m <= shape.rows
    few_rows = whole and not streamed
    # With AVX-512 copies of b are packed on the way as fast as ahead, so rows may be few and a packed less often [7].
    on_the_way = packed(product) and target.arch == "avx512"
    enough = min(_ENOUGH_TILES_OF_FEW_ROWS if few_rows else _ENOUGH_TILES, max(1, work // _TASK_WORK))
    # Each split leaves accumulators in memory, for which its part of k must be long.
    splits = max(1, product.k // (depth if streamed else 4 * depth if whole else 8 * depth))
    cuts = _CUTS["columns" if whole else "rows" if on_the_way else "both"]
    tiles = [
        (even(product.m, shape.rows // down, shape.step), even(product.n, shape.columns // across, COLUMN_STEP))
        for down, across in cuts
    ]
    if streamed and not product.b_transposed:
        columns = max(_STREAM_SUMS // (product.m * len(product.b)), 128)
        tile = (product.m, min(columns, product.n))
    else:
        # Splits where they are cheap, or where it takes them to share the work at all.
        unsplit = (one for one in tiles if count(one) >= enough and not few_rows)
        split = (one for one in tiles if count(one) * splits >= (enough if few_rows else enough // 2))
        tile = next(itertools.chain(unsplit, split), tiles[-1])
    splits = max(1, min(splits, enough // count(tile)))
    # A result depends on where k is cut, and a reduced one on the tiles: neither may depend on threads.
    if on_the_way and splits == 1 and not whole and not product.reduced:
        wanted = max(enough // 2, min(_ENOUGH_TILES_OF_A_THREAD * target.sm_count, work // _TASK_WORK))
        wide = [one for one, (_, across) in zip(tiles, cuts, strict=True) if shape.columns // across >= _WIDE]
        tile = next((one for one in wide if count(one) >= wanted), max((*wide, tile), key=count))
    rows, columns = tile
    found = count(tile)
    tile_work = rows * columns * math.ceil(product.k / splits) * len(product.b)
    group = max(1, min(_TASK_WORK // tile_work, found))
    many = found > group and not streamed
    ahead = found * splits >= _AHEAD_TILES * target.sm_count
    return HostKnobs(
        rows,
        columns,
        depth,
        splits=splits,
        tiles_per_task=group,
        # It is packed for each column of tiles, which two don't make worth a launch.
        pack_a=many and 2 * columns < product.n and (ahead or whole),
        pack_b=many and rows < product.m and ahead and not on_the_way,
        streams=streamed,
    )


def _variants(best: HostKnobs, product: Product) -> Iterator[HostKnobs]:
    """Other configurations, for the autotuner."""
    if not best.streams:
        yield replace(best, pack_a=best.columns < product.n, pack_b=best.rows < product.m)
    for factor in (2, 4):
        yield replace(best, columns=min(best.columns * factor, product.n))
        yield replace(best, rows=max(1, best.rows // factor))
    yield replace(best, depth=min(2 * best.depth, up(product.k, DEPTH_STEP)))
