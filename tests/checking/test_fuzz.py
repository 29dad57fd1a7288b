"""A few random calls of each op; `checking.fuzz.calls` runs as many as wanted, and JAXDNN_FUZZ_CASES here."""

import os

import jax
import numpy as np
import pytest

from checking.calls import refusal
from checking.cases import BF16, F16, F32, F64, TABLE, AttentionCase, MatmulCase, NormCase
from checking.cases.dtypes import E4M3, E5M2, I8
from checking.compare import as_tuple, difference
from checking.compiler_log import kernels
from checking.fuzz import bounded, bounded_functions
from checking.fuzz import calls as fuzz
from checking.fuzz import matmul as fuzz_matmul
from checking.fuzz import norm as fuzz_norm
from checking.fuzz import transforms as fuzz_transforms
from checking.fuzz.analytic import evaluate
from checking.fuzz.bounded import Bounded
from checking.fuzz.epilogues import Program
from checking.targets import H100
from checking.tolerance import Rounding
from checking.transforms import jvp, vjp, with_cotangents, with_tangents
from jaxdnn import _native
from jaxdnn.planning.calls import find_calls
from jaxdnn.planning.candidates import engines_for

COUNT = int(os.environ.get("JAXDNN_FUZZ_CASES", "40"))
SEED = 20_261_121
PORTION = 20


@pytest.mark.parametrize("start", range(0, COUNT, PORTION))
@pytest.mark.parametrize("op", fuzz.OPS)
def test_random_calls(op, start):
    numbers = range(start, min(start + PORTION, COUNT))
    wrong = [text for _, text in fuzz.failures(op, SEED, numbers, workers=2)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("engine", ["xla", "host"])
def test_weights_of_almost_one(engine):
    """Gradients of queries that see few keys are small differences, of what is summed over features."""
    case = AttentionCase(
        seed=1693358851, queries=217, keys=6, heads=4, size=160, value_size=160, causal=True, lengths="query key"
    )
    assert fuzz.problem(fuzz.Fuzzed(case, "vjp", options=(("engine", engine),))) == ""


@pytest.mark.parametrize("start", range(0, COUNT // 2, PORTION // 2))
def test_random_compositions(start):
    wrong = [text for _, text in fuzz_transforms.failures(SEED, range(start, start + PORTION // 2))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("start", range(0, COUNT // 2, PORTION // 2))
def test_kernels_of_random_products_compile(start):
    """For a GPU, without one, and without a warning: of what can't be, compilers make a trap."""
    for number in range(start, start + PORTION // 2):
        case = fuzz_matmul.draw(np.random.default_rng([SEED, number]))
        for call in find_calls(as_tuple(case.call), *case.primals()):
            for engine in (engine for engine in engines_for(call.spec, call.problem) if engine.platform == "cuda"):
                if refusal(engine, call, H100) is None:
                    config = next(iter(engine.configurations(call.problem, H100)))
                    plan = engine.build(config, call.problem, H100)
                    kernels(_native.compile(plan.unit, plan.arch).log)


FORMULAS = [case for case in TABLE.every if case.op == "norm"]
FORMULAS = [case for case in FORMULAS if case.rows * case.columns <= 400 and case.data in ("normal", "large_mean")]


@pytest.mark.parametrize("case", FORMULAS, ids=str)
def test_the_formulas_are_jax_derivatives(case):
    """Two derivations of one truth: the fuzzer's formulas, and JAX's derivatives of the tests' definition."""
    for check, transform, arguments in (("jvp", jvp, with_tangents), ("vjp", vjp, with_cotangents)):
        primals, directions = arguments(case)
        wide = jax.tree.map(lambda array: jax.numpy.asarray(array, np.float64), (primals, directions))
        with jax.default_device(jax.devices("cpu")[0]):
            exact = jax.jit(lambda *a, f=transform: f(lambda *b: case.reference(Rounding(0.0), *b), *a))(*wide)
        for want, (got, _) in zip(jax.tree.leaves(exact), evaluate(case, check, primals, directions), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-11)


def test_bounds_find_what_is_wrong():
    case = NormCase("layer_norm", (6, 40), x=F32, scale=F32, bias=F32)
    pairs = evaluate(case, "vjp", *with_cotangents(case))
    for value, error in pairs:
        right = value.astype(np.float32)
        assert not difference(right, value, error)
        assert difference(right + np.float32(2e-5) * np.abs(value).max(), value, error)
        assert np.max(error) < 2e-5 * np.abs(value).max()


@pytest.mark.parametrize("check", fuzz.CHECKS)
def test_the_programs_mean_the_same_in_both_namespaces(check):
    """JAX's derivatives in float64, and those in numpy, of random products and epilogues."""
    compared = 0
    for number in range(250):
        case = fuzz_matmul.draw(np.random.default_rng([7, number]))
        floating = not {*case.dtypes.values(), *case.outputs.values()} - {BF16, F16, F32, F64}
        if case.dtypes_of != (F64, F64) or not floating or case.result_dtype != F64:
            continue
        case = case.replace(program=None) if "float" in str(case.program) or "round" in str(case.program) else case
        case = case.replace(extras=()) if case.program is None and case.kind != "gated_linear_unit" else case
        directions = {"forward": tuple, "jvp": case.tangents, "vjp": case.cotangents}[check]()
        got = fuzz.transformed(as_tuple(case.call), check, range(len(case.operands)))(case.primals(), directions)
        wanted = fuzz_matmul.evaluate(case, check, case.primals(), directions)
        for ours, (want, error) in zip(jax.tree.leaves(got), wanted, strict=True):
            assert not fuzz.difference_of(np.asarray(ours), want, error), str(case)
            compared += 1
    assert compared > 5


def test_bounds_of_products_find_what_is_wrong():
    """A bias that is added twice, a row that is summed once too often."""
    program = Program(("s0", "o0"), ("v0 = xp.gelu(s0 + o0)",), (("v0", False), ("xp.sum(v0, axis=0)", True)))
    drawn = {"extras": (((9,), F32),), "precision": "highest", "program": program}
    case = fuzz_matmul.DrawnCase("matmul", (20, 30), (30, 9), **drawn)
    directions = case.cotangents()
    for value, error in fuzz_matmul.evaluate(case, "vjp", case.primals(), directions):
        right = value.astype(np.float32)
        assert not difference(right, value, error)
        assert difference(right * np.float32(1.001) + np.float32(1e-4), value, error)
        assert np.max(error) < 1e-4 * np.abs(value).max()


def test_steps_are_uncertain():
    x = Bounded(np.array([0.9, 1.0, -1e-9]), np.full(3, 1e-6), F32)
    assert bounded_functions.floor(x).error.tolist() == [0, 1, 1]
    assert (x < 1.0).error.tolist() == [0, 1, 0]
    (slope,) = bounded.pull_back([bounded_functions.relu(x)], [bounded.exact(np.ones(3))], [x])
    assert (slope.error > 0.5).tolist() == [False, False, True]


@pytest.mark.parametrize("op", fuzz.OPS)
def test_draws_are_a_function_of_seed_and_number(op):
    assert [fuzz.draw(op, 1, k) for k in range(30)] == [fuzz.draw(op, 1, k) for k in range(30)]
    assert len({fuzz.draw(op, 1, k) for k in range(30)} | {fuzz.draw(op, 2, k) for k in range(30)}) > 54


def test_drawn_norms_are_varied():
    drawn = [fuzz.draw("norm", 3, k) for k in range(2000)]
    assert {one.check for one in drawn} == set(fuzz.CHECKS)
    assert {one.case.x for one in drawn} == {*fuzz_norm.DTYPES} >= {F16, F64}
    assert sum(one.mapped > 0 for one in drawn) > 300
    assert sum(one.case.residual is not None for one in drawn) > 300
    assert len({one.case.shape for one in drawn}) > 1000


def test_drawn_products_are_varied():
    drawn = [fuzz_matmul.draw(np.random.default_rng([3, k])) for k in range(400)]
    assert {case.dtypes_of for case in drawn} >= {(BF16, BF16), (F16, F16), (E4M3, E5M2), (I8, I8), (F32, F32)}
    assert {case.kind for case in drawn} == {"matmul", "dot_general", "gated_linear_unit"}
    assert len({case.program and case.program.source for case in drawn}) > 200
    assert any(0 in (*case.a, *case.b) for case in drawn)
    assert any(len(case.a) == 1 for case in drawn)
    assert any(case.program and case.program.returned[0][1] for case in drawn)


def test_drawn_compositions_are_varied():
    drawn = [fuzz_transforms.draw(3, k) for k in range(1000)]
    assert {one.run for one in drawn} == {*fuzz_transforms.RUNS}
    assert {name for one in drawn for name in one.transforms} == {*fuzz_transforms.TRANSFORMS}
    assert {pair for one in drawn for pair in one.layers} > {("gated", "custom_vjp"), ("several", "random")}
    assert len({one.transforms for one in drawn}) > 500


def test_the_command_line(capsys):
    assert fuzz_transforms.main(["--seed", "5", "--only", "7"]) == 0
    assert "1 cases, 0 wrong" in capsys.readouterr().out
    for op in fuzz.OPS:
        assert fuzz.main(["--op", op, "--seed", "5", "--only", "7"]) == 0
        assert f"{op}: 1 cases" in capsys.readouterr().out
    for case in (NormCase("rms_norm", (3, 8), scale=F32), MatmulCase("matmul", (3, 8), (8, 2), epilogue="relu")):
        assert fuzz.main(["--check", "jvp", "--engine", "xla", "--case", repr(case)]) == 0
        assert "right" in capsys.readouterr().out
