"""The benchmark's training steps compute what they say, with jaxdnn's ops and with plain ones alike."""

import re
from dataclasses import replace
from functools import partial
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdnn.bench import FAMILIES, timing, training
from jaxdnn.bench.models import Kind, Model, loss, plain
from jaxdnn.planning.measure import in_rounds

BATCH = 2
MODELS = [Model(kind, length=12, layers=2, width=128, vocabulary=70) for kind in get_args(Kind)]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.kind)
def test_both_compute_the_same(model):
    case = training.case(model, BATCH, "float32")
    operands = case.operands(jax.random.key(0))
    (ours, moved), (plains, expected) = (
        jax.jit(implementation.run)(*implementation.prepare(*operands)) for implementation in (case.jaxdnn, case.xla)
    )
    np.testing.assert_allclose(ours, plains, rtol=1e-6)
    # How far the parameters went, by about a hundredth of the largest gradient.
    for before, one, other in zip(*map(jax.tree.leaves, (operands[0], moved, expected)), strict=True):
        np.testing.assert_allclose(
            one - before, other - before, rtol=0, atol=1e-4 * np.abs(other - before).max() + 1e-9
        )
        assert not np.array_equal(one, before)
    assert case.sample is not None
    ((found, exact),) = case.sample(operands, (ours, moved))
    assert exact.dtype == np.float64
    np.testing.assert_allclose(found, exact, rtol=1e-6)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.kind)
def test_who_knows_nothing_loses_the_logarithm_of_the_vocabulary(model):
    parameters, tokens = training.case(model, BATCH, "float32").operands(jax.random.key(0))
    nothing = jax.tree.map(jnp.zeros_like, parameters)
    np.testing.assert_allclose(loss(model, plain(model.kind), nothing, tokens), np.log(model.vocabulary), rtol=1e-6)
    last = tokens.at[:, -1].set((tokens[:, -1] + 1) % model.vocabulary)
    assert loss(model, plain(model.kind), parameters, last) != loss(model, plain(model.kind), parameters, tokens)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.kind)
def test_operations_are_those_of_the_products(model):
    """But for attention's, of which a causal mask hides some."""
    case = training.case(model, BATCH, "float32")
    jaxpr = jax.make_jaxpr(lambda *operands: loss(model, plain(model.kind), *operands))(
        *case.operands(jax.random.key(0))
    )
    weights = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), (batch, _) = equation.params["dimension_numbers"]
            terms = equation.outvars[0].aval.size * equation.invars[0].aval.shape[contracted[0]]
            weights += 0 if batch else terms // (BATCH * model.length)  # attention's alone have batches
    attention = 14 * model.layers * BATCH * (12 * 13 // 2) * model.width
    assert case.flops == 6 * BATCH * model.length * weights + attention


def test_a_whole_program_says_its_memory():
    case = training.case(MODELS[1], BATCH, "float32")
    measured = timing.compiled(case).measure()
    assert 0 < measured.temporary < 2**24
    assert 0 < measured.xla_temporary < 2**24
    assert "host" in measured.engines


def test_seconds_are_of_one_set(monkeypatch):
    monkeypatch.setattr(timing, "interleaved_medians", lambda calls: dict.fromkeys(calls, 8.0))
    norm = next(iter(FAMILIES["norm"].cases([(8, 16)], ["float32"])))
    assert [timing.compiled(case).measure().xla for case in (training.case(MODELS[1], BATCH, "float32"), norm)] == [
        8.0,
        1.0,
    ]


@pytest.mark.parametrize("reuses", [True, False])
def test_a_call_takes_the_memory_of_the_results_before(reuses):
    sets = [(jnp.ones(8),)]
    call = timing._over_sets(timing._program_of_sets(jnp.negative, sets, reuses=reuses), sets)
    (before,) = call()
    (found,) = call()
    assert before.is_deleted() == reuses
    assert not found.is_deleted()
    assert (found == -1).all()


@pytest.mark.parametrize(("rows", "sets"), [(8, 64), (2048, 31), (65_536, 8)])
def test_programs_are_larger_than_caches(rows, sets, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    norm = next(iter(FAMILIES["norm"].cases([(rows, 512)], ["bfloat16"])))
    assert norm.sets == sets


@pytest.mark.parametrize(
    ("mb", "gflops", "rounds"),
    [(0.01, 0, 16), (1, 0, 16), (1, 1, 4), (1, 100, 1), (20, 10, 3), (200, 0, 1)],
)
def test_programs_take_longer_than_their_start(mb, gflops, rounds, monkeypatch):
    norm = next(iter(FAMILIES["norm"].cases([(8, 512)], ["bfloat16"])))
    case = replace(norm, bytes=int(mb * 10**6), flops=gflops * 10**9)
    assert case.rounds == 1
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert case.rounds == rounds
    assert replace(case, alone=True).rounds == 1


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_each_round_computes_all(rounds):
    """The compiler leaves none out, though all have the same operands and only the last ones' results are read."""
    called = []

    def negative(x):
        called.append(x)
        return -x

    def run(x):
        return jax.pure_callback(negative, x, x)

    sets, before = [(jnp.arange(4.0),), (jnp.ones(4),)], [jnp.zeros(4)] * 2
    results = jax.jit(partial(in_rounds, run, rounds))(before, sets)
    np.testing.assert_array_equal(results, [-arrays[0] for arrays in sets])
    assert len(called) == 2 * rounds


def test_rounds_copy_nothing():
    sets, before = [(jnp.ones(4),), (jnp.zeros(4),)], [jnp.zeros(4)] * 2
    compute = jax.jit(partial(in_rounds, jnp.sin, 7), donate_argnums=0)
    program = compute.lower(before, sets).compile().as_text() or ""
    assert "while(" in program
    assert not re.search(r"= f\d+\[4\]\S* copy\(", program)


def test_models_have_whole_heads():
    assert [case.call for case in training.cases([(1, 8, 1, 192)])] == ["GPT's training step"]
    with pytest.raises(
        ValueError, match="a Llama has heads of 128 features; expected a multiple of that as width, got 64"
    ):
        Model("Llama", 8, 1, 64, 10)


def test_a_gpu_gets_larger_models(monkeypatch):
    on_cpu = {case.call: case.flops for case in FAMILIES["training"].cases()}
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    on_gpu = {case.call: case.flops for case in FAMILIES["training"].cases()}
    assert {call: on_gpu[call] > 100 * flops for call, flops in on_cpu.items()} == dict.fromkeys(on_cpu, True)
    assert {case.dtype for case in FAMILIES["training"].cases()} == {jnp.bfloat16.__name__}
