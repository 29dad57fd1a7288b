"""Which knobs of attention's kernels for Hopper to try, best first.

The tiles are those of FlashAttention-3 and -4 for the H100; of those that fit a call, the one comes first that a model
of its time prefers (benchmarks/results/attention_kernels.md). A few queries, as a decoder has them, take as long as
memory takes to deliver keys and values: those of the heads that share keys are rows of one tile, the ring of stages is
deep, and keys are split where tiles are too few to draw all of memory's bandwidth.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import ceil

from jaxdnn.device import Target
from jaxdnn.engines.attention.combine import partial_bytes
from jaxdnn.engines.attention.function import mask_function, score_function
from jaxdnn.engines.attention.problem import Attention, Band
from jaxdnn.engines.attention.score_tile import function_and_tile, score_tile
from jaxdnn.engines.attention.sm90.knobs import (
    MOST_SPLITS,
    AttentionSm90Knobs,
    held_registers,
    knobs_reason,
    most_heads,
    tile_count,
)
from jaxdnn.engines.attention.transposed import by_feature

SHORT = ((64, 128), (64, 80), (64, 64))
NARROW = (192, 64)  # blocks of as many keys as a warp group has queries
TILES = ((192, 128), (192, 112), (192, 96), (192, 80), NARROW, (128, 128), (128, 112), (128, 80))
# Stages of queries, and whether they are in registers. Of 128 elements, two stages take 0 to 3 % less time than
# registers, but 1 % more under a window; of 64, 7 % more (benchmarks/results/attention_kernels.md).
# Where scores are computed by a function that loads nothing, a soft cap, two take up to 4 % more.
IN_REGISTERS, IN_TWO_STAGES, IN_ONE_STAGE = (1, True), (2, False), (1, False)
LARGEST_IN_REGISTERS = 64
# Of keys and values: of large float32 vectors one is all that fits. Small blocks of three warp groups are read fast.
STAGES, FLOAT32_STAGES, SMALL_STAGES = (2,), (2, 1), (4, 3, 2)
SCORE_STAGES = (2, 1, 0)  # 1,159, 1,308 and 2,029 us with a bias of 4096 x 4096 at head size 128
SHARERS = 2  # elements of the batch, whose blocks share score tiles
FLOAT32_TILES = ((128, 128), (128, 96), (128, 64), (64, 96), (64, 64))
# With a function of scores, or dropout, for which three warp groups have few registers to spare; with one that loads
# nothing they have enough.
WITH_FUNCTIONS = ((128, 128), (128, 112), (128, 96), (128, 80), (128, 64), (192, 112))
# Registers that a thread may hold without spilling some, by warp groups; a mask's function, dropout, and both together
# need so many (benchmarks/results/attention_kernels.md).
MOST_HELD = {1: 216, 2: 199, 3: 144}
OF_MASK, OF_DROPOUT, OF_BOTH = 16, 44, 30
WIDEST_DROPOUT = 112
# The time of a block of 128 keys by queries of a tile, measured at head size 64; of other blocks, a fixed part, less
# where scores are computed, of heads up to 128; and of a tile besides its blocks, in blocks.
BLOCK = {192: 1.18, 128: 1.0, 64: 0.85}
LARGE_BLOCK = 1.29  # of 192 queries, with larger heads
SKIPPING = 0.95  # of that, where warp groups let blocks pass under a causal mask
PASSING = 0.5  # of a block's time, in which they let one pass under a window
BLOCK_START, COMPUTED_START = 0.15, 0.03
ONE_STAGE = 1.3  # of float32: as much longer where a block's copies wait for the multiplies of the one before
TILE_START = 1.3
COMBINED = 3  # blocks' time of the step that combines splits
# Heads that are worked through together, at least: under a mask, whose tiles differ in length, and of parts of a
# sequence, whose tiles read few keys each.
LEAST_MASKED, LEAST_OF_PARTS = 8, 16
DEEP = ((2, 4), (2, 3), (1, 4), (1, 3))  # blocks of a multiprocessor, and stages, where copies take longest
# FlashAttention-3's for the H100 (`hopper/heuristics.h`): heads are packed where that leaves at most this part of the
# tiles, and keys are not split where 0.8 of the multiprocessors have a tile, which then draw the whole bandwidth.
PACKED = 0.9
ALONE = 1 / 0.8
COMBINE_BYTES = 19_000_000  # what memory delivers while splits are combined: 3.2 us, and 1.3 between two launches


def candidates(problem: Attention, target: Target) -> Iterator[AttentionSm90Knobs]:
    """Knobs that work for the call."""
    found: dict[tuple[int, int], AttentionSm90Knobs] = {}
    score_stages = SCORE_STAGES if _tiled(problem) else (0,)
    choices = (
        (tile, *others)
        for tile in _tiles(problem)
        for others in product(score_stages, _stages(problem, tile), _queries(problem, tile))
    )
    for tile, of_scores, of_keys, (query_stages, in_registers) in choices:
        knobs = AttentionSm90Knobs(*tile, query_stages, in_registers, of_keys, of_scores)
        knobs = knobs if of_scores else _packed(problem, knobs)
        knobs = _deepest(problem, knobs, target)
        heads = _streamed_swizzle(problem, knobs, target) if of_scores else swizzle(problem, knobs.heads, target)
        knobs = replace(knobs, swizzle=heads, skips=_skips(problem, knobs))
        halved = replace(knobs, halves=_halves(problem, knobs))
        knobs = halved if knobs_reason(problem, halved, target.shared_memory) is None else knobs
        if knobs_reason(problem, knobs, target.shared_memory) is None:
            found.setdefault(tile, knobs)
    fitting = [knobs for knobs in found.values() if _held(problem, knobs) <= MOST_HELD[knobs.consumers]]
    fitting = fitting or [min(found.values(), key=lambda knobs: _held(problem, knobs))]
    for knobs in sorted(fitting, key=lambda knobs: time(problem, knobs, target)):
        if (parts := splits(problem, knobs, target)) > 1:
            yield replace(knobs, splits=parts)
        shared = replace(knobs, cluster=SHARERS, swizzle=max(1, knobs.swizzle // SHARERS))
        # In clusters, warp groups that let blocks pass spill, and save less than each by itself.
        sharing = target.sm_count >= SHARERS and not knobs.skips
        if sharing and knobs_reason(problem, shared, target.shared_memory) is None:
            yield shared
        yield knobs


def _skips(problem: Attention, knobs: AttentionSm90Knobs) -> bool:
    """Whether warp groups let blocks pass that they don't see: of three, under a causal mask, or where the last tile
    has no query for some of them, which takes 1.5 to 7 % less time; of two it takes as much, or 2 % more
    (benchmarks/results/attention_kernels.md).
    """
    if knobs.consumers != 3 or knobs.heads > 1 or mask_function(problem) is not None or problem.dropout is not None:
        return False
    if problem.operands and not knobs.score_stages:
        return False  # what a function loads takes the registers
    if problem.mask.band.right is not None:
        return not problem.operands
    return _working(problem, knobs, (problem.query_length - 1) // knobs.tile_m * knobs.tile_m) < knobs.consumers


def _halves(problem: Attention, knobs: AttentionSm90Knobs) -> bool:
    """Whether warp groups multiply half of a block at the diagonal: two of them, with queries in two stages. Under
    causal masks that takes 2.5 to 5.5 % less time with heads of 128, 4 % with 96, as much under a window, and 1 % more
    with heads of 64 (benchmarks/results/attention_kernels.md).
    """
    causal = problem.mask.band.right is not None and problem.mask.band.left is None
    return causal and knobs.consumers == 2 and knobs.query_stages == 2


def _working(problem: Attention, knobs: AttentionSm90Knobs, query: int) -> int:
    """Warp groups that have queries of the tile of one head that begins with this query."""
    return ceil(min(knobs.tile_m, problem.query_length - query) / 64)


def time(problem: Attention, knobs: AttentionSm90Knobs, target: Target) -> float:
    """About, in blocks of 128 x 128."""
    band, size = problem.mask.band, max(problem.head_size, problem.value_head_size)
    masked, windowed = band.right is not None, band.right is not None and band.left is not None
    one = BLOCK[knobs.tile_m * knobs.blocks] / knobs.blocks  # which run as its warp groups do
    if knobs.consumers == 3 and size > 64:
        one = LARGE_BLOCK * (SKIPPING if knobs.skips and masked and not windowed else 1)
    start = COMPUTED_START if _is_computed(problem) and size <= 128 else BLOCK_START
    block = one * (start + (1 - start) * knobs.tile_n / 128) * (ONE_STAGE if knobs.stages == 1 else 1)
    passing = knobs.skips and windowed
    tile_start = TILE_START * (1 if passing else one)
    queries = knobs.tile_m // knobs.heads
    times: list[float] = []
    for query in range(0, problem.query_length, queries):
        blocks: float = _seen_blocks(problem, knobs, query, queries)
        if passing:
            ends = range(query, min(query + queries, problem.query_length), 64)
            own = sum(max(1, _seen_blocks(problem, knobs, first, 64)) for first in ends) / len(ends)
            blocks += (1 - PASSING) * (own - blocks)
        # Under a mask, SKIPPING has what those without queries save.
        working = _working(problem, knobs, query) if knobs.skips and not masked else knobs.consumers
        times.append(BLOCK[64 * working] / BLOCK[knobs.tile_m] * (blocks * block + tile_start))
    rows, parts = tile_count(problem, knobs) // len(times), splits(problem, knobs, target)
    spread = rows * sum(times) / target.sm_count + (max(times) - min(times)) / 4
    # Some multiprocessor has so many of the longest ones.
    longest = enumerate(sorted(times, reverse=True), 1)
    rounds = (ceil(count * rows * parts / target.sm_count) * one / parts for count, one in longest)
    return max(spread, *rounds) + (COMBINED if parts > 1 else 0)


def _seen_blocks(problem: Attention, knobs: AttentionSm90Knobs, query: int, queries: int) -> int:
    """Of keys, which so many queries see of the band."""
    band, last = problem.mask.band, min(query + queries, problem.query_length) - 1
    first_key = 0 if band.left is None else max(0, query - band.left)
    end_key = problem.key_length if band.right is None else min(problem.key_length, last + band.right + 1)
    return max(0, ceil(end_key / knobs.tile_n) - first_key // knobs.tile_n)


def _tiles(problem: Attention) -> Sequence[tuple[int, int]]:
    """Of queries and keys."""
    if by_feature(problem):
        return FLOAT32_TILES
    if not _has_functions(problem):
        return (*TILES, *SHORT)
    if problem.query_length <= SHORT[0][0]:
        return SHORT
    if score_function(problem) is not None or problem.dropout is not None:
        widest = WIDEST_DROPOUT if problem.dropout is not None else WITH_FUNCTIONS[0][1]
        return [tile for tile in _with_functions(problem) if tile[1] <= widest]
    return [TILES[0], *WITH_FUNCTIONS]


def _is_small(tile: tuple[int, int]) -> bool:
    """Whether three warp groups have smaller blocks of keys than they can multiply at once."""
    return tile[0] == TILES[0][0] and tile[1] < TILES[0][1]


def _stages(problem: Attention, tile: tuple[int, int]) -> Sequence[int]:
    """Of keys and values, best first."""
    if by_feature(problem):
        return FLOAT32_STAGES
    return SMALL_STAGES if _is_small(tile) and not _has_functions(problem) else STAGES


def _queries(problem: Attention, tile: tuple[int, int]) -> Sequence[tuple[int, bool]]:
    """Where queries may be, best first: a few leave the room to stages of keys, and functions leave no registers."""
    few = tile[0] <= SHORT[0][0]
    if _is_computed(problem):
        return (IN_REGISTERS, IN_ONE_STAGE)
    if by_feature(problem) or _has_functions(problem):
        return (IN_ONE_STAGE,) if few else (IN_TWO_STAGES, IN_ONE_STAGE)
    if _is_small(tile) and (problem.head_size > LARGEST_IN_REGISTERS or tile == NARROW):
        return (IN_ONE_STAGE, IN_TWO_STAGES, IN_REGISTERS)  # beside four stages of keys
    if few or problem.head_size <= LARGEST_IN_REGISTERS or problem.mask.band.left is not None:
        return (IN_REGISTERS, IN_TWO_STAGES, IN_ONE_STAGE)
    return (IN_TWO_STAGES, IN_REGISTERS, IN_ONE_STAGE)


def _has_functions(problem: Attention) -> bool:
    """Whether a thread holds what functions of scores load, or dropout's bits."""
    functions = (score_function(problem), mask_function(problem), problem.dropout)
    return any(one is not None for one in functions)


def _is_computed(problem: Attention) -> bool:
    """Whether a function of scores that loads nothing is all there is besides a band: its operations take as long as
    multiplies of 16 bits, so that what counts is how many scores a tile has.
    """
    computed = score_function(problem) is not None and not problem.operands and not by_feature(problem)
    return computed and mask_function(problem) is None and problem.dropout is None


def _with_functions(problem: Attention) -> Sequence[tuple[int, int]]:
    """Tiles of queries and keys, with a function of scores."""
    if _is_computed(problem):
        skipping = problem.mask.band.right is not None
        large = max(problem.head_size, problem.value_head_size) > LARGEST_IN_REGISTERS
        return (NARROW, *WITH_FUNCTIONS[:-1]) if skipping or not large else WITH_FUNCTIONS[:-1]
    if mask_function(problem) is not None:  # three warp groups have no registers for both
        return WITH_FUNCTIONS[:-1]
    # What comes in tiles takes no registers of consumers.
    return (TILES[0], *WITH_FUNCTIONS) if _tiled(problem) else WITH_FUNCTIONS


def _tiled(problem: Attention) -> bool:
    """Whether an array that scores read comes in tiles; a few queries read little of it.

    The producer's fourth ring takes 8 registers of a consumer, which a mask's function and dropout both together need.
    """
    if mask_function(problem) is not None and problem.dropout is not None:
        return False
    return problem.query_length > SHORT[0][0] and not isinstance(score_tile(problem, score_function(problem)), str)


def _held(problem: Attention, knobs: AttentionSm90Knobs) -> int:
    """Registers of a thread."""
    score, _ = function_and_tile(problem, score_function(problem), tiled=knobs.score_stages > 0)
    held = held_registers(problem, knobs) + (score.registers(knobs.tile_n) if score is not None else 0)
    if mask_function(problem) is not None:
        held += OF_MASK + (OF_BOTH if problem.dropout is not None else 0)
    return held + (OF_DROPOUT if problem.dropout is not None else 0)


def _packed(problem: Attention, knobs: AttentionSm90Knobs) -> AttentionSm90Knobs:
    """With rows of several heads in a tile, if that leaves few enough tiles."""
    packed = replace(knobs, heads=most_heads(problem, knobs.tile_m))
    return packed if tile_count(problem, packed) <= PACKED * tile_count(problem, knobs) else knobs


def _deepest(problem: Attention, knobs: AttentionSm90Knobs, target: Target) -> AttentionSm90Knobs:
    """With as many stages as fit, where keys are read for one tile alone, and copies take longest."""
    few = knobs.consumers == 1 and tile_count(problem, knobs) == problem.batch * problem.key_heads
    choices = (replace(knobs, blocks=n, stages=stages) for n, stages in (DEEP if few else ()))
    return next((one for one in choices if knobs_reason(problem, one, target.shared_memory) is None), knobs)


def swizzle(problem: Attention, heads: int, target: Target) -> int:
    """Tiles of the heads whose keys and values fit in the L2 cache: a power of two of those that share them.

    Of a mask more, so that the long tiles of many heads begin before the short ones of any: 16,384 causal queries of 8
    heads of 256 take 1,713 us two heads at a time, 1,619 four, 1,583 eight.
    """
    size = problem.key.itemsize * problem.key_length * (problem.head_size + problem.value_head_size)
    sharing = ceil(problem.group / heads)
    fitting = max(1, target.l2_bytes // size, _least_heads(problem) // sharing)
    return sharing << (fitting.bit_length() - 1)


def _streamed_swizzle(problem: Attention, knobs: AttentionSm90Knobs, target: Target) -> int:
    """Likewise, where what scores read passes through the cache beside them; of no fewer heads than work at a time.

    4096 x 4096, 16 heads of 128, 4 elements that share a bias, on an H200, by heads: 4 1,094 us, 8 1,165, 16 1,159, 32
    1,260, 64 1,273.
    """
    vectors = problem.head_size + problem.value_head_size
    size = problem.key.itemsize * problem.key_length * (vectors + problem.group * problem.query_length)
    fitting = max(1, target.l2_bytes // size)
    working = max(1, target.sm_count // ceil(problem.query_length / knobs.tile_m))
    return max(problem.group << (fitting.bit_length() - 1), 1 << (working.bit_length() - 1))


def _least_heads(problem: Attention) -> int:
    """Heads that have to be worked through together, whether or not what they read fits in the L2 cache."""
    if problem.mask.query_segments is not None or problem.mask.band.left is not None:
        return LEAST_OF_PARTS
    return LEAST_MASKED if is_masked(problem) else 1


def is_masked(problem: Attention) -> bool:
    """Whether tiles differ in how many keys they see."""
    return problem.mask.band != Band() or mask_function(problem) is not None


def splits(problem: Attention, knobs: AttentionSm90Knobs, target: Target) -> int:
    """How many parts of the keys take the least time.

    All tiles together take as long as memory takes to deliver their keys; and a multiprocessor, which works through its
    tiles, as long as it takes to draw theirs. Where each element of the batch has a length of its own, multiprocessors
    that work through several parts end apart, half a part on average. Time counts as the bytes that memory delivers
    meanwhile.
    """
    tiles, blocks = tile_count(problem, knobs), most_blocks(problem, knobs)
    slots = target.sm_count * knobs.blocks
    if tiles >= slots and problem.query_length * knobs.heads > knobs.tile_m:
        return 1  # tiles of one head see more keys or fewer, and are taken by whoever is free
    block = problem.key.itemsize * knobs.tile_n * (problem.head_size + problem.value_head_size)

    def cost(splits: int) -> float:
        parts, part = ceil(tiles * splits / target.sm_count), ceil(blocks / splits)
        drawn = target.sm_count / ALONE  # by all, while one multiprocessor draws a block
        apart = part / 2 * knobs.blocks if tiles * splits > slots and problem.mask.key_lengths is not None else 0
        time = (max(tiles * blocks, parts * part * drawn) + apart * drawn) * block
        return time if splits == 1 else time + COMBINE_BYTES + 2 * sum(partial_bytes(problem, splits))

    return min(range(1, min(blocks, MOST_SPLITS) + 1), key=cost)


def most_blocks(problem: Attention, knobs: AttentionSm90Knobs) -> int:
    """Blocks of keys that a tile sees at most."""
    mask, seen = problem.mask, problem.key_length
    positions = mask.query_positions or mask.key_positions  # which no number of keys bounds
    left, right, queries = mask.band.left, mask.band.right, min(problem.query_length, knobs.tile_m // knobs.heads)
    if right is not None and not positions:
        if left is not None:  # as many as there are, and the rest of the block that the first is in
            seen = min(seen, max(1, left + right + queries) + knobs.tile_n - 1)
        if mask.query_offset is None:
            seen = min(seen, max(1, right + problem.query_length))
    return ceil(seen / knobs.tile_n)
