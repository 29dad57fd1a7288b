"""What compares results finds what is just outside of its bounds, and lets pass what is just inside."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

from checking.cases.matmul import MatmulCase
from checking.compare import difference
from checking.pointwise import tolerance as pointwise
from checking.product.tolerance import Expected, wrong_elements
from checking.tolerance import exact_and_tolerance, within
from checking.transforms import forward, primals

E4M3 = jnp.float8_e4m3fn
FLOATS = ("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64")

# ------------------------------------------------------------ one element, of each dtype

# The exact value and what it may be off by, and how far from it results are that are right and wrong, all but the first
# in units in the last place: one farther is the first that is wrong.
PLACES = [(2.5, 0, 0, (0,), (-1, 1)), (2.5, 0, 1, (-1, 1), (-2, 2)), (2.5, 0.5, 0, (-0.5, 0.5), (-1.5, 1.5))]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("start", "between", "spread", "right", "wrong"), PLACES)
def test_the_nearest_number_beyond_the_bound_is_wrong(dtype, start, between, spread, right, wrong):
    place = 2 * float(jnp.finfo(dtype).eps)
    exact, off = np.array([start + between * place]), np.array([spread * place])
    for places in (*right, *wrong):
        got = (exact + places * place).astype(jnp.dtype(dtype))
        assert got.astype(np.float64) == exact + places * place
        assert bool(difference(got, exact, off)) == (places in wrong)
        assert wrong_elements(got, Expected(exact, exact - off, exact + off)).any() == (places in wrong)


@pytest.mark.parametrize("dtype", FLOATS)
def test_what_a_pointwise_function_only_moves_is_exact(dtype):
    x = np.array([2.5, -2.5]).astype(jnp.dtype(dtype))
    ((exact, tolerance),) = pointwise.exact_and_tolerance(lambda x: -x, [x])
    place = 2 * float(jnp.finfo(dtype).eps)
    for places in (0, -1, 1):
        got = (exact + places * place).astype(x.dtype)
        assert pointwise.wrong_elements(got, exact, tolerance).tolist() == [places != 0] * 2


@pytest.mark.parametrize(("dtype", "relative"), [("float32", 2.0**-18), ("float64", 2.0**-42)])
def test_a_pointwise_function_errs_by_its_own_unit(dtype, relative):
    x = np.linspace(-3, 3, 50).astype(dtype)
    ((exact, tolerance),) = pointwise.exact_and_tolerance(jnp.exp, [x])
    assert (tolerance < relative * exact).all()
    for factor in (0.0, 0.9, -0.9, 1.1, -1.1):
        got = (exact + factor * tolerance).astype(dtype)
        assert (pointwise.wrong_elements(got, exact, tolerance) == (abs(factor) > 1)).all()


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "uint8", "uint32", "bool"])
def test_the_next_integer_is_wrong(dtype):
    """int64 where float64 would not tell them apart."""
    exact = np.array([2**60 if dtype == "int64" else 1]).astype(dtype)
    for got, found in ((exact, False), (~exact if dtype == "bool" else exact + 1, True)):
        got = got.astype(dtype)
        assert bool(difference(got, exact, np.zeros(1))) == found
        assert wrong_elements(got, Expected(exact, exact, exact)).any() == found
        assert pointwise.wrong_elements(got, exact, np.zeros(1)).any() == found


def test_an_inverted_mask_of_an_op_is_wrong():
    mask = np.arange(12).reshape(3, 4) % 3 == 0
    assert not difference(mask, mask, np.zeros(mask.shape))
    assert "in 12 of 12 elements" in difference(~mask, mask, np.zeros(mask.shape))


def test_a_corner_of_zeros_of_an_op_is_wrong():
    case = MatmulCase("matmul", (1024, 48), (48, 1024), ("bfloat16", "bfloat16"))
    (exact,), (deviation,) = exact_and_tolerance(forward, case, primals(case))
    result = exact.astype(jnp.bfloat16)
    assert not difference(result, exact, deviation)
    result[-8:, -8:] = 0
    assert re.search("is wrong in 6[0-4] of 1048576 elements", difference(result, exact, deviation))


# ------------------------------------------------------------ what is not finite

LARGEST = 65504.0
# The exact value, what is right there, and what is wrong.
SPECIAL = {
    "infinity": (np.inf, [np.inf], [3.0, -np.inf, np.nan, LARGEST]),
    "minus infinity": (-np.inf, [-np.inf], [-3.0, np.inf, np.nan, -LARGEST]),
    "no number": (np.nan, [np.nan], [np.inf, -np.inf, 0.0]),
    "number": (3.0, [3.0], [np.inf, -np.inf, np.nan, 3.02]),
    "zero": (0.0, [0.0, -0.0], [np.inf, np.nan, 1.0]),
    "beyond the largest": (1e6, [np.inf], [LARGEST, -np.inf, np.nan]),
    "minus beyond the largest": (-1e6, [-np.inf], [-LARGEST, np.inf, np.nan]),
    "at the threshold": (65520.0, [np.inf, LARGEST], [-np.inf, np.nan, 3.0]),
    "below the threshold": (65400.0, [65408.0], [np.inf, -np.inf, np.nan]),
}


@pytest.mark.parametrize("name", SPECIAL)
def test_what_is_not_finite(name):
    exact, right, wrong = SPECIAL[name]
    want, none = np.array([exact]), np.zeros(1)
    for value in (*right, *wrong):
        got = np.array([value]).astype(np.float16)
        assert bool(difference(got, want, none)) == (value in wrong or (value != value and exact == exact)), value
        rounding = np.where(np.isfinite(want), np.abs(want) * 2.0**-11, 0)
        assert pointwise.wrong_elements(got, want, rounding + 1e-7).any() == bool(difference(got, want, none)), value
        assert wrong_elements(got, Expected(want, want, want)).any() == bool(difference(got, want, none)), value


def test_what_has_no_infinity_overflows_to_nan():
    got, want, allowed = np.array([np.nan, 448.0]).astype(E4M3), np.array([500.0, 500.0]), np.array([16.0, 16.0])
    assert within(got, want, allowed).tolist() == [True, False]
    assert within(got[:1], np.array([300.0]), allowed[:1]).tolist() == [False]


@pytest.mark.parametrize("value", [3.0, -np.inf, np.nan])
def test_a_pointwise_function_that_is_infinite(value):
    x = np.array([-1.0, 0.0, 2.0], np.float32)
    ((exact, tolerance),) = pointwise.exact_and_tolerance(lambda x: 1 / jnp.abs(x), [x])
    right = np.array([1.0, np.inf, 0.5], np.float32)
    assert not pointwise.wrong_elements(right, exact, tolerance).any()
    right[1] = value
    assert pointwise.wrong_elements(right, exact, tolerance).tolist() == [False, True, False]


def test_a_pointwise_sum_errs_by_its_own_terms():
    """The bound follows what is summed, and not the size of the array: a float64 sum has that of float64."""
    x = np.ones((50, 1000))
    ((_, tolerance),) = pointwise.exact_and_tolerance(lambda x: jnp.sum(x, axis=1), [x])
    assert tolerance.max() < 1e-9
