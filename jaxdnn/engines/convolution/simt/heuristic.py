"""Which knobs of the convolution on any GPU to try, best first, by the time of what tiles multiply."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil

from jaxdnn.device import Target
from jaxdnn.engines.convolution.matrices import product_of_group
from jaxdnn.engines.convolution.problem import Convolution
from jaxdnn.engines.convolution.simt.knobs import (
    ConvolutionSimtKnobs,
    blocks,
    convolution_atom,
    knobs_reason,
    sides,
    vector,
)
from jaxdnn.engines.product.atom import DOUBLE, TENSOR, threads

SPLITS = (1, 2, 4, 8, 16, 32, 64, 128)
WARPS = 8  # of a multiprocessor that keep it busy
SPLIT_LAUNCH = 5e-6  # seconds that the second kernel of a split takes at least
SPLIT_RATE = 2.5e12  # bytes a second that accumulators of splits are written and read at


@dataclass(frozen=True)
class Shape:
    """A tile, and the multiply-adds a second of a device whose multiprocessors are all busy with it."""

    knobs: ConvolutionSimtKnobs
    rate: float


_FMA = (
    Shape(ConvolutionSimtKnobs(128, 64, 8, 8, resident=2), 12e12),
    Shape(ConvolutionSimtKnobs(64, 64, 8, 8, resident=4), 10e12),
    Shape(ConvolutionSimtKnobs(128, 32, 8, 8, resident=4), 9e12),
    Shape(ConvolutionSimtKnobs(32, 32, 4, 4, resident=6), 5e12),
)
_TENSOR = (
    Shape(ConvolutionSimtKnobs(128, 64, 32, 64, 32, resident=2), 60e12),
    Shape(ConvolutionSimtKnobs(64, 64, 32, 32, 32, resident=3), 45e12),
    Shape(ConvolutionSimtKnobs(128, 32, 32, 32, 32, resident=3), 40e12),
    Shape(ConvolutionSimtKnobs(64, 16, 16, 16, 32, resident=4), 20e12),
)
# Elements that are gathered one by one have a place each to be computed: fewer of them a stage.
_UNALIGNED = tuple(Shape(replace(shape.knobs, depth=8), shape.rate / 3) for shape in _FMA)
_UNALIGNED_TENSOR = tuple(Shape(replace(shape.knobs, depth=16), shape.rate / 6) for shape in _TENSOR)
_DOUBLE = (
    Shape(ConvolutionSimtKnobs(64, 64, 32, 32, 8, resident=2), 12e12),
    Shape(ConvolutionSimtKnobs(32, 32, 16, 16, 16, resident=3), 7e12),
)


def candidates(problem: Convolution, target: Target) -> Iterator[ConvolutionSimtKnobs]:
    """Knobs that work for the problem, by the time that is expected of them."""
    found: dict[ConvolutionSimtKnobs, float] = {}
    for shape in _shapes(problem):
        for split in SPLITS:
            knobs = replace(shape.knobs, split_k=split)
            if knobs_reason(problem, knobs, target) is None:
                found[knobs] = seconds(problem, knobs, shape.rate, target)
    return iter(sorted(found, key=found.__getitem__))


def _shapes(problem: Convolution) -> tuple[Shape, ...]:
    atom = convolution_atom(problem)
    if atom is DOUBLE:
        return _DOUBLE
    aligned = min(vector(atom, side) for side in sides(problem)) > 1
    if atom is TENSOR:
        return _TENSOR if aligned else _UNALIGNED_TENSOR
    return _FMA if aligned else _UNALIGNED


def seconds(problem: Convolution, knobs: ConvolutionSimtKnobs, rate: float, target: Target) -> float:
    """An estimate of the time, for comparing knobs with each other."""
    product = product_of_group(problem)
    each = ceil(blocks(problem, knobs) / target.sm_count)  # blocks of a multiprocessor, one after the other or together
    warps = min(each, knobs.resident) * threads(convolution_atom(problem), knobs) / 32
    depth = ceil(product.k / (knobs.split_k * knobs.depth)) * knobs.depth
    busy = rate * min(1.0, warps / WARPS)
    time = each * target.sm_count * knobs.tile_m * knobs.tile_n * depth / busy
    if knobs.split_k > 1:
        accumulators = problem.rows * problem.columns * problem.batch * 4
        time += SPLIT_LAUNCH + 2 * accumulators * knobs.split_k / SPLIT_RATE
    return time
