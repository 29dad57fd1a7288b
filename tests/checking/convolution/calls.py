"""Calls of convolutions, for the tests of an engine: operands, and whether results are right."""

import zlib
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from checking.calls import calls_of
from checking.convolution import problems
from checking.emulation.plans import Emulated
from jaxdnn.engines.convolution.problem import Convolution
from jaxdnn.planning.calls import Call

UNITS = {"float64": 1e-12, "float32": 2e-6, "int32": 0.0}  # of a sum's rounding


def convolutions(case: Any, result: str, mapped: tuple[int | None, ...] | None = None) -> Call:
    """The call of a case, or of its gradients, that computes this array; under vmap if `mapped` has its in_axes."""
    calls = [call for call in calls_of(case, mapped) if isinstance(call.problem, Convolution)]
    (found,) = [call for call in calls if call.problem.result == result]
    return found


def arrays(call: Call) -> list[np.ndarray]:
    """Random operands, a function of their types alone."""
    found = []
    for name, type_ in call.signature.operands.items():
        random = np.random.default_rng(zlib.crc32(f"{name}{type_.shape}".encode()))
        if np.issubdtype(type_.dtype, np.integer):
            found.append(random.integers(-100, 100, type_.shape).astype(type_.dtype))
        else:
            found.append(random.standard_normal(type_.shape).astype(type_.dtype))
    return found


def empty(call: Call) -> list[np.ndarray]:
    return [np.zeros(type_.shape, type_.dtype) for type_ in call.signature.results.values()]


def check(call: Call, operands: Sequence[np.ndarray], found: Sequence[np.ndarray], unit: float = 0.0) -> None:
    """Against the problem, in float64: sums are off by `unit` of the largest, and results are rounded once."""
    problem = call.problem
    assert isinstance(problem, Convolution)
    unit = unit or UNITS[problem.accumulator]
    for got, want in zip(found, problems.run(problem, operands), strict=True):
        exact = np.float64(want) if want.dtype != np.int64 else np.float64(want.astype(np.int32))
        scale = max(1.0, float(np.max(np.abs(exact), initial=0, where=np.isfinite(exact))))
        of = jnp.finfo(got.dtype) if jnp.issubdtype(got.dtype, jnp.floating) else None
        rounding, least = (float(of.eps) / 2, float(of.smallest_subnormal) / 2) if of else (0, 0)
        np.testing.assert_allclose(np.float64(got).ravel(), exact, rtol=rounding, atol=unit * scale + least)


def emulate(emulated: Emulated, number: int, call: Call, unit: float = 0.0) -> None:
    """Runs plan `number` on the CPU, and checks it."""
    operands, results = arrays(call), empty(call)
    emulated.run(number, operands, results)
    check(call, operands, results, unit)
