"""Which knobs to try for a product over a short K, best first; and where tiles of lines are faster.

Numbers in brackets are those of the notes on sm90 in benchmarks/results/product_kernels.md.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import ceil

from jaxdnn.device import Target
from jaxdnn.engines.product import sm90_model as model
from jaxdnn.engines.product.accumulators import ARITHMETIC, accumulator_limit
from jaxdnn.engines.product.copies import copy_seconds
from jaxdnn.engines.product.operands import packed
from jaxdnn.engines.product.problem import Product
from jaxdnn.engines.product.sm90 import heuristic as of_lines
from jaxdnn.engines.product.sm90.knobs import (
    L2_BYTES,
    Sm90Knobs,
    accumulator_registers,
    store_reason,
    stores,
)
from jaxdnn.engines.product.sm90.short_k.knobs import (
    STEP,
    knobs_reason,
    shared_memory,
    stage,
    staged,
    whole_lines_reason,
)
from jaxdnn.engines.product.sm90_grid import cluster_tiles, column_tiles, row_tiles
from jaxdnn.engines.product.sm90_shapes import deepest
from jaxdnn.engines.product.tma import DEPTH_BYTES, tma_reason

_IN_TURNS = Sm90Knobs(tile_m=128, stages=8, cluster_m=1, schedule="pingpong")
# The most rows first [41]: a tile is little work, and what comes between two of them counts.
_SHAPES = (
    Sm90Knobs(tile_m=384, stages=8, cluster_m=1, consumers=3),
    Sm90Knobs(tile_m=256, stages=8, cluster_m=1),
    Sm90Knobs(tile_m=192, stages=8, cluster_m=1, consumers=3),
    _IN_TURNS,
    Sm90Knobs(tile_m=128, stages=8, cluster_m=1),
    Sm90Knobs(tile_m=64, stages=8, cluster_m=1, schedule="pingpong"),
)
# By which columns of b stay [67]: how much longer a column takes, with arithmetic at most, also in whole lines [81],
# or with more than that, by so many warp groups, and columns at once; from how many columns on results leave in whole
# lines; and how many times 64 rows pass a multiprocessor at least.
_STATIONARY_SHAPES = tuple(
    Sm90Knobs(tile_m=64, stages=12, cluster_m=1, consumers=consumers, schedule="pingpong", swizzle=1, whole_rows=True)
    for consumers in (2, 3)
)
_STATIONARY_SLOWER = {
    "arithmetic": {(2, 64): 1.06, (2, 128): 1.0, (3, 64): 1.12, (3, 128): 1.06},
    "lines": {(2, 64): 1.07, (2, 128): 1.0, (3, 64): 1.02, (3, 128): 0.94},
    "functions": {(2, 64): 1.2, (2, 128): 1.2, (3, 64): 0.98, (3, 128): 1.0},
}
_LINES_COLUMNS = 256
# And elements of K: shorter ones were not timed, but in whole lines of more than the L2 cache holds.
_FEWEST_ROWS_THAT_PASS, _STATIONARY_K = 3, 48
_WIDTHS = (32, 64, 96, 128)  # of tiles whose warps store lines of at least 64 bytes
_NARROW = 64  # columns of a tile, up to which half of the multiprocessors may be idle
_CUT_K = 64  # up to which results are most of what is moved
_FEWEST_TILES = {True: 0.5, False: 1.5}  # of a multiprocessor, of what is narrow, and of what is not
_SHORT_K = 192  # from which on a block has room for two stages, and TMA's lines are fewer for an element
_BATCH_K = 96  # from which on matrices of a batch with several tiles of b are faster in lines [53]
# Up to which plain results whose rows are no whole lines count more than how a is loaded [79], unless b stays [81].
_FEW_COLUMNS = 384
# Rows that begin anywhere [52]: columns of a tile, and its rows, at most, where there are few columns or two matrices,
# and elsewhere; up to which K few columns are few; bytes a second that tiles come at from the L2 cache, of 64 rows and
# of more; and how much longer that takes than copies and lines, before these are worth it: of results that TMA stores,
# and of others, which take longer than a model of lines says.
_ANYWHERE_WIDTH, _ANYWHERE_ROWS, _ANYWHERE_K = 64, {True: 256, False: 192}, 64
_FEW_ROUNDS = 2  # of such tiles
_L2_RATE, _WORTH_COPIES = {True: 4e12, False: 5e12}, {True: 1.3, False: 1.8}
_CLOCK = 1.7e9  # hertz, of a multiprocessor that is busy


def candidates(product: Product, target: Target) -> Iterator[Sm90Knobs]:
    """Knobs that work for the product: as many columns as it has, and then as many rows as leave no block idle."""
    narrow = product.n <= _NARROW

    def few(knobs: Sm90Knobs) -> bool:
        return cluster_tiles(product, knobs) * product.batch < _FEWEST_TILES[narrow] * target.sm_count

    width = next((width for width in _WIDTHS if product.n <= width), _WIDTHS[-1])
    # As many elements with half the columns, where the last tile would be at most half full [59].
    halved = product.n > _WIDTHS[-1] and 0 < product.n % _WIDTHS[-1] <= _NARROW
    if halved and few(replace(_IN_TURNS, tile_n=width)):
        width = _NARROW
    rows = min(384, ceil(product.m / 64) * 64)
    cut = product.n > _WIDTHS[-1] and product.n * 2 % 32 and _is_large(product) and product.k <= _CUT_K
    found = [
        replace(shape, tile_n=tile_n, whole_rows=True)
        for tile_n in sorted(_WIDTHS, key=lambda tile_n: (tile_n != width, -tile_n))
        for shape in _SHAPES
    ]

    def last(knobs: Sm90Knobs) -> bool:
        return knobs.tile_m > rows or (few(knobs) and knobs.tile_m > 64)

    if tma_reason(product.a, "a"):
        found.sort(key=_anywhere(product, width, target))
    elif cut:  # neighbours' lines have to meet in the L2 cache [42]
        found.sort(key=lambda knobs: (knobs.tile_m, knobs.tile_n, knobs.schedule) != (128, 64, "cooperative"))
    yield from _stationary(product, target)
    for knobs in sorted(found, key=last):
        fitted = _fitted(product, knobs, target)
        if fitted is not None:
            yield fitted


def lines_reason(product: Product, target: Target) -> str | None:
    """Why tiles of lines take less time, or None."""
    if tma_reason(product.a, "a"):
        return _copies_reason(product, target)
    if product.k > _SHORT_K:
        return f"k is {product.k}; up to {_SHORT_K} whole rows take less time than their lines"
    if product.batch > 1 and product.n > _WIDTHS[-1] and product.k > _BATCH_K:
        return "of each matrix b there are several tiles, whose lines two blocks load together"
    cut = product.n > _WIDTHS[-1] and staged(product) == "rows" and product.is_plain and product.batch == 1
    storing = cut and (product.n <= _FEW_COLUMNS or any(_stationary(product, target)))
    if product.k * product.a.itemsize % (DEPTH_BYTES // 2) == 0 and not storing:
        return "rows of a are whole lines, or halves, which TMA loads as fast"
    return None


def _anywhere(product: Product, width: int, target: Target) -> Callable[[Sm90Knobs], tuple[bool, bool, int]]:
    """What orders tiles of rows that begin anywhere: each element is loaded by itself, with all that waits for it; in
    few rounds, so is each round of rows [56].
    """
    few = width <= _WIDTHS[0] or (product.n <= _ANYWHERE_WIDTH and product.k <= _ANYWHERE_K)
    rows = _ANYWHERE_ROWS[few or len(product.b) > 1]

    def rounds(tile_m: int) -> int:
        tiles = ceil(product.m / tile_m) * ceil(product.n / min(width, _ANYWHERE_WIDTH)) * product.batch
        return ceil(tiles / target.sm_count)

    few_rounds = rounds(rows) <= _FEW_ROUNDS
    return lambda knobs: (
        knobs.tile_n != min(width, _ANYWHERE_WIDTH),
        knobs.tile_m > rows,
        rounds(knobs.tile_m) * knobs.tile_m if few_rounds else 0,
    )


def _copies_reason(product: Product, target: Target) -> str | None:
    """Why lines of a copy take less time than rows that begin anywhere, or None."""
    rows, lines = (next(found(product, target), None) for found in (candidates, of_lines.candidates))
    if rows is None or lines is None:
        return None
    tiles = cluster_tiles(product, rows) * product.batch
    loading = tiles * stage(product, rows) / _L2_RATE[rows.tile_m == 64]
    clocks = rows.tile_m // 16 * ceil(product.k / STEP) * load_clocks(product.k)
    loading += tiles / target.sm_count * clocks / _CLOCK
    copying = copy_seconds(packed(product)[1], product.batch, target.bandwidth or model.MEMORY_RATE)
    worth = _WORTH_COPIES[store_reason(product, lines) is None]
    if loading < worth * (copying + model.seconds(product, lines, target.sm_count)):
        return None
    return f"tiles of {rows.tile_m} rows ask the L2 cache for more than copies of all rows take"


def _stationary(product: Product, target: Target) -> Iterator[Sm90Knobs]:
    """Knobs by which columns of b stay, by how many each multiprocessor computes, those past the last one included."""
    if product.n * len(product.b) <= _NARROW or product.k > _SHORT_K:
        return
    arithmetic = ARITHMETIC.issuperset(product.program.operations)
    found: dict[Sm90Knobs, float] = {}
    for shape in _STATIONARY_SHAPES:
        for width in (64, 128):
            knobs = _staying(product, replace(shape, tile_n=width // len(product.b)), target)
            if knobs is None:
                continue
            if product.k < _STATIONARY_K and not (knobs.store == "lines" and _is_large(product)):
                continue
            groups = column_tiles(product, knobs)
            tiles = ceil(row_tiles(product, knobs) * product.batch * groups / (target.sm_count // groups * groups))
            if tiles >= _FEWEST_ROWS_THAT_PASS:
                work = "functions" if not arithmetic else "lines" if knobs.store == "lines" else "arithmetic"
                found[knobs] = tiles * knobs.columns * _STATIONARY_SLOWER[work][knobs.consumers, width]
    yield from sorted(found, key=found.__getitem__)


def _staying(product: Product, shape: Sm90Knobs, target: Target) -> Sm90Knobs | None:
    """Knobs by which all columns of b stay, or as few parts of them as there is room for."""
    shape = _storing(product, replace(shape, stationary=1))
    least = replace(shape, stages=shape.consumers, epilogue_stages=2 if shape.store == "lines" else 1)
    one, two = (shared_memory(product, replace(least, stationary=count)) for count in (1, 2))
    most = 1 + (target.shared_memory - one) // (two - one)  # tiles of columns
    if most < 1:
        return None
    tiles = ceil(product.n / shape.tile_n)
    parts = ceil(tiles / most)
    return (
        _fitted(product, replace(shape, stationary=ceil(tiles / parts)), target) if parts <= target.sm_count else None
    )


@functools.cache
def load_clocks(k: int) -> int:
    """How long shared memory takes for a warp's loads of 16 rows of `k` elements, of a step each: those of different
    words of one bank come one after the other.
    """
    loads = [first + half + row for first in (0, 8) for half in (range(2) if k % 2 else (0,)) for row in (0, 8 * k)]
    worst = 0
    for load in loads:
        words = {(lane // 4 * k + lane % 4 * 2 + load) // 2 for lane in range(32)}
        worst += max(Counter(word % 32 for word in words).values())
    return worst


def _is_large(product: Product) -> bool:
    """Whether the L2 cache can't hold the results."""
    return product.m * product.n * product.batch * 2 > L2_BYTES


def _storing(product: Product, knobs: Sm90Knobs) -> Sm90Knobs:
    """The knobs with the fastest way for results to leave."""
    store = stores(product, knobs, staged(product))[0]
    in_lines = store == "rows" and product.n >= _LINES_COLUMNS and not whole_lines_reason(product, knobs)
    return replace(knobs, store="lines" if in_lines else store)


def _fitted(product: Product, knobs: Sm90Knobs, target: Target) -> Sm90Knobs | None:
    """The knobs with as many stages as there is room for."""
    knobs = _storing(product, knobs)
    if accumulator_registers(product, knobs) > accumulator_limit(product, knobs):
        return None
    return deepest(knobs, lambda one: knobs_reason(product, one, target.shared_memory))
