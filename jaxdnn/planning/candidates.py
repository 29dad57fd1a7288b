"""What each engine offers for a call: reasons against it, and plans that are ready to run."""

import dataclasses
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jaxdnn import _native
from jaxdnn.config import Options
from jaxdnn.device import Target
from jaxdnn.engines.base import Engine, Problem
from jaxdnn.plan import Plan
from jaxdnn.spec import Signature, Spec

_LARGEST_KNOB = 2**31


@dataclass(frozen=True)
class Request:
    """A call and what it is planned for; a target that is a string is the reason why there is none."""

    spec: Spec
    signature: Signature
    platform: str
    target: Target | str

    @property
    def device(self) -> Target:
        """The target; where there is none, one that tells nothing, for XLA."""
        return (
            Target(self.platform, "", self.platform, 0, present=False) if isinstance(self.target, str) else self.target
        )

    @cached_property
    def problem(self) -> Problem | str:
        """What engines see of it."""
        return self.spec.problem(self.signature)


def _engines() -> tuple[Engine, ...]:
    from jaxdnn.engines.table import ENGINES  # when a call is planned: it takes half of the time of `import jaxdnn`

    return ENGINES


def engines_for(spec: Spec, problem: Problem | str) -> list[Engine]:
    """The engine table's rows for the problem, in order; where there is none, for any that the op may state."""
    if isinstance(problem, str):
        return [engine for engine in _engines() if engine.problem in (*spec.problems, None)]
    return [engine for engine in _engines() if isinstance(problem, engine.problem or Problem)]


def serves_everything(engine: Engine) -> bool:
    """Whether the engine is the last resort, which no option rules out but `fallback=False`."""
    return engine.platform == "any"


def reason_against(engine: Engine, request: Request, *, outdone: bool = True) -> str | None:
    """Why the engine does not serve this call, or None: it can't, or is `outdone`."""
    if serves_everything(engine):
        return None
    if engine.platform != request.platform:
        return f"it runs on {engine.platform}, and this call is compiled for {request.platform}"
    if isinstance(request.target, str):
        return request.target
    if request.spec.options.deterministic and "deterministic" not in engine.notes:
        return "its results may vary from run to run, which options(deterministic=False) allows"
    problem = request.problem
    if isinstance(problem, str):
        return problem
    reason = engine.reason(problem, request.target)
    return engine.outdone(problem, request.target) if outdone and reason is None else reason


def prepare(engine: Engine, configs: Iterable[Any], request: Request) -> tuple[Any, Plan | None] | str:
    """The first configuration within `workspace_limit` and its plan, compiled (and loaded, if the device is here).

    If there is none, the reason against the first one. Only the workspace makes it go on to the next one: that costs no
    compilation, while what keeps one kernel from being compiled or loaded keeps all of them.
    """
    limit, reasons = request.spec.options.workspace_limit, []
    for config in configs:
        plan = engine.build(config, request.problem, request.device)
        if plan is not None and limit is not None and plan.workspace > limit:
            reasons.append(f"it needs {plan.workspace} bytes of workspace, and workspace_limit is {limit}")
            continue
        if plan is not None and plan.unit:
            try:
                (_native.load if request.device.present else _native.compile)(plan.unit, plan.arch)
            except _native.Unavailable as unavailable:
                return str(unavailable)
        return config, plan and dataclasses.replace(plan, op=request.spec.title)
    return reasons[0]


def knobs_of(config: Any) -> tuple[tuple[str, object], ...]:
    """A configuration's knobs, by name."""
    return tuple((field.name, getattr(config, field.name)) for field in dataclasses.fields(config))


def with_knobs(engine: Engine, configs: Iterable[Any], knobs: dict[str, Any]) -> Any:
    """The first of an engine's configurations that can have these knobs, with them set by name. Raises ValueError for
    one that none has, or can.
    """
    first, *others = configs
    having = [one for one in (first, *others) if knobs.keys() <= dict(knobs_of(one)).keys()] or [first]
    config = having[0]
    known = [name for name, _ in knobs_of(config)]
    if unknown := sorted(set(knobs) - set(known)):
        raise ValueError(
            f"options: engine {engine.name!r} has no knob {', '.join(unknown)}; its knobs here are {', '.join(known)}"
        )
    for name, value in knobs.items():
        if isinstance(getattr(config, name), bool) and not isinstance(value, bool):
            raise ValueError(f"options: knob {name} must be True or False; got {value!r}")
        counts = type(getattr(config, name)) is int and isinstance(value, int)
        if counts and (isinstance(value, bool) or abs(value) >= _LARGEST_KNOB):
            raise ValueError(f"options: knob {name} must be an int below {_LARGEST_KNOB}; got {value!r}")
    for one in having:
        # Of another configuration the rest may fit these: 64 rows are too few for three warp groups.
        with suppress(ValueError):
            return dataclasses.replace(one, **knobs)
    return dataclasses.replace(config, **knobs)  # which raises


def check_engine(options: Options, platform: str) -> None:
    """Raises ValueError if `options` name an engine that does not exist, or none that runs on the platform."""
    if options.engine is None:
        return
    runs_on = {engine.platform for engine in _engines() if engine.name == options.engine}
    if not runs_on:
        names = dict.fromkeys(engine.name for engine in _engines())
        raise ValueError(f"options: there is no engine {options.engine!r}; the engines are {', '.join(names)}")
    if runs_on.isdisjoint((platform, "any")):
        names = dict.fromkeys(engine.name for engine in _engines() if engine.platform in (platform, "any"))
        raise ValueError(
            f"options: engine must be one that runs on {platform}, as this call does: {', '.join(names)}; "
            f"got {options.engine!r}, which runs on {', '.join(sorted(runs_on))}"
        )
