"""Which engine serves a call, with which knobs: what was measured to be best, or the first of the table that can."""

import time
from dataclasses import dataclass
from typing import Any

from jaxdnn.config import logger
from jaxdnn.device import find_target
from jaxdnn.engines.base import Engine
from jaxdnn.plan import Plan
from jaxdnn.planning import measure
from jaxdnn.planning.cache import recall, remember
from jaxdnn.planning.candidates import (
    Request,
    check_engine,
    engines_for,
    prepare,
    reason_against,
    serves_everything,
    with_knobs,
)
from jaxdnn.spec import Signature, Spec


class NoEngineError(RuntimeError):
    """No native engine serves a call that must not fall back to XLA; the message holds every engine's reason."""


@dataclass(frozen=True)
class Selection:
    """What will run, and why nothing before it in the engine table does.

    Attributes:
      engine: the engine's name.
      config: its knobs.
      plan: what it does; None if the reference is lowered through XLA.
      rejected: name and reason of every engine that comes earlier in the table.
    """

    engine: str
    config: Any
    plan: Plan | None
    rejected: tuple[tuple[str, str], ...]


def select(spec: Spec, signature: Signature, platform: str) -> Selection:
    """What serves the call under its options, made ready to run: what was measured to be best, or the first engine.

    Raises:
      ValueError: options name an engine, a knob or a target that does not exist, or an engine of another platform.
      NoEngineError: only XLA is left, and `options(fallback=False)` forbids it.
    """
    started = time.perf_counter()
    check_engine(spec.options, platform)
    request = Request(spec, signature, platform, find_target(platform, spec.options))
    selection = _measured(request) or _first(request)
    _log(spec, signature, selection, time.perf_counter() - started)
    return selection


def _measured(request: Request) -> Selection | None:
    """What measurement found best, where the options ask for that and allow it; None too if it no longer exists."""
    spec, signature, target, options = request.spec, request.signature, request.target, request.spec.options
    if options.autotune == "off" or options.engine is not None or isinstance(target, str) or not target.present:
        return None
    if signature.reason:
        return None
    measured = recall(spec, signature, target)
    if not measured and options.autotune == "on":
        measured = measure.configurations(spec, signature, request.platform, target)
        remember(spec, signature, target, measured)
    if not measured:
        return None
    best = measured[0]
    rejected: list[tuple[str, str]] = []
    for engine in engines_for(spec, request.problem):
        reason = reason_against(engine, request)
        if reason or engine.name != best.engine:
            rejected.append((engine.name, reason or "measurement chose another"))
            continue
        if serves_everything(engine) and not options.fallback:
            return None
        try:
            outcome = _prepare(engine, best.knobs, request)
        except (TypeError, ValueError):  # remembered knobs that the engine no longer has, or not with these values
            return None
        return None if isinstance(outcome, str) else Selection(engine.name, *outcome, tuple(rejected))
    return None


def _first(request: Request) -> Selection:
    """The first engine of the table that serves the call; where the options leave no other, one that is outdone."""
    options = request.spec.options
    rejected: list[tuple[str, str]] = []
    for outdone in (True, False) if options.engine is None else (False,):
        rejected.clear()
        for engine in engines_for(request.spec, request.problem):
            outcome = _try(engine, request, outdone)
            if isinstance(outcome, str):
                rejected.append((engine.name, outcome))
                continue
            if serves_everything(engine) and not options.fallback and options.engine != engine.name:
                break
            return Selection(engine.name, *outcome, tuple(rejected))
    reasons = "; ".join(f"{name}: {reason}" for name, reason in rejected)
    raise NoEngineError(
        f"{request.spec.title}: no native engine serves this call ({reasons}); with options(fallback=True) XLA runs it"
    )


def _try(engine: Engine, request: Request, outdone: bool) -> tuple[Any, Plan | None] | str:
    """The engine's configuration and plan, ready to run, or why it does not serve."""
    options = request.spec.options
    if options.engine not in (None, engine.name) and not serves_everything(engine):
        return f'options(engine="{options.engine}") asks for another'
    if reason := reason_against(engine, request, outdone=outdone):
        return reason
    return _prepare(engine, options.knobs if options.engine == engine.name else (), request)


def _prepare(engine: Engine, knobs: tuple[tuple[str, object], ...], request: Request) -> tuple[Any, Plan | None] | str:
    """The heuristic's choice with these knobs; without any, the first configuration that the options allow."""
    configs = engine.configurations(request.problem, request.device)
    if knobs:
        configs = [with_knobs(engine, configs, dict(knobs))]
    return prepare(engine, configs, request)


def _log(spec: Spec, signature: Signature, selection: Selection, seconds: float) -> None:
    shapes = ", ".join(f"{name} {array.dtype.name}{list(array.shape)}" for name, array in signature.operands.items())
    reasons = "".join(f"; not {name}: {reason}" for name, reason in selection.rejected)
    logger.info(
        "%s (%s): engine %s %s in %.1f ms%s",
        spec.title,
        shapes,
        selection.engine,
        selection.config,
        seconds * 1e3,
        reasons,
    )
