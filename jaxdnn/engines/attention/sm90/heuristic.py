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
from jaxdnn.engines.attention.shares import best_shares
from jaxdnn.engines.attention.sm90.backward.knobs import MOST_HELD as MOST_BACKWARD_HELD
from jaxdnn.engines.attention.sm90.backward.knobs import (
    TILE_N,
    AttentionSm90BackwardKnobs,
    backward_knobs_reason,
    function_registers,
    held_with_functions,
    sums_bytes,
)
from jaxdnn.engines.attention.sm90.backward.knobs import TILES as BACKWARD_TILES
from jaxdnn.engines.attention.sm90.gradients.knobs import (
    KEY_REGISTERS,
    KEY_TILE,
    QUERY_REGISTERS,
    AttentionSm90GradientKnobs,
    key_knobs_reason,
    key_registers,
    query_knobs_reason,
    query_registers,
)
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
TILES = ((192, 128), (128, 128), (128, 112), (128, 80))
# Stages of queries, and whether they are in registers. Of 128 elements, two stages take 0 to 3 % less time than
# registers, but 1 % more under a window; of 64, 7 % more (benchmarks/results/attention_kernels.md).
IN_REGISTERS, IN_TWO_STAGES, IN_ONE_STAGE = (1, True), (2, False), (1, False)
LARGEST_IN_REGISTERS = 64
STAGES, FLOAT32_STAGES = (2,), (2, 1)  # of keys and values: of large vectors one is all that fits
SCORE_STAGES = (2, 1, 0)  # 1,159, 1,308 and 2,029 us with a bias of 4096 x 4096 at head size 128
SHARERS = 2  # elements of the batch, whose blocks share score tiles
FLOAT32_TILES = ((128, 128), (128, 96), (128, 64), (64, 96), (64, 64))
# With a function of scores, or dropout, for which three warp groups have few registers to spare.
WITH_FUNCTIONS = ((128, 128), (128, 112), (128, 96), (128, 80), (128, 64), (192, 112))
# Registers that a thread may hold without spilling some, by warp groups; a mask's function, dropout, and both together
# need so many (benchmarks/results/attention_kernels.md).
MOST_HELD = {1: 216, 2: 199, 3: 144}
OF_MASK, OF_DROPOUT, OF_BOTH = 16, 44, 30
WIDEST_DROPOUT = 112
# The time of a block of 128 keys by queries of a tile, measured at head size 64; of other blocks, a fixed part; and of
# a tile besides its blocks, in blocks.
BLOCK = {192: 1.18, 128: 1.0, 64: 0.85}
BLOCK_START = 0.15
ONE_STAGE = 1.3  # of float32: as much longer where a block's copies wait for the multiplies of the one before
TILE_START = 1.3
# Bytes of the float32 sums of queries' gradients; and how many tiles a part of the heads has for each multiprocessor.
MOST_SUMS, FEWEST_WAVES = 2**27, 12
LEAST_MASKED, LEAST_UNMASKED = 8, 4  # heads that gradients are worked through together
DEEP = ((2, 4), (2, 3), (1, 4), (1, 3))  # blocks of a multiprocessor, and stages, where copies take longest
# FlashAttention-3's for the H100 (`hopper/heuristics.h`): heads are packed where that leaves at most this part of the
# tiles, and keys are not split where 0.8 of the multiprocessors have a tile, which then draw the whole bandwidth.
PACKED = 0.9
ALONE = 1 / 0.8
COMBINE_BYTES = 10_000_000  # what memory delivers during a launch, of 2.5 us
BLOCKS = (128, 112, 96, 80, 64)  # that gradients stream: wide multiplies read shared memory less often
FLOAT32_BLOCKS = (*BLOCKS, 32)  # whose features are streamed, too


def candidates(problem: Attention, target: Target) -> Iterator[AttentionSm90Knobs]:
    """Knobs that work for the call."""
    found: dict[tuple[int, int], AttentionSm90Knobs] = {}
    score_stages = SCORE_STAGES if _tiled(problem) else (0,)
    stages = FLOAT32_STAGES if by_feature(problem) else STAGES
    choices = (
        (tile, *others) for tile in _tiles(problem) for others in product(score_stages, stages, _queries(problem, tile))
    )
    for tile, of_scores, of_keys, (query_stages, in_registers) in choices:
        knobs = AttentionSm90Knobs(*tile, query_stages, in_registers, of_keys, of_scores)
        knobs = knobs if of_scores else _packed(problem, knobs)
        knobs = _deepest(problem, knobs, target)
        heads = _streamed_swizzle(problem, knobs, target) if of_scores else swizzle(problem, knobs.heads, target)
        knobs = replace(knobs, swizzle=heads)
        if knobs_reason(problem, knobs, target.shared_memory) is None:
            found.setdefault(tile, knobs)
    fitting = [knobs for knobs in found.values() if _held(problem, knobs) <= MOST_HELD[knobs.consumers]]
    fitting = fitting or [min(found.values(), key=lambda knobs: _held(problem, knobs))]
    for knobs in sorted(fitting, key=lambda knobs: time(problem, knobs, target.sm_count)):
        if (parts := splits(problem, knobs, target)) > 1:
            yield replace(knobs, splits=parts)
        shared = replace(knobs, cluster=SHARERS, swizzle=max(1, knobs.swizzle // SHARERS))
        if target.sm_count >= SHARERS and knobs_reason(problem, shared, target.shared_memory) is None:
            yield shared
        yield knobs


def time(problem: Attention, knobs: AttentionSm90Knobs, sm_count: int) -> float:
    """About, in blocks of 128 x 128."""
    band = problem.mask.band
    together = BLOCK[knobs.tile_m * knobs.blocks] / knobs.blocks  # blocks of a multiprocessor are as its warp groups
    block = together * (BLOCK_START + (1 - BLOCK_START) * knobs.tile_n / 128) * (ONE_STAGE if knobs.stages == 1 else 1)
    times: list[float] = []
    queries = knobs.tile_m // knobs.heads
    for query in range(0, problem.query_length, queries):
        last = min(query + queries, problem.query_length) - 1
        first_key = 0 if band.left is None else max(0, query - band.left)
        end_key = problem.key_length if band.right is None else min(problem.key_length, last + band.right + 1)
        blocks = max(0, ceil(end_key / knobs.tile_n) - first_key // knobs.tile_n)
        times.append(blocks * block + TILE_START * together)
    # The last tiles to be taken are the shortest of a causal mask, and as long as all of a full one.
    return sum(times) / len(times) * tile_count(problem, knobs) / sm_count + (times[0] + times[-1]) / 4


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


def _queries(problem: Attention, tile: tuple[int, int]) -> Sequence[tuple[int, bool]]:
    """Where queries may be, best first: a few leave the room to stages of keys, and functions leave no registers."""
    few = tile[0] <= SHORT[0][0]
    if by_feature(problem) or _has_functions(problem):
        return (IN_ONE_STAGE,) if few else (IN_TWO_STAGES, IN_ONE_STAGE)
    if few or problem.head_size <= LARGEST_IN_REGISTERS or problem.mask.band.left is not None:
        return (IN_REGISTERS, IN_TWO_STAGES, IN_ONE_STAGE)
    return (IN_TWO_STAGES, IN_REGISTERS, IN_ONE_STAGE)


def _has_functions(problem: Attention) -> bool:
    """Whether a thread holds what functions of scores load, or dropout's bits."""
    functions = (score_function(problem), mask_function(problem), problem.dropout)
    return any(one is not None for one in functions)


def _with_functions(problem: Attention) -> Sequence[tuple[int, int]]:
    """Tiles of queries and keys, with a function of scores."""
    if not _tiled(problem):
        return WITH_FUNCTIONS
    # What comes in tiles takes no registers of consumers; but where there are three of them, the producer has too few
    # for a list and a fourth ring.
    return (TILES[0], *WITH_FUNCTIONS) if mask_function(problem) is None else WITH_FUNCTIONS[:-1]


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


def backward_candidates(problem: Attention, target: Target) -> Iterator[AttentionSm90BackwardKnobs]:
    """Knobs that work for the call; large blocks are read less often, but leave functions fewer registers."""
    tiles = sorted(BACKWARD_TILES, reverse=problem.query_length > BACKWARD_TILES[0])
    found: dict[int, AttentionSm90BackwardKnobs] = {}
    for tile_m, tiled in product(tiles, (True, False)):
        knobs = AttentionSm90BackwardKnobs(tile_m, backward_swizzle(problem, tile_m, target), score_tiles=tiled)
        if backward_knobs_reason(problem, knobs, target.shared_memory) is None:
            found.setdefault(knobs.tile_m, knobs)
    fitting = [one for one in found.values() if held_with_functions(problem, one)[0] <= MOST_BACKWARD_HELD]
    for knobs in fitting or [found[min(found)]]:
        shares = best_shares(problem, (knobs.tile_m, TILE_N), target)
        yield replace(knobs, shares=shares, parts=parts(problem, knobs, target))


def parts(problem: Attention, knobs: AttentionSm90BackwardKnobs, target: Target) -> int:
    """As many as make the sums of a part no larger than MOST_SUMS; fewer where a part would have too few tiles."""
    heads = problem.batch * problem.key_heads
    tiles = heads * ceil(problem.key_length / TILE_N)
    sums = heads * problem.group * ceil(problem.query_length / knobs.tile_m) * sums_bytes(problem, knobs)
    equal = [n for n in range(1, heads + 1) if heads % n == 0 and tiles >= n * FEWEST_WAVES * target.sm_count]
    return next((n for n in equal if sums <= n * MOST_SUMS), max(equal, default=1))


def gradient_candidates(problem: Attention, target: Target) -> Iterator[AttentionSm90GradientKnobs]:
    """Knobs that work for the call: the best of both kernels, then others of one."""
    first = AttentionSm90GradientKnobs(
        query_tile=64 if problem.query_length <= 64 else 128,
        query_swizzle=swizzle(problem, 1, target),
        cluster=2 if problem.key_length > KEY_TILE and target.sm_count > 1 else 1,
        key_swizzle=gradient_swizzle(problem, target),
    )
    blocks = FLOAT32_BLOCKS if by_feature(problem) else BLOCKS
    of_queries = [
        one
        for block in blocks
        for stages in (2, 1)
        if not query_knobs_reason(
            problem, one := replace(first, key_block=block, value_stages=stages), target.shared_memory
        )
    ]
    of_keys = [
        one
        for block in blocks
        if not key_knobs_reason(problem, one := replace(first, query_block=block), target.shared_memory)
    ]
    taken = function_registers(problem)
    of_queries = [one for one in of_queries if query_registers(problem, one) + taken <= QUERY_REGISTERS] or [
        min(of_queries, key=lambda one: one.key_block)
    ]
    of_keys = [one for one in of_keys if key_registers(problem, one) + taken <= KEY_REGISTERS] or of_keys[-1:]
    of_keys = [replace(one, shares=best_shares(problem, (one.query_block, KEY_TILE), target)) for one in of_keys]
    best = of_queries[0]
    yield from (replace(one, query_block=of_keys[0].query_block, shares=of_keys[0].shares) for one in of_queries)
    yield from (replace(best, query_block=one.query_block, shares=one.shares) for one in of_keys[1:])


def gradient_swizzle(problem: Attention, target: Target) -> int:
    """Key heads whose queries, with their cotangents, fit in the L2 cache."""
    vectors = problem.query.itemsize * (problem.head_size + problem.value_head_size)
    fitting = target.l2_bytes // (problem.group * problem.query_length * vectors)
    return 1 << (max(1, fitting).bit_length() - 1)


def backward_swizzle(problem: Attention, tile_m: int, target: Target) -> int:
    """Key heads that have the tiles of one round of multiprocessors, or, with blocks of 128 queries, of four. Fewer, if
    more would not fit in the L2 cache with what they read and the float32 sums of their queries' gradients.

    Tiles of a head wait for each other, by as many blocks of queries as there are tiles of it at work; those of a mask,
    which differ in length, the longer. What is least is within 2 % of the best that was measured
    (benchmarks/results/attention_kernels.md).
    """
    masked = problem.mask.band != Band() or mask_function(problem) is not None
    rounds = (tile_m // BACKWARD_TILES[0]) ** 2
    heads = max(
        LEAST_MASKED if masked else LEAST_UNMASKED, rounds * target.sm_count // ceil(problem.key_length / TILE_N)
    )
    if not masked:
        vectors = problem.query.itemsize * (problem.head_size + problem.value_head_size) + 4 * problem.head_size
        heads = max(1, min(heads, target.l2_bytes // (problem.group * problem.query_length * vectors)))
    return 1 << (heads.bit_length() - 1)


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
    """Tiles of the heads whose keys and values fit in the L2 cache: a power of two of those that share them."""
    size = problem.key.itemsize * problem.key_length * (problem.head_size + problem.value_head_size)
    fitting = max(1, target.l2_bytes // size)
    return ceil(problem.group / heads) << (fitting.bit_length() - 1)


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
        parts, part = ceil(tiles * splits / slots), ceil(blocks / splits)
        drawn = slots / ALONE  # by all, while one draws a block
        apart = part / 2 if parts > 1 and problem.mask.key_lengths is not None else 0
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
