"""`autotune`: measures a function's calls ahead of time, and remembers the winners."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import jax

from jaxdnn.api_boundary import api_boundary
from jaxdnn.config import current_options
from jaxdnn.device import find_target
from jaxdnn.planning.cache import remember
from jaxdnn.planning.calls import Call, NoDerivative, find_calls, find_differentiated_calls
from jaxdnn.planning.measure import Measurement, configurations
from jaxdnn.planning.tables import Table


@dataclass(frozen=True, repr=False)
class Tuning(Table):
    """What `autotune` measured: each call with its configurations, the fastest first. Prints as a table."""

    calls: tuple[tuple[Call, tuple[Measurement, ...]], ...]

    columns = ("call", "arrays", "engine", "knobs", "time", "workspace")

    def tables(self) -> list[tuple[str, list[tuple[str, ...]]]]:
        """One row for each configuration."""
        rows = [
            (
                call.spec.title,
                call.arrays,
                one.engine,
                "\n".join(f"{name}={value}" for name, value in one.knobs),
                f"{one.seconds * 1e6:.1f} us",
                f"{one.workspace} B",
            )
            for call, measured in self.calls
            for one in measured
        ]
        return [("Measured, the fastest of each call first", rows)]


@api_boundary("autotune")
def autotune(fn: Callable[..., Any], *args: Any) -> Tuning:
    """Times every configuration of every jaxdnn call in `fn(*args)`, and of its reverse-mode derivative, if it has one.

    The winners are remembered for this device, on disk, and used under `options(autotune="cached")`. Calls that are the
    same but for their options share one entry.

    Args:
      fn: a function of arrays.
      *args: its arguments: arrays, or `jax.ShapeDtypeStruct` for shapes alone. Their values do not matter.

    Returns:
      A `Tuning`, which prints as a table of time and workspace.

    Raises:
      RuntimeError: JAX's default device is one for which there are no engines.

    Example:
      >>> import jax.numpy as jnp, jaxdnn
      >>> tuning = jaxdnn.autotune(jaxdnn.rms_norm, jnp.ones((4, 8)))
      >>> with jaxdnn.options(autotune="cached"):
      ...     y = jaxdnn.rms_norm(jnp.ones((4, 8)))
    """
    backend = jax.default_backend()
    platform = "cuda" if backend == "gpu" else backend
    target = find_target(platform, current_options())
    if isinstance(target, str) or not target.present:
        raise RuntimeError(f"autotune: there is no device to measure on: {target}")
    measured = {}
    calls = find_calls(fn, *args)
    with suppress(NoDerivative):
        calls += find_differentiated_calls(fn, *args)
    for call in calls:
        if call.identity not in measured:
            times = configurations(call.spec, call.signature, platform, target)
            remember(call.spec, call.signature, target, times)
            measured[call.identity] = (call, tuple(times))
    return Tuning(tuple(measured.values()))
