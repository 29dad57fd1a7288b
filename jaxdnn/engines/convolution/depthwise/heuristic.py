"""Which knobs of a depthwise convolution on the tensor cores to try, best first: a model of time.

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

# Channels and warps of a block, and blocks of a multiprocessor.
_SHAPES = ((32, 8, 1), (32, 16, 1), (64, 8, 1), (64, 16, 1), (128, 8, 1), (128, 16, 1), (32, 8, 2))
_STAGES = (8, 6, 4, 3)  # the first ones that fit
_WAVES = (1, 2)  # of thread blocks, one after the other
_MOST = 8  # that are offered
_CLOCK = 1.7e9
_SCHEDULERS = 4
_MULTIPLY = 6.2  # cycles of a scheduler's tensor core
_SHARED_BYTES = 128  # that shared memory moves in a cycle
_LATENCY = 450.0  # cycles of a step, besides multiplies
_START = 4e-6  # seconds of a block, of which the bands take most
_RESERVED = 1024  # bytes of shared memory that a block has besides


def candidates(form: Strips, target: Target) -> Iterator[DepthwiseKnobs]:
    """Knobs that work for the convolution, by the time that is expected of them."""
    found = {knobs: seconds(form, knobs, target) for knobs in _fitting(form, target)}
    return iter(sorted(found, key=found.__getitem__)[:_MOST])


def _fitting(form: Strips, target: Target) -> Iterator[DepthwiseKnobs]:
    for (across, images), (slab, warps, resident) in combinations(_steps(form), _SHAPES):
        if slab > GROUP and slab >= 2 * form.problem.groups:
            continue
        knobs = DepthwiseKnobs(across, images, slab, warps, resident=resident)
        room = target.shared_memory // resident - _RESERVED * (resident - 1)
        for stages in _STAGES:
            knobs = replace(knobs, stages=stages)
            if form.shared_memory(knobs) > room or knobs_reason(form, knobs, target):
                continue
            count = form.count(knobs)
            for waves in _WAVES:
                parts = max(1, min(waves * resident * target.sm_count // form.slabs(knobs), count))
                yield replace(knobs, parts=ceil(count / ceil(count / parts)))
            break


def _steps(form: Strips) -> set[tuple[int, int]]:
    """Strips of a line, which cut it in about equal ranges, and images."""
    strips = ceil(form.windows[1].output / STRIP)
    equal = {ceil(strips / ranges) for ranges in range(ceil(strips / STRIPS), strips + 1)}
    found = set()
    for across in equal:
        most = min(STRIPS // across, form.problem.n)
        found |= {(across, images) for images in {most, ceil(most / 2), 1}}
    return found


def seconds(form: Strips, knobs: DepthwiseKnobs, target: Target) -> float:
    """An estimate of the time, for comparing knobs with each other."""
    y, _ = form.windows
    line = knobs.slab * LINE_BYTES
    multiplies = knobs.slab * y.filter * form.depth / _SCHEDULERS * _MULTIPLY
    read = knobs.slab * y.stride * form.depth * STRIPS * 2 * LINE_BYTES
    moved = form.units(knobs) + knobs.across * knobs.images  # lines of a step, from or to memory
    shared = (3 * moved * line + read) / _SHARED_BYTES
    blocks = form.slabs(knobs) * knobs.parts
    together = min(knobs.resident, ceil(blocks / target.sm_count))
    waves = ceil(blocks / (target.sm_count * knobs.resident))
    rows = ceil(form.count(knobs) / knobs.parts)
    steps = rows + ceil(rows / form.rows(knobs) + 0.5) * (form.slots - 1)
    busy = max(multiplies, shared)
    cycles = max(together * busy, busy + _LATENCY)
    bytes_of_step = together * moved * line / (target.bandwidth / target.sm_count)
    return waves * (_START + steps * max(cycles / _CLOCK, bytes_of_step))
