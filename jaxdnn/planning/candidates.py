"""What each engine offers for a call: reasons against it, and plans that are ready to run."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from jaxdnn import _native
from jaxdnn.config import Options
from jaxdnn.device import Target
from jaxdnn.engines.base import Engine
from jaxdnn.plan import Plan
from jaxdnn.spec import Signature, Spec

_LARGEST_KNOB = 2**31


def _engines() -> tuple[Engine, ...]:
    from jaxdnn.engines.table import ENGINES  # when a call is planned: it takes half of the time of `import jaxdnn`

    return ENGINES


def engines_for(spec: Spec) -> list[Engine]:
    """The engine table's rows for this op, in order."""
    return [engine for engine in _engines() if engine.op in (spec.op, "any")]


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
    if spec.options.deterministic and "deterministic" not in engine.notes:
        return "its results may vary from run to run, which options(deterministic=False) allows"
    return engine.supports(spec, signature, target)


def prepare(
    engine: Engine, configs: Iterable[Any], spec: Spec, signature: Signature, target: Target
) -> tuple[Any, Plan | None] | str:
    """The first configuration within `workspace_limit` and its plan, compiled (and loaded, if the device is here).

    If there is none, the reason against the first one. Only the workspace makes it go on to the next one: that costs no
    compilation, while what keeps one kernel from being compiled or loaded keeps all of them.
    """
    limit, reasons = spec.options.workspace_limit, []
    for config in configs:
        plan = engine.plan(config, spec, signature, target)
        if plan is not None and limit is not None and plan.workspace > limit:
            reasons.append(f"it needs {plan.workspace} bytes of workspace, and workspace_limit is {limit}")
            continue
        if plan is not None and plan.unit:
            try:
                (_native.load if target.present else _native.compile)(plan.unit, plan.arch)
            except _native.Unavailable as unavailable:
                return str(unavailable)
        return config, plan
    return reasons[0]


def with_knobs(engine: Engine, config: Any, knobs: dict[str, Any]) -> Any:
    """`config` with some knobs set by name. Raises ValueError for one that the engine does not have, or can't."""
    known = [field.name for field in dataclasses.fields(config)]
    if unknown := sorted(set(knobs) - set(known)):
        raise ValueError(
            f"options: engine {engine.name!r} has no knob {', '.join(unknown)}; its knobs here are {', '.join(known)}"
        )
    for name, value in knobs.items():
        counts = type(getattr(config, name)) is int and isinstance(value, int)
        if counts and (isinstance(value, bool) or abs(value) >= _LARGEST_KNOB):
            raise ValueError(f"options: knob {name} must be an int below {_LARGEST_KNOB}; got {value!r}")
    return dataclasses.replace(config, **knobs)


def check_engine_name(options: Options) -> None:
    """Raises ValueError if `options` name an engine that does not exist."""
    names = list(dict.fromkeys(engine.name for engine in _engines()))
    if options.engine is not None and options.engine not in names:
        raise ValueError(f"options: there is no engine {options.engine!r}; the engines are {', '.join(names)}")
