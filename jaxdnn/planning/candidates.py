"""What each engine offers for a call: reasons against it, and plans that are ready to run."""

import dataclasses
from typing import Any

from jaxdnn import _native
from jaxdnn.config import Options
from jaxdnn.device import Target
from jaxdnn.engines import ENGINES
from jaxdnn.engines.base import Engine
from jaxdnn.plan import Plan
from jaxdnn.spec import Signature, Spec


def engines_for(spec: Spec) -> list[Engine]:
    """The engine table's rows for this op, in order."""
    return [engine for engine in ENGINES if engine.op in (spec.op, "any")]


def serves_everything(engine: Engine) -> bool:
    """Whether the engine is the last resort, which no option rules out but `fallback=False`."""
    return engine.platform == "any"


def reason_against(engine: Engine, spec: Spec, signature: Signature, platform: str, target: Target | str) -> str | None:
    """Why the engine can't serve this call, or None. A target that is a string is the reason why there is none."""
    if serves_everything(engine):
        return None
    if engine.platform != platform:
        return f"it runs on {engine.platform}, and this call is compiled for {platform}"
    if isinstance(target, str):
        return target
    return engine.supports(spec, signature, target)


def prepare(engine: Engine, config: Any, spec: Spec, signature: Signature, target: Target) -> Plan | str | None:
    """The plan of one configuration, compiled (and loaded, if the device is here), or why it can't be had."""
    plan = engine.plan(config, spec, signature, target)
    limit = spec.options.workspace_limit
    if plan is not None and limit is not None and plan.workspace > limit:
        return f"it needs {plan.workspace} bytes of workspace, and workspace_limit is {limit}"
    if plan is not None and plan.unit:
        try:
            (_native.load if target.present else _native.compile)(plan.unit, plan.arch)
        except _native.Unavailable as unavailable:
            return str(unavailable)
    return plan


def with_knobs(engine: Engine, config: Any, knobs: dict[str, Any]) -> Any:
    """`config` with some knobs set by name. Raises ValueError for one that the engine does not have."""
    known = [field.name for field in dataclasses.fields(config)]
    if unknown := sorted(set(knobs) - set(known)):
        raise ValueError(
            f"options: engine {engine.name!r} has no knob {', '.join(unknown)}; its knobs here are {', '.join(known)}"
        )
    return dataclasses.replace(config, **knobs)


def check_engine_name(options: Options) -> None:
    """Raises ValueError if `options` name an engine that does not exist."""
    names = list(dict.fromkeys(engine.name for engine in ENGINES))
    if options.engine is not None and options.engine not in names:
        raise ValueError(f"options: there is no engine {options.engine!r}; the engines are {', '.join(names)}")
