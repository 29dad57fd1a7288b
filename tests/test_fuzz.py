"""A few random calls; `python tests/fuzz.py` runs as many as wanted, and JAXDNN_FUZZ_CASES raises the number here."""

import os

import fuzz
import jax
import numpy as np
import pytest
from analytic import evaluate
from cases import CASES, F16, F32, F64, NormCase
from checking import difference
from test_jvp import arguments as jvp_arguments
from test_jvp import jvp
from test_vjp import arguments as vjp_arguments
from test_vjp import vjp
from tolerance import Rounding

COUNT = int(os.environ.get("JAXDNN_FUZZ_CASES", "60"))
SEED = 20_261_121
PORTION = 20


@pytest.mark.parametrize("start", range(0, COUNT, PORTION))
def test_random_calls(start):
    numbers = range(start, min(start + PORTION, COUNT))
    wrong = [text for _, text in fuzz.failures(SEED, numbers, workers=2)]
    assert not wrong, "\n".join(wrong)


FORMULAS = [case for case in CASES if case.rows * case.columns <= 400 and case.data in ("normal", "large_mean")]


@pytest.mark.parametrize("case", FORMULAS, ids=str)
def test_the_formulas_are_jax_derivatives(case):
    """Two derivations of one truth: the fuzzer's formulas, and JAX's derivatives of the tests' definition."""
    for check, transform, arguments in (("jvp", jvp, jvp_arguments), ("vjp", vjp, vjp_arguments)):
        primals, directions = arguments(case)
        wide = jax.tree.map(lambda array: jax.numpy.asarray(array, np.float64), (primals, directions))
        with jax.default_device(jax.devices("cpu")[0]):
            exact = jax.jit(lambda *a, f=transform: f(lambda *b: case.reference(Rounding(0.0), *b), *a))(*wide)
        for want, (got, _) in zip(jax.tree.leaves(exact), evaluate(case, check, primals, directions), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-11)


def test_bounds_find_what_is_wrong():
    case = NormCase("layer_norm", (6, 40), x=F32, scale=F32, bias=F32)
    pairs = evaluate(case, "vjp", *vjp_arguments(case))
    for value, error in pairs:
        right = value.astype(np.float32)
        assert not difference(right, value, error)
        assert difference(right + np.float32(2e-5) * np.abs(value).max(), value, error)
        assert np.max(error) < 2e-5 * np.abs(value).max()


def test_draws_are_a_function_of_seed_and_number():
    assert [fuzz.draw(1, k) for k in range(50)] == [fuzz.draw(1, k) for k in range(50)]
    assert len({fuzz.draw(1, k) for k in range(50)} | {fuzz.draw(2, k) for k in range(50)}) > 90


def test_draws_are_varied():
    drawn = [fuzz.draw(3, k) for k in range(2000)]
    assert {one.check for one in drawn} == set(fuzz.CHECKS)
    assert {one.case.x for one in drawn} == {*fuzz.DTYPES} >= {F16, F64}
    assert sum(one.mapped > 0 for one in drawn) > 300
    assert sum(one.case.residual is not None for one in drawn) > 300
    assert len({one.case.shape for one in drawn}) > 1000


def test_the_command_line(capsys):
    assert fuzz.main(["--seed", "5", "--only", "7"]) == 0
    assert "1 cases" in capsys.readouterr().out
    case = NormCase("rms_norm", (3, 8), scale=F32)
    assert fuzz.main(["--check", "jvp", "--engine", "xla", "--case", repr(case)]) == 0
    assert "right" in capsys.readouterr().out
