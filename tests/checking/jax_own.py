"""What tests share that ask of jaxdnn's functions what JAX's own tests ask of JAX's."""

import jax
import jax.numpy as jnp
import numpy as np


def array(shape, dtype, seed=0):
    """Small random numbers, which bfloat16 holds."""
    random = np.random.default_rng([seed, *shape])
    values = random.integers(-3, 4, shape)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        values = values + 1j * random.integers(-3, 4, shape)
    elif jnp.issubdtype(dtype, jnp.floating):
        values = values / 4
    elif dtype == "bool":
        values = values > 0
    else:
        values = np.abs(values) if dtype.startswith("u") else values
    return jnp.asarray(values, jnp.dtype(dtype))


def same(got, want):
    """Whether two trees of arrays are one in all but roundings, of which JAX's and ours need not be the same."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        ours, theirs = jnp.asarray(ours), jnp.asarray(theirs)
        assert (ours.shape, ours.dtype, ours.weak_type) == (theirs.shape, theirs.dtype, theirs.weak_type)
        exact = not jnp.issubdtype(theirs.dtype, jnp.inexact)
        eps = 0.0 if exact else float(jnp.finfo(theirs.dtype).eps)
        wide = np.complex128 if jnp.issubdtype(theirs.dtype, jnp.complexfloating) else np.float64
        expected = np.asarray(theirs).astype(wide)
        scale = np.max(np.abs(expected), initial=0.0)
        np.testing.assert_allclose(np.asarray(ours).astype(wide), expected, rtol=2 * eps, atol=8 * eps * scale)


def outcome(function, *arguments, **keywords):
    """The type of what a call returns, or of what it raises, for which there may be clearer words than JAX's."""
    try:
        result = jax.eval_shape(lambda: function(*arguments, **keywords))
    except Exception as error:
        return type(error)
    return result.shape, result.dtype, result.weak_type
