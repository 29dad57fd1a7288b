"""Random bits of attention's dropout: a function of the row and the column, so that every block and pass has the same.

Philox4x32-10 is of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

import jax
import jax.numpy as jnp

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

Words = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def random_bits(seeds: jax.Array, rows: jax.Array, first_column: jax.Array | int, columns: int) -> jax.Array:
    """Of `seeds` (..., 2) and `rows` (r,), 32 random bits for each of `columns`: (..., r, columns).

    Four neighbouring columns, the first a multiple of four, share the four words of one counter.
    """
    key = tuple(seeds[..., None, None, i] for i in range(2))
    first_column = jnp.asarray(first_column, "uint32")
    groups = first_column // 4 + jnp.arange(columns // 4 + 2, dtype="uint32")
    zero = jnp.zeros((), "uint32")
    *batch, row, column = range(seeds.ndim + 1)
    groups = jnp.expand_dims(groups, (*batch, row))
    rows = jnp.expand_dims(rows.astype("uint32"), (*batch, column))
    words = philox((groups, rows, zero, zero), key)
    stacked = jnp.stack(jnp.broadcast_arrays(*words), -1)
    flat = stacked.reshape(*stacked.shape[:-2], 4 * (columns // 4 + 2))
    return jax.lax.dynamic_slice_in_dim(flat, (first_column % 4).astype("int32"), columns, -1)


def philox(counter: Words, key: tuple[jax.Array, ...]) -> Words:
    """Four random words for each counter of four."""
    a, b, c, d = counter
    for number in range(_ROUNDS):
        step_a, step_b = (jnp.uint32(step * number % 2**32) for step in _KEY_STEPS)
        high_a, low_a = _product(_MULTIPLIERS[0], a)
        high_c, low_c = _product(_MULTIPLIERS[1], c)
        a, b, c, d = high_c ^ b ^ (key[0] + step_a), low_c, high_a ^ d ^ (key[1] + step_b), low_a
    return a, b, c, d


def _product(constant: int, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The high and the low word of a product, without integers of 64 bits, which JAX may not have."""
    high, low = jnp.uint32(constant >> 16), jnp.uint32(constant & 0xFFFF)
    x_high, x_low = x >> 16, x & 0xFFFF
    cross, other = low * x_high, high * x_low
    middle = (low * x_low >> 16) + (cross & 0xFFFF) + (other & 0xFFFF)
    return high * x_high + (cross >> 16) + (other >> 16) + (middle >> 16), jnp.uint32(constant) * x
