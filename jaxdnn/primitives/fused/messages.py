"""Messages of JAX about a user's arrays, which say which function was called, and on what."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import jax
import jax.numpy as jnp


def described_type(array: object) -> str:
    """The dtype and shape of an array, as float32[3, 4]; of anything else its Python type."""
    try:
        type_ = jax.typeof(array)
    except TypeError:
        return f"a {type(array).__name__}"
    return f"{jnp.dtype(type_.dtype).name}{list(type_.shape)}"


@contextmanager
def described(caller: str, arrays: Mapping[str, object]) -> Iterator[None]:
    """Puts the public function and its arguments in front of what JAX has to say about them."""
    try:
        yield
    except (TypeError, ValueError) as error:
        given = ", ".join(f"{name} {described_type(array)}" for name, array in arrays.items())
        raise (TypeError if isinstance(error, TypeError) else ValueError)(f"{caller} of {given}: {error}") from error
