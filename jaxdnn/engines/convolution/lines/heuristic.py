"""Which knobs of a depthwise convolution of whole lines to try, best first, by a model of time."""

from collections.abc import Iterator
from math import ceil

from jaxdnn.device import Target
from jaxdnn.engines.convolution.lines.knobs import Lines, LinesKnobs, knobs_reason

_WIDTHS = (8, 7, 6, 5, 4, 10, 14)  # of equally good ones the first
_STAGES = (12, 8, 6, 4)  # the first ones that fit
_MOST = 4  # that are offered

# Reckoned; of what was measured since (benchmarks/results/convolution_kernels.md), lines reach 0.81 to 0.91 of a copy.
_MEMORY = 0.88  # of a copy's speed, that whole lines reach
_ISSUE = 1.2e9  # instructions of a scheduler, a second, with enough warps
_WARPS = 12  # that are enough
_OTHERS = 4.5  # instructions of an element besides multiply-adds
_LEAST_ROWS = 4  # of a block, that its first lines are worth waiting for
_SCHEDULERS, _LANES = 4, 32
_START = {False: 5e-6, True: 8e-6}  # seconds besides; of a filter's gradient those of a second kernel, too


def candidates(form: Lines, target: Target) -> Iterator[LinesKnobs]:
    """Knobs that work for the convolution, by the time that is expected of them."""
    found = {knobs: seconds(form, knobs, target) for knobs in _fitting(form, target)}
    return iter(sorted(found, key=found.__getitem__)[:_MOST])


def _fitting(form: Lines, target: Target) -> Iterator[LinesKnobs]:
    parts = ceil(form.count / ceil(form.count / target.sm_count))
    for width in _WIDTHS:
        for stages in _STAGES:
            knobs = LinesKnobs(width, stages, parts)
            if knobs_reason(form, knobs, target) is None:
                yield knobs
                break


def seconds(form: Lines, knobs: LinesKnobs, target: Target) -> float:
    """An estimate of the time."""
    return max(_arithmetic(form, knobs), _moved(form, knobs, target)) + _START[form.to_filter]


def is_bound_by_memory(form: Lines, knobs: LinesKnobs, target: Target) -> bool:
    """Whether multiply-adds hide behind what is moved, and every multiprocessor has a few rows."""
    return form.count >= _LEAST_ROWS * target.sm_count and _arithmetic(form, knobs) <= _moved(form, knobs, target)


def _arithmetic(form: Lines, knobs: LinesKnobs) -> float:
    places = form.windows[1]
    elements = form.channels * places.output
    instructions = elements * (form.taps + _OTHERS + places.filter / knobs.width) / _LANES / _SCHEDULERS
    return _steps(form, knobs) * instructions / (_ISSUE * min(1.0, form.threads(knobs) / _LANES / _WARPS))


def _moved(form: Lines, knobs: LinesKnobs, target: Target) -> float:
    places = form.windows[1]
    line = 2 * form.channels * (places.image + places.output)
    return _steps(form, knobs) * line / (_MEMORY * target.bandwidth / target.sm_count)


def _steps(form: Lines, knobs: LinesKnobs) -> float:
    """Of a block, each of which is a row; between images, and parts, there are some more."""
    rows = ceil(form.count / knobs.parts)
    return rows + (form.windows[0].filter - 1) * (rows / form.windows[0].output + 0.5)
