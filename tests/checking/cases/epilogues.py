"""Epilogues that cases name: functions of a product's sums and of further operands."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def _summed(y: Any) -> Any:
    return y, jnp.sum(y, axis=-2)


def _reductions(acc: Any) -> Any:
    """Of values that the zeros outside of a result would change."""
    more, less, places = acc + 1, -1 - jnp.abs(acc), tuple(range(acc.ndim - 1))
    count = jnp.sum((more > 0).astype(jnp.int32), places, dtype=jnp.int32)
    return acc, jnp.sum(more, places), jnp.max(less, places), jnp.sum(more, -1), count, jnp.max(less), jnp.sum(more)


def _extrema(acc: Any) -> Any:
    """Fusion may compute the first one's array twice, and round it differently."""
    steep = jax.lax.erf(jnp.expm1(jnp.minimum(acc, 3)))
    return jnp.max(jnp.maximum(steep, acc), axis=-2), acc - 0.1 * jnp.min(acc, axis=-1, keepdims=True)


EPILOGUES: dict[str, Callable[..., Any]] = {
    "bias": lambda acc, bias: acc + bias,
    "bias gelu": lambda acc, bias: jax.nn.gelu(acc + bias),
    "bias erf gelu": lambda acc, bias: jax.nn.gelu(acc + bias, approximate=False),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "operand alone": lambda _, c: c,
    "accumulate": lambda acc, c, alpha, beta: alpha * acc + beta * c,
    "residual": lambda acc, bias, c: jnp.tanh(acc + bias) + c,
    "shortcut": lambda acc, bias, c: acc + bias + c,
    "symmetric residual": lambda acc, c: jnp.tanh(acc + c) + jnp.swapaxes(c, -1, -2),
    "of rows": lambda acc, scale: jnp.sin(acc * scale[..., None]),
    "scaled": lambda acc, a_scale, b_scale: acc * (a_scale * b_scale).astype(acc.dtype),
    "two results": lambda acc, bias: (jnp.tanh(acc + bias), jnp.square(acc)),
    "largest": lambda acc: (acc, jnp.max(jnp.abs(acc))),
    "summed over rows": lambda acc, c: _summed(acc * c),
    "least of each row": lambda acc: jnp.min(acc, axis=-1),
    "extrema": _extrema,
    "channel sums": lambda acc: (acc, jnp.sum(acc, (0, 2, 3)), jnp.sum(acc * acc, (0, 2, 3))),
    "sums of channels": lambda acc: (acc, jnp.sum(acc, (0, 1, 2)), jnp.sum(acc * acc, (0, 1, 2))),
    "reductions": _reductions,
    "sum alone": lambda acc: jnp.sum(jnp.square(acc)),
    "below the diagonal": lambda acc: jnp.where(jnp.tri(*acc.shape[-2:], dtype=bool), acc, 0),
    "softmax": lambda acc: jax.nn.softmax(acc / 4),
    "dequantized": lambda acc, scale: acc.astype(jnp.float32) * scale,
}
