"""Masks at the door: the ways in which callers say which keys a query sees become a `Band` and a few arrays."""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxdnn.engines.attention.problem import Band
from jaxdnn.primitives.fused.messages import described_type

Alignment = Literal["top_left", "bottom_right"]
_LARGEST = 2**31 - 1  # of what kernels count by
Pair = jax.typing.ArrayLike | tuple[jax.typing.ArrayLike | None, jax.typing.ArrayLike | None] | None


@dataclass(frozen=True)
class Sizes:
    """The sizes of scores, as the caller knows them."""

    batch: Any
    heads: Any
    queries: Any
    keys: Any

    @property
    def known(self) -> bool:
        return isinstance(self.queries, int) and isinstance(self.keys, int)


def lengths(caller: str, sizes: Sizes, given: Mapping[str, Any]) -> dict[str, jax.Array]:
    """How many queries and keys there are in each batch element, at most as many as the axis has."""
    found = {}
    for (argument, array), (name, most) in zip(
        given.items(), (("query_lengths", sizes.queries), ("key_lengths", sizes.keys)), strict=True
    ):
        if array is None:
            continue
        array = _integers(caller, argument, array)
        if array.shape != (sizes.batch,):
            raise ValueError(
                f"{caller}: {argument} must have shape {(sizes.batch,)}, a length for each batch element; got "
                f"{array.shape}"
            )
        if isinstance(array, np.ndarray):
            array = np.clip(array, 0, _LARGEST)
        wide = array if array.dtype.itemsize >= 4 else array.astype("int32")  # which `most` fits
        found[name] = jnp.clip(wide, 0, most).astype("int32")
    return found


def pair(caller: str, argument: str, given: Pair, sizes: Sizes, names: tuple[str, str]) -> dict[str, jax.Array]:
    """Integers of queries and of keys, each of shape (length,) or (batch, length); of one array, those of both."""
    if given is None:
        return {}
    both = tuple(given) if isinstance(given, (tuple, list)) else (given, given)
    if len(both) != 2:
        raise ValueError(f"{caller}: {argument} must be one array, or a pair for queries and keys; got {len(both)}")
    found = {}
    for name, array, length in zip(names, both, (sizes.queries, sizes.keys), strict=True):
        if array is None:
            continue
        array = _integers(caller, argument, array)
        _check_range(caller, argument, array)
        if array.ndim not in (1, 2) or array.shape[-1] != length or array.shape[:-1] not in ((), (1,), (sizes.batch,)):
            what = "queries" if name == names[0] else "keys"
            one = "" if isinstance(given, (tuple, list)) else f"; as one array {argument} is for queries and keys alike"
            raise ValueError(
                f"{caller}: {argument} of {what} must have shape {(length,)} or {(sizes.batch, length)}; got "
                f"{array.shape}{one}"
            )
        found[name] = jnp.atleast_2d(array.astype("int32"))
    return found


def segments(caller: str, given: Pair, sizes: Sizes) -> dict[str, jax.Array]:
    """The segments of queries and of keys."""
    found = pair(caller, "segment_ids", given, sizes, ("query_segments", "key_segments"))
    if len(found) == 1:
        raise ValueError(f"{caller}: segment_ids must be of queries and of keys; got None for one of them")
    return found


def band(
    caller: str,
    is_causal: bool,
    window: int | tuple[int | None, int | None] | None,
    alignment: Alignment,
    sizes: Sizes,
    arrays: Mapping[str, jax.Array],
) -> tuple[Band, dict[str, jax.Array]]:
    """Causal and window masks as one band, and what is added to the queries' positions, where that is not known.

    `arrays` are the lengths and positions.
    """
    left, right = _window(caller, window)
    if is_causal:
        right = 0 if right is None else min(right, 0)
    if alignment not in ("top_left", "bottom_right"):
        raise ValueError(f'{caller}: causal_alignment must be "top_left" or "bottom_right"; got {alignment!r}')
    if alignment == "top_left":
        return Band(left, right), {}
    if (left, right) == (None, None):
        raise ValueError(
            f'{caller}: causal_alignment="bottom_right" says where a causal mask or a window lies, and there is none; '
            "pass is_causal=True or local_window_size="
        )
    if placed := [name for name in ("query_positions", "key_positions") if name in arrays]:
        raise ValueError(
            f'{caller}: causal_alignment="bottom_right" and positions (here {placed[0]}) contradict each other: both '
            "say where queries stand among the keys; pass one of them"
        )
    if sizes.known and not {"query_lengths", "key_lengths"}.intersection(arrays):
        ahead = sizes.keys - sizes.queries
        return Band(None if left is None else left - ahead, None if right is None else right + ahead), {}
    ends = (arrays.get("key_lengths", sizes.keys), arrays.get("query_lengths", sizes.queries))
    offset = jnp.broadcast_to(jnp.asarray(ends[0] - ends[1], "int32"), (sizes.batch,))
    return Band(left, right), {"query_offset": offset}


def broadcastable(caller: str, name: str, array: jax.Array, sizes: Sizes) -> jax.Array:
    """An array over scores, with all four dimensions."""
    expected = (sizes.batch, sizes.heads, sizes.queries, sizes.keys)
    if array.ndim > 4 or any(
        size not in (1, wanted) for size, wanted in zip(array.shape[::-1], expected[::-1], strict=False)
    ):
        raise ValueError(
            f"{caller}: {name} must broadcast to (batch, heads, queries, keys), here {expected}; got {array.shape}"
        )
    return array.reshape((1,) * (4 - array.ndim) + array.shape)


def _window(caller: str, given: int | Sequence[int | None] | None) -> tuple[int | None, int | None]:
    if given is None:
        return None, None
    both = given if isinstance(given, Sequence) else (given, given)
    try:
        left, right = (None if one is None else operator.index(one) for one in both)
    except (TypeError, ValueError):
        raise TypeError(
            f"{caller}: local_window_size must be an int, or a pair (left, right) of ints or None; got {given!r}"
        ) from None
    if any(one is not None and one < 0 for one in (left, right)):
        raise ValueError(f"{caller}: local_window_size must not be negative; got {given!r}")
    left, right = (None if one is None or one >= _LARGEST else one for one in (left, right))
    return left, right


def _check_range(caller: str, argument: str, array: jax.Array | np.ndarray) -> None:
    """Raises ValueError for values that kernels don't have, where they are known."""
    limits = jnp.iinfo("int32")
    if jnp.iinfo(array.dtype).max <= limits.max or not array.size:
        return
    if isinstance(array, Tracer) or (isinstance(array, jax.Array) and not array.is_fully_addressable):
        return
    values = np.asarray(array)  # JAX would trace the comparison
    least, most = int(values.min()), int(values.max())
    if least < limits.min or most > limits.max:
        raise ValueError(
            f"{caller}: {argument} must fit 32-bit integers; got values from {least} to {most}: number them anew, as "
            "the second result of jnp.unique(ids, return_inverse=True) does"
        )


def _integers(caller: str, name: str, given: jax.typing.ArrayLike) -> jax.Array | np.ndarray:
    """An array of JAX; of numbers that are none yet one of numpy, since JAX would cut them to 32 bits."""
    numbers = all(isinstance(one, (int, np.ndarray, np.generic)) for one in jax.tree.leaves(given))
    array = np.asarray(given) if numbers else jnp.asarray(given)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{caller}: {name} must be integers; got {described_type(array)}")
    return array
