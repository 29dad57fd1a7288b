"""Programs compute what JAX computes: the host's interpreter, and the emitted source compiled for the CPU."""

import shutil
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pointwise_cases import ACTIVATIONS, FLOATING, INTEGERS, PAIRS, SPECIAL, jvp, vjp
from pointwise_runs import Call, Emitted, run_host
from pointwise_tolerance import exact_and_tolerance, wrong_elements

from jaxdnn import _native

SHAPE = (5, 67)
RANDOM = np.random.default_rng(7)


def values(dtype: str, shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    if dtype == "bool":
        return RANDOM.random(shape) < 0.5
    if dtype.startswith(("int", "uint")):
        about = np.iinfo(dtype)
        wide = RANDOM.integers(about.min, about.max, shape, dtype, endpoint=True)
        small = RANDOM.integers(0, 9, shape).astype(dtype)
        return np.where(RANDOM.random(shape) < 0.5, wide, small - np.array(3).astype(dtype) if about.min < 0 else small)
    return (RANDOM.standard_normal(shape) * RANDOM.choice([0.1, 1, 4], shape)).astype(dtype)


def pair(function: Callable[..., Any], dtype: str) -> Call:
    x = values(dtype)
    return Call(function, SHAPE, (x,), (values(dtype),))


def single(function: Callable[..., Any], dtype: str) -> Call:
    return Call(function, SHAPE, (values(dtype),))


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
    for dtype in ("int32", "uint32", "int8", "uint8", "int16", "uint16", "int64", "uint64"):
        calls |= {f"{name}, {dtype}": pair(function, dtype) for name, function in INTEGERS.items()}
    return calls


TABLE = table()


def check(call: Call, results: list[np.ndarray]) -> None:
    for number, (got, (exact, tolerance)) in enumerate(
        zip(results, exact_and_tolerance(call.function, (*call.sums, *call.operands)), strict=True)
    ):
        wrong = wrong_elements(got, exact, tolerance)
        if wrong.any():
            at = tuple(int(i) for i in np.argwhere(wrong)[0]) if got.ndim else ()
            given = [array[at] for array in (*call.sums, *call.operands) if array.shape == got.shape]
            raise AssertionError(
                f"result {number}: {wrong.sum()} of {wrong.size} are wrong; at {at}, of {given}: "
                f"{got[at]!r} for {exact[at]!r} +- {tolerance[at]:.3g}"
            )


@pytest.mark.parametrize("name", TABLE)
def test_host(name):
    check(TABLE[name], run_host(TABLE[name]))


@pytest.mark.parametrize("isa", _native.host()["isas"][1:])
def test_every_instruction_set(isa):
    for name in [*ACTIVATIONS, *(f"{name}, float32" for name in FLOATING), "div, int32", "to floats, float64"]:
        check(TABLE[name], run_host(TABLE[name], isa))


@pytest.fixture(scope="module")
def emitted(tmp_path_factory) -> Emitted:
    if shutil.which("g++") is None:
        pytest.skip("g++, which compiles the emitted source for the CPU, is missing")
    return Emitted(list(TABLE.values()), tmp_path_factory.mktemp("emitted"))


@pytest.mark.parametrize("name", TABLE)
def test_emitted_source(name, emitted):
    check(TABLE[name], emitted.run(list(TABLE).index(name)))


# ---- Where functions are singular or overflow ---------------------------------------------------------------------------


def special_call(name: str) -> Call:
    function = (ACTIVATIONS | FLOATING | PAIRS)[name]
    if name in PAIRS:
        return Call(function, (len(SPECIAL), len(SPECIAL)), (np.tile(SPECIAL[:, None], len(SPECIAL)),), (SPECIAL,))
    return Call(function, (len(SPECIAL),), (SPECIAL,))


# XLA computes these otherwise at their limits.
SPECIAL_NAMES = [*ACTIVATIONS, *FLOATING, *PAIRS]


def check_special(call: Call, results: list[np.ndarray]) -> None:
    for got, want in zip(results, call.expected(), strict=True):
        assert got.dtype == want.dtype
        with np.errstate(all="ignore"):
            np.testing.assert_allclose(
                got.astype(np.float64), want.astype(np.float64), rtol=2e-5, atol=1e-6 if got.dtype != bool else 0
            )


@pytest.mark.parametrize("name", SPECIAL_NAMES)
def test_special_values_on_the_host(name):
    check_special(special_call(name), run_host(special_call(name)))


@pytest.fixture(scope="module")
def emitted_special(tmp_path_factory) -> Emitted:
    if shutil.which("g++") is None:
        pytest.skip("g++, which compiles the emitted source for the CPU, is missing")
    return Emitted([special_call(name) for name in SPECIAL_NAMES], tmp_path_factory.mktemp("special"))


@pytest.mark.parametrize("name", SPECIAL_NAMES)
def test_special_values_in_emitted_source(name, emitted_special):
    check_special(special_call(name), emitted_special.run(SPECIAL_NAMES.index(name)))


def test_signs_of_zero():
    zeros = np.array([0.0, -0.0], np.float32)
    for name in "abs neg sign floor ceil sqrt sin tan tanh erf expm1 log1p asin atan sinh asinh atanh".split():
        call = Call(FLOATING[name], (2,), (zeros,))
        assert np.array_equal(np.signbit(run_host(call)[0]), np.signbit(call.expected()[0])), name


# ---- Where elements come from and go to ----------------------------------------------------------------------------------

BATCH, ROWS, COLUMNS = 3, 7, 300
SUM = values("float32", (BATCH, ROWS, COLUMNS))


def layout(function: Callable[..., Any], *operands: np.ndarray) -> Call:
    return Call(function, SUM.shape, (SUM,), operands)


LAYOUTS = {
    "scalar": layout(lambda acc, s: acc * s, np.float32(3)),
    "batch": layout(lambda acc, b: acc * b[:, None, None], values("float32", (BATCH,))),
    "row": layout(lambda acc, b: acc + b, values("bfloat16", (COLUMNS,))),
    "column": layout(lambda acc, b: acc + b[:, None], values("float16", (ROWS,))),
    "column with its dimension": layout(lambda acc, b: acc + b, values("float32", (ROWS, 1))),
    "matrix": layout(lambda acc, b: acc + b, values("float32", (ROWS, COLUMNS))),
    "transposed": layout(lambda acc, b: acc + b.T, values("float32", (COLUMNS, ROWS))),
    "full": layout(lambda acc, b: acc + b, values("bfloat16", SUM.shape)),
    "full, batch last": layout(lambda acc, b: acc + b.transpose(2, 0, 1), values("float32", (ROWS, COLUMNS, BATCH))),
    "row of each batch": layout(lambda acc, b: acc + b[:, None], values("float32", (BATCH, COLUMNS))),
    "batch with its dimensions": layout(lambda acc, b: acc + b, values("float32", (BATCH, 1, 1))),
    "outer product": layout(
        lambda acc, a, b: acc + a[:, None] * b, values("float32", (ROWS,)), values("float32", (COLUMNS,))
    ),
    "one operand twice": layout(
        lambda acc, b: acc + b[:ROWS, None] if False else acc + b + b[None, None], values("float32", (COLUMNS,))
    ),
    "mask": layout(lambda acc, m: jnp.where(m, acc, 0), values("bool", (ROWS, COLUMNS))),
    "integers": layout(lambda acc, i: acc * i, values("int8", (COLUMNS,))),
    "float8": layout(lambda acc, f: acc * f.astype(jnp.float32), values("float8_e4m3fn", SUM.shape)),
    "coordinates": layout(
        lambda acc: (
            acc + jax.lax.broadcasted_iota(jnp.float32, acc.shape, 0) * jnp.arange(ROWS)[:, None] - jnp.arange(COLUMNS)
        )
    ),
    "causal": layout(lambda acc: jnp.where(jnp.arange(ROWS)[:, None] >= jnp.arange(COLUMNS), acc, -jnp.inf)),
    "several": layout(
        lambda acc, b: {
            "y": (acc + b).astype(jnp.bfloat16),
            "mask": acc > 0,
            "acc": acc,
            "q": jnp.round(acc * 9).astype(jnp.int8),
        },
        values("float32", (COLUMNS,)),
    ),
    "unused": layout(lambda acc, a, b: acc + b, values("float32", (3, 2)), values("float32", (COLUMNS,))),
    "constant": layout(lambda acc: jnp.full_like(acc, 3)),
    "captured scalars": layout(lambda acc, two=np.float32(2), three=np.array([3.0], np.float32): acc * two + three),
}
MATRIX = SUM[0]
LAYOUTS |= {
    f"{name} over {where}": Call(
        lambda acc, b, f=function, a=axis: f(acc * b, axis=a), MATRIX.shape, (MATRIX,), (values("float32", (COLUMNS,)),)
    )
    for name, function in {"sum": jnp.sum, "max": jnp.max, "min": jnp.min}.items()
    for where, axis in {"rows": 0, "columns": 1, "all": None}.items()
}
LAYOUTS |= {
    "bias gradient": Call(lambda acc: (acc.astype(jnp.bfloat16), acc.astype(jnp.bfloat16).sum(0)), MATRIX.shape, (MATRIX,)),
    "amax": Call(lambda acc: (acc.astype(jnp.float8_e4m3fn), jnp.max(jnp.abs(acc), keepdims=True)), MATRIX.shape, (MATRIX,)),
    "max of integers": Call(lambda acc: jnp.max(acc, axis=1, keepdims=True), (4, 9), (values("int32", (4, 9)),)),
    "two sums": Call(lambda gate, up, b: jax.nn.silu(gate + b) * up, MATRIX.shape, (MATRIX, values("float32", MATRIX.shape)), (values("float32", (COLUMNS,)),)),
    "no sum": Call(lambda a, b: a * b, (ROWS, COLUMNS), (), (values("float32", (ROWS, 1)), values("float32", (COLUMNS,)))),
    "vector": Call(lambda acc, b: acc * b, (COLUMNS,), (SUM[0, 0],), (values("float32", (COLUMNS,)),)),
    "number": Call(lambda acc, b: acc * b, (), (np.float32(3).reshape(()),), (np.float32(2),)),
    "narrow tile": Call(lambda acc, b: acc * b + jnp.arange(5)[:, None], (2, 5, 3), (values("float32", (2, 5, 3)),), (values("float32", (3,)),)),
    "dimensions of size one": Call(lambda acc, b: acc * b, (1, 4, 1), (values("float32", (1, 4, 1)),), (values("float32", (1, 4, 1)),)),
    "int32 sums": Call(lambda acc, s, b: (acc.astype(jnp.float32) * s + b).astype(jnp.bfloat16), (4, 40), (values("int32", (4, 40)),), (np.float32(1e-6), values("float32", (40,)))),
    "float64 sums": Call(lambda acc, b: jnp.tanh(acc) * b, (4, 40), (values("float64", (4, 40)),), (values("float64", (40,)),)),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_on_the_host(name):
    check(LAYOUTS[name], run_host(LAYOUTS[name]))


@pytest.fixture(scope="module")
def emitted_layouts(tmp_path_factory) -> Emitted:
    if shutil.which("g++") is None:
        pytest.skip("g++, which compiles the emitted source for the CPU, is missing")
    return Emitted(list(LAYOUTS.values()), tmp_path_factory.mktemp("layouts"))


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_in_emitted_source(name, emitted_layouts):
    check(LAYOUTS[name], emitted_layouts.run(list(LAYOUTS).index(name)))
