"""The calls that cases make, as engines see them: spec and signature, without running anything."""

import collections
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxdnn import explain, options
from jaxdnn.config import Options
from jaxdnn.custom_call import HANDLERS
from jaxdnn.engines.table import ENGINES
from jaxdnn.planning.calls import Call, NoDerivative, find_calls, find_differentiated_calls
from jaxdnn.planning.select import select

# The engines that serve an op: the folders of these names.
FAMILIES = {
    "matmul": ("product",),
    "convolution": ("convolution", "product"),
    "epilogue": ("pointwise",),
    "norm": ("norm",),
    "attention": ("attention",),
}


@functools.cache
def calls_of(case: Any, mapped: tuple[int | None, ...] | None = None) -> tuple[Call, ...]:
    """The calls of a case, with those of its gradient if it has one, under vmap over four elements if `mapped` has its
    in_axes.
    """
    arrays = [jax.ShapeDtypeStruct(case.shape_of(name), jnp.dtype(dtype)) for name, dtype in case.dtypes.items()]
    function = case.call
    if mapped is not None:
        sizes = [(4,) if axis == 0 else () for axis in mapped]
        arrays = [jax.ShapeDtypeStruct(size + a.shape, a.dtype) for size, a in zip(sizes, arrays, strict=True)]
        function = jax.vmap(case.call, mapped)
    try:
        calls = find_differentiated_calls(function, *arrays)
    except NoDerivative:
        calls = find_calls(function, *arrays)
    # To engines the passes are the same.
    return tuple({call.identity: call for call in reversed(calls)}.values())[::-1]


def native_calls(text: str) -> int:
    """How many of our custom calls a compiled program has."""
    return sum(text.count(f'custom_call_target="{name}"') for name in HANDLERS)


def expected_native_calls(case: Any, engine: str, *, differentiated: bool) -> int:
    """How many calls of a case kernels of ours serve here, with `engine` asked for; `test_golden_coverage` pins which.

    An epilogue that no engine of products can have, and the derivative of one, have an engine of their own.
    """
    with options(engine=engine):
        forward, both = explain(case.call, *case.primals()).sections
    _, calls = both if differentiated else forward
    return sum(call.call.count for call in calls if call.engine != "xla")


def refusal(engine: Any, call: Call, target: Any, *, slow: bool = False) -> str | None:
    """Why the engine does not serve a call, or None; if it may be `slow`, why it can't, whoever takes less time."""
    problem = call.problem
    if engine.problem and isinstance(problem, str):
        return problem
    if engine.problem and not isinstance(problem, engine.problem):
        return f"it serves another problem than {problem.family}"
    reason = engine.reason(problem, target)
    return reason if slow or reason else engine.outdone(problem, target)


def configurations(engine: Any, call: Call, target: Any) -> list[Any]:
    """What the engine offers for a call; nothing if it does not serve it."""
    if refusal(engine, call, target):
        return []
    return list(engine.configurations(call.problem, target))


def native(platform: str, op: str) -> list[Any]:
    """The engines of the table with kernels of our own for an op on a platform."""
    return [engine for engine in ENGINES if engine.platform == platform and engine.family in FAMILIES[op]]


def primitives(jaxpr):
    """How often each of jaxdnn's primitives occurs, inner jaxprs included."""
    found = collections.Counter()
    for equation in jaxpr.eqns:
        if equation.primitive.name.startswith("jaxdnn_"):
            found[equation.primitive.name] += 1
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    found += primitives(inner)
    return found


def choose(case, direction=0, on="cpu", **options):
    call = calls_of(case)[direction]
    return select(call.spec.replace(options=Options(**options)), call.signature, on)
