"""Programs compute what JAX computes: the host's interpreter, and the emitted source compiled for the CPU."""

import jax.numpy as jnp
import numpy as np
import pytest

from checking.fuzz import pointwise as fuzz_pointwise
from checking.pointwise.cases import ACTIVATIONS, FLOATING, PAIRS, SPECIAL
from checking.pointwise.runs import Call, Emitted, run_host
from checking.pointwise.table import TABLE
from checking.pointwise.tolerance import check
from jaxdnn import _native


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


@pytest.mark.parametrize("isa", _native.host()["isas"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
def test_float64_is_rounded_once(dtype, isa):
    """What lies half-way between two numbers, and next to that: in float32 on the way it would be half-way as well."""
    bits = f"uint{jnp.finfo(dtype).bits}"
    # What is subnormal in float32 may be flushed to zero.
    first, last = np.array([2.0**-126, jnp.finfo(dtype).max]).astype(dtype).view(bits)
    ordered = np.arange(first, last + 1, dtype=bits)
    numbers = ordered.view(dtype).astype(np.float64)
    below, above, is_even = numbers[:-1], numbers[1:], ordered[:-1] % 2 == 0
    middle = (below + above) / 2
    values = np.stack([middle * (1 - 2.0**-40), middle, middle * (1 + 2.0**-40)])
    exact = np.stack([below, np.where(is_even, below, above), above])
    for sign in (1, -1):
        (got,) = run_host(Call(lambda x: x.astype(dtype), values.shape, (sign * values,)), isa)
        np.testing.assert_array_equal(got.astype(np.float64), sign * exact)


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
            # XLA's tanh may be a unit in the last place from one, of which a sum leaves that, times what it multiplies.
            np.testing.assert_allclose(*wide, rtol=relative, atol=0 if exact else 4e-6)


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
    """A few; `checking.fuzz.pointwise` runs as many as wanted."""
    wrong = [text for _, text in fuzz_pointwise.failures(20_261_121, range(25))]
    assert not wrong, "\n".join(wrong)
