"""Layers in a loop, and layers that are computed again in the backward pass."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checking.calls import primitives
from checking.cases import F32, NormCase
from checking.compare import check, engines

LAYERS = 3
CASE = NormCase("layer_norm", (4, 16), scale=F32, bias=F32, residual=F32)


def stacked(case):
    x, residual, scale, bias = case.primals()
    factors = 1 + np.arange(LAYERS, dtype=np.float32)[:, None] / 4
    return (x, residual, scale * factors, bias * factors), case.cotangents()


def network(function, x, residual, scales, biases):
    """The residual stream of a transformer: every layer adds to it and normalizes it."""

    def layer(carry, parameters):
        y, stream = carry
        y, stream = function(jnp.tanh(y), stream, *parameters)
        return (y, stream), jnp.mean(y)

    (y, stream), means = jax.lax.scan(layer, (x, residual), (scales, biases))
    return y, stream, means


def gradients(function, arrays, cotangents):
    def loss(*arrays):
        y, stream, means = network(function, *arrays)
        return jnp.sum(y * cotangents[0]) + jnp.sum(stream * cotangents[1]) + jnp.sum(jnp.square(means))

    return jax.value_and_grad(loss, (0, 1, 2, 3))(*arrays)


def rematerialized(function, arrays, cotangents):
    return gradients(jax.checkpoint(function), arrays, cotangents)


def with_policy(function, arrays, cotangents):
    saved = jax.checkpoint_policies.dots_saveable
    return gradients(jax.checkpoint(function, policy=saved), arrays, cotangents)


def forward_mode(function, arrays, cotangents):
    del cotangents
    return jax.jvp(functools.partial(network, function), arrays, jax.tree.map(jnp.cos, arrays))


def hessian_vector_product(function, arrays, cotangents):
    def gradient(arrays):
        return gradients(jax.checkpoint(function), arrays, cotangents)[1]

    return jax.jvp(gradient, (arrays,), (jax.tree.map(jnp.cos, arrays),))[1]


def while_loop(function, arrays, cotangents):
    del cotangents
    x, residual, scales, biases = arrays

    def body(state):
        i, y, stream = state
        return i + 1, *function(y, stream, scales[i], biases[i])

    return jax.lax.while_loop(lambda state: state[0] < LAYERS, body, (0, x, residual))[1:]


@pytest.mark.parametrize("engine", engines())
@pytest.mark.parametrize(
    "transform",
    [gradients, rematerialized, with_policy, forward_mode, hessian_vector_product, while_loop],
    ids=lambda transform: transform.__name__,
)
def test_loop(transform, engine):
    check(transform, CASE, stacked, engine, surroundings=True)


def test_remat_computes_again():
    x, scale, bias = NormCase("layer_norm", (4, 16), scale=F32, bias=F32).primals()

    def loss(x):
        return jnp.sum(jnp.sin(jax.checkpoint(lambda x: CASE.replace(residual=None).call(x, scale, bias))(jnp.sin(x))))

    found = primitives(jax.make_jaxpr(jax.grad(loss))(x).jaxpr)
    assert found == {"jaxdnn_norm_forward": 2, "jaxdnn_norm_backward": 1}
