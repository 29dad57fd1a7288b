"""Functions of one score, for cases of attention."""
# ruff: noqa: ARG005

from typing import Any

import jax.numpy as jnp
import numpy as np

# Functions, with the shapes of their operands; sizes are those of the case.
SCORE_MODS: dict[str, tuple[Any, tuple[tuple[str | int, ...], ...]]] = {
    "slopes": (lambda score, batch, head, query, key, slopes: score + slopes[head] * (key - query) / 8, (("heads",),)),
    "table": (
        lambda score, batch, head, query, key, table: score + table[jnp.clip(key - query + 3, 0, 6)] * 0.5,
        ((7,),),
    ),
    "temperature": (
        lambda score, batch, head, query, key, factor, shift: score * jnp.tanh(factor[batch, head]) + shift,
        (("batch", "heads"), ()),
    ),
}
UNDER_TANH = {"temperature": (0,)}  # operands of which a function takes the hyperbolic tangent
MASK_MODS: dict[str, Any] = {
    "stripes": lambda batch, head, query, key, width: (query - key) % width[head % 2] != 1,
    "prefix": lambda batch, head, query, key, width: (key <= query) | (key < width[batch % 2]),
}
WIDTHS = np.array([3, 2])
