"""Attention on the CPU: several blocks along each axis, what they skip, and what is the same from run to run."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn
from checking.cases import AttentionCase
from checking.cases.dtypes import BF16, F16, F64
from checking.compare import as_tuple, assert_close, needs_native
from checking.transforms import vjp, with_cotangents
from jaxdnn.planning.calls import find_differentiated_calls
from jaxdnn.planning.select import select

pytestmark = needs_native

# Lengths that are no multiple of a block's, and each axis in several blocks.
CASES = [
    AttentionCase(batch=1, queries=1, keys=1, heads=1, key_heads=1, size=1, value_size=1, residual=True),
    AttentionCase(batch=1, queries=1, keys=135, heads=4, key_heads=1, size=20, value_size=12, residual=True),
    AttentionCase(queries=133, keys=1, heads=2, key_heads=1, size=7, value_size=9, sinks=True),
    AttentionCase(queries=101, keys=67, heads=6, key_heads=2, size=17, value_size=40, causal=True, residual=True),
    AttentionCase(queries=67, keys=101, causal=True, alignment="bottom_right", mask="b1ts", residual=True, dropout=0.3),
    AttentionCase(queries=66, keys=70, segments="both", window=(17, 3), residual=True, sinks=True, soft_cap=1.5),
    AttentionCase(batch=3, queries=65, keys=66, lengths="query key", positions="query key", window=(9, None)),
    AttentionCase(queries=37, keys=45, heads=4, bias="1nts", soft_cap=2.0, residual=True, causal=True),
    AttentionCase(batch=3, queries=37, keys=45, heads=4, key_heads=2, bias="b11s", dropout=0.3),
    AttentionCase(queries=37, keys=45, bias="1nt1", soft_cap=2.0, dtype=BF16),
    AttentionCase(queries=71, keys=38, heads=4, key_heads=2, size=33, value_size=16, dtype=BF16, causal=True),
    AttentionCase(queries=40, keys=71, size=33, value_size=16, dtype=F16, soft_cap=2.0, mask_mod="stripes"),
    AttentionCase(queries=37, keys=45, heads=4, size=19, value_size=11, dtype=F64, causal=True, residual=True),
    # Few queries, of heads that share keys.
    AttentionCase(batch=3, queries=3, keys=77, heads=6, key_heads=2, lengths="query key", sinks=True, residual=True),
    AttentionCase(queries=2, keys=150, heads=8, key_heads=1, size=64, value_size=80, dtype=BF16, segments="both"),
    AttentionCase(queries=5, keys=133, size=48, alignment="bottom_right", window=(61, 9), dropout=0.3),
    AttentionCase(queries=3, keys=77, heads=4, key_heads=2, size=16, positions="query key", window=(30, 9)),
    AttentionCase(queries=4, keys=91, heads=4, key_heads=2, bias="1nts", soft_cap=2.0, mask_mod="stripes", dtype=F16),
    AttentionCase(
        queries=1, keys=91, heads=4, key_heads=2, size=33, dtype=F64, alignment="bottom_right", window=(40, 0)
    ),
]
PANELS = {"query_block": 32, "key_block": 32, "splits": 3, "streams": False}
STREAMS = PANELS | {"streams": True}
BLOCKS = [
    {"query_block": 32, "key_block": 4, "splits": 3, "streams": False},
    {"query_block": 64, "key_block": 32, "splits": 1, "streams": False, "per_task": 2},
    {"query_block": 32, "key_block": 160, "splits": 1, "streams": False, "per_task": 3},  # all keys
    {"query_block": 32, "key_block": 12, "splits": 1, "streams": True, "per_task": 3},
    STREAMS,
]


@pytest.fixture(autouse=True)
def on_cpu(cpus):
    with jax.default_device(cpus[0]), jaxdnn.options(engine="host", fallback=False):
        yield


@pytest.fixture(params=[PANELS, STREAMS], ids=["panels", "streams"])
def either_way(request):
    with jaxdnn.options(knobs=request.param):
        yield


@pytest.mark.parametrize("knobs", BLOCKS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_blocks_are_joined(case, knobs):
    # Not by `check`, whose name of an engine would forget the knobs.
    with jaxdnn.options(knobs=knobs):
        results = jax.jit(functools.partial(vjp, as_tuple(case.call)))(*with_cotangents(case))
    assert_close(results, vjp, case, with_cotangents)


def arrays(queries, keys, heads=2, size=24, dtype="float32"):
    random = np.random.default_rng(0)
    shapes = ((1, length, heads, size) for length in (queries, keys, keys))
    return [jnp.asarray(random.standard_normal(shape), dtype) for shape in shapes]


@pytest.mark.usefixtures("either_way")
def test_blocks_that_no_query_sees_are_not_read():
    query, key, value = arrays(64, 64)
    function = functools.partial(jaxdnn.dot_product_attention, is_causal=True)
    wanted, vjp = jax.vjp(function, query, key, value)
    found, vjp_found = jax.vjp(function, query, key.at[:, 32:].set(jnp.nan), value.at[:, 32:].set(jnp.nan))
    cotangent = jnp.zeros_like(wanted).at[:, :32].set(1)
    np.testing.assert_array_equal(found[:, :32], wanted[:, :32])
    assert np.isnan(found[:, 32:]).all()
    np.testing.assert_array_equal(vjp_found(cotangent)[0][:, :32], vjp(cotangent)[0][:, :32])


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_passes_through(bad):
    query, key, value = arrays(40, 50)
    out = jaxdnn.dot_product_attention(query, key, value.at[0, 17, 1, 3].set(bad))
    wanted = jaxdnn.dot_product_attention(query, key, value)
    np.testing.assert_array_equal(out[0, :, 1, 3], np.full(40, bad, np.float32))
    np.testing.assert_array_equal(out[0, :, 0], wanted[0, :, 0])
    out = jaxdnn.dot_product_attention(query.at[0, 9, 1, 3].set(np.nan), key, value)
    assert np.isnan(out[0, 9, 1]).all()
    np.testing.assert_array_equal(np.delete(out, 9, 1), np.delete(wanted, 9, 1))


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("scale", [1e-30, 1e4, 1e30])
def test_large_scores_do_not_overflow(scale):
    query, key, value = arrays(33, 65)
    out = jaxdnn.dot_product_attention(query, key, value, scale=scale)
    scores = scale * np.einsum("btnh,bsnh->bnts", np.float64(query), np.float64(key))
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    exact = np.einsum("bnts,bsnh->btnh", weights / weights.sum(-1, keepdims=True), np.float64(value))
    np.testing.assert_allclose(out, exact, rtol=0, atol=1e-2)


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0)])
def test_rows_without_keys_are_zeros(lengths):
    query, key, value = arrays(40, 41)
    queries, keys = (jnp.asarray([length], jnp.int32) for length in lengths)

    def function(*arrays):
        return jaxdnn.dot_product_attention(
            *arrays, query_seq_lengths=queries, key_value_seq_lengths=keys, return_residual=True
        )

    (out, log_sum_exp), vjp = jax.vjp(function, query, key, value)
    np.testing.assert_array_equal(out, np.zeros_like(out))
    np.testing.assert_array_equal(log_sum_exp, np.full_like(log_sum_exp, -np.inf))
    for gradient in vjp((jnp.ones_like(out), jnp.ones_like(log_sum_exp))):
        np.testing.assert_array_equal(gradient, np.zeros_like(gradient))


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("splits", [1, 4])
def test_results_are_the_same_from_run_to_run(splits, streams):
    operands = arrays(200, 300)

    @jax.jit
    def both(*arrays):
        out, vjp = jax.vjp(functools.partial(jaxdnn.dot_product_attention, is_causal=True), *arrays)
        return out, *vjp(out)

    with jaxdnn.options(knobs=PANELS | {"splits": splits, "streams": streams}):
        first = both(*operands)
        for _ in range(5):
            jax.tree.map(np.testing.assert_array_equal, both(*operands), first)


def test_memory_is_linear_in_the_length():
    def workspace(length):
        shapes = (jax.ShapeDtypeStruct((1, length, 8, 64), jnp.float32),) * 3
        calls = find_differentiated_calls(functools.partial(jaxdnn.dot_product_attention, is_causal=True), *shapes)
        plans = [select(call.spec, call.signature, "cpu").plan for call in calls]
        return [plan.workspace for plan in plans if plan is not None]

    assert workspace(65_536) == [2 * bytes_ for bytes_ in workspace(32_768)]
    assert workspace(32_768)[0] == 0


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"query_block": 33}, "query_block must be a multiple of 32; got 33"),
        ({"key_block": 6}, "key_block must be a multiple of 4; got 6"),
        ({"splits": 0}, "splits must be an int of at least 1; got 0"),
        ({"per_task": 0}, "per_task must be an int of at least 1; got 0"),
    ],
)
def test_knobs(knobs, message):
    with jaxdnn.options(knobs=knobs), pytest.raises(ValueError, match=message):
        jaxdnn.dot_product_attention(*arrays(3, 4))
