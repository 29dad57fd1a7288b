"""`explain`: what will run, before it runs."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import jax

from jaxdnn.api_boundary import api_boundary
from jaxdnn.config import current_options
from jaxdnn.device import find_target
from jaxdnn.planning.calls import Call, NoDerivative, find_calls, find_differentiated_calls
from jaxdnn.planning.select import NoEngineError, Selection, select
from jaxdnn.planning.tables import Table


@dataclass(frozen=True)
class ExplainedCall:
    """One call of an `Explanation`.

    Attributes:
      call: the call and how often it occurs.
      selection: what runs; None if `options(fallback=False)` leaves nothing.
      reason: why nothing runs, else empty.
      limit: seconds in which the device's memory could move the call's bytes; None where its bandwidth is not known.
    """

    call: Call
    selection: Selection | None
    reason: str
    limit: float | None

    @property
    def engine(self) -> str:
        """The engine's name, or "none"."""
        return self.selection.engine if self.selection else "none"

    def cells(self) -> tuple[str, ...]:
        """The table's row."""
        spec, signature = self.call.spec, self.call.signature
        selection = self.selection
        config, plan = (selection.config, selection.plan) if selection else (None, None)
        rejected = selection.rejected if selection else ()
        knobs = (f"{field.name}={getattr(config, field.name)}" for field in fields(config)) if config else ()
        return (
            spec.title + (f" x{self.call.count}" if self.call.count > 1 else ""),
            self.call.arrays,
            self.engine,
            ", ".join(knobs),
            "\n".join(spec.fused),
            _size(plan.workspace if plan else 0),
            _size(signature.bytes),
            f"{spec.flops(signature):.3g}",
            "" if self.limit is None else f"{self.limit * 1e6:.1f} us",
            self.reason or "\n".join(f"{name}: {reason}" for name, reason in rejected),
        )


@dataclass(frozen=True, repr=False)
class Explanation(Table):
    """A table in the terminal, HTML in a notebook; `sections` holds the data."""

    device: str
    sections: tuple[tuple[str, tuple[ExplainedCall, ...]], ...]

    columns = (
        "call",
        "arrays",
        "engine",
        "knobs",
        "fused",
        "workspace",
        "moved",
        "flops",
        "limit",
        "not used, and why",
    )

    def tables(self) -> list[tuple[str, list[tuple[str, ...]]]]:
        """One row for each call."""
        return [(f"{title}, on {self.device}", [call.cells() for call in calls]) for title, calls in self.sections]


@api_boundary("explain")
def explain(fn: Callable[..., Any], *args: Any, platform: str | None = None) -> Explanation:
    """Tells which engine each jaxdnn call in `fn(*args)` runs on, forward and backward, and why not on the others.

    Nothing is executed; kernels are compiled, since whether they can be is part of the answer.

    Args:
      fn: a function of arrays. Options in force when `explain` is called apply.
      *args: its arguments: arrays, or `jax.ShapeDtypeStruct` for shapes alone.
      platform: "cpu" or "cuda"; the default is the GPU that `options(target=)` names, else JAX's default backend.

    Returns:
      An `Explanation`, which prints as a table and shows as HTML in a notebook. Its first section is `fn` itself, its
      second `fn` with its reverse-mode derivative, empty and with the reason in its title where there is none.

    Raises:
      ValueError: platform is another one.

    Example:
      >>> import jax.numpy as jnp, jaxdnn
      >>> jaxdnn.explain(jaxdnn.rms_norm, jnp.ones((4, 8)), platform="cpu").sections[0][1][0].engine
      'host'
    """
    if platform not in (None, "cpu", "cuda"):
        raise ValueError(f'explain: platform must be "cpu", "cuda" or None; got {platform!r}')
    options = current_options()
    if platform is None:
        backend = "cuda" if options.target is not None else jax.default_backend()
        platform = "cuda" if backend == "gpu" else backend
    target = find_target(platform, options)
    bandwidth = 0.0 if isinstance(target, str) else target.bandwidth

    def explained(call: Call) -> ExplainedCall:
        limit = call.signature.bytes / bandwidth if bandwidth else None
        try:
            return ExplainedCall(call, select(call.spec, call.signature, platform), "", limit)
        except NoEngineError as error:
            return ExplainedCall(call, None, str(error), limit)

    sections = [("Forward", find_calls(fn, *args))]
    try:
        sections.append(("Forward and backward", find_differentiated_calls(fn, *args)))
    except NoDerivative as reason:
        sections.append((f"Forward and backward ({reason})", []))
    explanations = tuple((title, tuple(map(explained, calls))) for title, calls in sections)
    return Explanation(platform if isinstance(target, str) else target.name, explanations)


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.3g} {unit}"
        count /= 1024
    raise AssertionError
