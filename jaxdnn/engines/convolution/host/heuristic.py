"""Which knobs of convolutions on the CPU to try, best first.

Numbers in brackets are those of the notes on host in benchmarks/results/convolution_kernels.md.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import ceil

from jaxdnn.device import Target
from jaxdnn.engines.convolution.host.knobs import HostConvolutionKnobs, HostDepthwiseKnobs, HostWindowKnobs
from jaxdnn.engines.convolution.host.unit import is_depthwise
from jaxdnn.engines.convolution.matrices import product_of_group
from jaxdnn.engines.convolution.problem import Convolution
from jaxdnn.engines.product.host.heuristic import even, shape_of
from jaxdnn.engines.product.host.knobs import COLUMN_STEP, DEPTH_STEP, up

# Depthwise.
_SPAN = 256  # channels of a tile, at most
_ELEMENTS = 16 * 1024  # of a tile: few enough for the L2 cache, enough to drown the start of a task

# Products.
_DEPTH = 768  # of windows: a panel of b comes from the L2 cache, and panels of a from L1 [2]
_ENOUGH_TILES = 32  # that many threads share evenly; a result must not depend on how many there are
_TASK_WORK = 2**18  # multiplications of one task: enough to drown the start of a task


def candidates(problem: Convolution, target: Target) -> Iterable[HostConvolutionKnobs]:
    """Of any convolution, best first."""
    if is_depthwise(problem):
        span = min(problem.groups, _SPAN)
        return [HostDepthwiseKnobs(max(8, _ELEMENTS // span), span)]
    best = _heuristic(problem, target)
    return dict.fromkeys((best, *_variants(best)))


def _heuristic(problem: Convolution, target: Target) -> HostWindowKnobs:
    product = product_of_group(problem)
    shape = shape_of(product, target)
    depth = shape.depth if problem.result == "filter" else _DEPTH
    depth = min(depth, up(product.k, DEPTH_STEP))
    columns = even(product.n, shape.columns, COLUMN_STEP)
    rows = even(product.m, shape.rows, shape.step)
    across = problem.groups * product.batch * ceil(product.n / columns)
    splits = 1
    if problem.result == "filter":
        splits = max(1, min(product.k // (4 * depth), ceil(_ENOUGH_TILES / (across * ceil(product.m / rows)))))
    while rows > 32 and across * splits * ceil(product.m / rows) < _ENOUGH_TILES:
        rows = up(ceil(rows / 2), shape.step)
    tiles = across * splits * ceil(product.m / rows)
    group = max(1, min(_TASK_WORK // (rows * columns * ceil(product.k / splits)), tiles))
    return HostWindowKnobs(rows, columns, depth, splits, group)


def _variants(best: HostWindowKnobs) -> Iterator[HostWindowKnobs]:
    """Other configurations, for the autotuner."""
    yield replace(best, rows=2 * best.rows)
    yield replace(best, rows=max(1, best.rows // 2))
    yield replace(best, depth=2 * best.depth)
    if best.splits > 1:
        yield replace(best, splits=best.splits // 2)
