"""Layers of products whose epilogues look at what moves on, in jaxdnn and in plain JAX."""

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxdnn
from checking.cases.dtypes import F32

Function = Callable[..., Any]

SIZE = 4
SHAPES = ((3, SIZE), (SIZE, SIZE), (SIZE, SIZE), (SIZE,))  # of x, two weights and a bias

# ------------------------------------------------------------ the two implementations


def _plain_matmul(a: Any, b: Any, *operands: Any, epilogue: Function = lambda acc: acc) -> Any:
    return epilogue(jnp.matmul(a, b), *operands)


def _plain_dot_general(
    a: Any, b: Any, numbers: Any, *, operands: Sequence[Any] = (), epilogue: Function = lambda acc: acc
) -> Any:
    return epilogue(lax.dot_general(a, b, numbers), *operands)


def _plain_gated(x: Any, gate: Any, up: Any, gate_bias: Any = 0.0, *, activation: Function = jax.nn.silu) -> Any:
    bias = jnp.broadcast_to(gate_bias, (*x.shape[:-1], SIZE))
    return activation(x @ gate + bias) * (x @ up)


def _plain_rms_norm(x: Any, scale: Any) -> Any:
    normalized = x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
    return normalized * jnp.broadcast_to(scale, x.shape)


OURS = SimpleNamespace(
    matmul=jaxdnn.matmul,
    dot_general=jaxdnn.dot_general,
    gated_linear_unit=jaxdnn.gated_linear_unit,
    rms_norm=jaxdnn.rms_norm,
)
PLAIN = SimpleNamespace(
    matmul=_plain_matmul,
    dot_general=_plain_dot_general,
    gated_linear_unit=_plain_gated,
    rms_norm=_plain_rms_norm,
)

# ------------------------------------------------------------ functions of an accumulator


def _with_jvp(seen: SimpleNamespace) -> Function:
    """A derivative that is no other's, which depends on what is seen when the function is made."""
    slope = seen.scale

    @jax.custom_jvp
    def function(y: Any) -> Any:
        return jnp.tanh(y)

    @function.defjvp
    def rule(primals: Any, tangents: Any) -> Any:
        return function(*primals), seen.traced() * slope * jnp.cos(primals[0]) * tangents[0]

    return function


def _with_vjp(seen: SimpleNamespace) -> Function:
    slope = seen.scale

    @jax.custom_vjp
    def function(y: Any) -> Any:
        return jnp.sin(y) * slope

    def backward(y: Any, dy: Any) -> Any:
        return (seen.traced() * jnp.tanh(y) * dy * slope,)

    function.defvjp(lambda y: (function(y), y), backward)
    return function


def _with_setting(seen: SimpleNamespace) -> Function:
    """A rule of a setting and of two arrays."""

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def function(scale: float, y: Any, z: Any) -> Any:
        return jnp.tanh(scale * y) * z

    def forward(scale: float, y: Any, z: Any) -> Any:
        return function(scale, y, z), (y, z)

    function.defvjp(forward, lambda scale, saved, dy: (seen.traced() * scale * saved[1] * dy, jnp.sin(saved[0]) * dy))
    return lambda y: function(seen.scale, y, y * y)


class _Layer:
    def __init__(self, seen: SimpleNamespace) -> None:
        self.seen = seen

    def activation(self, y: jax.Array) -> jax.Array:
        return jnp.tanh(y * self.seen.scale)

    def __call__(self, y: jax.Array) -> jax.Array:
        return jnp.sin(y * self.seen.number)


def _counted(seen: SimpleNamespace) -> Function:
    calls = [seen.scale]

    def function(y: Any) -> Any:
        calls[0] += 1
        return jnp.sin(y) * calls[0]

    return function


def _with_default(seen: SimpleNamespace) -> Function:
    def function(y: Any, scale: float = seen.scale) -> Any:
        return jnp.tanh(y) * scale

    return function


def _dropped(seen: SimpleNamespace) -> Function:
    """Which no kernel draws, so XLA has it."""
    return lambda y: y * jax.random.uniform(seen.key, y.shape, F32).astype(y.dtype)


def _derivative(seen: SimpleNamespace) -> Function:
    return lambda y: jax.vjp(lambda y: jnp.tanh(y) * seen.scale, y)[1](jnp.ones_like(y))[0]


def _chosen(seen: SimpleNamespace) -> Function:
    def function(y: Any) -> Any:
        rows = lax.broadcasted_iota("int32", y.shape, y.ndim - 2)
        return jnp.where(rows > 0, jnp.tanh(y), seen.scale * jax.nn.relu(y))

    return function


# Functions of what is seen, which make one of the accumulator. They see more of it when that one is called.
ACTIVATIONS: dict[str, Callable[[SimpleNamespace], Function]] = {
    "number": lambda seen: lambda y: jnp.tanh(y) * seen.scale,
    "numpy scalar": lambda seen: lambda y: jnp.sin(y) * seen.number,
    "numpy array": lambda seen: lambda y: jnp.sin(y) + jnp.reshape(seen.one, (1,) * y.ndim),
    "jax array": lambda seen: lambda y: jnp.sin(y) * jnp.asarray(seen.number),
    "partial": lambda seen: functools.partial(lambda scale, y: jax.nn.gelu(y) * scale, seen.scale),
    "keyword": lambda seen: functools.partial(jax.nn.gelu, approximate=seen.scale > 1),
    "default": _with_default,
    "method": lambda seen: _Layer(seen).activation,
    "object": _Layer,
    "counter": _counted,
    "custom_jvp": _with_jvp,
    "custom_vjp": _with_vjp,
    "custom_vjp with a setting": _with_setting,
    "jit": lambda seen: jax.jit(lambda y: jax.nn.silu(y) * seen.scale),
    "checkpoint": lambda seen: jax.checkpoint(lambda y: jnp.sin(jnp.tanh(y) * seen.scale)),
    "vmap": lambda seen: jax.vmap(lambda y: jnp.tanh(y) * seen.scale),
    "derivative": _derivative,
    "choice": _chosen,
    "stopped": lambda seen: lambda y: y * seen.scale + lax.stop_gradient(jnp.sin(y)),
    # What isn't fused may see arrays of the program around it.
    "softmax": lambda seen: lambda y: jax.nn.softmax(y * seen.scale, -1),
    "traced array": lambda seen: lambda y: jnp.cumsum(y, -1) * jnp.broadcast_to(seen.bias, y.shape),
    "traced scalar": lambda seen: lambda y: jnp.cumsum(jnp.sin(y), 0) * seen.bias[..., 0],
    "random": _dropped,
    "scan": lambda seen: lambda y: lax.scan(lambda c, _: (jnp.sin(c) * seen.scale, None), y, None, 2)[0],
    "cond": lambda seen: lambda y: lax.cond(jnp.sum(y) > 0, jnp.sin, lambda y: y * seen.scale, y),
}
RULED_IN_REVERSE = {"custom_vjp", "custom_vjp with a setting"}
RULED = {"custom_jvp", *RULED_IN_REVERSE}

# ------------------------------------------------------------ layers


def _sum(ops: Any, x: Any, w: Any, seen: SimpleNamespace) -> Any:
    return ops.matmul(x, w, epilogue=lambda acc: seen.activation(acc))


def _biased(ops: Any, x: Any, w: Any, seen: SimpleNamespace) -> Any:
    def epilogue(acc: Any, bias: Any) -> Any:
        return seen.activation(acc + jnp.broadcast_to(bias, acc.shape))

    return ops.matmul(x, w, seen.bias, epilogue=epilogue)


def _residual(ops: Any, x: Any, w: Any, seen: SimpleNamespace) -> Any:
    return ops.matmul(x, w, x, epilogue=lambda acc, x: seen.activation(acc) + seen.scale * x)


def _several(ops: Any, x: Any, w: Any, seen: SimpleNamespace) -> Any:
    found = ops.matmul(x, w, epilogue=lambda acc: {"y": seen.activation(acc), "aux": (jnp.sum(acc, -1), acc > 0)})
    seen.aux.append(found["aux"][0])
    return jnp.where(found["aux"][1], found["y"], found["y"] / 2)


def _transposed(ops: Any, x: Any, w: Any, seen: SimpleNamespace) -> Any:
    return ops.matmul(x, w.T, epilogue=lambda acc: seen.activation(acc))


def _contracted(ops: Any, x: Any, w: Any, seen: SimpleNamespace) -> Any:
    numbers = (((x.ndim - 1,), (1,)), ((), ()))
    return ops.dot_general(x, w, numbers, operands=[seen.scale], epilogue=lambda acc, s: seen.activation(acc) * s)


def _attended(ops: Any, x: Any, w: Any, seen: SimpleNamespace) -> Any:
    """Two products of what is traced."""
    scores = ops.matmul(x, x.T, epilogue=lambda acc: acc * seen.number)
    return ops.matmul(jax.nn.softmax(scores, -1), x @ w, epilogue=lambda acc: seen.activation(acc))


def _gated(ops: Any, x: Any, w: Any, seen: SimpleNamespace) -> Any:
    return ops.gated_linear_unit(x, w, w.T, seen.bias, activation=lambda y: seen.activation(y))


def _normed(ops: Any, x: Any, w: Any, seen: SimpleNamespace) -> Any:
    return ops.matmul(ops.rms_norm(x, seen.bias), w, epilogue=lambda acc: seen.activation(acc))


LAYERS = {
    "plain": _sum,
    "biased": _biased,
    "residual": _residual,
    "several": _several,
    "transposed": _transposed,
    "contracted": _contracted,
    "attended": _attended,
    "gated": _gated,
    "normed": _normed,
}


class Tracing:
    """Whether the program is still being traced. What is called afterwards is called again, and too late."""

    def __init__(self) -> None:
        self.over = False

    def __call__(self) -> float:
        assert not self.over, "a rule of the user's is called after it was traced"
        return 1.5


def network(ops: Any, layers: Sequence[tuple[str, str]], dtype: str, traced: Tracing) -> Function:
    """The layers, as a function of x, two weights and a bias. What the epilogues see is gone when it returns."""

    keys = jax.random.split(jax.random.key(3), len(layers))

    def function(x: Any, w0: Any, w1: Any, bias: Any) -> Any:
        seen = SimpleNamespace(scale=0.75, number=np.dtype(dtype).type(1.25), one=np.full(1, 0.5, dtype))
        seen.bias, seen.aux, seen.traced = bias, [], traced
        for i, (layer, activation) in enumerate(layers):
            seen.key = keys[i]
            seen.activation = ACTIVATIONS[activation](seen)
            x = LAYERS[layer](ops, x, (w0, w1)[i % 2], seen)
            seen.scale, seen.number = seen.scale + 0.5, seen.number - 0.5
        aux = seen.aux
        vars(seen).clear()
        seen.traced = traced
        return {"x": x, "aux": aux}

    return function
