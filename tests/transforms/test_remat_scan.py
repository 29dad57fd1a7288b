"""Layers in a loop, and layers that are computed again in the backward pass."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn
from checking.cases import TABLE
from checking.compare import as_tuple, assert_close, check, runs

LAYERS = 3


def stacked(case):
    """What goes round, and the parameters of each layer."""
    primals, count = case.primals(), len(case.outputs)
    factors = 1 + np.arange(LAYERS) / 4
    return (
        (*primals[:count], *(np.stack([p * p.dtype.type(f) for f in factors]) for p in primals[count:])),
        case.cotangents(),
    )


def unrolled(layer, carry, parameters):
    """As `jax.lax.scan`, in Python."""
    results = []
    for i in range(LAYERS):
        carry, result = layer(carry, tuple(array[i] for array in parameters))
        results.append(result)
    return carry, jnp.stack(results)


def network(function, count, *arrays, scan=jax.lax.scan):
    """Every layer's results are the next one's first operands, as a transformer's residual stream is."""

    def layer(carry, parameters):
        first, *others = carry
        results = function(jnp.tanh(first), *others, *parameters)
        return results, jnp.mean(results[0])

    results, means = scan(layer, tuple(arrays[:count]), tuple(arrays[count:]))
    return *results, means


def gradients(function, arrays, cotangents, scan=jax.lax.scan):
    def loss(*arrays):
        *results, means = network(function, len(cotangents), *arrays, scan=scan)
        weighted = sum(jnp.sum(result * cotangent) for result, cotangent in zip(results, cotangents, strict=True))
        return weighted + jnp.sum(jnp.square(means))

    return jax.value_and_grad(loss, tuple(range(len(arrays))))(*arrays)


def rematerialized(function, arrays, cotangents):
    return gradients(jax.checkpoint(function), arrays, cotangents)


def with_policy(function, arrays, cotangents):
    saved = jax.checkpoint_policies.dots_saveable
    return gradients(jax.checkpoint(function, policy=saved), arrays, cotangents)


def forward_mode(function, arrays, cotangents):
    transformed = functools.partial(network, function, len(cotangents))
    return jax.jvp(transformed, arrays, jax.tree.map(jnp.cos, arrays))


def hessian_vector_product(function, arrays, cotangents, scan=jax.lax.scan):
    def gradient(arrays):
        return gradients(jax.checkpoint(function), arrays, cotangents, scan)[1]

    return jax.jvp(gradient, (arrays,), (jax.tree.map(jnp.cos, arrays),))[1]


def while_loop(function, arrays, cotangents):
    count = len(cotangents)

    def body(state):
        i, *carry = state
        return i + 1, *function(*carry, *(parameters[i] for parameters in arrays[count:]))

    return jax.lax.while_loop(lambda state: state[0] < LAYERS, body, (0, *arrays[:count]))[1:]


@pytest.mark.parametrize(("case", "engine"), runs(TABLE.looped))
@pytest.mark.parametrize(
    "transform",
    [gradients, rematerialized, with_policy, forward_mode, while_loop],
    ids=lambda transform: transform.__name__,
)
def test_loop(transform, case, engine):
    check(transform, case, stacked, engine, surroundings=True)


# The reference's perturbations are functions with derivatives of their own, whose second ones JAX gets wrong in a scan.
in_python = functools.partial(hessian_vector_product, scan=unrolled)


@pytest.mark.parametrize(("case", "engine"), runs(TABLE.looped))
def test_hessian_vector_product(case, engine):
    with jaxdnn.options(engine=engine):
        actual = jax.jit(functools.partial(hessian_vector_product, as_tuple(case.call)))(*stacked(case))
    assert_close(actual, in_python, case, stacked, surroundings=True)
