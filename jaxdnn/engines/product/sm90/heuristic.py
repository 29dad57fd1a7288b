"""Which knobs of the kernel for Hopper's tensor cores to try for a product, best first.

Numbers in brackets are those of the notes on sm90 in benchmarks/results/product_kernels.md.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import ceil
from typing import Literal

from jaxdnn.device import Target
from jaxdnn.engines.base import MAX_TENSOR_MAPS
from jaxdnn.engines.product.accumulators import accumulator_limit
from jaxdnn.engines.product.copies import copy_seconds
from jaxdnn.engines.product.operands import packed, swap_reason, swapped, transposes
from jaxdnn.engines.product.problem import Product
from jaxdnn.engines.product.sm90.knobs import (
    Sm90Knobs,
    Store,
    accumulator_registers,
    depth,
    fetch_reason,
    knobs_reason,
    stores,
    tensor_maps,
)
from jaxdnn.engines.product.sm90_bytes import is_small
from jaxdnn.engines.product.sm90_grid import summed_columns
from jaxdnn.engines.product.sm90_model import (
    BRIEF_K,
    FEW_ROUNDS,
    LONG_K,
    MANY_ROUNDS,
    MEMORY_RATE,
    across_lines,
    in_row_order,
    is_across,
    is_brief,
    rounds,
    seconds,
)
from jaxdnn.engines.product.sm90_shapes import (
    ACROSS_SHAPES,
    ALONE,
    BYTES_SHAPES,
    FEW_PAIRS,
    LONG_SHAPES,
    PAIRED,
    SHAPES,
    SWAPPED_ACROSS_SHAPES,
    SWAPPED_FEW_SHAPES,
    SWAPPED_MANY_SHAPES,
    SWAPPED_SHAPES,
    SWAPPED_WIDE_SHAPES,
    deepest,
)
from jaxdnn.engines.product.tiles import tile_operands
from jaxdnn.engines.product.tma import CHUNK
from jaxdnn.engines.product.views import row_views

MANY_SPLITS = 16  # whose accumulators take little to add, beside the product
PROMISING = 1.1  # times the time of the fastest tile, up to which those of the transposed product are looked at
DEEP_K = 448  # from which on lines across others are waited for less with one more stage than subtiles of results [48]
WORTH_A_TURN = 16  # stages, from which on fewer rounds hide that one warp group turns its results [60]
PROMOTION = 2  # stages of 8-bit floats that the tensor cores sum: as fast as four, and a third as far off [8]
# Stages between the consumers. Without an epilogue nothing is gained, but by 8-bit floats, of which each column is
# multiplied twice as fast, and stored no faster [9].
STAGGER = 3
PROMOTED_STAGGER = 2


def splits(product: Product, knobs: Sm90Knobs, sm_count: int) -> list[int]:
    """Into how many parts K may be cut to occupy more of the device: parts of at least 1 KiB of each row, and more than
    MANY_SPLITS only where these leave half of the device idle.
    """
    rows, columns = ceil(product.m / knobs.tile_m), ceil(product.n * len(product.b) / knobs.tile_n)
    tiles = rows * columns * product.batch
    most = min(sm_count // tiles, product.k // (8 * depth(product)))
    if 2 * tiles * MANY_SPLITS > sm_count:
        most = min(most, MANY_SPLITS)
    return [1, *(split for split in (2, 4, 8, 16, 32, 64, most) if 1 < split <= most)]


def has_one_tile_each(product: Product, swapped_shape: Sm90Knobs, sm_count: int) -> bool:
    """Whether a tile has all rows of one matrix of 16-bit elements, and each multiprocessor at most one."""
    columns = swapped_shape.tile_m * sm_count
    return product.a.itemsize == 2 and product.batch == 1 and product.m <= swapped_shape.tile_n and product.n <= columns


def candidates(
    product: Product,
    target: Target,
    *,
    staged: Literal["tma", "rows"] = "tma",
    shapes: Sequence[Sm90Knobs] = SHAPES,
    splits: Callable[[Product, Sm90Knobs, int], Sequence[int]] = splits,
    matrices: bool = False,
) -> Iterator[Sm90Knobs]:
    """Those of these shapes that work for the product, by the time that is expected of them. `staged` is how results
    leave that pass through shared memory; `splits` says into how many parts to cut K; and of plain `matrices` there are
    also clusters of many blocks, and those of the transposed product that promise to be as fast.
    """
    found: dict[Sm90Knobs, float] = {}
    few_tiles = SWAPPED_FEW_SHAPES if product.k >= WORTH_A_TURN * depth(product) else ()
    wide = [shape for shape in SWAPPED_WIDE_SHAPES if has_one_tile_each(product, shape, target.sm_count)]
    swapped_shapes = (*SWAPPED_SHAPES, *wide, *SWAPPED_MANY_SHAPES, *few_tiles)
    across = ACROSS_SHAPES if matrices and is_across(product) else ()
    if across and product.a.itemsize == 2:  # of which they were timed [37]
        swapped_shapes = (*swapped_shapes, *SWAPPED_ACROSS_SHAPES)
    more = LONG_SHAPES if product.a.itemsize == 2 and product.k >= LONG_K else ()
    more = BYTES_SHAPES if is_small(product) else more
    # Copies of b, or views of it and a copy of a.
    for views in sorted({1, row_views(product)}) if matrices else (1,):
        copies = packed(product, views)[1] if matrices else ()
        copying = copy_seconds(copies, product.batch, target.bandwidth or MEMORY_RATE)
        for shape in (*shapes, *(more if matrices else ()), *(across if views == 1 else ACROSS_SHAPES)):
            for split in splits(product, shape, target.sm_count) if views == 1 else (1,):
                knobs = fitted(product, replace(shape, split_k=split, views=views), target, staged)
                if knobs is not None:
                    time = copying + seconds(product, knobs, target.sm_count, matrices=matrices)
                    found.setdefault(knobs, time)
    timed = matrices and not product.reduced and not tile_operands(product)
    if timed and found and product.k > depth(product) and swap_reason(product) is None:
        transposed, most = swapped(product), PROMISING * min(found.values())
        for shape in swapped_shapes:
            if seconds(product, shape, target.sm_count, matrices=True) > most:
                continue
            knobs = fitted(transposed, shape, target, staged)
            if knobs is not None:
                found[knobs] = seconds(product, knobs, target.sm_count, matrices=True)
    # Of those that take the same time, the one with fewer warps: none waits for a tile that does not come [16]; then,
    # where TMA asks for most lines twice, one whose blocks share columns [45], or for some, of small products of bytes
    # in turns, any that share [75]; then, over a short K, or of these, one whose blocks wait for fewer others [64, 75].
    of_bytes = is_small(product)
    twice = of_bytes and max(map(across_lines, (product.a, *product.b))) > 1

    def order(knobs: Sm90Knobs) -> tuple[float, ...]:
        blocks = knobs.cluster_m * knobs.cluster_n
        alone = bool(across) and knobs.cluster_m == 1 and not knobs.swapped
        alone |= twice and blocks == 1 and knobs.schedule == "pingpong"
        return found[knobs], knobs.threads, alone, blocks if product.k <= BRIEF_K or of_bytes else 1

    return iter(sorted(found, key=order))


def fitted(product: Product, knobs: Sm90Knobs, target: Target, staged: Literal["tma", "rows"]) -> Sm90Knobs | None:
    """The knobs for this product, or the transposed one where they are swapped: as many accumulators as two matrices b
    need, and as many stages as there is room for.
    """
    accumulators = len(product.b)
    if knobs.tile_n % accumulators:
        return None
    rows = ceil(product.m / knobs.tile_m)
    along_k = product.b_transposed or transposes(product, "b")
    if CHUNK < knobs.tile_n < 2 * CHUNK and (accumulators > 1 or not along_k):
        return None
    if (cluster := knobs.cluster_m * knobs.cluster_n) > 2:
        if rows == 1 and product.k < LONG_K:
            return None  # its blocks wait for each other as long as they wait for what they share [33]
    elif knobs.cluster_n > 1 and knobs.views == 1 and not is_across(product) and rows == 1:
        return None  # all blocks share one row of tiles [29]
    ragged = knobs.schedule == "pingpong" and knobs.tile_n % CHUNK and not knobs.swapped
    if ragged and not (product.is_plain and product.k >= LONG_K):
        return None
    brief = is_brief(product)
    if brief and knobs.schedule == "pingpong":
        knobs = replace(knobs, cluster_m=1)  # they are loaded in half the time, and pairs wait for each other [25]
    if replace(knobs, views=1) == (PAIRED if brief or (rows % 2 and rows < 2 * FEW_PAIRS) else ALONE):
        return None
    if knobs.split_k > 1 and cluster > 1:
        return None  # K is split where blocks are idle, and the producer has no registers left for both
    promotion = PROMOTION if promotes(product) else 0
    if promotion and knobs.consumer_rows != 64:
        return None
    if knobs.consumers == 3 and knobs.tile_n > CHUNK:
        many_rounds = rounds(product, knobs, target.sm_count) > MANY_ROUNDS
        # Without an epilogue, or of whole chunks; narrow tiles wait for lines [30].
        fast = product.is_plain or knobs.tile_n // accumulators % CHUNK == 0
        alone = accumulators > 1 and knobs.tile_m - 64 < product.m <= knobs.tile_m  # the only tile [56]
        fast = fast and (knobs.tile_n >= 3 * CHUNK or across_lines(product.b[0]) == 1 or alone)
        # In many rounds, of 16-bit operands; with an epilogue, over a long K [45, 46].
        in_many = product.a.itemsize == 2 and (product.is_plain or product.k >= LONG_K)
        fast = fast and (in_many or not many_rounds)
        if not ((many_rounds or is_small(product)) if promotion else fast):
            return None
    knobs = replace(knobs, tile_n=knobs.tile_n // accumulators, promotion=promotion)
    knobs = replace(knobs, store=storing(product, knobs, staged))
    knobs = replace(knobs, fetch=fetched(product, knobs))
    smallest = knobs.consumer_rows * knobs.tile_n * accumulators == 64 * 64
    if not smallest and accumulator_registers(product, knobs) > accumulator_limit(product, knobs):
        return None
    shared = knobs.schedule == "cooperative" and knobs.consumers == 2
    stagger = PROMOTED_STAGGER if promotion else 0 if product.is_plain else STAGGER
    if not shared or rounds(product, knobs, target.sm_count) <= FEW_ROUNDS:
        stagger = 0
    if in_row_order(product) or summed_columns(product, knobs) > 1:
        knobs = replace(knobs, swizzle=1)  # rows of results are written whole [28], or a block's sums are of one column
    deep = product.is_plain and product.k >= DEEP_K and max(map(across_lines, (product.a, *product.b))) > 1
    if deep and knobs.schedule == "pingpong" and knobs.tile_n > 2 * CHUNK and knobs.views == 1:
        knobs = replace(knobs, stages=8)
    knobs = replace(knobs, stagger=min(stagger, knobs.stages - 1))
    given = swapped(product) if knobs.swapped else product
    return deepest(knobs, lambda one: knobs_reason(given, one, target.shared_memory, staged, groups=one.groups))


def promotes(product: Product) -> bool:
    """Whether the accumulators of more than one stage of 8-bit floats are added, which the tensor cores do with 14
    bits, and the call wants more.
    """
    return "float8" in product.a.dtype and product.k > depth(product) and not product.fast


def storing(product: Product, knobs: Sm90Knobs, staged: Literal["tma", "rows"] = "tma") -> Store:
    """How results leave."""
    store = stores(product, knobs, staged)[0]
    return "direct" if tensor_maps(product, replace(knobs, store=store)) > MAX_TENSOR_MAPS else store


def fetched(product: Product, knobs: Sm90Knobs) -> Literal["tma", "direct"]:
    """How operands of the result's own shape come: by TMA, where that can be."""
    tiles = replace(knobs, fetch="tma")
    return "direct" if fetch_reason(product, tiles) or tensor_maps(product, tiles) > MAX_TENSOR_MAPS else "tma"
