"""Which knobs of a depthwise convolution on the tensor cores to try, best first, by a model of time.

Numbers in brackets are those of the notes on depthwise in benchmarks/results/convolution_kernels.md.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product as combinations
from math import ceil

from jaxdnn.device import Target
from jaxdnn.engines.convolution.depthwise.knobs import (
    GROUP,
    LINE_BYTES,
    STRIP,
    STRIPS,
    DepthwiseKnobs,
    Strips,
    knobs_reason,
)

_SHAPES = ((32, 16), (32, 8), (64, 16), (64, 8))  # channels and warps of a block; of equal ones the first
_STAGES = (8, 6, 4, 3)  # the first ones that fit
_WAVES = (1, 2)  # of thread blocks, one after the other
_MOST = 8  # that are offered
_SCHEDULERS = 4
_MULTIPLY = 4.5e-9  # seconds of a scheduler's tensor core [1]
_STEP = 330e-9  # seconds of a step's chain, whatever it moves [1]
_LINE = 10e-9  # seconds that shared memory takes for a warp's copy of 8 places of 32 channels, all told [1]
_MEMORY = 0.86  # of a copy's speed, that long lines of places reach [2]

# What ordinary arithmetic takes instead: the engine of direct convolutions.
_ARITHMETIC = 9e12  # multiply-adds a second of 132 multiprocessors [3]
_ORDINARY_MEMORY = 0.62  # of a copy's speed [3]

_START = {False: 5e-6, True: 8e-6}  # seconds besides, of either; of a filter's gradient those of a second kernel, too


def candidates(form: Strips, target: Target) -> Iterator[DepthwiseKnobs]:
    """Knobs that work for the convolution, by the time that is expected of them."""
    found = {knobs: seconds(form, knobs, target) for knobs in _fitting(form, target)}
    return iter(sorted(found, key=found.__getitem__)[:_MOST])


def _fitting(form: Strips, target: Target) -> Iterator[DepthwiseKnobs]:
    for (across, images), (slab, warps) in combinations(_steps(form), _SHAPES):
        if slab > GROUP and slab >= 2 * form.problem.groups:
            continue
        knobs = DepthwiseKnobs(across, images, slab, warps)
        for stages in _STAGES:
            knobs = replace(knobs, stages=stages)
            if knobs_reason(form, knobs, target):
                continue
            count = form.count(knobs)
            for waves in _WAVES:
                parts = max(1, min(waves * target.sm_count // form.slabs(knobs), count))
                yield replace(knobs, parts=ceil(count / ceil(count / parts)))
            break


def _steps(form: Strips) -> list[tuple[int, int]]:
    """Strips of a line, which cut it in about equal ranges, and images."""
    strips = ceil(form.windows[1].output / STRIP)
    found = set()
    for across in {ceil(strips / ranges) for ranges in range(ceil(strips / STRIPS), strips + 1)}:
        most = min(STRIPS // across, form.problem.n)
        found |= {(across, images) for images in (most, ceil(most / 2), 1)}
    return sorted(found)


def seconds(form: Strips, knobs: DepthwiseKnobs, target: Target) -> float:
    """An estimate of the time."""
    y, _ = form.windows
    lines = knobs.groups * (form.units(knobs) + knobs.across * knobs.images)  # of a step, from or to memory
    multiplies = knobs.slab * y.filter * form.depth / _SCHEDULERS * _MULTIPLY
    chain = _STEP + multiplies + lines / knobs.groups / knobs.team * 8 * _LINE
    moved = lines * GROUP * LINE_BYTES / (_MEMORY * target.bandwidth / target.sm_count)
    rows = ceil(form.count(knobs) / knobs.parts)
    warm_up = (form.slots - 1) * ceil(rows / form.rows(knobs) + 0.5) - form.lead * rows // form.rows(knobs)
    waves = ceil(form.slabs(knobs) * knobs.parts / target.sm_count)
    return waves * (rows + warm_up) * max(chain, moved) + _START[form.to_filter]


def ordinary_seconds(form: Strips, target: Target) -> float:
    """An estimate of the time that it takes without tensor cores."""
    y, x = form.windows
    result = form.problem.n * form.problem.groups * y.output * x.output
    source = form.problem.n * form.problem.groups * y.image * x.image
    arithmetic = result * y.filter * x.filter / (_ARITHMETIC * target.sm_count / 132)
    moved = 2 * (result + source) / (_ORDINARY_MEMORY * target.bandwidth)
    return max(arithmetic, moved) + _START[form.to_filter]
