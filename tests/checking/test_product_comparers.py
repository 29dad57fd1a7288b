"""What compares a product's results finds what is just outside of its bounds, and lets pass what is just inside."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from checking.product.calls import ProductCase
from checking.product.tolerance import Expected, check, expected, expected_of, tolerated, wrong_elements


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
