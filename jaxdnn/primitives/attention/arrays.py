"""The arrays of an attention call, and what each of their dimensions is.

b  batch          k  key heads                 t  queries   h  the head size of queries and keys
                  g  query heads of a key head s  keys      d  that of values and results

A dimension of size one is the same for all. Scores have the dimensions bkgts.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

SCORES = "bkgts"
DIMENSIONS: Mapping[str, str] = {
    "query": "btkgh",
    "key": "bskh",
    "value": "bskd",
    "bias": "bkgts",
    "sinks": "kg",
    "mask": "bkgts",
    "query_lengths": "b",
    "key_lengths": "b",
    "query_segments": "bt",
    "key_segments": "bs",
    "query_positions": "bt",
    "key_positions": "bs",
    "query_offset": "b",
    "seeds": "bkgw",  # two words
    "batch_index": "b",  # what these two number is counted before the call is split over devices
    "head_index": "kg",
    "out": "btkgd",
    "log_sum_exp": "bkgt",
    "delta": "bkgt",
}


def dimensions(name: str) -> str:
    """Those of an array, its tangent or its cotangent. Operands of the caller's functions have none."""
    return DIMENSIONS.get(name.removeprefix("d_"), "")


def over_scores(name: str, array: jax.Array) -> jax.Array:
    """The array with a dimension for each of those that scores have."""
    return jnp.expand_dims(array, [place for place, label in enumerate(SCORES) if label not in dimensions(name)])
