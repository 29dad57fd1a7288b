"""Which knobs of a depthwise convolution of whole lines to try, best first, by a model of time."""

from collections.abc import Iterator
from math import ceil

from jaxdnn.device import Target
from jaxdnn.engines.convolution.lines.knobs import Lines, LinesKnobs, knobs_reason

_WIDTHS = (8, 7, 6, 5, 4, 10, 14)  # of equally good ones the first
_STAGES = (12, 8, 6, 4)  # the first ones that fit
_MOST = 4  # that are offered

# Predicted, not measured.
_MEMORY = 0.88  # of a copy's speed, that whole lines reach
_ISSUE = 1.2e9  # instructions of a scheduler, a second, with enough warps
_WARPS = 12  # that are enough
_OTHERS = 4.5  # instructions of an element besides multiply-adds
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
    y, x = form.windows
    rows = ceil(form.count / knobs.parts)
    overlap = (y.filter - 1) * ceil(rows / y.output + 0.5)
    elements = form.channels * x.output
    instructions = elements * (form.taps + _OTHERS + x.filter / knobs.width) / _LANES / _SCHEDULERS
    arithmetic = instructions / (_ISSUE * min(1.0, form.threads(knobs) / _LANES / _WARPS))
    moved = 2 * form.channels * (x.image + x.output) / (_MEMORY * target.bandwidth / target.sm_count)
    waves = ceil(knobs.parts / target.sm_count)
    return waves * max((rows + overlap) * arithmetic, (rows + overlap / 2) * moved) + _START[form.strips.to_filter]
