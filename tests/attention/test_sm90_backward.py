"""Attention's gradients on Hopper: what the engine plans and refuses, that it compiles, and that it computes them."""

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
    everything,
    mask,
    slopes,
    stripes,
)
from checking.attention.gradients import SCALE, Gradients, hiding, scaled, shifted
from checking.compiler_log import compile_checked
from checking.emulation.plans import Emulated
from checking.product.calls import run_plan
from checking.targets import H100
from jaxdnn import device
from jaxdnn.engines.attention.sm90.backward.knobs import AttentionSm90BackwardKnobs, backward_knobs_reason
from jaxdnn.engines.attention.sm90.engine import AttentionSm90
from jaxdnn.plan import Scalar, TensorMap

ENGINE = AttentionSm90()
GPU = jax.default_backend() == "gpu"


# Several blocks of keys and of queries, edges in each direction, rows that see nothing, heads that share their keys.
SMALL = {
    "full": Gradients((200, 370, 64, 64)),
    "causal": Gradients((200, 300, 72, 40), **CAUSAL, **RESIDUAL),
    "causal, fewer keys": Gradients((300, 140, 32, 32), **ALIGNED, **RESIDUAL),
    "causal, shared keys": Gradients((150, 150, 128, 128), (4, 1), **CAUSAL),
    "window": Gradients((300, 260, 64, 64), (2, 1), 2, "float16", **WINDOW, **RESIDUAL),
    "window past the keys": Gradients((400, 100, 16, 16), local_window_size=(3, 3), **RESIDUAL),
    "lengths": Gradients((150, 300, 128, 128), (1, 1), 3, lengths=True),
    "lengths, aligned": Gradients((150, 300, 32, 96), (2, 1), 3, lengths=True, **ALIGNED, **RESIDUAL),
    "lengths, window": Gradients((150, 300, 32, 32), (1, 1), 3, lengths=True, **WINDOW),
    "heads first": Gradients((150, 300, 64, 64), (4, 2), 2, heads_first=True, **CAUSAL, **RESIDUAL),
    "sinks": Gradients((100, 140, 64, 64), batch=2, **CAUSAL, **RESIDUAL, **SINKS),
    "value of another size": Gradients((130, 200, 128, 64)),
    "short": Gradients((3, 300, 8, 8), (2, 2), 2),
    "mask": Gradients((150, 300, 64, 64), (4, 2), 2, **mask(2, 1, 150, 300)),
    "mask of keys, causal": Gradients((130, 141, 32, 32), (2, 1), 2, **mask(2, 1, 1, 141), **CAUSAL, **RESIDUAL),
    "mask of grouped heads": Gradients((200, 400, 64, 64), (4, 2), 2, **mask(1, 4, 200, 400)),
    "mask of heads": Gradients((200, 400, 128, 128), (2, 2), **mask(1, 2, 200, 400)),
    "stripes": Gradients((130, 200, 64, 64), mask_mod=stripes, mask_mod_operands=WIDTHS, lengths=True, **RESIDUAL),
    "segments": Gradients((300, 300, 128, 128), (2, 1), segment_ids=True, **RESIDUAL),
    "segments, causal": Gradients((300, 300, 32, 96), (2, 1), 2, segment_ids=True, **CAUSAL, **RESIDUAL),
    "segments, of keys": Gradients((200, 300, 64, 64), by="kv", segment_ids=True),
    "positions": Gradients((200, 300, 64, 64), (2, 1), 2, positions=True, **WINDOW, **RESIDUAL),
    "positions, lengths": Gradients(
        (100, 140, 64, 64), batch=2, positions=True, lengths=True, **CAUSAL, **SINKS, **RESIDUAL
    ),
    "bias": Gradients((150, 300, 64, 64), (4, 2), 2, **bias(1, 4, 150, 300), **RESIDUAL),
    "bias, causal": Gradients((150, 301, 32, 32), (2, 1), 2, **bias(2, 1, 150, 301, dtype="float32"), **ALIGNED),
    "bias of keys": Gradients((70, 200, 128, 64), (2, 1), 3, **bias(3, 1, 1, 200), lengths=True),
    "bias of queries": Gradients((130, 90, 128, 128), **bias(1, 2, 130, 1, dtype="float16"), dtype="float16"),
    # In tiles by TMA: of heads, of elements of the batch, of both and of neither.
    "bias in tiles": Gradients((150, 304, 64, 64), (4, 2), 2, **bias(1, 4, 150, 304), **RESIDUAL),
    "bias in tiles, elements": Gradients((130, 200, 32, 32), (2, 1), 3, "float16", **bias(3, 1, 130, 200), **CAUSAL),
    "bias in tiles, neither": Gradients((200, 136, 64, 64), batch=2, **bias(1, 1, 200, 136), logits_soft_cap=2.0),
    "bias in tiles, large": Gradients((200, 264, 128, 128), (4, 2), 2, **bias(1, 4, 200, 264), **CAUSAL, **RESIDUAL),
    "of a bias in tiles": Gradients((200, 264, 64, 64), (4, 2), 3, by="qkvf", **bias(1, 4, 200, 264), **CAUSAL),
    "of a bias in tiles, both": Gradients(
        (130, 136, 64, 64), batch=2, by="qkvf", **bias(2, 2, 130, 136, dtype="float16"), segment_ids=True
    ),
    "of a bias in tiles, large": Gradients(
        (150, 136, 96, 96), batch=2, dtype="float16", by="qkvf", **bias(1, 2, 150, 136), segment_ids=True
    ),
    "of a scale beside tiles": Gradients(
        (200, 264, 64, 64),
        batch=2,
        score_mod=scaled,
        score_mod_operands=SCALE,
        by="f",
        **bias(1, 2, 200, 264),
    ),
    "soft cap": Gradients((100, 300, 128, 128), **WINDOW, logits_soft_cap=2.0, **SINKS),
    "soft cap, segments": Gradients((130, 200, 64, 64), logits_soft_cap=2.0, segment_ids=True, **RESIDUAL),
    "slopes": Gradients((130, 200, 64, 64), (4, 2), score_mod=slopes, **CAUSAL, **RESIDUAL),
    "scores that are not finite": Gradients((80, 140, 32, 32), score_mod=hiding, **RESIDUAL),
    "infinities past the end": Gradients((130, 140, 64, 64), score_mod=shifted),
    "of a bias": Gradients((150, 300, 64, 64), (4, 2), 3, by="qkvf", **bias(1, 4, 150, 300)),
    "of a bias of each": Gradients((260, 141, 32, 96), batch=2, by="qkvf", **bias(2, 2, 260, 141, dtype="float32")),
    "of a bias, masked": Gradients((200, 300, 128, 128), batch=2, by="qkvf", **bias(1, 1, 200, 300), segment_ids=True),
    "of a bias of keys": Gradients(
        (170, 200, 64, 64), batch=3, by="qkvf", **bias(3, 1, 1, 200), lengths=True, **CAUSAL
    ),
    "of a bias of queries": Gradients((130, 290, 64, 64), batch=2, by="f", **bias(1, 2, 130, 1), **WINDOW, **RESIDUAL),
    "of a scale": Gradients(
        (130, 200, 64, 64), (4, 2), score_mod=scaled, score_mod_operands=SCALE, by="qkvf", **CAUSAL
    ),
    "of a scale, dropout": Gradients(
        (130, 200, 64, 64),
        (4, 2),
        2,
        score_mod=scaled,
        score_mod_operands=SCALE,
        by="qf",
        **bias(1, 1, 130, 200),
        logits_soft_cap=4.0,
        **DROPOUT,
    ),
    "dropout": Gradients((130, 301, 64, 64), (4, 2), 2, **DROPOUT, **CAUSAL, **RESIDUAL),
    "dropout, soft cap": Gradients((200, 150, 128, 128), **DROPOUT, logits_soft_cap=2.0, segment_ids=True),
    "negative scale": Gradients((70, 140, 64, 64), scale=-0.3, **RESIDUAL),
    # A block's ring of tiles goes round while those who add wait for what other blocks add.
    "tiles that nobody sees": Gradients((64, 3840, 32, 32), batch=3, lengths=True),
    "of queries": Gradients((100, 200, 64, 64), by="q"),
    "of keys": Gradients((100, 200, 64, 64), by="k"),
    "of values": Gradients((100, 200, 64, 64), by="v"),
}
LARGE = {
    "64": Gradients((4096, 4096, 64, 64), (8, 8)),
    "96": Gradients((4096, 4096, 96, 96), (8, 8), **CAUSAL),
    "128": Gradients((4096, 4096, 128, 128), (8, 8)),
    "128 and 64": Gradients((4096, 4096, 128, 64), (8, 8), **CAUSAL),
    "causal 64": Gradients((4096, 4096, 64, 64), (8, 8), **CAUSAL, **RESIDUAL),
    "causal 128": Gradients((4096, 4096, 128, 128), (8, 2), **CAUSAL, **RESIDUAL),
    "window 128": Gradients((4096, 4096, 128, 128), (8, 2), 1, "float16", lengths=True, **WINDOW, **RESIDUAL),
    "bias 64": Gradients((4096, 4096, 64, 64), (8, 8), **bias(1, 8, 4096, 4096)),
    "bias 128": Gradients((4096, 4096, 128, 128), (8, 8), **bias(1, 8, 4096, 4096), **CAUSAL),
    "of a bias 64": Gradients((4096, 4096, 64, 64), (8, 8), by="qkvf", **bias(1, 8, 4096, 4096)),
    "of a bias 128": Gradients((4096, 4096, 128, 128), (8, 8), by="qkvf", **bias(1, 8, 4096, 4096), **CAUSAL),
    "of a scale 128": Gradients((4096, 4096, 128, 128), (4, 4), score_mod=scaled, score_mod_operands=SCALE, by="qkvf"),
    "soft cap 64": Gradients((4096, 4096, 64, 64), (8, 8), **CAUSAL, logits_soft_cap=30.0),
    "soft cap 128": Gradients((4096, 4096, 128, 128), (8, 8), **CAUSAL, logits_soft_cap=30.0),
    "slopes 128": Gradients((4096, 4096, 128, 128), (8, 8), score_mod=slopes, **CAUSAL, **RESIDUAL),
    "soft cap, segments 128": Gradients((4096, 4096, 128, 128), segment_ids=True, **CAUSAL, logits_soft_cap=30.0),
    "dropout 64": Gradients((4096, 4096, 64, 64), (8, 8), **DROPOUT, **CAUSAL, **RESIDUAL),
    "dropout 128": Gradients((4096, 4096, 128, 128), (8, 8), **DROPOUT),
    "everything 64": Gradients((4096, 4096, 64, 64), (8, 8), **everything(4096), **DROPOUT, **CAUSAL, **RESIDUAL),
    "mask 128": Gradients((4096, 4096, 128, 128), (8, 8), **mask(1, 1, 4096, 4096)),
    "segments 64": Gradients((4096, 4096, 64, 64), (8, 8), segment_ids=True, **CAUSAL, **RESIDUAL),
    "segments 128": Gradients((4096, 4096, 128, 128), (8, 8), segment_ids=True, **CAUSAL, **RESIDUAL),
    "positions 128": Gradients((4096, 4096, 128, 128), (8, 8), positions=True, **CAUSAL, **RESIDUAL),
}
# Bytes, stored and loaded: the producer has 24 registers, and keeps in memory what it needs when a tile begins.
MOST_SPILLED = 260
# With functions and lists, of which it walks through one for each head.
MOST_SPILLED_WITH_FUNCTIONS = 700
FEW = replace(H100, sm_count=3)  # multiprocessors, so that each works through several tiles


# Knobs for which no heuristic asks where sums are small.
FORCED = {
    "bias of keys": {"parts": 3},
    "causal, shared keys": {"shares": 2},
    "lengths, aligned": {"shares": 2},
    "mask": {"shares": 2},
    "of a bias": {"parts": 2, "shares": 2},
    "segments, causal": {"parts": 2, "shares": 2},
    "dropout": {"parts": 4},
    "tiles that nobody sees": {"swizzle": 1},
}


# Of these, all that is offered runs on the CPU, too; of the others, what comes first.
OFFERED = (
    "full",
    "causal",
    "lengths",
    "value of another size",
    "mask",
    "segments, causal",
    "bias",
    "soft cap",
    "dropout",
)


def configured(name, target):
    problem = (SMALL | LARGE)[name].problem
    offered = list(ENGINE.configurations(problem, target))
    offered += [replace(knobs, **FORCED[name]) for knobs in offered if name in FORCED]
    return [(knobs, ENGINE.build(knobs, problem, target)) for knobs in offered]


def emulated_plans(name):
    found = configured(name, FEW)
    forced = [plan for knobs, plan in found if name in FORCED and replace(knobs, **FORCED[name]) == knobs]
    return [plan for _, plan in found] if name in OFFERED else forced[:1] or [found[0][1]]


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    """The plans of SMALL, and where those of each begin."""
    plans, starts = [], {}
    for name in SMALL:
        starts[name] = len(plans)
        plans += emulated_plans(name)
    return Emulated(plans, tmp_path_factory.mktemp("emulated")), starts


@pytest.mark.parametrize("name", SMALL)
def test_its_text_computes_what_is_right(name, emulated):
    """In several orders of threads and blocks, with the same bits."""
    one, (machine, starts) = SMALL[name], emulated
    operands = one.operands()
    for number, _ in enumerate(emulated_plans(name)):
        results = one.results()
        machine.run(starts[name] + number, operands, results)
        one.check(operands, results)


@pytest.mark.parametrize("name", [*SMALL, *LARGE])
def test_configurations_compile(name):
    assert ENGINE.reason((SMALL | LARGE)[name].problem, H100) is None
    found = configured(name, H100)
    assert found
    for knobs, plan in found if name in LARGE else found[:1]:
        compile_checked(plan, knobs, MOST_SPILLED_WITH_FUNCTIONS if "Function" in plan.unit else MOST_SPILLED)


def test_a_plan_is_what_it_is():
    problem = LARGE["causal 128"].problem
    ((_, plan),) = configured("causal 128", H100)
    rows, main, query, *sums = plan.launches
    assert (rows.grid, rows.block) == ((8 * 4096 // 64, 1, 1), (256, 1, 1))
    assert (main.grid, main.block) == ((132, 1, 1), (384, 1, 1))  # 32 tiles of each of 2 heads would be too few
    assert (query.grid, query.block) == ((8 * 64, 1, 1), (256, 1, 1))
    assert [(one.grid, one.block) for one in sums] == 2 * [((2 * 4096 * 16 // 256, 1, 1), (256, 1, 1))]
    maps = [one for one in main.arguments if isinstance(one, TensorMap)]
    assert [one.box for one in maps] == [(64, 64, 1, 1), (64, 128, 1, 1), (64, 128, 1, 1), (64, 64, 1, 1)]
    assert maps[3].dimensions == maps[0].dimensions == (128, 4096, 8, 1)
    assert Scalar("float32", problem.scale) in main.arguments
    # Two numbers of a row; a counter of each block, and of tiles; the sums; and the gradients of each of 4 shares.
    assert plan.scratch == (8 * 4096 * 8, (8 * 64 + 1) * 4, *3 * [8 * 4096 * 128 * 4])


def test_memory_is_linear_in_the_length():
    workspaces = []
    for length in (4096, 8192):
        problem = Gradients((length, length, 64, 64), **CAUSAL).problem
        workspaces.append(ENGINE.build(next(ENGINE.configurations(problem, H100)), problem, H100).workspace)
    assert workspaces[1] - 4 == 2 * (workspaces[0] - 4)


@pytest.mark.parametrize(("name", "tile"), [("64", 128), ("causal 64", 128), ("128", 64), ("96", 64)])
def test_tiles(name, tile):
    knobs = next(ENGINE.configurations(LARGE[name].problem, H100))
    assert isinstance(knobs, AttentionSm90BackwardKnobs)
    assert knobs.tile_m == tile


def test_sizes_are_not_in_the_code():
    stated = [
        Gradients((queries, keys, 64, 64), heads, batch, **CAUSAL, **RESIDUAL).problem
        for queries, keys, heads, batch in ((512, 512, (4, 2), 2), (4096, 1000, (32, 4), 3))
    ]
    assert len({ENGINE.build(AttentionSm90BackwardKnobs(), one, H100).unit for one in stated}) == 1


@pytest.mark.parametrize(
    ("one", "said"),
    [
        (Gradients((64, 64, 64, 64), dtype="float64"), "query is float64"),
        (Gradients((64, 64, 60, 64)), "the head size is 60"),
        (Gradients((64, 64, 64, 264)), "value's head size is 264; it takes multiples of 8 up to 256"),
    ],
)
def test_reasons(one, said):
    assert said in (ENGINE.reason(one.problem, H100) or "")


def test_gradient_that_sums_over_the_batch_is_refused():
    problem = SMALL["lengths"].problem
    d_key = replace(problem.backward.d_key, batch=())
    problem = replace(problem, backward=replace(problem.backward, d_key=d_key))
    assert "d_key is a sum over elements of the batch" in (ENGINE.reason(problem, H100) or "")


def test_parts_are_equal():
    problem = SMALL["of a bias"].problem
    knobs = AttentionSm90BackwardKnobs(parts=4)
    assert "6 key heads in a batch are no 4 equal parts" in (
        backward_knobs_reason(problem, knobs, H100.shared_memory) or ""
    )


def test_shares_are_equal():
    problem, knobs = SMALL["causal, shared keys"].problem, AttentionSm90BackwardKnobs(shares=3)
    assert "4 query heads of a key head are no 3 equal shares" in (
        backward_knobs_reason(problem, knobs, H100.shared_memory) or ""
    )


@pytest.mark.parametrize("name", ["128", "128 and 64"])
def test_knobs_that_do_not_fit(name):
    knobs, problem = AttentionSm90BackwardKnobs(128), LARGE[name].problem
    assert "expected at most 224" in (backward_knobs_reason(problem, knobs, H100.shared_memory) or "")
    with pytest.raises(ValueError, match="does not fit"):
        ENGINE.build(knobs, problem, H100)


@pytest.mark.parametrize(
    ("shape", "owners", "parts"),
    [((1, 2, 488, 488), 2 * 2 * 4, 1), ((1, 2, 488, 1), 2 * 4, 12), ((1, 1, 1, 488), 4, 24)],
)
def test_gradients_of_what_scores_load_have_as_many_parts_as_pay(shape, owners, parts):
    """Of three elements that share a bias one is 14 us: three would be shorter, and all of them have to be added. What
    is small is added in no time, and has a part for each step.
    """
    problem = Gradients((488, 488, 96, 96), (2, 1), 3, by="qkvf", **bias(*shape)).problem
    plan = ENGINE.build(next(ENGINE.configurations(problem, H100)), problem, H100)
    (launch,) = (one for one in plan.launches if one.kernel == "attention_sm90_loaded_gradient_0")
    assert launch.grid[0] == owners * parts * launch.cluster[0] <= H100.sm_count
    assert any(one.kernel == "product_reduce_0" for one in plan.launches) == (parts > 1)


@pytest.mark.parametrize("knobs", [{"tile_m": 96}, {"swizzle": 0}, {"parts": 0}, {"shares": 0}, {"sums": 3}])
def test_knobs_are_validated(knobs):
    with pytest.raises(ValueError, match=r"AttentionSm90BackwardKnobs: .* (must be|expected) "):
        AttentionSm90BackwardKnobs(**knobs)


@pytest.mark.skipif(not GPU, reason="there is no GPU")
@pytest.mark.parametrize("name", SMALL)
def test_results(name):
    one = SMALL[name]
    operands = one.operands()
    for target in (device.gpus()[0], replace(device.gpus()[0], sm_count=3)):
        for knobs, plan in configured(name, target):
            types = one.backward.signature.results.values()
            results, again = (run_plan(plan, types, operands) for _ in range(2))
            one.check(operands, results)
            assert all(map(np.array_equal, results, again)), f"{knobs} is not deterministic"
