"""Attention's gradients on Hopper as two kernels: what they plan, that they compile, and compute what is right."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from checking.attention.calls import (
    ALIGNED,
    CAUSAL,
    DROPOUT,
    RESIDUAL,
    SINKS,
    WIDTHS,
    WINDOW,
    bias,
    mask,
    stripes,
)
from checking.attention.gradients import SCALE, Gradients, scaled, shifted
from checking.compiler_log import compile_checked
from checking.emulation.plans import Emulated
from checking.product.calls import run_plan
from checking.targets import H100
from jaxdnn import device
from jaxdnn.engines.attention.sm90.backward.knobs import SIZES
from jaxdnn.engines.attention.sm90.engine import AttentionSm90
from jaxdnn.engines.attention.sm90.gradients.heuristic import gradient_candidates
from jaxdnn.engines.attention.sm90.gradients.knobs import AttentionSm90GradientKnobs, gradient_knobs_reason
from jaxdnn.engines.attention.sm90.gradients.unit import gradient_plan

ENGINE = AttentionSm90()
FEW = replace(H100, sm_count=3)  # multiprocessors, so that each works through several tiles
GPU = jax.default_backend() == "gpu"


def planned(problem, target=FEW, **knobs):
    """The plan that is tried first; of small vectors, too, of which one kernel has all gradients."""
    return gradient_plan(problem, replace(next(gradient_candidates(problem, target)), **knobs), target.sm_count)


# Several blocks along each axis, edges in each direction, rows and keys that see nothing, and heads that share keys.
SMALL = {
    "full": Gradients((70, 200, 256, 256)),
    "causal": Gradients((200, 300, 192, 128), **CAUSAL, **RESIDUAL),
    "causal, fewer keys": Gradients((300, 140, 136, 136), (1, 1), **ALIGNED, **RESIDUAL),
    "window": Gradients((150, 260, 48, 64), (2, 1), 2, "float16", **WINDOW, **RESIDUAL),
    "window past the keys": Gradients((400, 100, 32, 32), local_window_size=(3, 3), **RESIDUAL),
    "lengths": Gradients((140, 200, 32, 32), (2, 2), 3, lengths=True, **RESIDUAL),
    "lengths, aligned": Gradients((150, 300, 32, 96), (2, 1), 3, lengths=True, **ALIGNED, **RESIDUAL),
    "lengths, window": Gradients((150, 300, 32, 32), (2, 1), 3, lengths=True, **WINDOW),
    "lengths, sinks": Gradients((150, 140, 32, 32), (2, 1), 3, lengths=True, **CAUSAL, **SINKS, **RESIDUAL),
    "heads first": Gradients((140, 200, 32, 96), (4, 2), 2, heads_first=True, **CAUSAL, **RESIDUAL),
    "short": Gradients((3, 200, 8, 8), (4, 4), 2),
    "segments": Gradients((300, 300, 32, 96), (2, 1), 2, segment_ids=True, **CAUSAL, **RESIDUAL),
    "mask of heads": Gradients((200, 400, 64, 64), (2, 2), 2, **mask(1, 2, 200, 400)),
    "stripes": Gradients((130, 200, 64, 64), mask_mod=stripes, mask_mod_operands=WIDTHS, lengths=True),
    "positions": Gradients((130, 200, 256, 256), (2, 1), 2, positions=True, **WINDOW),
    "bias": Gradients((150, 301, 64, 64), (4, 2), 2, **bias(1, 4, 150, 301), **CAUSAL),
    "float32": Gradients((150, 301, 64, 64), (4, 2), 2, "float32", **CAUSAL, **RESIDUAL),
    "float32, window": Gradients((130, 200, 128, 40), (2, 1), 2, "float32", **WINDOW, lengths=True, **SINKS),
    "float32, bias and mask": Gradients(
        (130, 140, 72, 128), (2, 1), 2, "float32", **bias(1, 2, 130, 140), **mask(1, 2, 130, 140), **DROPOUT
    ),
    "of a bias": Gradients((130, 200, 256, 160), batch=2, by="qkvf", **bias(1, 2, 130, 200), segment_ids=True),
    "soft cap": Gradients((100, 300, 192, 192), **WINDOW, logits_soft_cap=2.0, **SINKS),
    "soft cap, segments": Gradients((130, 200, 64, 64), logits_soft_cap=2.0, segment_ids=True, **DROPOUT),
    "infinities past the end": Gradients((130, 140, 64, 64), score_mod=shifted, lengths=True),
    "of a scale": Gradients((100, 150, 64, 64), (4, 2), score_mod=scaled, score_mod_operands=SCALE, by="qf"),
    "dropout": Gradients((130, 301, 64, 64), (4, 2), 2, **DROPOUT, **CAUSAL, **RESIDUAL),
}
# Knobs for which no heuristic asks where multiprocessors are few.
FORCED = {"segments": {"shares": 2}, "window": {"shares": 2}}


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    plans = [planned(one.problem, **FORCED.get(name, {})) for name, one in SMALL.items()]
    return Emulated(plans, tmp_path_factory.mktemp("emulated"))


@pytest.mark.parametrize("name", SMALL)
def test_its_text_computes_what_is_right(name, emulated):
    one = SMALL[name]
    operands, results = one.operands(), one.results()
    emulated.run(list(SMALL).index(name), operands, results)
    one.check(operands, results)


LARGE = {
    "256": Gradients((4096, 4096, 256, 256), (8, 8)),
    "256, every mask": Gradients((4096, 4096, 256, 256), (8, 2), **WINDOW, lengths=True),
    "192 and 128": Gradients((4096, 4096, 192, 128), (8, 8), **CAUSAL),
    "160": Gradients((4096, 4096, 160, 160), (8, 8), **CAUSAL),
    "128 and 256": Gradients((4096, 4096, 128, 256), (8, 8)),
    "64": Gradients((4096, 4096, 64, 64), (8, 8), dtype="float16", **CAUSAL),
    "256, segments": Gradients((4096, 4096, 256, 256), (8, 2), segment_ids=True, **CAUSAL),
    "256, bias": Gradients((4096, 4096, 256, 256), (8, 8), by="qkvf", **bias(1, 8, 4096, 4096)),
    "256, soft cap": Gradients((4096, 4096, 256, 256), (8, 8), **CAUSAL, logits_soft_cap=30.0),
    "256, dropout": Gradients((4096, 4096, 256, 256), (8, 8), **CAUSAL, **DROPOUT),
    "192, soft cap, segments": Gradients((4096, 4096, 192, 128), segment_ids=True, **CAUSAL, logits_soft_cap=30.0),
    "float32 64": Gradients((4096, 4096, 64, 64), (8, 8), dtype="float32"),
    "float32 128": Gradients((4096, 4096, 128, 128), (8, 8), dtype="float32", segment_ids=True, **CAUSAL, **DROPOUT),
}


# Of which all configurations are compiled, which tuning may choose; of the others, the one that is chosen without it.
TUNED = ("192 and 128", "256, every mask")
MOST_SPILLED = 32  # bytes, with functions: at 256 elements there are no smaller tiles
MOST_SPILLED_OF_SHARES = 180  # which also have a number more, and float32 results: addresses, some outside of loops
SERVED = [name for name, one in SMALL.items() if one.problem.head_size > SIZES[-1]]  # of the others, one kernel has all


@pytest.mark.parametrize("name", [*SERVED, *LARGE])
def test_configurations_compile(name):
    problem = (SMALL | LARGE)[name].problem
    tried = list(gradient_candidates(problem, H100))
    assert tried
    for knobs in tried if name in TUNED else tried[:1]:
        plan = gradient_plan(problem, knobs, H100.sm_count)
        with_functions = MOST_SPILLED if knobs.shares == 1 else MOST_SPILLED_OF_SHARES
        compile_checked(plan, knobs, with_functions if "Function" in plan.unit else 0)


@pytest.mark.parametrize(
    ("sizes", "by", "said"),
    [
        ((130, 200, 136, 64), "qkv", "at most 128 elements"),
        ((130, 200, 64, 64), "qkvf", "no gradients of what scores of float32 load"),
    ],
)
def test_reasons_against_float32(sizes, by, said):
    one = Gradients(sizes, dtype="float32", by=by, **bias(1, 2, *sizes[:2], dtype="float32"))
    assert said in (ENGINE.reason(one.problem, H100) or "")


@pytest.mark.parametrize(("name", "two"), [("160", True), ("128 and 256", True), ("64", False)])
def test_large_vectors_have_two_kernels(name, two):
    problem = LARGE[name].problem
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
    knobs = next(gradient_candidates(LARGE[name].problem, H100))
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
    one = SMALL["lengths, sinks"]
    problem, types = with_float32(one.backward)
    operands, results = one.operands(), [np.zeros(type_.shape, type_.dtype) for type_ in types]
    Emulated([planned(problem)], tmp_path).run(0, operands, results)
    one.check(operands, results, problem)
    assert not np.array_equal(results[1], results[1].astype(problem.key.dtype).astype("float32"))


def test_a_sink_of_minus_infinity_has_no_gradient(tmp_path):
    """Nor do queries that see nothing, or are past their element's length."""
    one = SMALL["lengths, sinks"]
    operands, results = one.operands(sinks=np.float32([-np.inf, 0.5])), one.results()
    Emulated([planned(one.problem)], tmp_path).run(0, operands, results)
    one.check(operands, results)
    ((first, second),) = results[list(one.backward.signature.results).index("d_sinks")]
    assert first == 0
    assert second != 0


def test_what_is_not_asked_for_is_not_computed(tmp_path):
    short = SMALL["short"]
    problem = short.problem
    asked = [without(problem, "d_query"), without(problem, "d_key", "d_value"), without(problem, "d_value")]
    plans = [planned(one) for one in asked]
    assert [len(plan.launches) for plan in plans] == [2, 2, 3]
    operands, emulated = short.operands(), Emulated(plans, tmp_path)
    for k, one in enumerate(asked):
        results = short.results()
        emulated.run(k, operands, results)
        wanted = [getattr(one.backward, name) is not None for name in short.backward.spec.results]
        assert [np.isfinite(np.float32(result)).all() for result in results] == wanted


def test_sizes_are_not_in_the_code():
    stated = [
        Gradients((queries, keys, 256, 256), heads, batch, **CAUSAL).problem
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
    problem = LARGE["256"].problem
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
    one = SMALL[name]
    operands, problem = one.operands(), one.problem
    for target in (device.gpus()[0], replace(device.gpus()[0], sm_count=4)):
        for knobs in gradient_candidates(problem, target):
            plan = gradient_plan(problem, knobs, target.sm_count)
            results, again = (run_plan(plan, one.backward.signature.results.values(), operands) for _ in range(2))
            one.check(operands, results)
            assert all(map(np.array_equal, results, again)), f"{knobs} is not deterministic"
