"""As JAX's own tests of `jax.nn.dot_product_attention` call it: the same results and gradients."""

import functools
import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn

B, S, T, N, H = 2, 16, 24, 4, 8
LENGTHS = np.array([5, 16], np.int32), np.array([9, 24], np.int32)

MASKS = {
    "none": {},
    "causal": {"is_causal": True},
    "padding": {"query_seq_lengths": LENGTHS[0], "key_value_seq_lengths": LENGTHS[1]},
    "key padding": {"key_value_seq_lengths": LENGTHS[1]},
    "window": {"local_window_size": (3, 2)},
    "window of one number": {"local_window_size": 4},
    "custom": {"mask": np.tril(np.ones((1, 1, S, T), bool), 3)},
    "custom of every head": {"mask": np.arange(B * N * S * T).reshape(B, N, S, T) % 5 != 1},
    "bias": {"bias": np.linspace(-1, 1, B * N * S * T, dtype=np.float32).reshape(B, N, S, T)},
    "bias of no head": {"bias": np.linspace(-2, 1, S * T, dtype=np.float32).reshape(1, 1, S, T)},
    "scale": {"scale": 0.25},
}
PAIRS = [
    ("causal", "padding"),
    ("custom", "padding"),
    ("bias", "causal"),
    ("bias of no head", "custom of every head"),
    ("causal", "window"),
    ("bias", "key padding"),
    ("custom", "scale"),
]
COMBINED = MASKS | {f"{one} and {other}": MASKS[one] | MASKS[other] for one, other in PAIRS}


@pytest.fixture(autouse=True)
def exact():
    """As JAX's own do on GPUs, where float32 is multiplied as tf32 without that."""
    with jax.default_matmul_precision("highest"):
        yield


def arrays(dtype, key_heads, seed=0):
    random = np.random.default_rng(seed)
    shapes = (B, S, N, H), (B, T, key_heads, H), (B, T, key_heads, H)
    return [jnp.asarray(random.standard_normal(shape), dtype) for shape in shapes]


def results(function, query, key, value):
    out, pull_back = jax.vjp(function, query, key, value)
    return out, pull_back(jnp.cos(out.astype(jnp.float32)).astype(out.dtype))


def assert_alike(ours, theirs, dtype):
    """Both round to the dtype, and theirs sums some of its products in 16 bits."""
    tolerance = {"float32": 2e-5, "bfloat16": 4e-2}[dtype]

    def compare(one, other):
        one, other = (np.asarray(array, np.float32) for array in (one, other))
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance * max(1.0, np.max(np.abs(other))))

    jax.tree.map(compare, ours, theirs)


@pytest.mark.parametrize(
    ("name", "dtype", "key_heads"),
    [
        *((name, "float32", 2) for name in COMBINED),
        *itertools.product(["causal", "bias and key padding"], ["bfloat16"], [1, 4]),
    ],
)
def test_same_as_jax(name, dtype, key_heads):
    keywords = COMBINED[name]
    if "bias" in keywords:
        keywords = keywords | {"bias": keywords["bias"].astype(dtype)}
    given = arrays(dtype, key_heads)
    ours, theirs = (
        jax.jit(functools.partial(results, functools.partial(function, **keywords)))(*given)
        for function in (
            jaxdnn.dot_product_attention,
            functools.partial(jax.nn.dot_product_attention, implementation="xla"),
        )
    )
    assert ours[0].dtype == theirs[0].dtype
    assert_alike(ours, theirs, dtype)


@pytest.mark.parametrize("shape", [(B, N, S, T), (1, N, S, T), (B, 1, S, T), (1, 1, S, T), (N, S, T), (1, S, T)])
def test_gradient_of_bias(shape):
    query, key, value = arrays("float32", 2)
    bias = jnp.linspace(-1, 1, int(np.prod(shape)), dtype=jnp.float32).reshape(shape)

    def gradient(function):
        return jax.grad(lambda bias: jnp.sum(jnp.sin(function(query, key, value, bias, is_causal=True))))(bias)

    assert_alike(*map(gradient, (jaxdnn.dot_product_attention, jax.nn.dot_product_attention)), "float32")


@pytest.mark.parametrize("in_axes", [(0, 0, 0), (1, 0, 0), (0, None, None), (None, 0, 0)])
def test_under_vmap(in_axes):
    given = [
        array if axis is None else jnp.stack([array, -array, array / 2], axis)
        for array, axis in zip(arrays("float32", 2), in_axes, strict=True)
    ]
    ours, theirs = (
        jax.vmap(functools.partial(results, function), in_axes)(*given)
        for function in (jaxdnn.dot_product_attention, jax.nn.dot_product_attention)
    )
    assert_alike(ours, theirs, "float32")


@pytest.mark.parametrize("batch", [True, False])
def test_residual(batch):
    given = [array if batch else array[0] for array in arrays("float32", 2)]
    ours, theirs = (
        function(*given, return_residual=True)
        for function in (jaxdnn.dot_product_attention, jax.nn.dot_product_attention)
    )
    assert [array.shape for array in ours] == [array.shape for array in theirs]
    assert_alike(ours, theirs, "float32")


def test_lengths_beyond_the_axis_are_those_of_the_axis():
    query, key, value = arrays("float32", 2)
    long = {"query_seq_lengths": np.array([99, 16], np.int32), "key_value_seq_lengths": np.array([24, 99], np.int32)}
    ours, theirs = (
        function(query, key, value, **long) for function in (jaxdnn.dot_product_attention, jax.nn.dot_product_attention)
    )
    assert_alike(ours, theirs, "float32")
    assert_alike(ours, jaxdnn.dot_product_attention(query, key, value), "float32")


def test_every_argument_of_jax_is_one_of_ours():
    theirs = inspect.signature(jax.nn.dot_product_attention).parameters
    ours = inspect.signature(jaxdnn.dot_product_attention).parameters
    assert list(ours)[: len(theirs)] == [*list(theirs)[:-2], "implementation", "return_residual"]
    for name, parameter in theirs.items():
        assert (ours[name].kind, ours[name].default) == (parameter.kind, parameter.default)
