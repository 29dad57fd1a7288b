"""The attention engine of any GPU: what it plans and refuses, that it compiles, and that it computes what is right."""

import functools
import zlib
from dataclasses import replace
from uuid import uuid4

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn
from checking.attention import problems
from checking.calls import calls_of
from checking.cases import AttentionCase
from checking.cases.dtypes import BF16, F16, F64
from checking.compiler_log import compile_checked
from checking.emulation.plans import Emulated
from checking.product.calls import run_plan
from checking.targets import A10, A100, H100
from jaxdnn import _native, device
from jaxdnn.engines.attention.problem import Attention
from jaxdnn.engines.attention.simt.engine import AttentionSimt
from jaxdnn.engines.attention.simt.heuristic import TILES
from jaxdnn.engines.attention.simt.knobs import AttentionSimtKnobs, knobs_reason
from jaxdnn.planning.calls import find_differentiated_calls

ENGINE = AttentionSimt()
GPU = jax.default_backend() == "gpu"
Case = functools.partial(AttentionCase, residual=True)
SMALL = AttentionSimtKnobs(16, 16, 1, 2)  # so that there are several tiles along each axis, and warps along both
TALL = AttentionSimtKnobs(16, 32, 2, 1)
TENSOR = AttentionSimtKnobs(16, 16, 1, 2, tensor=True)
TALL_TENSOR = AttentionSimtKnobs(32, 16, 2, 1, tensor=True)

# Lengths that are no multiple of a tile's, each axis in several tiles, and what no other case has.
CASES = {
    "plain": (SMALL, Case(queries=37, keys=45, heads=2, key_heads=1, size=8, value_size=12)),
    "no log-sum-exp": (SMALL, AttentionCase(batch=1, queries=17, keys=33, size=3, value_size=5)),
    "causal": (TALL, Case(batch=1, queries=50, keys=40, heads=4, key_heads=2, size=7, value_size=9, causal=True)),
    "aligned": (SMALL, Case(batch=1, queries=20, keys=50, causal=True, alignment="bottom_right")),
    "window": (SMALL, Case(batch=1, queries=60, keys=50, window=(9, 3), sinks=True)),
    "window past the keys": (SMALL, Case(batch=1, queries=60, keys=20, window=(3, 3))),
    "lengths": (SMALL, Case(batch=3, queries=33, keys=40, lengths="query key", causal=True, alignment="bottom_right")),
    "segments": (SMALL, Case(queries=40, keys=40, segments="both", window=(17, None))),
    "positions": (SMALL, Case(queries=35, keys=37, positions="query key", window=(9, None))),
    "mask array": (SMALL, Case(queries=20, keys=35, mask="b1ts", sinks=True)),
    "mask function": (TALL, Case(queries=35, keys=40, mask_mod="stripes", soft_cap=2.0)),
    "bias of heads": (SMALL, Case(queries=20, keys=35, heads=4, key_heads=2, bias="1nts", soft_cap=2.0)),
    "bias of batches": (SMALL, Case(batch=3, queries=20, keys=19, heads=2, bias="b1ts", causal=True)),
    "bias of rows": (SMALL, Case(batch=1, queries=20, keys=35, bias="1nt1")),
    "bias of columns": (SMALL, Case(batch=3, queries=20, keys=35, bias="b11s", dropout=0.3)),
    "bias of scores": (TALL, Case(queries=20, keys=35, bias="ts", dtype=BF16, size=5, value_size=6)),
    "one bias": (SMALL, Case(queries=20, keys=35, bias="1111")),
    "slopes": (SMALL, Case(queries=20, keys=35, heads=4, score_mod="slopes")),
    "dropout": (SMALL, Case(queries=20, keys=35, dropout=0.3, causal=True)),
    "float16": (SMALL, Case(batch=1, queries=20, keys=35, size=24, value_size=40, dtype=F16, sinks=True)),
    "float64": (TALL, Case(batch=1, queries=33, keys=35, size=6, value_size=33, dtype=F64, causal=True, sinks=True)),
    "tf32": (TENSOR, Case(queries=37, keys=45, heads=2, key_heads=1, size=12, value_size=20, causal=True)),
    "tf32, bias": (TALL_TENSOR, Case(batch=1, queries=40, keys=45, bias="1nts", size=24, sinks=True)),
    "bfloat16, tensor": (TALL_TENSOR, Case(batch=1, queries=40, keys=35, size=40, value_size=9, dtype=BF16)),
    "no batch": (SMALL, Case(batch=None, queries=1, keys=33, heads=3, key_heads=1)),
}
# Name, knobs, the call; and the one whose results the backward pass is given.
CALLS = [
    (f"{name}, {call.spec.results[0]}", knobs, call, calls[0])
    for name, (knobs, case) in CASES.items()
    for calls in [calls_of(case)]
    for call in calls
    if isinstance(call.problem, Attention)
]
NAMES = [name for name, *_ in CALLS]


def operand(name, type_, problem):
    """Values that make sense for an operand of this name; the same for all calls."""
    random = np.random.default_rng(zlib.crc32(name.encode()))
    match name:
        case "query_lengths" | "key_lengths":  # some, none, and all of the axis
            length = problem.query_length if name == "query_lengths" else problem.key_length
            return np.resize([length // 2 + 3, 0, length], type_.shape).astype("int32")
        case "query_segments" | "key_segments":
            found = np.sort(random.integers(0, 3, type_.shape), -1)
            return np.where(np.arange(found.shape[-1]) % 11 == 3, -1, found).astype("int32")
        case "query_offset":
            return random.integers(-9, 9, type_.shape, "int32")
        case "batch_index" | "head_index":
            return np.arange(np.prod(type_.shape), dtype="int32").reshape(type_.shape)
    if type_.dtype == bool:
        return random.random(type_.shape) < 0.7
    if np.issubdtype(type_.dtype, np.integer):
        return random.integers(0, 40, type_.shape).astype(type_.dtype)
    return random.standard_normal(type_.shape).astype(type_.dtype)


def arrays(one, forward):
    """Operands; those of the backward pass that the forward one leaves are what that leaves."""
    found = {name: operand(name, type_, one.problem) for name, type_ in one.signature.operands.items()}
    if one.problem.backward is not None:
        types = forward.signature.results
        given = [found[name] for name in forward.signature.operands]
        left = problems.run(forward.problem, given, list(types.values()))
        found |= {name: array.astype(types[name].dtype) for name, array in zip(types, left, strict=True)}
    return list(found.values())


def check(one, operands, found, knobs):
    """Against the problem, in float64. Sums are exact but for rounding; results are rounded once."""
    wanted = problems.run(one.problem, operands, list(one.signature.results.values()))
    unit = 1e-12 if one.problem.accumulator == "float64" else 2.0**-9 if knobs.tensor else 1e-5
    for name, got, want in zip(one.spec.results, found, wanted, strict=True):
        scale = max(1.0, float(np.max(np.abs(want), initial=0, where=np.isfinite(want))))
        rounding = float(jnp.finfo(got.dtype).eps) / 2
        np.testing.assert_allclose(np.float64(got), want, rtol=rounding, atol=unit * scale, err_msg=name)


def empty(one):
    return [np.zeros(type_.shape, type_.dtype) for type_ in one.signature.results.values()]


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    plans = [ENGINE.build(knobs, one.problem, H100) for _, knobs, one, _ in CALLS]
    return Emulated(plans, tmp_path_factory.mktemp("emulated"))


@pytest.mark.parametrize("number", range(len(CALLS)), ids=NAMES)
def test_its_text_computes_what_is_right(number, emulated):
    _, knobs, *calls = CALLS[number]
    operands, results = arrays(*calls), empty(calls[0])
    emulated.run(number, operands, results)
    check(calls[0], operands, results, knobs)


# What there is of the backward pass, besides all of it.
ASKED = {
    "no cotangent of results": {"d_out": None},
    "keys alone": {"d_query": None, "d_value": None},
    "values alone": {"d_query": None, "d_key": None},
    "queries alone": {"d_key": None, "d_value": None, "d_log_sum_exp": None},
}


@pytest.mark.parametrize("asked", ASKED)
def test_what_is_not_asked_for_is_not_computed(asked, tmp_path):
    _, knobs, one, forward = CALLS[NAMES.index("plain, d_query")]
    operands, found = arrays(one, forward), empty(one)
    problem = replace(one.problem, backward=replace(one.problem.backward, **ASKED[asked]))
    assert ENGINE.reason(problem, H100) is None
    Emulated([ENGINE.build(knobs, problem, H100)], tmp_path).run(0, operands, found)
    wanted = problems.run(problem, operands, found)
    for name, got, want in zip(one.spec.results, found, wanted, strict=True):
        if getattr(problem.backward, name) is not None:
            np.testing.assert_allclose(got, want, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("name", ["segments, out", "segments, d_query"])
def test_tiles_that_no_query_sees_are_not_read(name, emulated):
    number = NAMES.index(name)
    _, _, one, forward = CALLS[number]
    wanted, found = empty(one), empty(one)
    operands = dict(zip(one.signature.operands, arrays(one, forward), strict=True))
    for side in ("query_segments", "key_segments"):
        operands[side] = np.where(np.arange(40) < 16, 3, -1)[None].repeat(2, 0).astype("int32")
    emulated.run(number, list(operands.values()), wanted)
    assert np.isfinite(wanted[0]).all()
    for side in ("key", "value"):
        operands[side][:, 16:] = np.nan
    emulated.run(number, list(operands.values()), found)
    for got, want in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(got, want)


def calls(sizes, dtype="float32", heads=(16, 16), **keywords):
    """The calls of `dot_product_attention` and its gradient for (queries, keys, head size, value's head size)."""
    queries, keys, size, value_size = sizes
    shapes = [(queries, heads[0], size), (keys, heads[1], size), (keys, heads[1], value_size)]
    function = functools.partial(jaxdnn.dot_product_attention, **keywords)
    return find_differentiated_calls(function, *(jax.ShapeDtypeStruct((1, *shape), dtype) for shape in shapes))


def soft_capped(score, *_):
    return 30 * jnp.tanh(score / 30)


LARGE = {
    "64": calls((4096, 4096, 64, 64)),
    "128": calls((4096, 4096, 128, 128), is_causal=True),
    "192 and 128": calls((4096, 4096, 192, 128), is_causal=True),
    "256": calls((4096, 4096, 256, 256), score_mod=soft_capped),
    "512": calls((4096, 4096, 512, 512)),
    "bfloat16": calls((4096, 4096, 128, 128), "bfloat16", (16, 4), logits_soft_cap=30.0, local_window_size=(512, 0)),
    "float16": calls((4096, 4096, 33, 77), "float16", dropout_rate=0.1, dropout_rng=jax.random.key(0)),
    "float64": calls((4096, 4096, 128, 128), "float64"),
    "float64, 512": calls((4096, 4096, 512, 512), "float64"),
}


def compiles(problem, target, count):
    """Without spills."""
    found = list(ENGINE.configurations(problem, target))[:count]
    assert found
    for knobs in found:
        compile_checked(ENGINE.build(knobs, problem, target), knobs)


@pytest.mark.parametrize(
    ("name", "target"), [*((name, H100) for name in LARGE), ("128", A100), ("512", A100), ("bfloat16", A10)]
)
def test_configurations_compile(name, target):
    for call in LARGE[name]:
        assert not isinstance(call.problem, str)
        reason = ENGINE.reason(call.problem, target)
        if name == "float64, 512" and call.problem.backward:
            assert "a thread would hold 132 words of sums" in (reason or "")
            continue
        assert reason is None
        compiles(call.problem, target, 2 if name == "128" else 1)


@pytest.mark.parametrize("number", range(len(CALLS)), ids=NAMES)
def test_every_part_compiles(number):
    problem = CALLS[number][2].problem
    assert ENGINE.reason(problem, H100) is None
    compiles(problem, H100, 1)


@pytest.mark.parametrize("target", [A10, A100, H100], ids=lambda target: target.arch)
@pytest.mark.parametrize("size", [1, 7, 64, 100, 129, 256, 511, 512])
def test_every_head_size_is_served(size, target):
    for call in calls((300, 500, size, size)):
        assert ENGINE.reason(call.problem, target) is None


def test_a_plan_is_what_it_is():
    forward, backward = (
        ENGINE.build(AttentionSimtKnobs(64, 64, 2, 4), call.problem, H100) for call in calls((300, 500, 64, 64))
    )
    (launch,) = forward.launches
    assert (launch.kernel, launch.grid, launch.block) == ("attention_simt", (16 * 5, 1, 1), (256, 1, 1))
    assert forward.workspace == 0
    assert [(launch.kernel, launch.grid[0]) for launch in backward.launches] == [
        ("attention_simt_delta", 16 * 300 // 8),
        ("attention_simt_d_query", 16 * 5),
        ("attention_simt_d_key_value", 16 * 8),
    ]
    assert backward.scratch == (16 * 300 * 4,) * 2


@pytest.mark.parametrize(
    ("queries", "heads", "tile_m"), [(4096, 16, 128), (1000, 16, 64), (100, 256, 64), (1, 256, 16)]
)
def test_tiles_are_of_a_size_with_the_call(queries, heads, tile_m):
    problem = calls((queries, 512, 64, 64), heads=(heads, heads))[0].problem
    assert next(iter(ENGINE.configurations(problem, H100))).tile_m == tile_m


def bias_gradient(*shape):
    """The problem of the gradient of a bias of this shape."""
    types = [jax.ShapeDtypeStruct((4, 512, 8, 32), "float32")] * 3
    found = find_differentiated_calls(jaxdnn.dot_product_attention, *types, jax.ShapeDtypeStruct(shape, "float32"))
    return found[-1].problem


@pytest.mark.parametrize(
    ("shape", "owners", "parts"),
    [
        # With 8 x 8 tiles of 4 x 8 heads, and two blocks for each of 132 multiprocessors: parts of 8 steps take as long
        # as those of a few less, where as many blocks work at once, and are fewer.
        ((4, 8, 512, 512), 32 * 64, 1),
        ((1, 8, 512, 512), 8 * 64, 1),
        ((1, 1, 512, 512), 64, 4),
        ((4, 1, 1, 512), 4 * 8, 8),
        ((1, 1, 1, 1), 1, 256),
    ],
)
def test_gradients_of_what_scores_load_are_summed_in_parts(shape, owners, parts):
    plan = ENGINE.build(AttentionSimtKnobs(64, 64, 2, 4), bias_gradient(*shape), H100)
    names = [launch.kernel for launch in plan.launches]
    assert plan.launches[names.index("attention_simt_d_loaded_0")].grid == (owners * parts, 1, 1)
    assert ("product_reduce_0" in names) == (parts > 1)
    assert plan.scratch[2:] == ((parts * int(np.prod(shape)) * 4,) if parts > 1 else ())


def test_sizes_are_not_in_the_code():
    knobs = AttentionSimtKnobs()
    stated = [
        calls((queries, keys, 64, 64), heads=heads)[0] for queries, keys, heads in ((512, 99, (4, 2)), (8, 9, (6, 1)))
    ]
    assert len({ENGINE.build(knobs, one.problem, H100).unit for one in stated}) == 1


@pytest.mark.parametrize(
    ("change", "target", "said"),
    [
        ({}, replace(A100, arch="sm_75"), "compute capability 8.0"),
        ({"key_length": 0}, H100, "an axis has no elements"),
        ({"key_length": 2**30}, H100, "a sequence is longer"),
        ({"head_size": 3000}, H100, "bytes of shared memory, and a block has 232448"),
        ({"batch": 2**30}, H100, "thread blocks, and a grid has at most"),
        ({"accumulator": "float64"}, H100, "query is float32, and sums are float64"),
    ],
)
def test_reasons(change, target, said):
    assert said in (ENGINE.reason(replace(LARGE["64"][0].problem, **change), target) or "")


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        (AttentionSimtKnobs(128, 128, 4, 2), "a thread would have 64 scores"),
        (AttentionSimtKnobs(64, 64, 2, 4), "bytes of shared memory"),
        (replace(TILES[3], resident=2), "words of sums"),
    ],
)
def test_knobs_that_do_not_fit(knobs, said):
    problem = LARGE["256"][1].problem
    assert said in (knobs_reason(problem, knobs, H100.shared_memory) or "")
    with pytest.raises(ValueError, match="does not fit"):
        ENGINE.build(knobs, problem, H100)


@pytest.mark.parametrize("knobs", [{"tile_m": 100}, {"tile_n": 100}, {"resident": 0}])
def test_knobs_are_validated(knobs):
    with pytest.raises(ValueError, match=r"AttentionSimtKnobs: .* (must be|expected) "):
        AttentionSimtKnobs(**knobs)


def test_a_bias_takes_the_compiler_hardly_longer():
    """What a batch adds to its address is one number for all of a thread's 32 scores: five times as long without."""

    def seconds(name):
        _, _, one, *_ = CALLS[NAMES.index(name)]
        plan = ENGINE.build(AttentionSimtKnobs(64, 64, 2, 2), one.problem, H100)
        return _native.compile(f"{plan.unit}// {uuid4()}", plan.arch).seconds

    assert seconds("bias of batches, out") < 3 * seconds("plain, out")


@pytest.mark.skipif(not GPU, reason="there is no GPU")
@pytest.mark.parametrize("number", range(len(CALLS)), ids=NAMES)
def test_results(number):
    _, knobs, *calls = CALLS[number]
    operands, (one, _), target = arrays(*calls), calls, device.gpus()[0]
    for chosen in (knobs, *ENGINE.configurations(one.problem, target)):
        plan = ENGINE.build(chosen, one.problem, target)
        results, again = (run_plan(plan, one.signature.results.values(), operands) for _ in range(2))
        check(one, operands, results, chosen)
        assert all(map(np.array_equal, results, again)), f"{chosen} is not deterministic"
