"""What compares results finds what is just outside of its bounds, and lets pass what is just inside."""

import re
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from checking.cases.matmul import MatmulCase
from checking.compare import difference
from checking.emulation.plans import run_on_cpu
from checking.pointwise import tolerance as pointwise
from checking.product.calls import ProductCase
from checking.product.tolerance import Expected, check, expected, expected_of, tolerated, wrong_elements
from checking.tolerance import exact_and_tolerance, within
from checking.transforms import forward, primals
from jaxdnn.plan import Launch, Operand, Plan, Result, Scalar, Scratch

E4M3 = jnp.float8_e4m3fn
FLOATS = ("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64")


def mask(acc):
    return acc > 0, acc.astype(jnp.int8), acc


PRODUCTS = {
    "bfloat16": ProductCase(64, 48, 1024, "bfloat16", precision="default"),
    "float32": ProductCase(64, 48, 4112, "float32"),
    "tf32": ProductCase(64, 48, 4112, "float32", precision="default"),
    "float8": ProductCase(64, 48, 4112, "float8_e4m3fn", out="float32", precision="default"),
    "float64": ProductCase(64, 48, 300, "float64"),
    "gelu": ProductCase(
        64, 48, 1024, "bfloat16", epilogue=lambda acc, bias: acc + bias, operands=(("float32", (1, 1, 48)),)
    ),
    "summed": ProductCase(64, 48, 1024, "float32", epilogue=lambda acc: jnp.sum(acc, axis=1)),
    "largest": ProductCase(64, 48, 1024, "float32", precision="default", epilogue=lambda acc: jnp.max(acc, axis=2)),
}
MASKED = {
    "float32": ProductCase(100, 72, 40, "float32", epilogue=mask),
    "tf32": ProductCase(100, 72, 40, "float32", epilogue=mask, precision="default"),
    "float8": ProductCase(100, 72, 40, "float8_e5m2", out="float32", epilogue=mask, precision="default"),
}


def rounded(case):
    """The exact results, rounded once, which tests may change."""
    outputs = case.product().program.outputs
    with np.errstate(over="ignore"):
        return [np.array(one.exact).astype(output.dtype) for one, output in zip(expected(case), outputs, strict=True)]


def is_wrong(case, results):
    try:
        check(case, results)
    except AssertionError as error:
        return "elements are wrong" in str(error)
    return False


# ------------------------------------------------------------ products


@pytest.mark.parametrize(
    "case", [*PRODUCTS.values(), *MASKED.values()], ids=[*PRODUCTS, *(f"{n} mask" for n in MASKED)]
)
def test_exact_results_of_products_pass(case):
    check(case, rounded(case))


@pytest.mark.parametrize("name", PRODUCTS)
def test_an_element_of_zero_is_wrong(name):
    """Unless the exact one is as good as zero: so are few."""
    case = PRODUCTS[name]
    (want,) = expected(case)
    wrong = wrong_elements(np.zeros_like(rounded(case)[0]), want)
    assert np.mean(~wrong) < 0.04
    far = np.abs(want.exact) > 2.1 * np.maximum(want.high - want.exact, want.exact - want.low) + 1e-37
    assert wrong[far].all()
    for at in np.argwhere(wrong)[:3]:
        results = rounded(case)
        results[0][tuple(at)] = 0
        assert is_wrong(case, results)


@pytest.mark.parametrize("name", ["tf32", "float8", "float32"])
def test_a_row_of_zeros_is_wrong(name):
    (result,) = rounded(PRODUCTS[name])
    result[:, 5] = 0
    assert is_wrong(PRODUCTS[name], [result])


@pytest.mark.parametrize("name", [name for name in PRODUCTS if name not in ("bfloat16", "gelu")])
def test_bounds_of_products_are_what_they_say(name):
    """Of results whose own rounding is less than a hundredth of the bound."""
    case = PRODUCTS[name]
    (want,) = expected(case)
    largest = np.unravel_index(np.argmax(np.abs(want.exact)), want.exact.shape)
    room = float(tolerated(want, rounded(case)[0].dtype)[largest])
    for factor in (0.0, 0.98, -0.98, 1.02, -1.02):
        (result,) = rounded(case)
        result[largest] = want.exact[largest] + factor * room
        assert is_wrong(case, [result]) == (abs(factor) > 1)


def test_a_corner_of_zeros_is_wrong():
    """And nothing else, in a million elements."""
    case = ProductCase(1024, 1024, 1008, "bfloat16", precision="default")
    (result,) = rounded(case)
    result[0, -8:, -8:] = 0
    wrong = wrong_elements(result, expected(case)[0])
    assert wrong[0, -8:, -8:].sum() > 60
    assert wrong.sum() == wrong[0, -8:, -8:].sum()


def test_an_eighth_of_the_rows_of_zeros_is_wrong():
    (result,) = rounded(PRODUCTS["tf32"])
    result[:, 8:16] = 0
    wrong = wrong_elements(result, expected(PRODUCTS["tf32"])[0])
    assert wrong[:, 8:16].mean() > 0.98
    assert wrong.sum() == wrong[:, 8:16].sum()


@pytest.mark.parametrize("value", [3.0, -np.inf, np.nan])
@pytest.mark.parametrize("name", ["bfloat16", "float32", "tf32", "float8", "float64"])
def test_an_infinity_is_an_infinity(name, value):
    case = PRODUCTS[name]
    arrays = [one.astype(np.float32 if "float8" in case.dtype else one.dtype) for one in case.arrays()]
    arrays[0][0, 5, 7] = np.inf
    (want,) = expected_of(case, arrays)
    result = want.exact.astype(rounded(case)[0].dtype)
    assert np.isinf(result[0, 5]).all()
    assert not wrong_elements(result, want).any()
    result[0, 5, 3] = np.sign(result[0, 5, 3]) * value
    assert np.argwhere(wrong_elements(result, want)).tolist() == [[0, 5, 3]]


@pytest.mark.parametrize("name", ["bfloat16", "float32"])
def test_float32_arithmetic_is_within_the_bounds(name):
    """In numpy's order."""
    case = PRODUCTS[name]
    a, b = (one.astype(np.float32) for one in case.matrices(case.arrays()))
    check(case, [np.matmul(a, b).astype(rounded(case)[0].dtype)])


def by_tensor_cores(case, promoted=8):
    """What Hopper's tensor cores add, `promoted` instructions at a time if they are 8-bit floats.

    An instruction cuts its products and the sum so far to `bits` below the largest one's power of two, and what it has
    added to `kept` bits. This gives the errors that were measured (benchmarks/results/product_kernels.md).
    """
    depth, bits, kept = {4: (8, 25, 23), 2: (16, 25, 23), 1: (32, 13, 13)}[jnp.dtype(case.dtype).itemsize]
    a, b = (one[0].astype(np.float32) for one in case.matrices(case.arrays()))
    if case.dtype == "float32":
        a, b = ((one.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32) for one in (a, b))
    a, b = a.astype(np.float64), b.astype(np.float64)
    total, acc = np.zeros((2, case.m, case.n))
    for i, start in enumerate(range(0, case.k, depth), 1):
        left, right = a[:, start : start + depth, None], b[None, start : start + depth]
        largest = np.maximum((exponent(left) + exponent(right)).max(axis=1), exponent(acc))
        acc = truncated(left * right, largest[:, None] - bits).sum(axis=1) + truncated(acc, largest - bits)
        acc = truncated(acc, exponent(acc) - kept)
        if case.dtype.startswith("float8") and i % promoted == 0:
            total, acc = (total + acc).astype(np.float32), np.zeros_like(acc)
    return [(total + acc).astype(np.float32)[None]]


def exponent(x):
    return np.where(x == 0, -100, np.frexp(x)[1] - 1)


def truncated(x, digit):
    return np.ldexp(np.trunc(np.ldexp(x, -digit)), digit)


ON_TENSOR_CORES = [
    ProductCase(64, 48, k, dtype, out="float32", precision="default")
    for dtype in ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
    for k in (40, 256, 1040, 4112)
]


@pytest.mark.parametrize("case", ON_TENSOR_CORES, ids=lambda case: f"{case.dtype} {case.k}")
def test_sums_of_tensor_cores_are_within_the_bounds(case):
    check(case, by_tensor_cores(case))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_sums_of_8_bit_floats_without_promotion_are_wrong(dtype):
    case = replace(PRODUCTS["float8"], dtype=dtype)
    assert is_wrong(case, by_tensor_cores(case, promoted=1000))


def test_an_operand_of_fewer_digits_is_wrong():
    """bfloat16 factors where tf32 ones are allowed, and tf32 ones where none are."""
    for name, digits in (("tf32", 0xFFFF0000), ("float32", 0xFFFFE000)):
        case = PRODUCTS[name]
        cut = [(one.astype(np.float32).view(np.uint32) & np.uint32(digits)) for one in case.matrices(case.arrays())]
        assert is_wrong(case, [np.matmul(*(one.view(np.float32) for one in cut))])


@pytest.mark.parametrize("name", MASKED)
def test_an_inverted_mask_is_wrong(name):
    case = MASKED[name]
    above, integers, acc = rounded(case)
    assert is_wrong(case, [~above, integers, acc])
    for other in (np.zeros_like(above), np.ones_like(above)):
        assert is_wrong(case, [other, integers, acc])


@pytest.mark.parametrize("name", MASKED)
def test_one_wrong_bool_and_one_wrong_integer_are_found_away_from_thresholds(name):
    case = MASKED[name]
    want = expected(case)[2]
    spread = want.high - want.exact
    near_zero = np.abs(want.exact) <= spread
    near_integer = np.abs(want.exact - np.rint(want.exact)) <= spread
    above, integers, _ = rounded(case)
    assert wrong_elements(~above, expected(case)[0])[~near_zero].all()
    for step in (1, -1):
        assert wrong_elements(integers + np.int8(step), expected(case)[1])[~near_integer].all()
    assert is_wrong(case, [above, integers + np.int8(1), rounded(case)[2]])


def test_integers_and_bools_at_a_threshold_may_be_either():
    at = Expected(np.array([3, 3]), np.array([2, 3]), np.array([3, 3]))
    for value, found in ((3, [False, False]), (2, [False, True]), (4, [True, True]), (1, [True, True])):
        assert wrong_elements(np.array([value, value], np.int8), at).tolist() == found
    at = Expected(np.array([True, True]), np.array([False, True]), np.array([True, True]))
    assert wrong_elements(np.array([False, False]), at).tolist() == [False, True]


def test_integer_products_are_exact():
    case = ProductCase(9, 11, 300, "int8")
    (result,) = rounded(case)
    check(case, [result])
    result[0, 4, 5] += 1
    assert is_wrong(case, [result])


def test_results_have_their_shape_and_dtype():
    case = PRODUCTS["float32"]
    (result,) = rounded(case)
    for other in (result[:, :-1], result.astype(np.float64)):
        with pytest.raises(AssertionError):
            check(case, [other])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_wrong_in_one_element(value):
    (result,) = rounded(PRODUCTS["bfloat16"])
    result[0, 1, 2] = value
    assert is_wrong(PRODUCTS["bfloat16"], [result])


def test_a_product_beyond_the_largest_number_is_infinite():
    case = replace(PRODUCTS["float32"], out="float16", epilogue=lambda acc: 1e6 * jnp.sign(acc) + acc)
    (result,) = rounded(case)
    assert np.isinf(result).all()
    check(case, [result])
    for other in (-result, np.full_like(result, 65504), np.full_like(result, np.nan)):
        assert is_wrong(case, [other])


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


# ------------------------------------------------------------ kernels on the CPU

STRAY = """
extern "C" __global__ void stray(float* operand, float* result, float* scratch, long long i, long long j, long long k) {
  if (threadIdx.x) return;
  for (int at = 0; at < 4; ++at) result[at] = scratch[at] = operand[at];
  result[i] = 1;
  scratch[j] = 1;
  operand[k] = 1;
}
"""


@pytest.mark.parametrize(
    ("places", "said"),
    [
        ((0, 0, None), ""),
        ((-1, 0, None), "before result 0"),
        ((0, 4, None), "after scratch buffer 0"),
        ((0, -3, None), "before scratch buffer 0"),
        ((0, 0, 2), "operand 0 was written to"),
        ((0, 0, 5), "after operand 0"),
    ],
)
def test_a_kernel_that_writes_elsewhere_is_wrong(places, said, tmp_path):
    unit = STRAY if places[2] is not None else STRAY.replace("operand[k] = 1;", "")
    numbers = (Scalar("int64", place or 0) for place in places)
    launch = Launch("stray", (Operand(0), Result(0), Scratch(0), *numbers), (1, 1, 1), (2, 1, 1))
    operand, result = np.arange(4, dtype=np.float32), np.zeros(4, np.float32)
    plan = Plan(unit, "sm_90", (launch,), scratch=(16,))
    if said:
        with pytest.raises(AssertionError, match=said):
            run_on_cpu(plan, ([operand], [result]), tmp_path)
    else:
        run_on_cpu(plan, ([operand], [result]), tmp_path)
        assert result.tolist() == [1, 1, 2, 3]


def test_a_result_that_is_not_written_is_no_number(tmp_path):
    unit = STRAY.replace("at < 4", "at < 3").replace("operand[k] = 1;", "")
    arguments = (Operand(0), Result(0), Scratch(0), *[Scalar("int64", 0)] * 3)
    plan = Plan(unit, "sm_90", (Launch("stray", arguments, (1, 1, 1), (1, 1, 1)),), scratch=(16,))
    operand, result = np.arange(4, dtype=np.float32), np.zeros(4, np.float32)
    run_on_cpu(plan, ([operand], [result]), tmp_path)
    assert np.isnan(result).tolist() == [False, False, False, True]
