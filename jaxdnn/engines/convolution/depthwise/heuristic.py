"""Which knobs of a depthwise convolution on the tensor cores to try, best first: a model of time."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product as combinations
from math import ceil

from jaxdnn.device import Target
from jaxdnn.engines.convolution.depthwise.knobs import (
    LINE_BYTES,
    STRIP,
    STRIPS,
    DepthwiseKnobs,
    Strips,
    knobs_reason,
)

_SHAPES = (
    (32, 8, 1),
    (32, 16, 1),
    (64, 16, 1),
    (64, 8, 1),
    (32, 8, 2),
)  # channels, warps, and blocks of a multiprocessor
_STAGES = (12, 8, 6, 4)  # the first ones that fit
_WAVES = (1, 2)  # of thread blocks, one after the other
_MOST = 8  # that are offered
_CLOCK = 1.7e9
_MULTIPLY = 4.0  # cycles of a scheduler's tensor core
_SHARED_BYTES = 128  # that shared memory moves in a cycle
_LATENCY = 450.0  # cycles of a step, of one block alone
_RESERVED = 1024  # bytes of shared memory that a block has besides


def candidates(form: Strips, target: Target) -> Iterator[DepthwiseKnobs]:
    """Knobs that work for the convolution, by the time that is expected of them."""
    found = {knobs: seconds(form, knobs, target) for knobs in _fitting(form, target)}
    return iter(sorted(found, key=found.__getitem__)[:_MOST])


def _fitting(form: Strips, target: Target) -> Iterator[DepthwiseKnobs]:
    most = ceil(form.windows[1].output / STRIP)
    for across, (slab, warps, resident) in combinations(range(1, min(most, STRIPS) + 1), _SHAPES):
        images = min(STRIPS // across, form.problem.n)
        knobs = DepthwiseKnobs(across, images, slab, warps, resident=resident)
        for waves, stages in combinations(_WAVES, _STAGES):
            count = form.count(knobs)
            parts = max(1, min(waves * resident * target.sm_count // form.slabs(knobs), count))
            choice = replace(knobs, stages=stages, parts=ceil(count / ceil(count / parts)))
            room = target.shared_memory // resident - _RESERVED * (resident - 1)
            if form.shared_memory(choice) <= room and knobs_reason(form, choice, target) is None:
                yield choice


def seconds(form: Strips, knobs: DepthwiseKnobs, target: Target) -> float:
    """An estimate of the time, for comparing knobs with each other."""
    y, _ = form.windows
    strips = knobs.across * knobs.images
    multiplies = knobs.slab * y.filter * form.depth / 4 * _MULTIPLY
    line = knobs.slab * LINE_BYTES
    shared = (3 * form.units(knobs) + knobs.slab * y.stride * form.depth + 2 * STRIPS) * line / _SHARED_BYTES
    busy = max(multiplies, shared)
    blocks = form.slabs(knobs) * knobs.parts
    waves = ceil(blocks / (target.sm_count * knobs.resident))
    together = min(knobs.resident, ceil(blocks / target.sm_count))
    rows = ceil(form.count(knobs) / knobs.parts)
    steps = rows + (1 + ceil(rows / form.rows(knobs))) * (form.slots - 1) * (form.slots > 1)
    cycles = max(together * busy, busy + _LATENCY)
    moved = together * (form.units(knobs) + strips) * line / (target.bandwidth / target.sm_count)
    return waves * steps * max(cycles / _CLOCK, moved)
