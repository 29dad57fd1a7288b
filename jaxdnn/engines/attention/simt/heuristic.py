"""Which knobs of attention's kernels for any GPU to try, best first."""

from collections.abc import Iterator
from dataclasses import replace
from math import ceil

from jaxdnn.device import Target
from jaxdnn.engines.attention.problem import Attention
from jaxdnn.engines.attention.simt.knobs import AttentionSimtKnobs, kernels, knobs_reason

# Large tiles multiply more of each element that they read from shared memory; small ones fit the larger head sizes.
TILES = (
    AttentionSimtKnobs(128, 64, 4, 2),
    AttentionSimtKnobs(64, 64, 2, 2),
    AttentionSimtKnobs(64, 64, 2, 4),
    AttentionSimtKnobs(64, 32, 2, 4),
    AttentionSimtKnobs(32, 32, 1, 4),
    AttentionSimtKnobs(16, 32, 1, 8),
    AttentionSimtKnobs(16, 16, 1, 4),
    AttentionSimtKnobs(8, 16, 1, 4),
)
# What tensor cores may multiply is tried first.
TENSOR_TILES = (
    AttentionSimtKnobs(128, 64, 4, 2, tensor=True),
    AttentionSimtKnobs(64, 64, 2, 2, tensor=True),
    AttentionSimtKnobs(64, 64, 2, 4, tensor=True),
    AttentionSimtKnobs(64, 32, 2, 4, tensor=True),
    AttentionSimtKnobs(32, 32, 2, 4, tensor=True),
    AttentionSimtKnobs(16, 32, 1, 4, tensor=True),
)
LEAST_ROWS = 16  # of a tensor core's multiply
RESIDENT = 2  # blocks that run behind each other's copies and exponentials, where both fit
RESERVED = 1024  # bytes of shared memory that each block takes besides its own


def candidates(problem: Attention, target: Target) -> Iterator[AttentionSimtKnobs]:
    """Knobs that work for the call."""
    for tiles in (TENSOR_TILES, TILES):
        fitting = [knobs for knobs in tiles if knobs_reason(problem, knobs, target.shared_memory) is None]
        if problem.dropout is not None and len(fitting) > 2:
            fitting = [knobs for knobs in fitting if knobs not in tiles[:2]]  # random bits leave no registers for them
        for knobs in ordered(problem, fitting, target.sm_count):
            twice = replace(knobs, resident=RESIDENT)
            shared = max(kernel.shared_memory for kernel in kernels(problem, knobs)) + RESERVED
            both = RESIDENT * shared <= target.shared_memory + RESERVED
            yield twice if both and knobs_reason(problem, twice, target.shared_memory) is None else knobs


def ordered(problem: Attention, tiles: list[AttentionSimtKnobs], sm_count: int) -> list[AttentionSimtKnobs]:
    """The largest first of those that occupy the device, and of which few rows are empty where there are few."""
    rows, heads = problem.query_length, problem.query_heads
    if problem.backward is not None:
        rows, heads = max(rows, problem.key_length), problem.key_heads

    def wasted(knobs: AttentionSimtKnobs) -> tuple[int, int]:
        idle = sm_count - ceil(rows / knobs.tile_m) * problem.batch * heads
        return max(0, idle), max(0, knobs.tile_m - max(rows, LEAST_ROWS))

    return sorted(tiles, key=wasted)
