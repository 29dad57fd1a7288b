"""The scores of one block: some of the queries and some of the keys, with all heads; and loops over such blocks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxdnn.primitives._define import as_type
from jaxdnn.primitives.attention.arrays import dimensions

_MOST_SCORES = 2**24  # of a block; in float32, 64 MiB
_LEAST_SIDE = 64  # of a block, where there are very many heads


@dataclass(frozen=True)
class Span:
    """A part of an axis.

    Attributes:
      first: its first place.
      size: how many places it has.
      unseen: the first place that is in no span before this one: the last span begins earlier, to be as long as all.
      whole: whether it is the axis.
    """

    first: Any
    size: Any
    unseen: Any
    whole: bool

    @property
    def places(self) -> jax.Array:
        places = jnp.arange(self.size, dtype="int32")
        return places if self.whole else self.first + places


@dataclass(frozen=True)
class Spans:
    """An axis of scores as spans of one size."""

    length: Any
    size: Any

    @property
    def count(self) -> int:
        return 1 if self.size == self.length else -(-self.length // self.size)

    def __getitem__(self, number: Any) -> Span:
        if self.count == 1:
            return Span(0, self.length, 0, whole=True)
        unseen = jnp.asarray(number, "int32") * self.size
        return Span(jnp.minimum(unseen, self.length - self.size), self.size, unseen, whole=False)


Block = Mapping[str, Span]  # of t, the queries, and of s, the keys


def spans_of(heads: Any, queries: Any, keys: Any) -> tuple[Spans, Spans]:
    """How queries and keys are split so that no block has too many scores; where sizes are not known, they are not."""
    if not all(isinstance(size, int) for size in (heads, queries, keys)):
        return Spans(queries, queries), Spans(keys, keys)
    most = max(_LEAST_SIDE**2, _MOST_SCORES // max(1, heads))
    if queries * keys <= most:
        return Spans(queries, queries), Spans(keys, keys)
    rows = min(queries, 1 << ((most.bit_length() - 1) // 2))
    columns = min(keys, most // rows)
    return Spans(queries, min(queries, most // columns)), Spans(keys, columns)


def fold(
    count: int, body: Callable[[Any, Any], Any], carry: Any, needed: Callable[[Any], jax.Array] | None = None
) -> Any:
    """What becomes of `carry` in `body(number, carry)`, one number after the other; of several, those that are needed.

    Derivatives keep no more of it than the carry.
    """
    if count == 1:
        return body(0, carry)

    def step(number: Any, carry: Any) -> Any:
        return body(number, carry) if needed is None else lax.cond(needed(number), partial(body, number), _as_is, carry)

    types = jax.make_jaxpr(partial(body, 0))(carry).out_avals
    leaves, structure = jax.tree.flatten(carry)
    carry = jax.tree.unflatten(structure, map(as_type, leaves, types))
    return lax.fori_loop(0, count, jax.checkpoint(step), carry)


def _as_is(carry: Any) -> Any:
    return carry


def part(name: str, array: jax.Array, block: Block) -> jax.Array:
    """What of an array belongs to the block."""
    for axis, label in enumerate(dimensions(name)):
        span = block.get(label)
        if span is not None and not span.whole and array.shape[axis] != 1:
            array = lax.dynamic_slice_in_dim(array, span.first, span.size, axis)
    return array


def put(name: str, array: jax.Array, block: Block, value: jax.Array) -> jax.Array:
    """The array with another value for what of it belongs to the block."""
    if all(span.whole for span in block.values()):
        return value
    starts = [jnp.int32(0)] * array.ndim
    for axis, label in enumerate(dimensions(name)):
        if label in block and array.shape[axis] != 1:
            starts[axis] = jnp.int32(block[label].first)
    return lax.dynamic_update_slice(as_type(array, jax.typeof(value)), value, starts)


def add(name: str, array: jax.Array, block: Block, value: jax.Array) -> jax.Array:
    """The array with `value` added to what of it belongs to the block."""
    return put(name, array, block, part(name, array, block) + value.astype(array.dtype))
