"""The axes of a convolution's arrays: which array has which, and in which order.

An axis goes by a letter and a number. Those of one letter are in the same arrays:

    n   images                            image,         output
    s   spatial, one for each window      image, filter, output, each with a size of its own
    g   groups of channels                image, filter, output
    c   channels of the image             image, filter
    k   channels of the output                   filter, output

Number 0 is the convolution's own. A mapped axis is one more of a letter: the one of the arrays that carry it.
"""

from collections.abc import Mapping, Sequence
from math import prod

import jax
import jax.numpy as jnp

from jaxdnn.engines.convolution.problem import ROLES, Role

Axis = tuple[str, int]
Carried = tuple[bool, bool, bool]  # by the arrays in the order of ROLES

LETTERS: Mapping[str, Carried] = {
    "n": (True, False, True),
    "g": (True, True, True),
    "c": (True, True, False),
    "k": (False, True, True),
}
_LETTER_OF: Mapping[Carried, str] = {carried: letter for letter, carried in LETTERS.items()}
_ORDERS: Mapping[Role, str] = {"image": "nsgc", "filter": "scgk", "output": "nsgk"}


def mapped_axes(levels: Sequence[Carried]) -> tuple[Axis, ...]:
    """The axes of levels that these arrays carry, outermost first."""
    return tuple((_LETTER_OF[carried], level + 1) for level, carried in enumerate(levels))


def axes_of(role: Role, mapped: Sequence[Axis], spatial: int) -> tuple[Axis, ...]:
    """The axes of an array, in order: mapped ones in front. Groups and channels are one dimension, of two axes."""
    side = ROLES.index(role)
    own = {"s": tuple(("s", i) for i in range(spatial))}
    order = (axis for letter in _ORDERS[role] for axis in own.get(letter, ((letter, 0),)))
    return (*(axis for axis in mapped if LETTERS[axis[0]][side]), *order)


def joined(role: Role, letters: str, mapped: Sequence[Axis], spatial: int) -> list[tuple[Axis, ...]]:
    """An array's axes, those of one letter in one dimension, but for spatial ones; groups are in front of the last."""
    axes = axes_of(role, mapped, spatial)
    by_letter = {letter: tuple(axis for axis in axes if axis[0] == letter) for letter in "nsgck"}
    *front, last = ([(axis,) for axis in by_letter["s"]] if x == "s" else [by_letter[x]] for x in letters)
    return [*(dimension for found in front for dimension in found), (*by_letter["g"], *last[0])]


def join(
    array: jax.Array, axes: Sequence[Axis], dimensions: Sequence[Sequence[Axis]], sizes: Mapping[Axis, int]
) -> jax.Array:
    """An array with these axes, of which some may share a dimension, with `dimensions` made of them."""
    split = jnp.reshape(array, [sizes[axis] for axis in axes])
    order = [axis for dimension in dimensions for axis in dimension]
    turned = jnp.transpose(split, [axes.index(axis) for axis in order])
    return jnp.reshape(turned, [prod(sizes[axis] for axis in dimension) for dimension in dimensions])


def disjoin(
    array: jax.Array,
    axes: Sequence[Axis],
    dimensions: Sequence[Sequence[Axis]],
    sizes: Mapping[Axis, int],
    shape: Sequence[int],
) -> jax.Array:
    """What `join` made this of, an array with these axes, of `shape`."""
    order = [axis for dimension in dimensions for axis in dimension]
    split = jnp.reshape(array, [sizes[axis] for axis in order])
    return jnp.reshape(jnp.transpose(split, [order.index(axis) for axis in axes]), shape)
