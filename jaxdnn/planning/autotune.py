"""`autotune`: measures a function's calls ahead of time, and remembers the winners."""

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from jaxdnn.api_boundary import api_boundary
from jaxdnn.config import current_options
from jaxdnn.device import find_target
from jaxdnn.planning.cache import recall, remember
from jaxdnn.planning.calls import Call, NoDerivative, default_platform, find_calls, find_differentiated_calls
from jaxdnn.planning.measure import Measurement, configurations
from jaxdnn.planning.outline import Outline, Outlined


@dataclass(frozen=True, repr=False)
class Tuning(Outlined):
    """What `autotune` measured: each call with its configurations, the fastest first. Prints as text."""

    calls: tuple[tuple[Call, tuple[Measurement, ...]], ...]

    def outline(self) -> Outline:
        """A heading for each call, a line for each configuration."""
        return Outline(
            "Measured, the fastest of each call first",
            tuple(
                Outline(f"{_name(call)}: {_gain(measured)}", tuple(map(str, measured)), folded=True)
                for call, measured in self.calls
            ),
        )


@api_boundary("autotune")
def autotune(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Tuning:
    """Times every configuration of every jaxdnn call in a function, and in its reverse-mode derivative, if it has one.

    The winners are remembered for this device, on disk, and used under `options(autotune="cached")`. Calls that are the
    same but for their options share one entry, and what is remembered is not measured again; to do so, remove the
    folder `autotune` in the kernel cache. Calls of symbolic sizes, or of no elements, are left out. A line for each
    call goes to stderr.

    Args:
      fn: a function of arrays.
      *args: its arguments: arrays, or `jax.ShapeDtypeStruct` for shapes alone. Their values do not matter.
      **kwargs: its keyword arguments: arrays likewise, and anything else as it is.

    Returns:
      A `Tuning`, which prints every configuration's time and workspace.

    Raises:
      RuntimeError: JAX's default device is one for which there are no engines.

    Example:
      >>> import jax.numpy as jnp, jaxdnn
      >>> tuning = jaxdnn.autotune(jaxdnn.rms_norm, jnp.ones((4, 8)))
      >>> with jaxdnn.options(autotune="cached"):
      ...     y = jaxdnn.rms_norm(jnp.ones((4, 8)))
    """
    platform = default_platform()
    target = find_target(platform, current_options())
    if isinstance(target, str) or not target.present:
        raise RuntimeError(f"autotune: there is no device to measure on: {target}")
    calls = find_calls(fn, *args, **kwargs)
    with suppress(NoDerivative):
        calls += find_differentiated_calls(fn, *args, **kwargs)
    distinct = {call.identity: call for call in reversed(calls)}
    tuned = []
    for number, call in enumerate(reversed(distinct.values()), 1):
        _tell(f"jaxdnn: {number}/{len(distinct)} {_name(call)}: ")
        if call.signature.reason:
            _tell(f"not measured: {call.signature.reason}\n")
            continue
        measured = recall(call.spec, call.signature, target)
        remembered = " (remembered)" if measured else ""
        if not measured:
            measured = tuple(configurations(call.spec, call.signature, platform, target))
            remember(call.spec, call.signature, target, measured)
        _tell(f"{_gain(measured)}{remembered}\n")
        tuned.append((call, measured))
    return Tuning(tuple(tuned))


def _tell(text: str) -> None:
    print(text, end="", file=sys.stderr, flush=True)


def _name(call: Call) -> str:
    return f"{call.spec.title} ({', '.join(call.arrays)})"


def _gain(measured: Sequence[Measurement]) -> str:
    """What ran before, what is the fastest, and of how many."""
    before, best = min(measured, key=lambda one: one.rank), measured[0]
    times = f"{before.seconds * 1e6:.1f} us before, {best.seconds * 1e6:.1f} us after"
    return f"{times}, on {best.engine}, the best of {len(measured)}"
