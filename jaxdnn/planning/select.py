"""Which engine serves a call, with which knobs: the first one of the engine table that can."""

import dataclasses
import time
from dataclasses import dataclass
from typing import Any

from jaxdnn import _native
from jaxdnn.config import Options, logger
from jaxdnn.device import Target, find_target
from jaxdnn.engines import ENGINES
from jaxdnn.engines.base import Engine
from jaxdnn.plan import Plan
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
    """The first engine that serves the call under its options, made ready to run.

    Raises:
      ValueError: options name an engine or a knob that does not exist.
      NoEngineError: only XLA is left, and `options(fallback=False)` forbids it.
    """
    started = time.perf_counter()
    options = spec.options
    _check_engine_name(options)
    target = find_target(platform, options)
    rejected: list[tuple[str, str]] = []
    for engine in ENGINES:
        if engine.op not in (spec.op, "any"):
            continue
        outcome = _try(engine, spec, signature, platform, target)
        if isinstance(outcome, str):
            rejected.append((engine.name, outcome))
            continue
        config, plan = outcome
        if plan is None and not options.fallback and options.engine != engine.name:
            break
        selection = Selection(engine.name, config, plan, tuple(rejected))
        _log(spec, signature, selection, time.perf_counter() - started)
        return selection
    reasons = "; ".join(f"{name}: {reason}" for name, reason in rejected)
    raise NoEngineError(
        f"{spec.title}: no native engine serves this call ({reasons}); with options(fallback=True) XLA runs it"
    )


def _try(
    engine: Engine, spec: Spec, signature: Signature, platform: str, target: Target | str
) -> tuple[Any, Plan | None] | str:
    """The engine's configuration and plan, compiled if there is code to compile, or why it does not serve."""
    options = spec.options
    last_resort = engine.platform == "any"
    if options.engine not in (None, engine.name) and not last_resort:
        return f'options(engine="{options.engine}") asks for another'
    if engine.platform not in (platform, "any"):
        return f"it runs on {engine.platform}, and this call is compiled for {platform}"
    if isinstance(target, str):
        if not last_resort:
            return target
        target = Target(platform, "", platform, 0, present=False)
    if reason := engine.supports(spec, signature, target):
        return reason
    config = next(iter(engine.candidates(spec, signature, target)))
    if options.engine == engine.name and options.knobs:
        config = _with_knobs(engine, config, dict(options.knobs))
    plan = engine.plan(config, spec, signature, target)
    if plan is None:
        return config, None
    if options.workspace_limit is not None and plan.workspace > options.workspace_limit:
        return f"it needs {plan.workspace} bytes of workspace, and workspace_limit is {options.workspace_limit}"
    if plan.unit:
        try:
            (_native.load if target.present else _native.compile)(plan.unit, plan.arch)
        except _native.Unavailable as unavailable:
            return str(unavailable)
    return config, plan


def _with_knobs(engine: Engine, config: Any, knobs: dict[str, Any]) -> Any:
    known = [field.name for field in dataclasses.fields(config)]
    if unknown := sorted(set(knobs) - set(known)):
        raise ValueError(
            f"options: engine {engine.name!r} has no knob {', '.join(unknown)}; its knobs here are {', '.join(known)}"
        )
    return dataclasses.replace(config, **knobs)


def _check_engine_name(options: Options) -> None:
    names = list(dict.fromkeys(engine.name for engine in ENGINES))
    if options.engine is not None and options.engine not in names:
        raise ValueError(f"options: there is no engine {options.engine!r}; the engines are {', '.join(names)}")


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
