"""Attention's gradients on Hopper as two kernels: what they plan, that they compile, and compute what is right."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn
from checking.attention import problems
from checking.compiler_log import kernels, launch_bounds
from checking.emulation.plans import Emulated
from checking.product.calls import run_plan
from jaxdnn import _native, device
from jaxdnn.engines.attention.sm90.engine import AttentionSm90
from jaxdnn.engines.attention.sm90.gradients.knobs import AttentionSm90GradientKnobs, gradient_knobs_reason
from jaxdnn.engines.attention.sm90.gradients.unit import gradient_plan
from jaxdnn.engines.attention.sm90.heuristic import gradient_candidates
from jaxdnn.planning.calls import find_differentiated_calls

ENGINE = AttentionSm90()
H100 = device._NAMED[90]
FEW = replace(H100, sm_count=3)  # multiprocessors, so that each works through several tiles
GPU = jax.default_backend() == "gpu"
CAUSAL = {"is_causal": True}
ALIGNED = CAUSAL | {"causal_alignment": "bottom_right"}
WINDOW = {"local_window_size": (40, 20)}
RESIDUAL = {"return_residual": True}
SINKS = {"sinks": jax.ShapeDtypeStruct((2,), "float32")}


def calls(sizes, heads=(2, 1), batch=1, dtype="bfloat16", lengths=False, **keywords):
    """The calls, forward and backward, of `dot_product_attention` for (queries, keys, head size, value's head size)."""
    queries, keys, size, value_size = sizes
    shapes = [(queries, heads[0], size), (keys, heads[1], size), (keys, heads[1], value_size)]
    arrays = [jax.ShapeDtypeStruct((batch, *shape), dtype) for shape in shapes]
    named = {name: keywords.pop(name) for name in ("sinks",) if name in keywords}
    if lengths:
        named |= dict.fromkeys(("query_seq_lengths", "key_value_seq_lengths"), jax.ShapeDtypeStruct((batch,), "int32"))
    function = functools.partial(jaxdnn.dot_product_attention, **keywords)
    return find_differentiated_calls(lambda *vectors, **others: function(*vectors, **others), *arrays, **named)


def operand(name, type_, lengths):
    random = np.random.default_rng(len(name))
    if name in ("query_lengths", "key_lengths"):
        # Some, none, and all of the axis.
        return np.resize([lengths[name] // 2 + 3, 0, lengths[name]], type_.shape).astype("int32")
    if name == "query_offset":
        return random.integers(-60, 60, type_.shape, "int32")
    return random.standard_normal(type_.shape).astype(type_.dtype)


def arrays(forward, backward):
    """The operands of the backward call, of which the forward one makes some."""
    problem = forward.problem
    lengths = {"query_lengths": problem.query_length, "key_lengths": problem.key_length}
    found = {name: operand(name, type_, lengths) for name, type_ in forward.signature.operands.items()}
    types = forward.signature.results
    results = problems.run(problem, list(found.values()), list(types.values()))
    found |= {name: one.astype(type_.dtype) for (name, type_), one in zip(types.items(), results, strict=True)}
    return [
        found[name] if name in found else operand(name, type_, lengths)
        for name, type_ in backward.signature.operands.items()
    ]


def check(one, problem, operands, found):
    """Against the problem, in float64. Probabilities and the scores' gradients are rounded to 16 bits."""
    wanted = problems.run(problem, operands, found)
    tolerance = 3 * float(jnp.finfo(problem.query.dtype).eps)
    for name, got, want in zip(one.spec.results, found, wanted, strict=True):
        bound = (1e-5 if name == "d_sinks" else tolerance) * max(1, float(np.max(np.abs(want), initial=0)))
        np.testing.assert_allclose(np.float64(got), want, rtol=0, atol=bound, err_msg=name)


def planned(problem, target=FEW):
    """The plan that is tried first; of small vectors, too, of which one kernel has all gradients."""
    return gradient_plan(problem, next(gradient_candidates(problem, target)), target.sm_count)


# Several blocks along each axis, edges in each direction, rows and keys that see nothing, and heads that share keys.
SMALL = {
    "full": calls((70, 200, 256, 256)),
    "causal": calls((200, 300, 192, 128), **CAUSAL, **RESIDUAL),
    "causal, fewer keys": calls((300, 140, 136, 136), (1, 1), **ALIGNED, **RESIDUAL),
    "window": calls((150, 260, 48, 64), (2, 1), 2, "float16", **WINDOW, **RESIDUAL),
    "window past the keys": calls((400, 100, 32, 32), local_window_size=(3, 3), **RESIDUAL),
    "lengths": calls((140, 200, 32, 32), (2, 2), 3, lengths=True, **RESIDUAL),
    "lengths, aligned": calls((150, 300, 32, 96), (2, 1), 3, lengths=True, **ALIGNED, **RESIDUAL),
    "lengths, window": calls((150, 300, 32, 32), (2, 1), 3, lengths=True, **WINDOW),
    "lengths, sinks": calls((150, 140, 32, 32), (2, 1), 3, lengths=True, **CAUSAL, **SINKS),
    "short": calls((3, 200, 8, 8), (4, 4), 2),
}


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    plans = [planned(backward.problem) for _, backward in SMALL.values()]
    return Emulated(plans, tmp_path_factory.mktemp("emulated"))


@pytest.mark.parametrize("name", SMALL)
def test_its_text_computes_what_is_right(name, emulated):
    forward, backward = SMALL[name]
    operands = arrays(forward, backward)
    results = [np.zeros(type_.shape, type_.dtype) for type_ in backward.signature.results.values()]
    emulated.run(list(SMALL).index(name), operands, results)
    check(backward, backward.problem, operands, results)


LARGE = {
    "256": calls((4096, 4096, 256, 256), (8, 8)),
    "256, every mask": calls((4096, 4096, 256, 256), (8, 2), **WINDOW, lengths=True),
    "192 and 128": calls((4096, 4096, 192, 128), (8, 8), **CAUSAL),
    "160": calls((4096, 4096, 160, 160), (8, 8), **CAUSAL),
    "128 and 256": calls((4096, 4096, 128, 256), (8, 8)),
    "64": calls((4096, 4096, 64, 64), (8, 8), dtype="float16", **CAUSAL),
}


# Of which all configurations are compiled, which tuning may choose; of the others, the one that is chosen without it.
TUNED = ("192 and 128", "256, every mask")
# Bytes, stored and loaded: a number or two that a thread reads once for each tile, and not for each block of keys.
MOST_SPILLED = 16


@pytest.mark.parametrize("name", [*SMALL, *LARGE])
def test_configurations_compile(name):
    problem = (SMALL | LARGE)[name][1].problem
    tried = list(gradient_candidates(problem, H100))
    assert tried
    for knobs in tried if name in TUNED else tried[:1]:
        plan = gradient_plan(problem, knobs, H100.sm_count)
        unit = _native.compile(plan.unit, plan.arch)
        assert "serialized" not in unit.log, "the compiler has the tensor cores wait for each multiply"
        for kernel, (registers, spilled) in kernels(unit.log).items():
            assert spilled <= MOST_SPILLED, f"{kernel} spills {spilled} bytes under {knobs}"
            assert registers * launch_bounds(plan.unit)[kernel][0] <= 65_536


@pytest.mark.parametrize(("name", "two"), [("160", True), ("128 and 256", True), ("64", False)])
def test_large_vectors_have_two_kernels(name, two):
    problem = LARGE[name][1].problem
    assert ENGINE.reason(problem, H100) is None
    plan = ENGINE.build(next(ENGINE.configurations(problem, H100)), problem, H100)
    assert any("query_gradient" in launch.kernel for launch in plan.launches) == two


@pytest.mark.parametrize(
    ("name", "keys", "queries"),
    [
        ("256", (64, 2, 1), 64),
        ("192 and 128", (96, 2, 2), 112),
        ("160", (112, 2, 1), 96),
        ("128 and 256", (128, 2, 1), 80),
        ("64", (128, 2, 2), 128),
    ],
)
def test_tiles(name, keys, queries):
    knobs = next(gradient_candidates(LARGE[name][1].problem, H100))
    assert (knobs.key_block, knobs.key_stages, knobs.value_stages) == keys
    assert (knobs.query_block, knobs.cluster) == (queries, 2)


def with_float32(one):
    """The call whose gradients of keys and values are float32."""
    backward = one.problem.backward
    wide = {name: replace(getattr(backward, name), dtype="float32") for name in ("d_key", "d_value")}
    types = dict(one.signature.results)
    types |= {name: jax.ShapeDtypeStruct(types[name].shape, "float32") for name in wide}
    return replace(one.problem, backward=replace(backward, **wide)), list(types.values())


def without(problem, *names):
    return replace(problem, backward=replace(problem.backward, **dict.fromkeys(names)))


def test_gradients_in_float32(tmp_path):
    forward, backward = SMALL["lengths, sinks"]
    problem, types = with_float32(backward)
    operands, results = arrays(forward, backward), [np.zeros(type_.shape, type_.dtype) for type_ in types]
    Emulated([planned(problem)], tmp_path).run(0, operands, results)
    check(backward, problem, operands, results)
    assert not np.array_equal(results[1], results[1].astype(backward.problem.key.dtype).astype("float32"))


def test_what_is_not_asked_for_is_not_computed(tmp_path):
    forward, backward = SMALL["short"]
    problem = backward.problem
    asked = [without(problem, "d_query"), without(problem, "d_key", "d_value"), without(problem, "d_value")]
    plans = [planned(one) for one in asked]
    assert [len(plan.launches) for plan in plans] == [2, 2, 3]
    operands, emulated = arrays(forward, backward), Emulated(plans, tmp_path)
    for k, one in enumerate(asked):
        results = [np.zeros(type_.shape, type_.dtype) for type_ in backward.signature.results.values()]
        emulated.run(k, operands, results)
        wanted = [getattr(one.backward, name) is not None for name in backward.spec.results]
        assert [np.isfinite(np.float32(result)).all() for result in results] == wanted


def test_sizes_are_not_in_the_code():
    stated = [
        calls((queries, keys, 256, 256), heads, batch, **CAUSAL)[1].problem
        for queries, keys, heads, batch in ((512, 512, (4, 2), 2), (4096, 1000, (32, 4), 3))
    ]
    assert len({gradient_plan(one, AttentionSm90GradientKnobs(), 132).unit for one in stated}) == 1


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        (AttentionSm90GradientKnobs(key_block=80), "208 numbers; expected at most 200"),
        (AttentionSm90GradientKnobs(query_block=96), "224 numbers; expected at most 208"),
        (AttentionSm90GradientKnobs(value_stages=2), "bytes of shared memory"),
        (AttentionSm90GradientKnobs(query_stages=3), "bytes of shared memory"),
    ],
)
def test_knobs_that_do_not_fit(knobs, said):
    problem = LARGE["256"][1].problem
    assert said in (gradient_knobs_reason(problem, knobs, H100.shared_memory) or "")
    with pytest.raises(ValueError, match="does not fit"):
        ENGINE.build(knobs, problem, H100)


@pytest.mark.parametrize(
    "knobs", [{"query_tile": 192}, {"key_block": 100}, {"key_stages": 1}, {"query_block": 100}, {"cluster": 3}]
)
def test_knobs_are_validated(knobs):
    with pytest.raises(ValueError, match=r"AttentionSm90GradientKnobs: .* (must be|expected) "):
        AttentionSm90GradientKnobs(**knobs)


@pytest.mark.skipif(not GPU, reason="there is no GPU")
@pytest.mark.parametrize("name", SMALL)
def test_results(name):
    forward, backward = SMALL[name]
    operands, problem = arrays(forward, backward), backward.problem
    for target in (device.gpus()[0], replace(device.gpus()[0], sm_count=4)):
        for knobs in gradient_candidates(problem, target):
            plan = gradient_plan(problem, knobs, target.sm_count)
            results, again = (run_plan(plan, backward.signature.results.values(), operands) for _ in range(2))
            check(backward, problem, operands, results)
            assert all(map(np.array_equal, results, again)), f"{knobs} is not deterministic"
