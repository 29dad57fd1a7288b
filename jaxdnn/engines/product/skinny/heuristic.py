"""Which knobs of the skinny kernel to try for a product, best first.

Numbers in brackets are those of the notes on skinny in benchmarks/results/product_kernels.md.
"""

import math
from collections.abc import Iterator

from jaxdnn.device import Target, resident_clusters
from jaxdnn.engines.product.accumulators import ARITHMETIC
from jaxdnn.engines.product.skinny.knobs import SkinnyKnobs, SkinnyProduct, knobs_reason
from jaxdnn.engines.product.sm90_model import moved
from jaxdnn.engines.product.tma import DEPTH_BYTES

SM_THREADS = 2048  # of a multiprocessor, at once
MOST_SPLITS = 8  # the largest cluster that every device with clusters takes
# The model of `seconds` [1].
BANDWIDTH = 4.3e12  # bytes a second where a target's is not known
L2_BANDWIDTH = 7e12  # bytes a second from the L2 cache to the multiprocessors
SM_BANDWIDTH = 102e9  # of which one multiprocessor takes at most so many
MEMORY_BANDWIDTH = 58e9  # bytes a second from memory to one multiprocessor: see "Few rows, by whom"
LATENCY = 0.6e-6  # seconds of the bandwidth that must have been asked for at any time, or it falls in proportion
AHEAD, FEWEST_STAGES, MOST_STAGES = 2e-6, 4, 16  # seconds of it that stages ask for, and stages at least [2]
START = 1.8e-6  # seconds before the first bytes, and after the last
ROUND = 0.25e-6  # seconds a round of blocks, where there are more than one
EXCHANGE = {1: 0.0, 2: 0.25e-6, 4: 0.5e-6, 8: 0.6e-6}  # seconds that a cluster takes to meet, with 16 columns
TOGETHER = 4  # elements of a thread that are finished together
FINISH = {False: 0.3e-6, True: 0.9e-6}  # seconds that they take, without and with accumulators of other blocks
TRANSCENDENTAL = 3  # times as long, with functions that are more than arithmetic: see "Few rows, by whom"


def candidates(one: SkinnyProduct, target: Target) -> Iterator[SkinnyKnobs]:
    """Knobs that work for the product, by the time that is expected of them."""
    found: dict[SkinnyKnobs, float] = {}
    for tile in (64, 128, 256):
        for split in (1, 2, 4, MOST_SPLITS):
            knobs = SkinnyKnobs(tile, 2, split)
            blocks = one.tiles(knobs) * one.product.batch * split
            parts = math.ceil(math.ceil(one.product.k / one.depth) / split)
            of_stages = blocks * tile * len(one.streamed) * DEPTH_BYTES
            ahead = AHEAD * (target.bandwidth or BANDWIDTH) / of_stages
            most = min(parts, MOST_STAGES, target.shared_memory // (one.stage_bytes(knobs) + 16))
            knobs = SkinnyKnobs(tile, max(2, min(max(FEWEST_STAGES, 1 + round(ahead)), most)), split)
            if knobs_reason(one, knobs, target) is None:
                found[knobs] = seconds(one, knobs, target)
    return iter(sorted(found, key=found.__getitem__))


def seconds(one: SkinnyProduct, knobs: SkinnyKnobs, target: Target) -> float:
    """An estimate of the time, for comparing knobs with each other."""
    rows = knobs.tile * len(one.streamed)
    blocks = one.tiles(knobs) * one.product.batch * knobs.split_k
    resident = min(
        target.shared_memory // one.shared_memory(knobs),
        SM_THREADS // one.threads(knobs),
        math.ceil(blocks / target.sm_count),
    )
    # Blocks that split K are a cluster [5].
    at_once = min(blocks, resident * knobs.split_k * resident_clusters(knobs.split_k, target.sm_count))
    of_block = math.ceil(one.product.k / knobs.split_k) * one.stationary.itemsize * rows
    streamed, both = of_block * at_once, of_block * at_once * (rows + one.width) / rows
    bandwidth = target.bandwidth or BANDWIDTH
    share = min(1.0, at_once * (knobs.stages - 1) * rows * DEPTH_BYTES / (LATENCY * bandwidth))
    busy = min(at_once, target.sm_count)
    from_memory = streamed / min(bandwidth * share, busy * MEMORY_BANDWIDTH)
    from_cache = both / min(L2_BANDWIDTH, busy * SM_BANDWIDTH)
    exchanging = EXCHANGE[knobs.split_k] * max(1.0, one.columns / 16)
    finishing = FINISH[knobs.split_k > 1] * math.ceil(one.columns * knobs.tile / (knobs.split_k * 2 * rows * TOGETHER))
    if not ARITHMETIC.issuperset(one.product.program.operations):
        finishing *= TRANSCENDENTAL
    rounds = math.ceil(blocks / at_once)
    moving = max(rounds * from_memory, rounds * from_cache, moved(one.product) / bandwidth)
    return START + moving + rounds * (exchanging + finishing + (ROUND if rounds > 1 else 0.0))
