"""Taylor series, `jax.experimental.jet`, against those of plain JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.jet import jet

import jaxdnn


def random(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def layer_norm(x, scale, bias):
    centered = x - jnp.mean(x, -1, keepdims=True)
    return centered * jax.lax.rsqrt(jnp.mean(centered * centered, -1, keepdims=True) + 1e-6) * scale + bias


def rms_norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


X, W, V, B = random(0, 3, 4), random(1, 4, 5), random(2, 4, 5), random(3, 5)
SCALE, BIAS, RESIDUAL = random(4, 4), random(5, 4), random(6, 3, 4)

# Ours, plain JAX, arguments.
CASES = {
    "matmul": (jaxdnn.matmul, jnp.matmul, (X, W)),
    "epilogue": (
        lambda x, w, b: jaxdnn.matmul(x, w, b, epilogue=lambda y, b: jax.nn.gelu(y + b)),
        lambda x, w, b: jax.nn.gelu(x @ w + b),
        (X, W, B),
    ),
    "several results": (
        lambda x, w: jaxdnn.matmul(x, w, epilogue=lambda y: (jnp.tanh(y), jnp.max(y, 1))),
        lambda x, w: (jnp.tanh(x @ w), jnp.max(x @ w, 1)),
        (X, W),
    ),
    "gated": (jaxdnn.gated_linear_unit, lambda x, w, v: jax.nn.silu(x @ w) * (x @ v), (X, W, V)),
    "mapped": (
        lambda x, w: jax.vmap(lambda x: jaxdnn.matmul(x, w, epilogue=jnp.sin))(x),
        lambda x, w: jnp.sin(x @ w),
        (jnp.stack([X, -2 * X]), W),
    ),
    "gradient of a product": (
        jax.grad(lambda x, w: jnp.sum(jaxdnn.matmul(x, w, epilogue=jnp.sin)), (0, 1)),
        jax.grad(lambda x, w: jnp.sum(jnp.sin(x @ w)), (0, 1)),
        (X, W),
    ),
    "rms_norm": (jaxdnn.rms_norm, rms_norm, (X, SCALE)),
    "layer_norm": (lambda *arrays: jaxdnn.layer_norm(*arrays, epsilon=1e-6), layer_norm, (X, SCALE, BIAS)),
    "residual": (
        lambda x, scale, residual: jaxdnn.rms_norm(x, scale, residual=residual),
        lambda x, scale, residual: (rms_norm(x + residual, scale), x + residual),
        (X, SCALE, RESIDUAL),
    ),
    "gradient of a norm": (
        jax.grad(lambda x, scale: jnp.sum(jnp.sin(jaxdnn.rms_norm(x, scale))), (0, 1)),
        jax.grad(lambda x, scale: jnp.sum(jnp.sin(rms_norm(x, scale))), (0, 1)),
        (X, SCALE),
    ),
}


@pytest.mark.parametrize("order", [1, 2, 4])
@pytest.mark.parametrize("name", CASES)
def test_as_of_plain_jax(name, order):
    ours, plain, arrays = CASES[name]
    series = [[jnp.cos((i + 2) * array) for i in range(order)] for array in arrays]
    with jax.default_matmul_precision("highest"):
        found, expected = (jet(function, arrays, series) for function in (ours, plain))
    largest = [1 + float(jnp.max(jnp.abs(array))) for array in jax.tree.leaves(expected)]
    for one, other, size in zip(jax.tree.leaves(found), jax.tree.leaves(expected), largest, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * size)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float64])
@pytest.mark.parametrize("name", CASES)
def test_of_each_dtype(name, dtype):
    """Which JAX's own have rules for, and what is beside them in ours not."""
    ours, plain, arrays = CASES[name]
    arrays = [array.astype(dtype) for array in arrays]
    series = [[jnp.cos(array), array] for array in arrays]
    with jax.default_matmul_precision("highest"):
        found, expected = (jet(function, arrays, series) for function in (ours, plain))
    near = 1e-9 if dtype == jnp.float64 else 0.1
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        exact = np.asarray(other, np.float64)
        np.testing.assert_allclose(np.asarray(one, np.float64), exact, atol=near * (1 + np.abs(exact).max()))
