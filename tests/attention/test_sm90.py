"""The Hopper attention engine: what it plans and refuses, that it compiles, and that it computes what is right."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from checking.attention.calls import (
    ALIGNED,
    CAUSAL,
    DROPOUT,
    MASKED,
    RESIDUAL,
    SINKS,
    WINDOW,
    arrays,
    bias,
    call,
    check,
    dropping,
    everything,
    mapped,
    mask,
    same_document,
    slopes,
)
from checking.attention.tiled import TILED
from checking.compiler_log import compile_checked
from checking.emulation.plans import Emulated
from checking.product.calls import run_plan
from checking.targets import A100, H100
from jaxdnn import device
from jaxdnn.engines.attention.sm90.engine import AttentionSm90
from jaxdnn.engines.attention.sm90.knobs import AttentionSm90Knobs, knobs_reason
from jaxdnn.plan import Counter, Scalar, TensorMap

ENGINE = AttentionSm90()
GPU = jax.default_backend() == "gpu"


# Several blocks of keys, edges in each direction, rows that see nothing, and a head that shares its keys.
SMALL = {
    "full": call((70, 370, 64, 64)),
    "causal": call((200, 300, 72, 40), **CAUSAL, **RESIDUAL),
    "causal, fewer keys": call((300, 140, 32, 32), **ALIGNED, **RESIDUAL),
    "window": call((300, 260, 64, 64), (4, 2), 2, "float16", **WINDOW, **RESIDUAL),
    "window past the keys": call((400, 100, 16, 16), local_window_size=(3, 3), **RESIDUAL),
    "lengths": call((150, 300, 128, 128), (2, 2), 3, lengths=True, **RESIDUAL),
    "lengths, aligned": call((150, 300, 32, 96), (2, 1), 3, lengths=True, **ALIGNED, **RESIDUAL),
    "lengths, window": call((150, 300, 32, 32), (2, 1), 3, lengths=True, **WINDOW, **RESIDUAL),
    "heads first": call((150, 300, 64, 64), (4, 2), 2, heads_first=True, **CAUSAL, **RESIDUAL),
    "sinks": call((100, 140, 64, 64), **CAUSAL, **RESIDUAL, **SINKS),
    "large heads": call((130, 200, 256, 256), **CAUSAL),
    "value of another size": call((130, 300, 192, 128)),
    "bias": call((150, 300, 64, 64), (4, 2), 2, **bias(1, 4, 150, 300), **RESIDUAL),
    "bias, causal": call((150, 301, 32, 32), (2, 1), 2, **bias(2, 1, 150, 301, dtype="float32"), **ALIGNED, **RESIDUAL),
    "bias of keys": call((70, 200, 64, 64), (2, 1), 3, **bias(3, 1, 1, 200), lengths=True),
    "bias of queries": call((130, 90, 128, 128), **bias(1, 2, 130, 1, dtype="float16"), dtype="float16"),
    # In tiles by TMA: of heads, of elements of the batch, of both and of neither.
    "bias in tiles": call((200, 304, 64, 64), (4, 2), 2, **bias(1, 4, 200, 304), **RESIDUAL),
    "bias in tiles, elements": call((140, 200, 72, 40), (4, 2), 3, "float16", **bias(3, 1, 140, 200, dtype="float16")),
    "bias in tiles, both": call(
        (300, 136, 32, 96), (2, 1), 2, **bias(2, 2, 300, 136, dtype="float16"), **WINDOW, lengths=True
    ),
    "bias in tiles, neither": call((130, 264, 128, 128), (2, 1), 2, **bias(1, 1, 130, 264), logits_soft_cap=2.0),
    "soft cap": call((100, 300, 64, 64), **WINDOW, logits_soft_cap=2.0, **SINKS),
    "slopes": call((130, 200, 64, 64), (4, 2), score_mod=slopes, **CAUSAL, **RESIDUAL),
    "scores that are not finite": call((80, 140, 32, 32), score_mod=dropping, **RESIDUAL),
    "negative scale": call((70, 140, 64, 64), scale=-0.3, **RESIDUAL),
    "dropout": call((130, 301, 64, 64), (4, 2), 2, **DROPOUT, **CAUSAL, **RESIDUAL),
    "short": call((3, 500, 8, 8), (4, 4), 2),
    # Maxima grow by more than the slack of those that weights are relative to.
    "sharp": call((130, 700, 64, 64), dtype="float16", scale=3.0, **RESIDUAL),
    "float32": call((70, 301, 64, 64), (4, 2), 2, "float32", **CAUSAL, **RESIDUAL),
    "float32, window": call((200, 260, 128, 40), (2, 1), 2, "float32", **WINDOW, lengths=True, **RESIDUAL),
    "float32, large heads": call((70, 150, 256, 192), dtype="float32"),
    "float32, bias and segments": call((200, 200, 64, 64), (2, 1), 2, "float32", **everything(200)),
    "one array of keys": mapped((70, 150, 64, 64), (2, 1), "bfloat16", **CAUSAL),
    "float32, one array of keys": mapped((70, 150, 64, 64), (4, 2), "float32", **CAUSAL),
    "float32, few queries": call((3, 500, 40, 24), (2, 1), 2, "float32", **SINKS),
    **MASKED,
}
DOCUMENTS = (jax.ShapeDtypeStruct((1, 4096), "int32"),)
LARGE = {
    "64": call((4096, 4096, 64, 64), (8, 8)),
    "128": call((4096, 4096, 128, 128), (8, 8)),
    "192": call((4096, 4096, 192, 192), (8, 8)),
    "192 and 128": call((4096, 4096, 192, 128), (8, 8), **CAUSAL),
    "256": call((4096, 4096, 256, 256), (8, 8), **CAUSAL, lengths=True, **RESIDUAL),
    "causal 64": call((4096, 4096, 64, 64), (8, 8), **CAUSAL, **RESIDUAL),
    "causal 128": call((4096, 4096, 128, 128), (8, 2), **CAUSAL, **RESIDUAL),
    "bias 64": call((4096, 4096, 64, 64), (8, 8), **bias(1, 8, 4096, 4096)),
    "bias 64, float32": call((4096, 4096, 64, 64), (8, 8), **bias(1, 8, 4096, 4096, dtype="float32"), **CAUSAL),
    "bias 128": call((4096, 4096, 128, 128), (8, 8), **bias(1, 8, 4096, 4096), **CAUSAL),
    "bias 192": call((4096, 4096, 192, 192), (8, 8), **bias(1, 8, 4096, 4096)),
    "bias 256": call((4096, 4096, 256, 256), (8, 8), **bias(1, 8, 4096, 4096)),
    "soft cap 64": call((4096, 4096, 64, 64), (8, 8), **CAUSAL, logits_soft_cap=30.0, **RESIDUAL),
    "soft cap 64, segments": call((4096, 4096, 64, 64), (8, 8), **CAUSAL, logits_soft_cap=30.0, segment_ids=True),
    "soft cap 128": call((4096, 4096, 128, 128), (8, 8), **CAUSAL, logits_soft_cap=30.0),
    "slopes 128": call((4096, 4096, 128, 128), (8, 8), score_mod=slopes, **CAUSAL, **RESIDUAL),
    "mask 128": call((4096, 4096, 128, 128), (8, 8), **mask(1, 1, 4096, 4096)),
    "documents 128": call((4096, 4096, 128, 128), (8, 8), mask_mod=same_document, mask_mod_operands=DOCUMENTS),
    "segments 64": call((4096, 4096, 64, 64), (8, 8), segment_ids=True, **CAUSAL, **RESIDUAL),
    "segments 128": call((4096, 4096, 128, 128), (8, 8), segment_ids=True, **CAUSAL, **RESIDUAL),
    "positions 256": call((4096, 4096, 256, 256), (8, 8), positions=True, **CAUSAL, **RESIDUAL),
    "dropout 64": call((4096, 4096, 64, 64), (8, 8), **DROPOUT, **CAUSAL, **RESIDUAL),
    "dropout 128": call((4096, 4096, 128, 128), (8, 8), **DROPOUT),
    "everything 128": call((4096, 4096, 128, 128), (8, 8), **everything(4096), **DROPOUT, **CAUSAL, **RESIDUAL),
    "float32 64": call((4096, 4096, 64, 64), (8, 8), dtype="float32"),
    "float32 128": call((4096, 4096, 128, 128), (8, 8), dtype="float32", **CAUSAL, **RESIDUAL),
    "float32 256": call((4096, 4096, 256, 256), (8, 8), dtype="float32"),
    "float32, bias 128": call((4096, 4096, 128, 128), (8, 8), dtype="float32", **everything(4096), **CAUSAL),
    "window 128": call((4096, 4096, 128, 128), (8, 2), dtype="float16", **WINDOW, lengths=True, **RESIDUAL),
    "window of 16k": call((16_384, 16_384, 128, 128), (16, 16), **WINDOW),
}
# Of which all configurations are compiled, which tuning may choose; of the others, the one that is chosen without it.
TUNED = ("64", "causal 128", "bias 64", "segments 128", "dropout 64", "everything 128")
# Bytes, stored and loaded: a number or two that a thread reads once for each tile, and not for each block of keys.
MOST_SPILLED = 16
FEW = replace(H100, sm_count=3)  # multiprocessors, so that each works through several tiles


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    chosen = [(one, next(ENGINE.configurations(one.problem, FEW))) for one in SMALL.values()]
    plans = [ENGINE.build(knobs, one.problem, FEW) for one, knobs in (*chosen, *TILED.values())]
    return Emulated(plans, tmp_path_factory.mktemp("emulated"))


@pytest.mark.parametrize("name", [*SMALL, *TILED])
def test_its_text_computes_what_is_right(name, emulated):
    one = SMALL[name] if name in SMALL else TILED[name][0]
    operands, types = arrays(one), one.signature.results.values()
    results = [np.zeros(type_.shape, type_.dtype) for type_ in types]
    emulated.run([*SMALL, *TILED].index(name), operands, results)
    check(one, operands, results)


@pytest.mark.parametrize("name", ["64", "causal 64", "causal 128", "window 128", "256", "bias 64"])
def test_what_lets_blocks_pass_compiles(name):
    problem = LARGE[name].problem
    knobs = replace(next(ENGINE.configurations(problem, H100)), skips=True)
    compile_checked(ENGINE.build(knobs, problem, H100), knobs)


@pytest.mark.parametrize("name", [*SMALL, *LARGE])
def test_configurations_compile(name):
    problem = (SMALL | LARGE)[name].problem
    assert ENGINE.reason(problem, H100) is None
    found = list(ENGINE.configurations(problem, H100))
    assert found
    for knobs in found if name in TUNED else found[:1]:
        compile_checked(ENGINE.build(knobs, problem, H100), knobs, MOST_SPILLED)


def test_a_plan_is_what_it_is():
    problem = LARGE["causal 128"].problem
    plan = ENGINE.build(next(ENGINE.configurations(problem, H100)), problem, H100)
    (launch,) = plan.launches
    assert (launch.grid, launch.block) == ((132, 1, 1), (384, 1, 1))
    query, key, value = (one for one in launch.arguments if isinstance(one, TensorMap))
    assert (query.dimensions, query.strides) == ((128, 4096, 8, 1), (2048, 256, 128))
    assert (key.dimensions, key.strides, key.box) == ((128, 4096, 2, 1), (512, 256, 128), (64, 128, 1, 1))
    assert (value.dimensions, value.strides, value.box) == (key.dimensions, key.strides, key.box)
    assert any(isinstance(one, Counter) for one in launch.arguments)
    assert plan.workspace == 0


@pytest.mark.parametrize(
    ("name", "tile"),
    [
        ("64", (128, 128)),
        ("128", (128, 128)),
        ("192", (128, 112)),
        ("192 and 128", (128, 128)),
        ("256", (128, 80)),
        ("causal 64", (192, 128)),
        ("causal 128", (128, 128)),
        ("bias 64", (128, 128)),
        ("bias 64, float32", (128, 128)),
        ("bias 128", (128, 128)),
        ("bias 256", (128, 64)),
        ("segments 64", (192, 128)),
        ("segments 128", (128, 128)),
        ("dropout 128", (128, 112)),
    ],
)
def test_tiles(name, tile):
    knobs = next(ENGINE.configurations(LARGE[name].problem, H100))
    assert (knobs.tile_m, knobs.tile_n) == tile


SCORE_STAGES = {"bias 64": 2, "bias 128": 2, "bias 192": 1, "bias 64, float32": 0, "soft cap 128": 0}


@pytest.mark.parametrize("name", SCORE_STAGES)
def test_stages_of_score_tiles(name):
    assert next(ENGINE.configurations(LARGE[name].problem, H100)).score_stages == SCORE_STAGES[name]


QUERIES = {"64": (1, True), "128": (2, False), "causal 128": (2, False), "window 128": (1, True), "256": (1, False)}
QUERIES |= {"bias 64": (2, False), "bias 128": (1, False), "segments 128": (2, False)}


@pytest.mark.parametrize("name", QUERIES)
def test_where_queries_are(name):
    """Stages, and whether consumers have them in registers; in one stage where others leave no shared memory."""
    knobs = next(ENGINE.configurations(LARGE[name].problem, H100))
    assert (knobs.query_stages, knobs.query_in_registers) == QUERIES[name]


@pytest.mark.parametrize(
    ("name", "heads"), [("bias 128", 4), ("bias 64, float32", 32), ("128", 16), ("window of 16k", 16)]
)
def test_heads_that_are_worked_through_together(name, heads):
    """Of what passes through the L2 cache, those that multiprocessors work on at once; else as many as fit there."""
    assert next(ENGINE.configurations(LARGE[name].problem, H100)).swizzle == heads


def test_a_score_tile_has_the_axes_of_its_array():
    found = {}
    for name in (one for one in SMALL if one.startswith("bias in tiles")):
        problem = SMALL[name].problem
        plan = ENGINE.build(next(ENGINE.configurations(problem, H100)), problem, H100)
        *_, tile = (one for one in plan.launches[0].arguments if isinstance(one, TensorMap))
        found[name] = tile.dimensions
    assert list(found.values()) == [(304, 200, 4, 1), (200, 140, 1, 3), (136, 300, 2, 2), (264, 130, 1, 1)]


@pytest.mark.parametrize(
    ("one", "said"),
    [
        (SMALL["full"], "no function of scores reads an array"),
        (SMALL["bias"], "multiples of 16 bytes"),
        (SMALL["bias, causal"], "is float32"),
        (SMALL["bias of keys"], "does not vary with both"),
        (SMALL["bias in tiles"], None),
    ],
)
def test_what_comes_in_tiles(one, said):
    why = knobs_reason(one.problem, AttentionSm90Knobs(score_stages=1), H100.shared_memory)
    assert why is None if said is None else said in (why or "")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("bias in tiles", None),
        ("bias in tiles, elements", "have no such array together"),
        ("bias in tiles, neither", None),
        ("full", "have no such array together"),
        ("bias in tiles, odd", "3 elements of the batch are no clusters of 2"),
        ("bias in tiles, lengths", "may differ from element to element"),
    ],
)
def test_elements_that_share_score_tiles(name, said):
    others = {
        "bias in tiles, odd": call((200, 304, 64, 64), (4, 2), 3, **bias(1, 4, 200, 304)),
        "bias in tiles, lengths": call((200, 304, 64, 64), (4, 2), 2, **bias(1, 4, 200, 304), lengths=True),
    }
    problem = (SMALL | others)[name].problem
    first = next(ENGINE.configurations(problem, H100))
    assert first.cluster == (1 if said else 2)
    assert said is None or said in (knobs_reason(problem, replace(first, cluster=2), H100.shared_memory) or "")
    plan = ENGINE.build(first, problem, H100)
    assert plan.launches[-1].cluster == (first.cluster, 1, 1)


def test_tiles_are_dealt_where_each_has_a_multiprocessor():
    problem = SMALL["full"].problem
    plan = ENGINE.build(AttentionSm90Knobs(), problem, H100)
    assert plan.launches[0].grid == (2, 1, 1)
    assert Scalar("int32", -1) in plan.launches[0].arguments


def test_sizes_are_not_in_the_code():
    stated = [
        call((queries, keys, 64, 64), heads, batch, **CAUSAL, **RESIDUAL).problem
        for queries, keys, heads, batch in ((512, 512, (4, 2), 2), (4096, 1000, (32, 4), 3))
    ]
    assert len({ENGINE.build(AttentionSm90Knobs(), one, H100).unit for one in stated}) == 1


def test_array_of_a_mask_is_in_the_code():
    units = {ENGINE.build(AttentionSm90Knobs(), SMALL[name].problem, H100).unit for name in ("lengths", "window")}
    assert ["KeyLengths" in unit for unit in units].count(True) == 1


@pytest.mark.parametrize(
    ("one", "said"),
    [
        (call((64, 64, 64, 64), dtype="float32", precision="highest"), "precision HIGHEST forbids"),
        (call((64, 64, 64, 64), dtype="float64"), "query is float64"),
        (call((64, 64, 60, 64)), "the head size is 60"),
        (call((64, 64, 64, 264)), "value's head size is 264"),
    ],
)
def test_reasons(one, said):
    assert said in (ENGINE.reason(one.problem, H100) or "")


def test_it_needs_hopper():
    assert "it needs compute capability 9.0" in (ENGINE.reason(SMALL["full"].problem, A100) or "")


@pytest.mark.parametrize(
    ("knobs", "name", "said"),
    [
        (AttentionSm90Knobs(192, 128), "128", "160 numbers; expected at most 128"),
        (AttentionSm90Knobs(128, 128), "192", "bytes of shared memory"),
        (AttentionSm90Knobs(skips=True), "segments 64", "warp groups skip none"),
        (AttentionSm90Knobs(halves=True), "128", "right edge alone"),
        (AttentionSm90Knobs(halves=True), "segments 64", "right edge alone"),
        (AttentionSm90Knobs(halves=True), "bias 128", "of whole blocks"),
        (AttentionSm90Knobs(64, halves=True), "causal 128", "several warp groups"),
        (AttentionSm90Knobs(128, 112, halves=True), "causal 128", "blocks of 128 keys"),
    ],
)
def test_knobs_that_do_not_fit(knobs, name, said):
    problem = LARGE[name].problem
    assert said in (knobs_reason(problem, knobs, H100.shared_memory) or "")
    with pytest.raises(ValueError, match="does not fit"):
        ENGINE.build(knobs, problem, H100)


@pytest.mark.skipif(not GPU, reason="there is no GPU")
@pytest.mark.parametrize("name", SMALL)
def test_results(name):
    one, operands = SMALL[name], arrays(SMALL[name])
    for target in (device.gpus()[0], replace(device.gpus()[0], sm_count=3)):
        for knobs in ENGINE.configurations(one.problem, target):
            plan = ENGINE.build(knobs, one.problem, target)
            results, again = (run_plan(plan, one.signature.results.values(), operands) for _ in range(2))
            check(one, operands, results)
            assert all(map(np.array_equal, results, again)), f"{knobs} is not deterministic"
