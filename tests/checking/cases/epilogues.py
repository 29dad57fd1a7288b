"""Epilogues that cases name: functions of a product's sums and of further operands."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def _summed(y: Any) -> Any:
    return y, jnp.sum(y, axis=-2)


def _extrema(sums: Any) -> Any:
    """Fusion may compute the first one's array twice, and round it differently."""
    steep = jax.lax.erf(jnp.expm1(jnp.minimum(sums, 3)))
    return jnp.max(jnp.maximum(steep, sums), axis=-2), sums - 0.1 * jnp.min(sums, axis=-1, keepdims=True)


EPILOGUES: dict[str, Callable[..., Any]] = {
    "bias": lambda sums, bias: sums + bias,
    "bias gelu": lambda sums, bias: jax.nn.gelu(sums + bias),
    "bias erf gelu": lambda sums, bias: jax.nn.gelu(sums + bias, approximate=False),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "accumulate": lambda sums, c, alpha, beta: alpha * sums + beta * c,
    "residual": lambda sums, bias, c: jnp.tanh(sums + bias) + c,
    "of rows": lambda sums, scale: jnp.sin(sums * scale[..., None]),
    "scaled": lambda sums, a_scale, b_scale: sums * (a_scale * b_scale).astype(sums.dtype),
    "two results": lambda sums, bias: (jnp.tanh(sums + bias), jnp.square(sums)),
    "largest": lambda sums: (sums, jnp.max(jnp.abs(sums))),
    "summed over rows": lambda sums, c: _summed(sums * c),
    "least of each row": lambda sums: jnp.min(sums, axis=-1),
    "extrema": _extrema,
    "sum alone": lambda sums: jnp.sum(jnp.square(sums)),
    "below the diagonal": lambda sums: jnp.where(jnp.tri(*sums.shape[-2:], dtype=bool), sums, 0),
    "softmax": lambda sums: jax.nn.softmax(sums / 4),
    "dequantized": lambda sums, scale: sums.astype(jnp.float32) * scale,
}
