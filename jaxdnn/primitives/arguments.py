"""Checks of arguments that several public functions take."""

from numbers import Real

import jax
import jax.numpy as jnp


def number(caller: str, name: str, value: object, hint: str = "") -> float:
    """A real number that is known when tracing, as a float.

    In messages, `caller` is the public function, and `hint` what to do instead.
    """
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{caller}: {name} must be a real number, known when tracing; got {value!r}{hint}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{caller}: {name} must be a number that a float can hold; got one that is larger") from None


def as_array(title: str, value: jax.typing.ArrayLike) -> jax.Array:
    """The value as an array. Raises TypeError, with what it is for, if it can't be one."""
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError):
        raise TypeError(f"{title} must be an array; got a {type(value).__name__}") from None
