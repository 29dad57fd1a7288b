"""What only attention has: its derivative as one primitive, its masks, its random bits, and functions of scores."""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn
from checking.calls import primitives
from checking.cases.attention import philox
from checking.compare import engines
from jaxdnn.primitives.attention.dropout import random_bits
from jaxdnn.primitives.attention.spec import AttentionSpec

attention = jaxdnn.dot_product_attention


@pytest.fixture(params=engines("attention"))
def each_engine(request):
    """Kernels, and the definition too, which no test would see where these serve a call."""
    with jaxdnn.options(engine=request.param):
        yield


def arrays(*shape, count=3, seed=0):
    random = np.random.default_rng(seed)
    return [jnp.asarray(random.standard_normal(shape), "float32") for _ in range(count)]


Q, K, V = arrays(2, 6, 4, 8)


def loss(*operands, **keywords):
    return jnp.sum(jnp.sin(attention(*operands, **keywords)))


# ---- Derivatives ----------------------------------------------------------------------------------------------------


def test_the_gradient_is_one_backward_primitive():
    jaxpr = jax.make_jaxpr(jax.jit(jax.grad(loss, (0, 1, 2))))(Q, K, V)
    assert primitives(jaxpr.jaxpr) == {"jaxdnn_attention_forward": 1, "jaxdnn_attention_backward": 1}


@pytest.mark.usefixtures("each_engine")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_strict_promotion(dtype):
    query, key, value = (array.astype(dtype) for array in (Q, K, V))
    keywords = {"dropout_rate": 0.5, "dropout_rng": jax.random.key(0), "sinks": jnp.ones(4, dtype)}

    def joined(query):
        part = jaxdnn.dot_product_attention(query, key, value, return_residual=True, **keywords)
        return jnp.sum(jaxdnn.combine_attention(part, part)[0].astype("float32"))

    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        jax.jit(jax.grad(joined))(query)


def test_the_tangent_is_one_primitive():
    jaxpr = jax.make_jaxpr(lambda *a: jax.jvp(attention, a, a))(Q, K, V)
    assert primitives(jaxpr.jaxpr) == {"jaxdnn_attention_forward": 1, "jaxdnn_attention_tangent": 1}


def test_no_array_as_large_as_the_scores_is_kept_for_the_gradient():
    query, key, value = arrays(1, 64, 1, 2)
    _, pull_back = jax.vjp(attention, query, key, value)
    assert max(leaf.size for leaf in jax.tree.leaves(pull_back)) == query.size


@pytest.mark.usefixtures("each_engine")
def test_the_log_sum_exp_is_differentiable():
    def sums(query):
        return jnp.sum(jnp.cos(attention(query, K, V, return_residual=True)[1]))

    def plain(query):
        scores = jnp.einsum("btnh,bsnh->btns", query, K, precision="highest") / np.sqrt(8)
        return jnp.sum(jnp.cos(jax.nn.logsumexp(scores, -1)))

    np.testing.assert_allclose(jax.grad(sums)(Q), jax.grad(plain)(Q), rtol=1e-4, atol=1e-5)


BLIND = jnp.arange(6)[:, None] == 2  # the third query
WAYS_TO_SEE_NOTHING = {
    "mask": {"mask": ~BLIND},
    "bias": {"bias": jnp.where(BLIND, -jnp.inf, jnp.zeros((6, 6), "float32"))},
    "segments": {"segment_ids": (jnp.where(BLIND[:, 0], 1, 0), jnp.zeros(6, int))},
    "mask_mod": {"mask_mod": lambda *at: at[2] != 2},
}


@pytest.mark.parametrize("way", WAYS_TO_SEE_NOTHING)
@pytest.mark.parametrize("gradient", ["out", "log_sum_exp"])
@pytest.mark.usefixtures("each_engine")
def test_rows_that_see_nothing_have_no_gradient(gradient, way):
    """Whatever their cotangent is: that of -infinity, in a loss, may well be NaN."""

    def results(*operands):
        return attention(*operands, **WAYS_TO_SEE_NOTHING[way], return_residual=True)

    (out, sums), pull_back = jax.vjp(results, Q, K, V)
    assert jnp.all(out[:, 2] == 0)
    assert jnp.all(sums[:, 2] == -jnp.inf)
    nan = {"out": jnp.zeros_like(out), "log_sum_exp": jnp.zeros_like(sums).at[:, 2].set(jnp.nan)}
    ones = {"out": jnp.ones_like(out), "log_sum_exp": jnp.ones_like(sums)}
    cotangents = nan if gradient == "log_sum_exp" else ones
    d_query, d_key, d_value = pull_back((cotangents["out"], cotangents["log_sum_exp"]))
    assert jnp.all(d_query[:, 2] == 0)
    assert all(jnp.all(jnp.isfinite(array)) for array in (d_query, d_key, d_value))


@pytest.mark.usefixtures("each_engine")
def test_very_negative_scores_have_finite_gradients():
    """One query, whose log-sum-exp is far below the logarithm of the smallest number."""
    query, key, value = jnp.ones_like(Q[:1, :1, :1]), jnp.full_like(K[:1, :3, :1], -100), V[:1, :3, :1]
    assert attention(query, key, value, return_residual=True)[1].item() < -200
    gradients = jax.grad(loss, (0, 1, 2))(query, key, value)
    assert all(jnp.all(jnp.isfinite(array)) for array in gradients)
    assert jnp.all(gradients[2] != 0)


# ---- Functions of scores --------------------------------------------------------------------------------------------


def test_functions_are_traced_once():
    calls = collections.Counter()

    def score_mod(score, batch, head, query, key, slopes):
        del batch
        calls["score"] += 1
        return score + slopes[head] * (key - query)

    def mask_mod(batch, head, query, key):
        del batch, head
        calls["mask"] += 1
        return key <= query

    keywords = {"score_mod": score_mod, "score_mod_operands": [jnp.ones(4)], "mask_mod": mask_mod}
    function = functools.partial(loss, **keywords)
    jax.jit(jax.hessian(lambda scale: function(scale * Q, K, V)))(1.0)
    assert calls == {"score": 1, "mask": 1}


def test_a_loop_of_calls_compiles_once():
    """A function that is written in the loop is a new one each time, and means the same."""
    compiled = set()
    for slope in (1.0, 2.0, 3.0):

        def score_mod(score, batch, head, query, key, slope):
            del batch, head
            return score + jax.nn.relu(slope * (key - query))

        text = jax.make_jaxpr(functools.partial(attention, score_mod=score_mod, score_mod_operands=[slope]))(Q, K, V)
        (equation,) = [one for one in text.jaxpr.eqns if one.primitive.name == "jaxdnn_attention_forward"]
        compiled.add(equation.params["spec"])
    assert len(compiled) == 1


def rounded(slope):
    @jax.custom_jvp
    def straight_through(score):
        return jnp.round(score)

    straight_through.defjvp(lambda primals, tangents: (straight_through(*primals), slope * tangents[0]))
    return lambda score, *_: straight_through(score)


def test_functions_that_differ_in_their_derivative_alone_are_two():
    def spec(slope):
        jaxpr = jax.make_jaxpr(functools.partial(attention, score_mod=rounded(slope)))(Q, K, V)
        (equation,) = [one for one in jaxpr.jaxpr.eqns if one.primitive.name == "jaxdnn_attention_forward"]
        return equation.params["spec"]

    assert spec(1.0) == spec(1.0)
    assert spec(1.0) != spec(2.0)
    gradients = [jax.grad(functools.partial(loss, score_mod=rounded(slope)))(Q, K, V) for slope in (1.0, 2.0)]
    np.testing.assert_allclose(2 * gradients[0], gradients[1], rtol=1e-5)


def test_a_number_gives_way_to_the_scores_dtype():
    def dtype(operand):
        seen = []
        attention(Q, K, V, score_mod=lambda *s: seen.append((s[0] * s[-1]).dtype) or s[0], score_mod_operands=[operand])
        return seen[0].name

    assert dtype(0.5) == "float32"
    assert dtype(jnp.float64(0.5)) == "float64"


def test_positions_are_what_functions_count_by():
    places = jnp.array([5, 0, 3, 1, 4, 2])
    moved = attention(Q[:, places], K, V, positions=(places, None), is_causal=True, score_mod=_by_distance)
    np.testing.assert_allclose(
        moved, attention(Q, K, V, is_causal=True, score_mod=_by_distance)[:, places], rtol=1e-5, atol=1e-6
    )


def _by_distance(score, batch, head, query, key):
    del batch, head
    return score - 0.1 * (query - key)


# ---- Dropout --------------------------------------------------------------------------------------------------------


def test_random_bits_are_philox():
    """The known answers that its authors publish, for counters and keys of zeros and of digits of pi."""
    zero = np.zeros((1, 2), np.uint32)
    words = philox(zero[:, None], np.zeros((1, 1), int), np.zeros(1, int))
    assert [hex(word) for word in words.ravel()] == ["0x6627e8d5", "0xe169c58d", "0xbc57ac4c", "0x9b00dbd8"]
    seeds = np.array([[0xA4093822, 0x299F31D0]], np.uint32)
    for first in (0, 5, 11):
        got = random_bits(jnp.asarray(seeds), jnp.arange(3), first, 6)
        want = philox(seeds[:, None, None], np.arange(3)[:, None], np.arange(5)).reshape(1, 3, -1)
        np.testing.assert_array_equal(got, want[..., first : first + 6])


def kept(key, rate=0.25, queries=64, keys=512):
    """Which probabilities are not dropped: with one-hot values, results are probabilities."""
    query, key_array = jnp.zeros((1, queries, 1, 4)), jnp.zeros((1, keys, 1, 4))
    eye = jnp.eye(keys)[None, :, None]
    return attention(query, key_array, eye, dropout_rate=rate, dropout_rng=key)[0, :, 0] * keys


@pytest.mark.usefixtures("each_engine")
def test_the_rate_is_exact_and_the_mean_is_kept():
    factors = np.asarray(kept(jax.random.key(1)))
    assert set(np.unique(factors).round(4)) == {0.0, 1.3333}
    count = factors.size
    assert abs(np.mean(factors == 0) - 0.25) < 5 * np.sqrt(0.25 * 0.75 / count)


def test_keys_are_arrays():
    """Fresh under vmap and scan, alike for one key, of either kind."""
    keys = jax.random.split(jax.random.key(0), 3)
    mapped = jax.vmap(kept)(keys)
    scanned = jax.lax.scan(lambda carry, key: (carry, kept(key)), 0, keys)[1]
    raw = jnp.stack([kept(jax.random.key_data(key)) for key in keys])
    for other in (scanned, raw):
        np.testing.assert_array_equal(mapped, other)
    assert len({array.tobytes() for array in np.asarray(mapped)}) == 3


@pytest.mark.usefixtures("each_engine")
def test_heads_and_batch_elements_drop_different_ones():
    query = jnp.zeros((2, 8, 4, 4))
    eye = jnp.broadcast_to(jnp.eye(32)[None, :, None], (2, 32, 2, 32))
    keywords = {"dropout_rate": 0.5, "dropout_rng": jax.random.key(3)}
    out = np.asarray(attention(query, jnp.zeros((2, 32, 2, 4)), eye, **keywords))
    assert len({out[b, :, n].tobytes() for b in range(2) for n in range(4)}) == 8


def test_no_dropout_draws_nothing():
    jaxpr = jax.make_jaxpr(lambda key: attention(Q, K, V, dropout_rng=key))(jax.random.key(0))
    assert "random" not in str(jaxpr)


# ---- Others ---------------------------------------------------------------------------------------------------------


def test_implementation_names_an_engine():
    def engine(implementation):
        jaxpr = jax.make_jaxpr(functools.partial(attention, implementation=implementation))(Q, K, V)
        (spec,) = [one.params["spec"] for one in jaxpr.jaxpr.eqns if one.primitive.name == "jaxdnn_attention_forward"]
        assert isinstance(spec, AttentionSpec)
        return spec.options.engine

    assert [engine(name) for name in (None, "xla", "cudnn")] == [None, "xla", None]


def test_key_heads_are_not_repeated():
    """No array of the program is as large as key would be with a head for each query head."""
    query, key, _ = arrays(1, 2, 16, 32)
    key = jnp.tile(key[:, :, :1], (1, 512, 1, 1))
    text = jax.jit(attention).lower(query, key, key).compile().as_text()
    sizes = {int(np.prod([int(n) for n in dims.split(",")])) for dims in re.findall(r"f32\[([\d,]+)\]", text)}
    assert max(sizes) < key.size * 16


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32"])
def test_lengths_of_a_dtype_that_the_axis_is_too_long_for(dtype):
    q = arrays(1, 300, 1, 4, count=1)[0]
    got = attention(q, q, q, key_value_seq_lengths=jnp.array([100], dtype))
    np.testing.assert_allclose(got, attention(q, q[:, :100], q[:, :100]), rtol=1e-5, atol=1e-6)


def test_a_table_that_is_written_to_is_read_again():
    """One of NumPy's is the same object then, and another meaning."""
    table = np.arange(6, dtype=np.float32)

    def found():
        return attention(Q, K, V, score_mod=lambda score, _b, _h, _i, j: score + jnp.asarray(table)[j])

    for _ in range(2):
        np.testing.assert_allclose(found(), attention(Q, K, V, bias=jnp.array(table)[None]), rtol=1e-5, atol=1e-6)
        table *= -1


@pytest.mark.parametrize("engine", [None, "xla"])
@pytest.mark.parametrize(
    ("queries", "keys", "mask", "seen"),
    [
        ([-1], [-1, 2**31 - 1], {"is_causal": True}, [0]),
        ([1], [1, -(2**31)], {"is_causal": True}, [0, 1]),
        ([1], [1, -(2**31)], {"local_window_size": (3, None)}, [0]),
        ([-(2**31)], [-(2**31), 2**31 - 1], {"local_window_size": (None, 2**31 - 2)}, [0]),
        ([-(2**31)], [-(2**31), 5], {"local_window_size": (3, None)}, [0, 1]),
        ([2**31 - 1], [2**31 - 1, 0], {"local_window_size": (None, 3)}, [0, 1]),
        ([0], [0, 2**31 - 1], {"local_window_size": 2**40}, [0, 1]),
    ],
    ids=repr,
)
def test_positions_at_the_ends_of_integers(engine, queries, keys, mask, seen):
    """They lie further apart than 32 bits count; of tangents too, which have no kernel."""
    value = jnp.array([1.0, 3.0]).reshape(1, 2, 1, 1)

    def call(value):
        with jaxdnn.options(engine=engine):
            return jaxdnn.dot_product_attention(
                jnp.ones((1, 1, 1, 1)), jnp.ones((1, 2, 1, 1)), value,
                positions=(jnp.array(queries), jnp.array(keys)), **mask,
            )  # fmt: skip

    y, d_y = jax.jvp(call, (value,), (value,))
    assert [float(y.sum()), float(d_y.sum())] == pytest.approx([float(value[:, jnp.array(seen)].mean())] * 2)
    gradient = jax.grad(lambda value: call(value).sum())(value).ravel()
    assert gradient.tolist() == pytest.approx([1 / len(seen) if key in seen else 0 for key in range(2)])


@pytest.mark.parametrize("x64", [False, True])
def test_numbers_beyond_32_bits(x64):
    """JAX would cut them before they are looked at. Lengths are those of the axis."""
    with jax.enable_x64(x64):
        value = jnp.array([1.0, 3.0]).reshape(1, 2, 1, 1)
        for lengths in (np.array([2**32 + 1]), [2**32 + 1]):
            y = jaxdnn.dot_product_attention(value[:, :1], value, value, scale=0.0, key_value_seq_lengths=lengths)
            assert float(y.sum()) == 2
        for name in ("segment_ids", "positions"):
            with pytest.raises(ValueError, match=f"{name} must fit 32-bit integers; got values from 1 to 4294967297"):
                jaxdnn.dot_product_attention(value, value, value, **{name: np.array([1, 2**32 + 1])})
