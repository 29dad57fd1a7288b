"""`causal_conv1d` and its step, against the sum that defines them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxdnn
from checking.sharding import placed

RANDOM = np.random.default_rng(3)
X, WEIGHT, BIAS, STATE = (
    RANDOM.standard_normal(shape).astype("float32") for shape in ((2, 9, 5), (4, 5), (5,), (2, 3, 5))
)
SEGMENTS = np.array([[0, 0, 0, 1, 1, 1, 1, 2, 2], [7, 7, 3, 3, 3, 3, 3, 3, 3]], "int32")


def defined(x, weight, bias, state=None, segments=None):
    """In float64, position by position."""
    x, weight, bias = (np.asarray(one, np.float64) for one in (x, weight, bias))
    width, before = len(weight), np.zeros((len(x), len(weight) - 1, x.shape[2])) if state is None else state
    seen, y = np.concatenate([before, x], 1), np.zeros(x.shape)
    for b, t, w in np.ndindex(len(x), x.shape[1], width):
        source = t - (width - 1) + w
        if segments is None or (source >= 0 and segments[b, source] == segments[b, t]):
            y[b, t] += weight[w] * seen[b, t + w]
    y = y + bias
    return y / (1 + np.exp(-y))


def close(got, want):
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("state", [None, STATE], ids=["no state", "state"])
def test_it_is_the_sum_that_defines_it(state):
    y, final = jaxdnn.causal_conv1d(
        X, WEIGHT, BIAS, activation=jax.nn.silu, initial_state=state, return_final_state=True
    )
    close(y, defined(X, WEIGHT, BIAS, state))
    close(final, X[:, -3:])


def test_segments_do_not_see_one_another():
    call = {"activation": jax.nn.silu, "segment_ids": SEGMENTS, "return_final_state": True}
    y, final = jaxdnn.causal_conv1d(X, WEIGHT, BIAS, **call)
    close(y, defined(X, WEIGHT, BIAS, segments=SEGMENTS))
    close(final, np.where((SEGMENTS[:, -3:] == SEGMENTS[:, -1:])[..., None], X[:, -3:], 0))
    negative, _ = jaxdnn.causal_conv1d(X, WEIGHT, BIAS, **{**call, "segment_ids": SEGMENTS - 1})
    close(negative, y)


@pytest.mark.parametrize("length", [1, 2, 9])
def test_pieces_and_steps_are_the_whole(length):
    """With the state of what comes before: a piece at a time, and a position at a time."""
    whole = jaxdnn.causal_conv1d(X, WEIGHT, BIAS, activation=jax.nn.silu)
    state, pieces = np.zeros_like(STATE), []
    for start in range(0, X.shape[1], length):
        piece, state = jaxdnn.causal_conv1d(
            X[:, start : start + length],
            WEIGHT,
            BIAS,
            activation=jax.nn.silu,
            initial_state=state,
            return_final_state=True,
        )
        pieces.append(piece)
    close(jnp.concatenate(pieces, 1), whole)
    state, steps = jnp.zeros_like(STATE), []
    for t in range(X.shape[1]):
        y, state = jaxdnn.causal_conv1d_update(X[:, t], state, WEIGHT, BIAS, activation=jax.nn.silu)
        steps.append(y)
    close(jnp.stack(steps, 1), whole)


@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["no segments", "segments"])
def test_gradients(segments):
    def loss(function):
        return lambda *arrays: jnp.sum(jnp.sin(function(*arrays)))

    def plain(x, weight, bias):
        seen = jnp.pad(x, ((0, 0), (3, 0), (0, 0)))
        ids = jnp.zeros(X.shape[:2], int) if segments is None else jnp.asarray(segments)
        ids = jnp.pad(ids, ((0, 0), (3, 0)), constant_values=100)
        terms = [
            jnp.where((ids[:, w : w + 9] == ids[:, 3:])[..., None], seen[:, w : w + 9], 0) * weight[w] for w in range(4)
        ]
        return jax.nn.silu(sum(terms) + bias)

    def ours(*arrays):
        return jaxdnn.causal_conv1d(*arrays, activation=jax.nn.silu, segment_ids=segments)

    got, want = (jax.grad(loss(function), (0, 1, 2))(X, WEIGHT, BIAS) for function in (ours, plain))
    for one, other in zip(got, want, strict=True):
        close(one, other)


@pytest.mark.parametrize("state", [False, True], ids=["no state", "state"])
@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["no segments", "segments"])
def test_explicit_mesh(cpus, segments, state):
    """Sequences, and channels, lie on devices of their own."""
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2, devices=cpus)
    x, weight, bias = X[..., :4], WEIGHT[:, :4], BIAS[:4]

    def ours(*arrays):
        given = {"segment_ids": None if segments is None else jnp.asarray(segments), "return_final_state": state}
        return jax.tree.leaves(jaxdnn.causal_conv1d(*arrays, activation=jax.nn.silu, **given))

    with jax.set_mesh(mesh):
        specs = (P("a", None, "b"), P(None, "b"), P("b"))
        got = jax.jit(ours)(*placed(mesh, specs, (x, weight, bias)))
        assert all(jax.typeof(one).sharding.spec == specs[0] for one in got)
    close(got[0], defined(x, weight, bias, segments=segments))


def test_explicit_mesh_of_positions(cpus):
    mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Explicit,), devices=cpus[:2])
    with jax.set_mesh(mesh):
        (x,) = placed(mesh, (P(None, "a"),), (X[:, :8],))
        y = jax.jit(lambda x: jaxdnn.causal_conv1d(x, WEIGHT, BIAS, activation=jax.nn.silu))(x)
        assert jax.typeof(y).sharding.spec == P(None, "a", None)
    close(y, defined(X[:, :8], WEIGHT, BIAS))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["no segments", "segments"])
def test_strict_promotion(dtype, segments):
    x, weight, bias, state = (jnp.asarray(one, dtype) for one in (X, WEIGHT, BIAS, STATE))
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        jaxdnn.causal_conv1d(x, weight, bias, segment_ids=segments)
        jaxdnn.causal_conv1d_update(x[:, 0], state, weight, bias)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_dtypes(dtype):
    arrays = [jnp.asarray(one, dtype) for one in (X, WEIGHT, BIAS)]
    y = jaxdnn.causal_conv1d(*arrays)
    assert y.dtype == jnp.dtype(dtype)
    wide = [np.asarray(one, np.float64) for one in arrays]
    exact = sum(np.pad(wide[0], ((0, 0), (3, 0), (0, 0)))[:, w : w + 9] * wide[1][w] for w in range(4)) + wide[2]
    np.testing.assert_allclose(np.asarray(y, np.float64), exact, atol=8 * float(jnp.finfo(dtype).eps))


def test_a_state_of_another_dtype_rounds_what_comes_next_alone():
    state = jnp.zeros(STATE.shape, "bfloat16")
    y, after = jaxdnn.causal_conv1d_update(X[:, 0], state, WEIGHT)
    np.testing.assert_array_equal(y, X[:, 0] * WEIGHT[-1])
    np.testing.assert_array_equal(after, jnp.concatenate([state[:, 1:], X[:, :1].astype("bfloat16")], 1))
    # A wider state is summed as it is: what is left of its sum has not the bits of bfloat16.
    one, tiny = jnp.ones((1, 1), "bfloat16"), jnp.full((1, 1, 1), -1 - 2.0**-12, "float32")
    y, _ = jaxdnn.causal_conv1d_update(one, tiny, jnp.ones((2, 1), "bfloat16"))
    np.testing.assert_array_equal(y, [[-(2.0**-12)]])
    with pytest.raises(TypeError, match="causal_conv1d_update: state must have a floating dtype; got int32"):
        jaxdnn.causal_conv1d_update(X[:, 0], state.astype("int32"), WEIGHT)


@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["no segments", "segments"])
def test_what_an_activation_returns_has_the_dtype_of_x(segments):
    y = jaxdnn.causal_conv1d(X, WEIGHT, activation=lambda acc: (acc > 0).astype("float16"), segment_ids=segments)
    assert y.dtype == X.dtype
    for activation in (jnp.sum, lambda acc: (acc, acc)):
        with pytest.raises(ValueError, match=r"activation must return an array of the shape .* \(2, 9, 5\); got"):
            jaxdnn.causal_conv1d(X, WEIGHT, activation=activation, segment_ids=segments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": X[0]}, r"x must have shape \(batch, length, channels\); got \(9, 5\)"),
        ({"weight": WEIGHT[:, :3]}, r"weight must have shape \(width, channels\), with the 5 channels of x"),
        ({"weight": WEIGHT.astype("float16")}, "must have one floating dtype; got float32 and float16"),
        ({"bias": BIAS * 1j}, "bias must have a floating dtype; got complex64"),
        ({"bias": BIAS[:2]}, r"bias must have shape \(5,\); got \(2,\)"),
        ({"initial_state": STATE[:, :2]}, r"initial_state must have shape \(2, 3, 5\)"),
        ({"segment_ids": SEGMENTS[:, :4]}, r"segment_ids must have shape \(2, 9\)"),
        ({"segment_ids": SEGMENTS.astype("float32")}, "segment_ids must have an integer dtype; got float32"),
        ({"segment_ids": SEGMENTS, "initial_state": STATE}, "exclude each other"),
        ({"return_final_state": 1}, "return_final_state must be True or False; got 1"),
        ({"activation": lambda acc: acc * 1j}, "activation must return real numbers; got complex64"),
        ({"activation": "silu"}, "activation must be a function of an array"),
        ({"seq_idx": SEGMENTS}, "did you mean segment_ids="),
    ],
)
def test_bad_input(changes, message):
    with pytest.raises((TypeError, ValueError), match=message):
        jaxdnn.causal_conv1d(**{"x": X, "weight": WEIGHT, **changes})


@pytest.mark.parametrize("given", [{}, {"initial_state": STATE[..., :0]}, {"segment_ids": SEGMENTS}], ids=repr)
def test_no_channels(given):
    y, state = jaxdnn.causal_conv1d(X[..., :0], WEIGHT[:, :0], return_final_state=True, **given)
    assert (y.shape, state.shape) == ((2, 9, 0), (2, 3, 0))
