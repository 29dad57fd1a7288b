"""What a pointwise function returns in exact arithmetic, and how far rounding may take an implementation from that.

The function's jaxpr is interpreted in float64, once exactly and several times with every rounded result perturbed, as
in tolerance.py. A function that amplifies rounding, or is discontinuous where it lies, so has a tolerance that says it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from checking.tolerance import DEVIATIONS, REPLAYS, within
from jaxdnn.pointwise.graph import CALLS
from jaxdnn.pointwise.operations import kind

# Exact but for the rounding of their result, in the words of `jax.lax`; what only moves elements is as well.
_EXACT = frozenset(
    (
        *("max", "min", "neg", "abs", "sign", "floor", "ceil", "round", "clamp", "select_n", "is_finite"),
        *("eq", "ne", "lt", "le", "gt", "ge", "reduce_max", "reduce_min", "convert_element_type"),
        *("broadcast_in_dim", "reshape", "squeeze", "transpose", "iota", "copy", "copy_p", "stop_gradient"),
    )
)
# Relative errors of a function: 8 units of float32. XLA's own float64 functions, which stand for the exact ones, err
# by more units. APPROXIMATE is that of functions whose results have 16 bits (jaxdnn/pointwise/cuda.py).
OPERATION, APPROXIMATE, _OPERATION_OF_FLOAT64 = 2.0**-21, 2.0**-17, 2.0**-45
_NARROW = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


def exact_and_tolerance(
    function: Callable[..., Any], arrays: Sequence[np.ndarray], error: float = OPERATION
) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each result its float64 value (integers as they are), and the difference that may be.

    `error` is that of an operation of float32 or fewer bits.
    """
    closed = jax.make_jaxpr(function)(*arrays)
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]), np.errstate(all="ignore"):
        exact = [np.asarray(value) for value in Wide(None).run(closed, arrays)]
        effects = [np.zeros(value.shape) for value in exact]
        for replay in range(REPLAYS):
            for effect, value, moved in zip(effects, exact, Wide(replay, error).run(closed, arrays), strict=True):
                effect += np.square(
                    np.nan_to_num(np.asarray(moved, np.float64) - value.astype(np.float64), posinf=0, neginf=0)
                )
        results = []
        for variable, value, effect in zip(closed.jaxpr.outvars, exact, effects, strict=True):
            rounding = 0.0
            if kind(variable.aval.dtype.name) == "f":
                about = jnp.finfo(variable.aval.dtype)
                size = np.where(np.isfinite(value), np.abs(value), 0.0)
                rounding = size * float(about.eps) / 2 + float(about.smallest_subnormal)
            # What is subnormal in float32 may be flushed to zero.
            tiny = 2.0**-126 if kind(variable.aval.dtype.name) == "f" else 0.0
            results.append((value, DEVIATIONS * np.sqrt(effect / REPLAYS) + rounding + tiny))
        return results


class Wide:
    """An interpreter of jaxprs that keeps every float in float64, and in a replay perturbs each function by `error`."""

    def __init__(self, replay: int | None, error: float = OPERATION) -> None:
        self.error, self.flushes = error, replay is not None and replay % 2 == 1
        self.random = None if replay is None else np.random.default_rng(replay)

    def run(self, closed: Any, arguments: Sequence[Any]) -> list[Any]:
        jaxpr, constants = (closed.jaxpr, closed.consts) if isinstance(closed, ClosedJaxpr) else (closed, ())
        values = {}
        values.update(zip(jaxpr.constvars, map(_widened, constants), strict=True))
        values.update(zip(jaxpr.invars, map(_widened, arguments), strict=True))

        def read(atom: Any) -> Any:
            return _widened(atom.val) if isinstance(atom, Literal) else values[atom]

        for equation in jaxpr.eqns:
            inputs = [read(atom) for atom in equation.invars]
            if equation.primitive.name in CALLS:
                called = next(equation.params[key] for key in ("jaxpr", "call_jaxpr") if key in equation.params)
                results = self.run(called, inputs)
            else:
                results = [self._rounded(self._evaluate(equation, inputs), equation)]
            values.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _evaluate(self, equation: Any, inputs: list[Any]) -> Any:
        name, dtype = equation.primitive.name, equation.outvars[0].aval.dtype.name
        wide = jnp.float64 if kind(dtype) == "f" else dtype
        if name == "convert_element_type":
            return jax.lax.convert_element_type(inputs[0], wide)
        if name == "iota":
            return jax.lax.broadcasted_iota(wide, equation.params["shape"], equation.params["dimension"])
        if name == "reduce_sum" and self.random is not None and kind(dtype) == "f":
            # As tolerance.py derives it: each term errs by so much, and so does the sum.
            terms = inputs[0].size / max(1, np.prod(equation.outvars[0].aval.shape))
            growth = (2.0**-52 if dtype == "float64" else 2.0**-24) * np.sqrt(terms)
            total = equation.primitive.bind(inputs[0] * self._noise(growth, inputs[0].shape), **equation.params)
            return total * self._noise(growth, total.shape)
        return equation.primitive.bind(*inputs, **equation.params)

    def _noise(self, growth: float, shape: tuple[int, ...]) -> Any:
        assert self.random is not None
        return 1 + growth * self.random.standard_normal(shape)

    def _rounded(self, value: Any, equation: Any) -> Any:
        dtype = equation.outvars[0].aval.dtype.name
        if kind(dtype) != "f":
            return value
        if self.random is not None and equation.primitive.name not in _EXACT:
            error = _OPERATION_OF_FLOAT64 if dtype == "float64" else self.error
            value = value * (1 + error * self.random.uniform(-1, 1, value.shape))
            if dtype == "float32" and self.flushes:  # what is subnormal, and may be multiplied later
                value = jnp.where(jnp.abs(value) < 2.0**-126, 0 * value, value)
        rounds = equation.primitive.name == "convert_element_type" and equation.invars[0].aval.dtype.name != "float32"
        if dtype in _NARROW or (dtype == "float32" and rounds):
            value = np.asarray(value).astype(jnp.dtype(dtype)).astype(np.float64)
        return jnp.asarray(value)


def _widened(value: Any) -> Any:
    array = jnp.asarray(value)
    return array.astype(jnp.float64) if kind(array.dtype.name) == "f" else array


def wrong_elements(got: np.ndarray, exact: np.ndarray, tolerance: np.ndarray) -> np.ndarray:
    """Which elements are not what they should be."""
    return ~within(got, exact, tolerance)


def check(call: Any, **runs: Sequence[np.ndarray]) -> None:
    """Fails with the first wrong element of a run, and what it was computed from where that has the result's shape."""
    arrays = (*call.accumulators, *call.operands)
    expected = exact_and_tolerance(call.function, arrays)
    for run, results in runs.items():
        for number, (got, (exact, tolerance)) in enumerate(zip(results, expected, strict=True)):
            assert got.shape == exact.shape
            wrong = wrong_elements(got, exact, tolerance)
            if wrong.any():
                at = tuple(int(i) for i in np.argwhere(wrong)[0])
                given = [array[at] for array in arrays if array.shape == got.shape]
                raise AssertionError(
                    f"{run}, result {number}: {wrong.sum()} of {wrong.size} are wrong; at {at}, of {given}: "
                    f"{got[at]!r} for {exact[at]!r} +- {tolerance[at]:.3g}"
                )
