"""Which knobs of the Hopper matmul kernel to try for a product, best first."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil

import numpy as np

from jaxdnn.device import Target
from jaxdnn.engines.product import EpilogueOperand, Product
from jaxdnn.engines.sm90_knobs import Sm90Knobs, knobs_reason, sum_registers
from jaxdnn.engines.sm90_tensors import depth, reduced, stored, tma_reason
from jaxdnn.engines.sm90_unit import cluster_tiles

# All numbers of this file were measured on an H200 that its power limit held at 1.43 GHz, bfloat16, random data.
RATE = 670e12  # flops a second of the 128 x 256 tile
SPLIT_LAUNCH = 4e-6  # seconds that the second kernel of a split takes at least
SUMS_RATE = 2.5e12  # bytes a second that sums of splits are written and read at
# In many rounds power is the limit: a last round that is not full costs less than its share, because what the idle
# blocks don't draw makes the others faster. In few rounds latency is, and the blocks of a cluster wait for each other.
TAIL_EXPONENT = 0.65
MANY_ROUNDS = 3
CLUSTER_LATENCY = 0.91  # speed with few rounds: 597 with clusters against 662 TFLOP/s at 2048 x 2048 x 2048
# Stages of 8-bit floats that the tensor cores sum. A sum of positive numbers comes out too small by 0.05 % with one, by
# 0.17 % with two and 0.5 % with four, whatever k; without promotion by 7 % with k = 4096, and 25 % with 16384. With
# normally distributed numbers the error is 2e-4 with two, relative to the norm. Speed at 8192 x 8192 x 8192: 972, 1194
# and 1199 TFLOP/s with one, two and four; 1254 without.
PROMOTION = 2
# Bias and gelu of four shapes: 624, 647, 624, 655 TFLOP/s with one stage between the consumers, 620, 670, 636, 676 with
# two, 633, 669, 646, 688 with three. Without an epilogue it is worth nothing.
MOST_STAGGER = 3
LIGHT_SUMS = 128  # registers of sums that leave room for an epilogue's work, or for the addresses of a direct store
# What is left beside them for an epilogue's values, with 64 rows a warp group and with 128: what did not spill.
EPILOGUE_REGISTERS = {64: 56, 128: 12}
REDUCTION_REGISTERS = 24


@dataclass(frozen=True)
class Shape:
    """A tile and schedule, and its speed relative to the first one when all blocks are busy."""

    knobs: Sm90Knobs
    speed: float


_SHAPES = (
    Shape(Sm90Knobs(), 1.0),
    # A larger tile moves a fifth less into shared memory, and the power saved becomes clock: 707 TFLOP/s at
    # 8192 x 28672 x 4096, and 700 of the first.
    Shape(Sm90Knobs(tile_m=256, tile_n=192, stages=3), 1.01),
    Shape(Sm90Knobs(tile_m=128, tile_n=192, schedule="pingpong"), 0.985),
    Shape(Sm90Knobs(tile_m=256, tile_n=128), 0.96),  # 663, 660, 657, 684 of four shapes; the first 669, 696, 700, 704
    Shape(Sm90Knobs(tile_n=192), 0.935),
    Shape(Sm90Knobs(tile_m=128, tile_n=128, stages=6, schedule="pingpong"), 0.95),
    Shape(Sm90Knobs(cluster_m=1), 0.98),
    # Promoted sums of 8-bit floats, 4096 and 8192 x 4096 x 14336: 1182 and 1251; with tile_n = 192 1080 and 1225.
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
    promotion = PROMOTION if promotes(product) else 0
    if promotion and knobs.consumer_rows != 64:
        return None
    staggered = knobs.schedule == "cooperative" and knobs.consumers == 2 and not product.is_plain
    direct = any(tma_reason(result, "a result") for result in stored(product))
    knobs = replace(
        knobs,
        tile_n=knobs.tile_n // sums,
        promotion=promotion,
        store="direct" if direct else "tma",
        stagger=knobs.stages - 1 if staggered else 0,
    )
    smallest = knobs.consumer_rows * knobs.tile_n * sums == 64 * 64
    if not smallest and sum_registers(product, knobs) > sums_limit(product, knobs):
        return None
    for slots, stages in ((slots, stages) for stages in range(knobs.stages, 1, -1) for slots in (2, 1)):
        choice = replace(knobs, stages=stages, slots=slots, stagger=min(knobs.stagger, stages - 1, MOST_STAGGER))
        if knobs_reason(product, choice, target.shared_memory) is None:
            return choice
    return None


def promotes(product: Product) -> bool:
    """Whether the sums of more than one stage of 8-bit floats are added, which the tensor cores do with 14 bits."""
    return "float8" in product.a.dtype and product.k > depth(product)


def sums_limit(product: Product, knobs: Sm90Knobs) -> int:
    """How many registers may hold sums."""
    if knobs.split_k > 1:
        return LIGHT_SUMS - 1  # a part's place in K takes registers too: 8 to 16 bytes spilled with as many or more
    if product.is_plain and knobs.store == "tma":
        return 192
    work = sum(map(operand_registers, product.operands)) + 8 * len(product.results)
    work += REDUCTION_REGISTERS * len(reduced(product))
    limit = LIGHT_SUMS + 64 * bool(knobs.promotion)  # half of them are added to the others, and free then
    return limit - max(0, work - EPILOGUE_REGISTERS[knobs.consumer_rows])


def operand_registers(operand: EpilogueOperand) -> int:
    """Registers that hold an operand's values for 32 columns of two rows."""
    rows = 2 if operand.broadcast in ("column", "full") else 1
    batched = int(operand.batch_stride != 0)
    if operand.broadcast in ("scalar", "column"):
        return rows + batched
    return batched + rows * (4 if operand.pairs and np.dtype(operand.dtype).itemsize < 4 else 8)


def splits(product: Product, knobs: Sm90Knobs, sm_count: int) -> list[int]:
    """Into how many parts K may be cut to occupy more of the device: parts of at least 1 KiB of each row."""
    rows, columns = ceil(product.m / knobs.tile_m), ceil(product.n * len(product.b) / knobs.tile_n)
    tiles = rows * columns * product.batch
    most = min(sm_count // tiles, product.k // (8 * depth(product)), 16)
    return [1, *(split for split in (2, 4, 8, most) if 1 < split <= most)]


def seconds(product: Product, knobs: Sm90Knobs, speed: float, sm_count: int) -> float:
    """An estimate of the time, for comparing knobs with each other."""
    cluster = knobs.cluster_m * knobs.cluster_n
    tiles = cluster_tiles(product, knobs) * product.batch * knobs.split_k
    rounds = ceil(tiles / max(1, sm_count // cluster))
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
