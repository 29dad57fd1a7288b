"""How far what runs first is from the fastest configuration, of the calls of a benchmark's cases."""

from collections.abc import Iterable, Iterator
from statistics import fmean

import jax

from jaxdnn.bench.timing import Case
from jaxdnn.config import Options
from jaxdnn.device import find_target
from jaxdnn.planning.calls import Call, default_platform, find_calls
from jaxdnn.planning.measure import configurations


def measure(cases: Iterable[Case]) -> Iterator[str]:
    """The lines to print: of each case's calls all configurations, the fastest first, those of engines included that
    planning takes for slower than others; then how much longer the first choices take.
    """
    platform = default_platform()
    target = find_target(platform, Options())
    assert not isinstance(target, str), "the bench has a device"
    ratios = []
    for case in cases:
        for call in _calls(case):
            measured = configurations(call.spec, call.signature, platform, target, outdone=False)
            first = min(measured, key=lambda one: one.rank)
            ratios.append(first.seconds / measured[0].seconds)
            yield f"{case} {call.spec.title}: the first choice takes {ratios[-1]:.2f} x the fastest"
            yield from (f"{'->' if one is first else '  '} {one}" for one in measured)
    mean, most = fmean(ratios), max(ratios)
    yield f"first choices take {mean:.3f} x the fastest in the mean, {most:.2f} x at most, of {len(ratios)} calls"


def _calls(case: Case) -> Iterable[Call]:
    operands = jax.eval_shape(case.operands, jax.eval_shape(jax.random.key, 0))
    calls = find_calls(case.jaxdnn.run, *jax.eval_shape(case.jaxdnn.prepare, *operands))
    return {call.identity: call for call in calls}.values()
