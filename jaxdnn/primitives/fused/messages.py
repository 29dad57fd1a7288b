"""Words for a user's arrays, in messages."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import jax


def described_type(array: object) -> str:
    """The dtype and shape of an array, as float32[3, 4]; of anything else its Python type."""
    try:
        type_ = jax.typeof(array)
    except TypeError:
        return f"a {type(array).__name__}"
    return f"{type_.dtype.name}{list(type_.shape)}"


def check_sequence(title: str, arrays: object) -> None:
    """Raises TypeError for one array in the place of several."""
    if not isinstance(arrays, Sequence) or isinstance(arrays, str):
        raise TypeError(f"{title} must be a sequence of arrays; got {described_type(arrays)}")


def counted(count: int, noun: str) -> str:
    """1 operand, 2 operands."""
    return f"{count} {noun}{'s' * (count != 1)}"


@contextmanager
def described(caller: str, arrays: Mapping[str, object], clearer: str = "") -> Iterator[None]:
    """Adds to what JAX has to say about a user's arrays which function was called, and on what; or, where something
    `clearer` can be said, says that in its place.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        if clearer:
            raise (TypeError if isinstance(error, TypeError) else ValueError)(clearer) from error
        given = ", ".join(f"{name} {described_type(array)}" for name, array in arrays.items())
        error.add_note(f"{caller} was called with {given}")
        raise
