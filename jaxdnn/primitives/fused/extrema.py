"""Maxima and minima whose derivatives survive XLA's fusion.

JAX finds the place of a maximum by comparing the array with it. Fusion may compute that array twice, for the maximum
and for the comparison, and round it in two ways; then no element is equal, and the derivative is lost or NaN. On an
H200, JAX 0.11.2, that happened to max(erf(expm1(x)), axis=0), and to maxima of a product whose K XLA had split.

A barrier has the array computed once, so that elements which are equal share the derivative. On CPUs XLA drops it
before it fuses: there 28 of 432 derivatives of max(abs(maximum(0.3 x - 0.1 max(x), x))) were NaN. So what is compared
is an array of which no element exceeds the maximum, and the first of the largest, which one pass finds, is it.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdnn.primitives._define import as_type

# By the name of the primitive: whether it looks for the largest.
EXTREMA = {"reduce_max": True, "reduce_min": False}


@partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def settled(x: jax.Array, axes: Sequence[int], largest: bool) -> jax.Array:
    """An array whose extremum along the axes is about to be found: itself, but where derivatives are taken."""
    del axes, largest
    return x


@settled.defjvp
def _settled_jvp(axes: Any, largest: bool, primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> Any:
    x = lax.optimization_barrier(*primals)
    # JAX has maxima of complex numbers, but no order of two.
    return _bounded(x, axes, largest) if jnp.issubdtype(x.dtype, jnp.floating) else x, *tangents


@partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _bounded(x: jax.Array, axes: Sequence[int], largest: bool) -> jax.Array:
    """An array that differs from another one by roundings, and in which an element is the extremum."""
    found = (jnp.max if largest else jnp.min)(x, axes, keepdims=True)
    bounded = (jnp.minimum if largest else jnp.maximum)(x, found)
    return jnp.where(_first(x, axes, largest), found, bounded)


@_bounded.defjvp
def _bounded_jvp(axes: Any, largest: bool, primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> Any:
    return _bounded(*primals, axes, largest), *tangents


def _first(x: jax.Array, axes: Sequence[int], largest: bool) -> jax.Array:
    """Where the first of the largest, or of the smallest, elements is along the axes."""
    index = jnp.zeros((), np.int32)
    for axis in axes:
        index = index * x.shape[axis] + lax.broadcasted_iota(np.int32, x.shape, axis)
    limits = jnp.finfo(x.dtype)
    least, none = np.asarray(limits.min if largest else limits.max), np.asarray(np.iinfo(np.int32).max, np.int32)
    index = as_type(index, jax.typeof(x))
    _, at = lax.reduce((x, index), (least, none), _larger if largest else _smaller, tuple(axes))
    return index == jnp.expand_dims(at, axes)


# An element and where it is. They are functions of the module, for which JAX compiles nothing again.
_Found = Sequence[jax.Array]


def _larger(one: _Found, other: _Found) -> tuple[jax.Array, jax.Array]:
    return _either(one[0] > other[0], one, other)


def _smaller(one: _Found, other: _Found) -> tuple[jax.Array, jax.Array]:
    return _either(one[0] < other[0], one, other)


def _either(beyond: jax.Array, one: _Found, other: _Found) -> tuple[jax.Array, jax.Array]:
    (a, at_a), (b, at_b) = one, other
    kept = beyond | ((a == b) & (at_a < at_b))
    return lax.select(kept, a, b), lax.select(kept, at_a, at_b)
