"""Which knobs of the kernel for any GPU to try for a product, best first.

Numbers in brackets are those of the notes on simt in benchmarks/results/product_kernels.md.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from jaxdnn.device import Target
from jaxdnn.engines.product.atom import DOUBLE, TENSOR, threads
from jaxdnn.engines.product.problem import Product
from jaxdnn.engines.product.simt.knobs import (
    COPY_BYTES,
    REALIGNED,
    SimtKnobs,
    blocks,
    few_elements,
    knobs_reason,
    product_atom,
    runs_of,
    vector,
)

# A rate is of the first tile, 4096 x 4096 x 4096 [1].
RATE = {"float32": 50e12, "int32": 29e12, "float64": 51e12}  # operations a second
TENSOR_RATE = 306e12
WARPS = 8  # of a multiprocessor that keep it busy
FEW_WARPS, FEW_TENSOR_WARPS = 0.65, 1.1  # with fewer, speed falls as this power [2]; of tensor cores [8]
MANY = 2**30  # multiplications from which on cuBLAS makes up for an epilogue of its own [5]
APPLIED = 0.15e-6  # seconds of an element with a function, of which a lane has many, one after the other [11]
SPLIT_LAUNCH = 5e-6  # seconds that the second kernel of a split takes at least
SPLIT_RATE = 2.5e12  # bytes a second that accumulators of splits are written and read at


@dataclass(frozen=True)
class Latency:
    """Seconds of 16-bit elements on tensor cores.

    Attributes:
      start: before the first copies arrive, and after the last multiply.
      stage: that each takes at least.
      loaded: besides, for each 256 of its elements.
      shared: the power of how many blocks a multiprocessor has, as which these share that.
      element: in the epilogue; half of it without functions.
    """

    start: float
    stage: float
    loaded: float
    shared: float
    element: float


# By whether rows are aligned: of many accumulators a lane [8], and of few [10].
LATENCY_OF_MANY = {
    True: Latency(2e-6, 0.085e-6, 0.02e-6, 0.7, 0.65e-9),
    False: Latency(2e-6, 0.4e-6, 0.027e-6, 0.8, 0.4e-9),
}
LATENCY_OF_FEW = {
    True: Latency(2e-6, 0.085e-6, 0.0125e-6, 1.3, 0.4e-9),
    False: Latency(1.6e-6, 0.23e-6, 0.0155e-6, 0.9, 0.6e-9),
}


@dataclass(frozen=True)
class Shape:
    """A tile, and its speed relative to the first one when all multiprocessors are busy."""

    knobs: SimtKnobs
    speed: float


_LARGE, _WIDE = SimtKnobs(), SimtKnobs(tile_n=64, thread_n=8, resident=3)
_SMALL = (
    Shape(SimtKnobs(tile_m=64, tile_n=64, thread_n=8, resident=5), 0.92),
    Shape(SimtKnobs(tile_m=32, thread_m=4, thread_n=8, resident=4), 0.75),
    Shape(SimtKnobs(tile_m=32, tile_n=64, thread_m=4, thread_n=8, resident=8), 0.75),
)
# Which of the tiles and depths of a stage is fastest depends on what is transposed, and aligned [3].
_ALIGNED = (Shape(_LARGE, 1.0), Shape(_WIDE, 0.97), *_SMALL)
_A_TRANSPOSED = (Shape(_WIDE, 1.0), Shape(replace(_LARGE, depth=8, stages=4), 0.97), *_SMALL)
_B_TRANSPOSED = (Shape(replace(_LARGE, depth=8, stages=4), 0.94), Shape(_WIDE, 0.93), *_SMALL)
_UNALIGNED = (
    Shape(replace(_WIDE, depth=8, stages=4), 0.88),
    Shape(replace(_LARGE, depth=8, stages=4), 0.8),
    *(Shape(shape.knobs, 0.86 * shape.speed) for shape in _SMALL),
)
# What is converted on its way waits in registers.
_CONVERTED = tuple(
    Shape(replace(shape.knobs, depth=8, stages=2), shape.speed) for shape in (Shape(_LARGE, 1.0), *_SMALL)
)
_DOUBLE = (
    Shape(SimtKnobs(thread_m=32, thread_n=32, resident=1), 1.0),
    Shape(SimtKnobs(tile_m=64, thread_m=32, thread_n=64), 0.98),
    Shape(SimtKnobs(tile_m=64, tile_n=64, thread_m=32, thread_n=32, depth=8, stages=4, resident=3), 0.96),
    Shape(SimtKnobs(tile_m=32, tile_n=32, thread_m=16, thread_n=16, resident=4), 0.6),
)
# Four warps a block, the fewest whose multiplies overlap: more of them take longer to start [10].
_SLICED = SimtKnobs(tile_m=16, tile_n=16, thread_m=16, thread_n=16, depth=128, slice_k=4, stages=8, resident=3)
_TENSOR = (
    Shape(SimtKnobs(thread_m=64, thread_n=64, depth=32), 1.0),
    Shape(SimtKnobs(tile_m=64, thread_m=32, thread_n=64, depth=32, resident=3), 0.72),
    Shape(SimtKnobs(tile_m=64, tile_n=64, thread_m=32, thread_n=32, depth=32, stages=4, resident=4), 0.58),
    Shape(SimtKnobs(tile_m=32, tile_n=64, thread_m=16, thread_n=32, depth=32, stages=4, resident=6), 0.42),
    Shape(SimtKnobs(tile_m=32, tile_n=32, thread_m=16, thread_n=16, depth=64, stages=6, resident=4), 0.42),
    Shape(SimtKnobs(tile_m=32, tile_n=32, thread_m=16, thread_n=16, depth=128, stages=4, resident=3), 0.42),
    Shape(replace(_SLICED, tile_n=32, slice_k=2, stages=6, resident=2), 0.42),
    Shape(_SLICED, 0.42),
)
# 16-bit elements of unaligned rows wait in registers too. More warps load more of them at once, so do deeper stages,
# which is what products that are small enough for this kernel wait for [6, 8].
_UNALIGNED_TENSOR = (
    Shape(SimtKnobs(tile_n=64, thread_m=32, thread_n=32, depth=32, stages=2, resident=1), 0.4),
    Shape(SimtKnobs(tile_m=64, tile_n=64, thread_m=32, thread_n=16, depth=64, stages=2, resident=1), 0.4),
    Shape(SimtKnobs(tile_m=64, tile_n=64, thread_m=32, thread_n=32, depth=32, stages=2, resident=3), 0.33),
    Shape(SimtKnobs(tile_m=32, tile_n=64, thread_m=16, thread_n=16, depth=64, stages=2), 0.3),
    Shape(SimtKnobs(tile_m=32, tile_n=32, thread_m=16, thread_n=16, depth=64, stages=2, resident=4), 0.2),
    Shape(SimtKnobs(tile_m=32, tile_n=32, thread_m=16, thread_n=16, depth=128, stages=2, resident=3), 0.2),
    Shape(SimtKnobs(tile_m=32, tile_n=32, thread_m=16, thread_n=16, depth=256, stages=2), 0.2),
    Shape(replace(_SLICED, tile_n=32, slice_k=2, stages=2, resident=4), 0.2),
    Shape(replace(_SLICED, tile_n=32, slice_k=2, depth=256, stages=2, resident=2), 0.2),
    Shape(replace(_SLICED, stages=2, resident=5), 0.2),
    Shape(replace(_SLICED, depth=256, stages=2), 0.2),
    Shape(replace(_SLICED, depth=512, stages=2, resident=2), 0.2),
)


def shapes(product: Product) -> tuple[Shape, ...]:
    """Tiles for the product's dtypes, layout and alignment."""
    atom, aligned = product_atom(product), together(product)
    if atom is DOUBLE:
        # 512 threads have 128 registers each, none of them for an epilogue, a transposed A or many addresses [4].
        spare = product.is_plain and len(product.b) == 1 and not product.a_transposed and aligned > 1
        return _DOUBLE if spare else _DOUBLE[1:]
    if atom is TENSOR:
        return _UNALIGNED_TENSOR if aligned <= REALIGNED else _TENSOR
    if product.a.itemsize < 4:
        return _CONVERTED
    if aligned == 1:
        return _UNALIGNED
    return _A_TRANSPOSED if product.a_transposed else _B_TRANSPOSED if product.b_transposed else _ALIGNED


def together(product: Product) -> int:
    """Neighbours that every copy may take."""
    (along_m, along_n), atom = runs_of(product), product_atom(product)
    return min(vector(atom, product.a, along_m), *(vector(atom, b, along_n) for b in product.b))


def candidates(product: Product, target: Target) -> Iterator[SimtKnobs]:
    """Knobs that work for the product, by the time that is expected of them."""
    found = timed(product, target)
    return iter(sorted(found, key=found.__getitem__))


def timed(product: Product, target: Target) -> dict[SimtKnobs, float]:
    """Knobs that work for the product, each with the time that is expected of it."""
    found: dict[SimtKnobs, float] = {}
    for shape in shapes(product):
        for split in splits(product, shape.knobs, target.sm_count * shape.knobs.resident):
            knobs = replace(shape.knobs, split_k=split)
            if knobs_reason(product, knobs, target) is None:
                found[knobs] = seconds(product, knobs, shape.speed, target.sm_count)
    return found


def splits(product: Product, knobs: SimtKnobs, slots: int) -> list[int]:
    """Into how many parts K may be cut to occupy more of the device: parts of at least 16 stages."""
    if threads(product_atom(product), knobs, knobs.slice_k) > 256:
        return [1]  # a part's place takes registers too [4]
    most = min(slots // blocks(product, knobs), product.k // (16 * knobs.depth), 64)
    return [1, *(split for split in (2, 3, 4, 6, 8, 16, 32, 64) if split <= most)]


def seconds(product: Product, knobs: SimtKnobs, speed: float, sm_count: int) -> float:
    """An estimate of the time, for comparing knobs with each other."""
    atom, aligned = product_atom(product), together(product) > REALIGNED
    each = math.ceil(blocks(product, knobs) / sm_count)  # blocks of a multiprocessor, one after the other or together
    warps = min(each, knobs.resident) * threads(atom, knobs, knobs.slice_k) / 32
    few = FEW_TENSOR_WARPS if atom is TENSOR and aligned else FEW_WARPS
    rate = (TENSOR_RATE if atom is TENSOR else RATE[product.accumulator]) * speed * min(1.0, warps / WARPS) ** few
    flops = 2 * knobs.tile_m * knobs.tile_n * math.ceil(product.k / knobs.split_k)
    time = each * sm_count * flops / rate
    if atom is TENSOR:
        latency = (LATENCY_OF_FEW if few_elements(product, knobs) else LATENCY_OF_MANY)[aligned]
        # What is not aligned lies in a chunk more than it would fill [12].
        along_m, along_n = runs_of(product)
        besides = 0 if aligned else COPY_BYTES // product.a.itemsize * (along_m + along_n * len(product.b))
        loading = latency.loaded * (knobs.tile_m + knobs.tile_n + besides) * knobs.depth / 256
        stage = latency.stage + loading * min(each, knobs.resident) ** latency.shared
        stages = math.ceil(each / knobs.resident) * math.ceil(math.ceil(product.k / knobs.split_k) / knobs.depth)
        elements = knobs.tile_m * knobs.tile_n / len(product.b)
        storing = latency.element * each * elements * (0.5 if product.is_plain else 1)
        if not (product.is_plain or few_elements(product, knobs)):
            storing = max(storing, APPLIED * elements / threads(atom, knobs, knobs.slice_k))
        time = latency.start + max(time, stages * stage) + storing
    if knobs.split_k > 1:
        accumulators = product.m * product.n * product.batch * len(product.b) * 4
        time += SPLIT_LAUNCH + 2 * accumulators * knobs.split_k / SPLIT_RATE
    return time
