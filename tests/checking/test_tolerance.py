"""The tolerances are no wider than they must be: what is a little wrong is found."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checking.cases import BF16, F16, F32, F64, NormCase
from checking.compare import as_tuple, difference
from checking.tolerance import Rounding, exact_and_tolerance
from checking.transforms import forward, primals, vjp, with_cotangents

ALL = NormCase("layer_norm", (6, 40), scale=F32, bias=F32, statistics=True)
CASES = [
    ALL,
    ALL.replace(x=BF16, scale=BF16, bias=BF16),
    ALL.replace(x=F64, scale=F64),
    NormCase("rms_norm", (5, 4096), x=F16, scale=F32, residual=F16, statistics=True),
]


def problems(wrong, exact, deviation):
    """For each array, whether `wrong` is found to be."""
    leaves = zip(jax.tree.leaves(wrong), jax.tree.leaves(exact), jax.tree.leaves(deviation), strict=True)
    return [bool(difference(got, want, spread)) for got, want, spread in leaves]


def rounded(exact, dtypes):
    return [np.asarray(array).astype(jax.numpy.dtype(dtype)) for array, dtype in zip(exact, dtypes, strict=True)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_exact_answer_rounded_once_is_right(case):
    exact, deviation = exact_and_tolerance(forward, case, primals(case))
    assert not any(problems(rounded(exact, case.outputs.values()), exact, deviation))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_few_units_in_the_last_place_are_wrong(case):
    """Of a 16-bit result three units are too many. Wider ones may err as much as the arithmetic does, and no more."""
    exact, deviation = exact_and_tolerance(forward, case, primals(case))
    dtypes = list(case.outputs.values())
    for i, dtype in enumerate(dtypes):
        arithmetic = 60 * case.unit * np.sqrt(case.columns)
        off = max(3 * float(jax.numpy.finfo(dtype).eps), arithmetic)
        wrong = rounded(exact, dtypes)
        place = np.unravel_index(np.argmax(np.abs(exact[i])), exact[i].shape)
        wrong[i][place] = exact[i][place] * (1 + off)
        assert problems(wrong, exact, deviation) == [j == i for j in range(len(dtypes))]


MISTAKES = {
    "epsilon left out": {"epsilon": 0.0},
    "another epsilon": {"epsilon": 2e-4},
    "offset": {"scale_offset": 1e-4},
}


def exactly(case, arrays):
    return case.reference(Rounding(case.unit), *(np.asarray(array, np.float64) for array in arrays))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_parameter_is_wrong(mistake):
    case = ALL.replace(epsilon=1e-4)
    exact, deviation = exact_and_tolerance(forward, case, primals(case))
    wrong = exactly(case.replace(**MISTAKES[mistake]), case.primals())
    found = problems(rounded(wrong, case.outputs.values()), exact, deviation)
    # The mean knows neither, and the reciprocal standard deviation no offset.
    assert found == [True, False, mistake != "offset"]


def dropped(case):
    """Gradients with one term of the backward formula dropped, by the term's name."""
    x, scale, _ = (np.asarray(array, np.float64) for array in case.primals())
    d_y = np.asarray(case.cotangents()[0], np.float64)
    centered = x - x.mean(-1, keepdims=True)
    rstd = 1 / np.sqrt(np.mean(centered**2, -1, keepdims=True) + case.epsilon)
    normalized, g = centered * rstd, d_y * scale
    first, second = g.mean(-1, keepdims=True), (g * normalized).mean(-1, keepdims=True)
    d_scale, d_bias = np.sum(d_y * normalized, 0), np.sum(d_y, 0)
    return {
        "nothing": (rstd * (g - first - normalized * second), d_scale, d_bias),
        "the mean of g": (rstd * (g - normalized * second), d_scale, d_bias),
        "the mean of g times xhat": (rstd * (g - first), d_scale, d_bias),
        "the last row": (rstd * (g - first - normalized * second), d_scale, np.sum(d_y[:-1], 0)),
        "epsilon": (rstd * (g - first - normalized * second * 1.0001), d_scale, d_bias),
    }


@pytest.mark.parametrize("term", ["nothing", "the mean of g", "the mean of g times xhat", "the last row", "epsilon"])
@pytest.mark.parametrize("dtype", [F32, F64])
def test_a_dropped_term_is_wrong(dtype, term):
    case = NormCase("layer_norm", (6, 40), x=dtype, scale=dtype, bias=dtype)
    (_, exact), (_, deviation) = exact_and_tolerance(vjp, case, with_cotangents(case))
    wrong = dropped(case)[term]
    found = problems([array.astype(dtype) for array in wrong], exact, deviation)
    assert any(found) == (term != "nothing")


def test_a_failure_tells_how_to_reproduce_it():
    exact, deviation = exact_and_tolerance(forward, ALL, primals(ALL))
    wrong = rounded(exact, ALL.outputs.values())
    wrong[0][2, 3] += 1
    message = difference(wrong[0], exact[0], deviation[0])
    assert "wrong in 1 of 240 elements; the worst is [2, 3]" in message
    command = "PYTHONPATH=tests python -P -m checking.fuzz.calls --check vjp --case "
    assert ALL.reproduction("vjp").startswith(command + "\"NormCase(kind='layer_norm'")
    assert eval(repr(ALL)) == ALL


def test_a_wrong_pattern_of_nan_is_wrong():
    case = NormCase("layer_norm", (6, 40), data="nan")
    exact, deviation = exact_and_tolerance(forward, case, primals(case))
    (right,) = rounded(exact, [F32])
    assert np.isnan(right).any(-1).sum() == 1
    spread, cured = right.copy(), np.nan_to_num(right)
    spread[0, 0] = np.nan
    assert problems([right], exact, deviation) == [False]
    assert problems([spread], exact, deviation) == [True]
    assert problems([cured], exact, deviation) == [True]


def test_as_tuple_keeps_tuples():
    assert as_tuple(lambda x: (x, 1))(0) == (0, 1)
    assert as_tuple(lambda x: x)(0) == (0,)


def test_each_operation_is_perturbed_otherwise():
    rounding = Rounding(2.0**-24, 1.0, 1.0)
    first, second = (np.asarray(rounding.each(np.ones(1000))) - 1 for _ in range(2))
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.2


def test_exponentials_below_the_smallest_normal_number_may_be_flushed():
    rounding, tiny = Rounding(2.0**-24, 1.0, 1.0), float(np.finfo(np.float32).tiny)
    with jax.enable_x64(True):
        small, one, hidden = np.asarray(rounding.exponential(jnp.asarray([-88.0, 0.0, -np.inf]), F32))
    assert 0.01 * tiny < abs(small - np.exp(-88.0)) < 2 * tiny
    assert abs(one - 1) < 1e-6
    assert abs(hidden) < 2 * tiny
