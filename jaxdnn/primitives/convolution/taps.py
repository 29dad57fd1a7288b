"""A convolution as products of its window's places, one after the other: what XLA is given where it has none."""

from collections.abc import Sequence
from math import prod

import jax
import jax.numpy as jnp
from jax import lax
from jax.lax import ConvDimensionNumbers

from jaxdnn.planning.transposes import inverse


def by_taps(
    lhs: jax.Array,
    rhs: jax.Array,
    numbers: ConvDimensionNumbers,
    *,
    window_strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int],
    rhs_dilation: Sequence[int],
    feature_group_count: int = 1,
    batch_group_count: int = 1,
) -> jax.Array:
    """`lax.conv_general_dilated` of arrays of one dtype, in which it is summed; none of them empty."""
    lhs, rhs = jnp.transpose(lhs, numbers.lhs_spec), jnp.transpose(rhs, numbers.rhs_spec)
    between = [(low, high, dilation - 1) for (low, high), dilation in zip(padding, lhs_dilation, strict=True)]
    lhs = lax.pad(lhs, lhs.dtype.type(0), [(0, 0, 0), (0, 0, 0), *between])
    (n, c, *sizes), (o, _, *window) = lhs.shape, rhs.shape
    spans = [(taps - 1) * dilation + 1 for taps, dilation in zip(window, rhs_dilation, strict=True)]
    places = [
        max(0, (size - span) // stride + 1) for size, span, stride in zip(sizes, spans, window_strides, strict=True)
    ]

    if 0 in places:
        return jnp.transpose(jnp.zeros((n // batch_group_count, o, *places), lhs.dtype), inverse(numbers.out_spec))

    # Of each group, the batch by channels, and features by channels. Groups are of one kind.
    groups, batch, channels = batch_group_count * feature_group_count, n // batch_group_count, c // feature_group_count
    images = jnp.reshape(lhs, (batch_group_count, batch, feature_group_count, channels, *sizes))
    images = jnp.reshape(jnp.swapaxes(images, 1, 2), (groups, batch, channels, *sizes))
    factors = jnp.reshape(rhs, (groups, o // groups, channels, prod(window)))
    extents = [(count - 1) * stride + 1 for count, stride in zip(places, window_strides, strict=True)]
    steps = (1, 1, 1, *window_strides)

    def add(tap: jax.Array, y: jax.Array) -> jax.Array:
        starts = (
            place * dilation for place, dilation in zip(jnp.unravel_index(tap, window), rhs_dilation, strict=True)
        )
        part = lax.dynamic_slice(images, (0, 0, 0, *starts), (*images.shape[:3], *extents))
        part = lax.slice(part, (0,) * part.ndim, part.shape, steps)
        return y + jnp.einsum("gnc...,goc->ngo...", part, lax.dynamic_index_in_dim(factors, tap, 3, keepdims=False))

    y = lax.fori_loop(0, prod(window), add, jnp.zeros((batch, groups, o // groups, *places), lhs.dtype))
    return jnp.transpose(jnp.reshape(y, (batch, o, *places)), inverse(numbers.out_spec))
