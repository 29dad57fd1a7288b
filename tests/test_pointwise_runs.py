"""Programs compute what JAX computes: the host's interpreter, and the emitted source compiled for the CPU."""

from collections.abc import Callable
from typing import Any

import fuzz_pointwise
import jax.numpy as jnp
import numpy as np
import pytest
from pointwise_cases import ACTIVATIONS, FLOATING, INTEGERS, PAIRS, SPECIAL, jvp, vjp
from pointwise_runs import Call, Emitted, run_host, values
from pointwise_tolerance import check

from jaxdnn import _native
from jaxdnn.pointwise.operations import NARROW_FLOATS

SHAPE = (5, 67)


def pair(function: Callable[..., Any], dtype: str) -> Call:
    return Call(function, SHAPE, (values(dtype, SHAPE, "x"),), (values(dtype, SHAPE, "y"),))


def single(function: Callable[..., Any], dtype: str) -> Call:
    return Call(function, SHAPE, (values(dtype, SHAPE, "x"),))


def table() -> dict[str, Call]:
    calls = {}
    for name, function in ACTIVATIONS.items():
        calls[name] = single(function, "float32")
        calls[f"{name}, vjp"] = pair(vjp(function), "float32")
        calls[f"{name}, jvp"] = pair(jvp(function), "float32")
        calls[f"{name}, second derivative"] = pair(vjp(lambda x, f=function: vjp(f)(x, jnp.cos(x))), "float32")
    for dtype in ("float32", "float64", "bfloat16", "float16"):
        calls |= {f"{name}, {dtype}": single(function, dtype) for name, function in FLOATING.items()}
        calls |= {f"{name}, {dtype}": pair(function, dtype) for name, function in PAIRS.items()}
    calls["literals after a minus"] = single(lambda x: x * (1 - jnp.tanh(-0.5)) - -2.0, "float32")
    calls |= {f"/ 2^-9, {dtype}": single(lambda x: x / x.dtype.type(2**-9), dtype) for dtype in NARROW_FLOATS}
    for dtype in ("int32", "uint32", "int8", "uint16", "uint64"):
        calls |= {f"{name}, {dtype}": pair(function, dtype) for name, function in INTEGERS.items()}
    return calls


TABLE = table()


@pytest.fixture(scope="module")
def emitted(tmp_path_factory) -> Emitted:
    return Emitted(list(TABLE.values()), tmp_path_factory.mktemp("emitted") / "unit")


@pytest.mark.parametrize("name", TABLE)
def test_results(name, emitted):
    check(TABLE[name], host=run_host(TABLE[name]), emitted=emitted.run(list(TABLE).index(name)))


@pytest.mark.parametrize("isa", _native.host()["isas"][1:])
def test_every_instruction_set(isa):
    for name in [*ACTIVATIONS, *(f"{name}, float32" for name in FLOATING), "div, int32", "to floats, float64"]:
        check(TABLE[name], host=run_host(TABLE[name], isa))


# ---- Where functions are singular or overflow ------------------------------------------------------------------------


def special_call(name: str) -> Call:
    function = (ACTIVATIONS | FLOATING | PAIRS)[name]
    if name not in PAIRS:
        return Call(function, SPECIAL.shape, (SPECIAL,))
    # Without what functions make subnormal: that may be flushed to zero, and its product with infinity is then NaN.
    size = np.abs(SPECIAL)
    some = SPECIAL[~((size > 80) & (size < 110) | (size > 0) & (size < 1e-30))]
    x, y = (np.ascontiguousarray(array) for array in np.meshgrid(some, some, indexing="ij"))
    return Call(function, x.shape, (x,), (y,))


SPECIAL_NAMES = [*ACTIVATIONS, *FLOATING, *PAIRS]


def check_special(call: Call, results: list[np.ndarray]) -> None:
    for got, want in zip(results, call.expected(), strict=True):
        assert got.dtype == want.dtype
        exact = got.dtype.kind in "biu"
        relative = 0 if exact else max(2e-5, float(jnp.finfo(got.dtype).eps))
        with np.errstate(all="ignore"):
            wide = [array.astype(np.float64) for array in (got, want)]
            np.testing.assert_allclose(*wide, rtol=relative, atol=0 if exact else 1e-6)


@pytest.fixture(scope="module")
def emitted_special(tmp_path_factory) -> Emitted:
    return Emitted([special_call(name) for name in SPECIAL_NAMES], tmp_path_factory.mktemp("special") / "unit")


@pytest.mark.parametrize("name", SPECIAL_NAMES)
def test_special_values(name, emitted_special):
    call = special_call(name)
    check_special(call, run_host(call))
    check_special(call, emitted_special.run(SPECIAL_NAMES.index(name)))


ODD = "abs neg sign floor ceil sqrt sin tan tanh erf expm1 log1p asin atan sinh asinh atanh"


def test_signs_of_zero():
    zeros = np.array([0.0, -0.0], np.float32)
    for name in ODD.split():
        call = Call(FLOATING[name], (2,), (zeros,))
        assert np.array_equal(np.signbit(run_host(call)[0]), np.signbit(call.expected()[0])), name


def test_random_functions():
    """A few; `python tests/fuzz_pointwise.py` runs as many as wanted."""
    wrong = [text for _, text in fuzz_pointwise.failures(20_261_121, range(25))]
    assert not wrong, "\n".join(wrong)
