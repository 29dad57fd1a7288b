"""Which knobs of the Hopper matmul kernel to try for a product, best first."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from jaxdnn.device import Target
from jaxdnn.engines.sm90_matmul import Sm90Knobs, knobs_reason
from jaxdnn.engines.sm90_product import Product, identity

# All numbers of this file were measured on an H200 that its power limit held at 1.43 GHz, bfloat16, random data.
RATE = 670e12  # flops a second of the 128 x 256 tile
SPLIT_LAUNCH = 4e-6  # seconds that the second kernel of a split takes at least
SUMS_RATE = 2.5e12  # bytes a second that sums of splits are written and read at
# In many rounds power is the limit: a last round that is not full costs less than its share, because what the idle
# blocks don't draw makes the others faster. In few rounds latency is, and the blocks of a cluster wait for each other.
TAIL_EXPONENT = 0.65
MANY_ROUNDS = 3
CLUSTER_LATENCY = 0.91  # speed with few rounds: 597 with clusters against 662 TFLOP/s at 2048 x 2048 x 2048
LIGHT_SUMS = 128  # registers of sums that leave room for an epilogue's work, or for the addresses of a direct store


@dataclass(frozen=True)
class Shape:
    """A tile and schedule, and its speed relative to the first one when all blocks are busy."""

    knobs: Sm90Knobs
    speed: float


_SHAPES = (
    Shape(Sm90Knobs(), 1.0),
    # A larger tile moves a fifth less into shared memory, and the power saved becomes clock.
    Shape(Sm90Knobs(tile_m=256, tile_n=192, stages=3), 1.025),
    Shape(Sm90Knobs(tile_m=128, tile_n=192, schedule="pingpong"), 0.985),
    Shape(Sm90Knobs(tile_m=128, tile_n=128, stages=6, schedule="pingpong"), 0.97),
    Shape(Sm90Knobs(cluster_m=1), 0.98),
    Shape(Sm90Knobs(tile_m=128, tile_n=128, stages=6, cluster_m=1), 0.94),
    Shape(Sm90Knobs(tile_m=64, tile_n=256, stages=5, cluster_m=1, consumers=1), 0.97),
    Shape(Sm90Knobs(tile_m=64, tile_n=128, stages=8, cluster_m=1, consumers=1), 0.94),
    Shape(Sm90Knobs(tile_m=128, tile_n=64, stages=8, cluster_m=1), 0.91),
    Shape(Sm90Knobs(tile_m=64, tile_n=64, stages=8, cluster_m=1, consumers=1), 0.80),
)


def candidates(product: Product, target: Target) -> Iterator[Sm90Knobs]:
    """Knobs that work for the product, by the time that is expected of them."""
    found: dict[Sm90Knobs, float] = {}
    for shape in _SHAPES:
        for split in splits(product, shape.knobs, target.sm_count):
            knobs = fitted(product, replace(shape.knobs, split_k=split), target)
            if knobs is not None:
                found[knobs] = seconds(product, knobs, shape.speed, target.sm_count)
    return iter(sorted(found, key=found.__getitem__))


def fitted(product: Product, knobs: Sm90Knobs, target: Target) -> Sm90Knobs | None:
    """The knobs for this product: as many sums as two matrices b need, and as many stages as there is room for."""
    sums = len(product.b)
    if knobs.tile_n % sums:
        return None
    plain = product.epilogue == identity(sums)
    direct = product.n * min(result.itemsize for result in product.results) % 16 != 0
    if (direct or not plain) and knobs.consumer_rows * knobs.tile_n > 128 * LIGHT_SUMS:
        return None
    if knobs.split_k > 1 and knobs.consumer_rows * knobs.tile_n >= 128 * LIGHT_SUMS:
        return None  # a part's place in K takes registers too: 8 to 16 bytes spilled with 128 or more sums a thread
    knobs = replace(
        knobs,
        tile_n=knobs.tile_n // sums,
        store="direct" if direct else "tma",
        # With bias and gelu it is worth 1 to 2 % in the geometric mean of four shapes, without an epilogue nothing.
        stagger=int(knobs.schedule == "cooperative" and knobs.consumers == 2 and not plain),
    )
    for slots, stages in ((slots, stages) for stages in range(knobs.stages, 1, -1) for slots in (2, 1)):
        choice = replace(knobs, stages=stages, slots=slots)
        if knobs_reason(product, choice, target.shared_memory) is None:
            return choice
    return None


def splits(product: Product, knobs: Sm90Knobs, sm_count: int) -> list[int]:
    """Into how many parts K may be cut to occupy more of the device: parts of at least 1 KiB of each row."""
    rows, columns = math.ceil(product.m / knobs.tile_m), math.ceil(product.n * len(product.b) / knobs.tile_n)
    tiles = rows * columns * product.batch
    most = min(sm_count // tiles, product.k // (8 * product.depth), 16)
    return [1, *(split for split in (2, 4, 8, most) if 1 < split <= most)]


def seconds(product: Product, knobs: Sm90Knobs, speed: float, sm_count: int) -> float:
    """An estimate of the time, for comparing knobs with each other."""
    cluster = knobs.cluster_m * knobs.cluster_n
    rows = math.ceil(product.m / (knobs.tile_m * knobs.cluster_m))
    columns = math.ceil(product.n / (knobs.tile_n * knobs.cluster_n))
    rounds = math.ceil(rows * columns * product.batch * knobs.split_k / max(1, sm_count // cluster))
    share = knobs.tile_m * knobs.tile_n / knobs.split_k
    full = product.m * product.n * product.batch / (rounds * sm_count * share)
    if rounds >= MANY_ROUNDS:
        full **= TAIL_EXPONENT
    elif cluster > 1:
        full *= CLUSTER_LATENCY
    # 8-bit elements are multiplied twice as fast, and float32 ones half as fast, as 16-bit ones.
    rate = RATE * speed * 2 / product.a.itemsize
    time = 2 * product.m * product.n * product.k * product.batch * len(product.b) / (rate * full)
    if knobs.split_k > 1:
        sums = product.m * product.n * product.batch * len(product.b) * 4
        time += SPLIT_LAUNCH + 2 * sums * knobs.split_k / SUMS_RATE
    return time
