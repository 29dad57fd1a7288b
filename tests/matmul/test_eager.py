"""Calls outside of `jit`: what was compiled once is not compiled again, and nothing of a call outlives it."""

import gc
import weakref
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import monitoring

import jaxdnn

X, W, BIAS = (
    jnp.asarray(np.random.default_rng(i).standard_normal(shape), jnp.float32)
    for i, shape in enumerate([(6, 8), (8, 10), (10,)])
)
STEPS = 4


@jax.custom_vjp
def clipped(y):
    """A function with rules of its own, of which there is one for the whole process."""
    return jnp.tanh(y)


clipped.defvjp(lambda y: (jnp.tanh(y), y), lambda y, dy: (jnp.clip(y * dy, -1, 1),))


def local(factor):
    """Functions with rules of their own, which are new each time."""
    function = jax.custom_vjp(lambda y: factor * jnp.tanh(y))
    function.defvjp(lambda y: (factor * jnp.tanh(y), y), lambda y, dy: (factor * y * dy,))
    return function


def local_jvp(factor):
    function = jax.custom_jvp(jnp.tanh)
    function.defjvp(lambda primals, tangents: (jnp.tanh(*primals), factor * primals[0] * tangents[0]))
    return function


ROWS = jnp.linspace(-1, 1, 10, dtype=jnp.float32)

# Of the number of the step: what is new in every step and computes the same.
ACTIVATIONS = {
    "tanh": lambda _: jnp.tanh,
    "relu": lambda _: jax.nn.relu,
    "silu": lambda _: jax.nn.silu,
    "gelu": lambda _: jax.nn.gelu,
    "custom_vjp": lambda _: clipped,
    "local custom_vjp": lambda _: local(2.0),
    "local custom_jvp": lambda _: local_jvp(2.0),
    "closure over a number": lambda _: lambda y: jnp.tanh(2.0 * y),
    "closure over a scalar": lambda _: (lambda scale: lambda y: jnp.tanh(scale * y))(jnp.float32(2)),
    "rule over an array that changes": lambda step: local_jvp(step + ROWS),
    "not pointwise": lambda _: lambda y: jax.nn.softmax(y, axis=-1),
}


def layer(activation):
    return lambda x, w: jaxdnn.matmul(x, w, BIAS, epilogue=lambda y, bias: activation(y + bias))


def loss(activation):
    return lambda x, w: jnp.sum(jnp.sin(layer(activation)(x, w)))


CALLS = {
    "forward": lambda activation: layer(activation)(X, W),
    "value and gradient": lambda activation: jax.value_and_grad(loss(activation), (0, 1))(X, W),
    "vmap of gradient": lambda activation: jax.vmap(jax.grad(loss(activation)), (0, None))(jnp.stack([X, -X]), W),
}


@pytest.fixture
def compiles():
    """How often XLA compiles from here on."""
    counts = Counter[str]()
    listening = True

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        del duration_secs
        if listening and event.endswith("backend_compile_duration"):
            counts[event] += 1

    monitoring.register_event_duration_secs_listener(listen)
    yield counts
    listening = False


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("call", CALLS)
def test_a_step_compiles_nothing_again(call, activation, compiles):
    CALLS[call](ACTIVATIONS[activation](0))
    compiles.clear()
    for step in range(1, STEPS):
        CALLS[call](ACTIVATIONS[activation](step))
    assert not compiles


@jax.default_matmul_precision("highest")
def test_what_changes_is_read_anew():
    """A number that the function, and one that its derivative, looks up."""
    scale = [1.0]

    @jax.custom_vjp
    def scaled(y):
        return scale[0] * y

    scaled.defvjp(lambda y: (scale[0] * y, y), lambda y, dy: (scale[0] * dy + 0 * y,))
    for scale[0] in (1.0, 2.0, 1.0):
        y, (gradient,) = jax.value_and_grad(lambda x: jnp.sum(jaxdnn.matmul(x, W, epilogue=scaled)), (0,))(X)
        np.testing.assert_allclose(y, scale[0] * jnp.sum(X @ W), rtol=1e-3)
        np.testing.assert_allclose(gradient, scale[0] * jnp.ones((6, 10)) @ W.T, rtol=1e-3)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("over", [local_jvp, lambda array: lambda y: jax.nn.softmax(y * array, axis=-1)])
def test_arrays_are_let_go(over, call):
    """Those that a step's function closes over, but for the first one's, whose program is kept."""
    CALLS[call](over(ROWS))
    held = []
    for step in range(STEPS):
        array = step + ROWS
        held.append(weakref.ref(array))
        CALLS[call](over(array))
        del array
    gc.collect()
    assert not any(array() is not None for array in held)


@pytest.mark.parametrize("call", CALLS)
def test_functions_are_let_go(call):
    """All but the first one, whose program is kept."""
    held = []
    for _ in range(STEPS):
        activation = local(3.0)
        held.append(weakref.ref(activation))
        CALLS[call](activation)
        del activation
    gc.collect()
    assert sum(function() is not None for function in held) <= 1
