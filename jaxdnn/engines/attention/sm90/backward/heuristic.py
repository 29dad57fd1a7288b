"""Which knobs of the one kernel of all gradients to try, best first."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import ceil

from jaxdnn.device import Target
from jaxdnn.engines.attention.problem import Attention
from jaxdnn.engines.attention.shares import best_shares
from jaxdnn.engines.attention.sm90.backward.knobs import (
    MOST_HELD,
    TILE_N,
    TILES,
    AttentionSm90BackwardKnobs,
    backward_knobs_reason,
    held_with_functions,
    sums_bytes,
)
from jaxdnn.engines.attention.sm90.heuristic import LEAST_MASKED, is_masked

# Bytes of the float32 sums of queries' gradients; and how many tiles a part of the heads has for each multiprocessor.
MOST_SUMS, FEWEST_WAVES = 2**27, 12
# What shared memory has to have room for, best first: tiles of what scores read, and how many sums.
ROOM = ((True, 2), (True, 1), (False, 2))
LEAST_UNMASKED = 4  # heads that are worked through together, without a mask


def backward_candidates(problem: Attention, target: Target) -> Iterator[AttentionSm90BackwardKnobs]:
    """Knobs that work for the call; large blocks are read less often, but leave functions fewer registers."""
    tiles = sorted(TILES, reverse=problem.query_length > TILES[0])
    found: dict[int, AttentionSm90BackwardKnobs] = {}
    for tile_m, (tiled, sums) in product(tiles, ROOM):
        swizzle = backward_swizzle(problem, tile_m, target)
        knobs = AttentionSm90BackwardKnobs(tile_m, swizzle, score_tiles=tiled, sums=sums)
        if backward_knobs_reason(problem, knobs, target.shared_memory) is None:
            found.setdefault(knobs.tile_m, knobs)
    fitting = [one for one in found.values() if held_with_functions(problem, one)[0] <= MOST_HELD]
    for knobs in fitting or [found[min(found)]]:
        shares = best_shares(problem, (knobs.tile_m, TILE_N), target)
        yield replace(knobs, shares=shares, parts=parts(problem, knobs, target))


def backward_swizzle(problem: Attention, tile_m: int, target: Target) -> int:
    """Key heads that have the tiles of one round of multiprocessors, or, with blocks of 128 queries, of four. Fewer, if
    more would not fit in the L2 cache with what they read and the float32 sums of their queries' gradients.

    Tiles of a head wait for each other, by as many blocks of queries as there are tiles of it at work; those of a mask,
    which differ in length, the longer. What is least is within 2 % of the best that was measured
    (benchmarks/results/attention_kernels.md).
    """
    masked = is_masked(problem)
    rounds = (tile_m // TILES[0]) ** 2
    heads = max(
        LEAST_MASKED if masked else LEAST_UNMASKED, rounds * target.sm_count // ceil(problem.key_length / TILE_N)
    )
    if not masked:
        vectors = problem.query.itemsize * (problem.head_size + problem.value_head_size) + 4 * problem.head_size
        heads = max(1, min(heads, target.l2_bytes // (problem.group * problem.query_length * vectors)))
    return 1 << (heads.bit_length() - 1)


def parts(problem: Attention, knobs: AttentionSm90BackwardKnobs, target: Target) -> int:
    """As many as make the sums of a part no larger than MOST_SUMS; fewer where a part would have too few tiles."""
    heads = problem.batch * problem.key_heads
    tiles = heads * ceil(problem.key_length / TILE_N)
    sums = heads * problem.group * ceil(problem.query_length / knobs.tile_m) * sums_bytes(problem, knobs)
    equal = [n for n in range(1, heads + 1) if heads % n == 0 and tiles >= n * FEWEST_WAVES * target.sm_count]
    return next((n for n in equal if sums <= n * MOST_SUMS), max(equal, default=1))
