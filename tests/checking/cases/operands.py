"""Products whose epilogues have operands of which a joined coordinate has some dimensions and not others, or in another
order, and tables that are looked up by integers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

import jaxdnn
from checking.pointwise.layouts import array

BATCH, HEADS, QUERIES, KEYS, DEPTH = 3, 4, 5, 7, 6
SCORES = ((BATCH, HEADS, QUERIES, DEPTH), (BATCH, HEADS, DEPTH, KEYS))
IMAGE = ((2, 3, 5, 6), (6, 7))  # pixels of channels, and weights


@dataclass(frozen=True)
class OperandCase:
    """matmul(a, b, *operands, epilogue=epilogue): shapes, types of the operands, the range of integers among them."""

    epilogue: Callable[..., Any]
    operands: tuple[str, ...]
    shapes: tuple[tuple[int, ...], tuple[int, ...]] = SCORES
    integers: tuple[int, int] = (0, 3)

    def arrays(self) -> list[np.ndarray]:
        random = np.random.default_rng(7)
        found = [random.standard_normal(shape).astype(np.float32) for shape in self.shapes]
        for number, type_ in enumerate(self.operands):
            like = array(type_, str(number))
            integers = random.integers(*self.integers, like.shape, endpoint=True)
            found.append(integers.astype(like.dtype) if like.dtype.kind in "iu" else like)
        return found

    def call(self, *arrays: Any) -> Any:
        return jaxdnn.matmul(*arrays, epilogue=self.epilogue, precision="highest")

    def reference(self, a: Any, b: Any, *operands: Any) -> Any:
        return self.epilogue(jnp.matmul(a, b, precision="highest"), *operands)


OPERANDS = {
    "bias that a batch shares": OperandCase(lambda acc, b: acc + b, ("float32[1,4,5,7]",)),
    "bias that heads share": OperandCase(lambda acc, b: acc * b, ("bfloat16[3,1,5,7]",)),
    "slopes": OperandCase(lambda acc, s: acc + s[:, None, None] * distances(), ("float32[4]",)),
    "key padding": OperandCase(lambda acc, m: jnp.where(m, acc, -1.0), ("bool[3,1,1,7]",)),
    "segments": OperandCase(
        lambda acc, q, k: jnp.where(q[:, None, :, None] == k[:, None, None, :], acc, 0.0), ("int32[3,5]", "int8[3,7]")
    ),
    "one of each head, transposed": OperandCase(lambda acc, b: acc * b.T[:, :, None, None], ("float32[4,3]",)),
    "gate of an image": OperandCase(lambda acc, g: acc * g, ("float32[2,1,1,7]",), IMAGE),
    "gate of each pixel's line": OperandCase(lambda acc, g: acc * g, ("float32[3,1,1]",), IMAGE),
    "position bias": OperandCase(lambda acc, p: acc + p, ("float32[3,5,1]",), IMAGE),
    "position bias and channels": OperandCase(lambda acc, p: acc + p, ("float16[3,5,7]",), IMAGE),
    "two of different forms": OperandCase(
        lambda acc, p, g, b: (acc + p) * g + b, ("float32[3,5,1]", "float32[2,1,1,7]", "float32[7]"), IMAGE
    ),
    "channels in the middle": OperandCase(
        lambda acc, b: acc + b[:, None, None, None], ("float32[3]",), ((2, 3, 1, 5, 6), (6, 9))
    ),
    "large batch with one modulus": OperandCase(
        lambda acc, b: acc + b, ("float32[1,3,2,2]",), ((301, 3, 2, 4), (301, 3, 4, 2))
    ),
    "odd sizes": OperandCase(lambda acc, b: acc + b, ("float32[5,1,131]",), ((3, 5, 37, 6), (6, 131))),
    # Looked up by integers.
    "relative positions": OperandCase(lambda acc, table: acc + table[:, distances() + QUERIES - 1], ("float32[4,11]",)),
    "relative positions, of operands": OperandCase(
        lambda acc, table, q, k: acc + jnp.take(table, q[:, None, :, None] - k[:, None, None, :] + 3, axis=0),
        ("float32[7]", "int32[3,5]", "int32[3,7]"),
    ),
    "rows of a table": OperandCase(lambda acc, t, ids: acc + t[ids], ("bfloat16[9,7]", "int32[2,3,5]"), IMAGE, (-9, 8)),
    "out of bounds: fill": OperandCase(
        lambda acc, t, ids: jnp.nan_to_num(acc + jnp.take(t, ids, axis=0), nan=5.0),
        ("float32[9,7]", "int32[2,3,5]"),
        IMAGE,
        (-20, 20),
    ),
    "out of bounds: another fill": OperandCase(
        lambda acc, t, ids: acc + t.at[ids].get(mode="fill", fill_value=3.0),
        ("float32[9,7]", "int16[2,3,5]"),
        IMAGE,
        (-20, 20),
    ),
    "out of bounds: clip": OperandCase(
        lambda acc, t, ids: acc + jnp.take(t, ids, axis=0, mode="clip"),
        ("float32[9,7]", "int8[2,3,5]"),
        IMAGE,
        (-128, 127),
    ),
    "columns of a table": OperandCase(
        lambda acc, t, ids: acc + jnp.take(t, ids, axis=1), ("float32[5,9]", "uint8[7]"), IMAGE, (0, 8)
    ),
    "two indices": OperandCase(
        lambda acc, t, i, j: acc * t[i[..., None], j], ("float32[9,4]", "int32[2,3,5]", "int32[7]"), IMAGE, (-4, 3)
    ),
    "transposed, widened table": OperandCase(
        lambda acc, t, ids: acc + t.T.astype("float32")[ids] * 2, ("int8[7,4]", "int32[2,3,5]"), IMAGE, (-4, 3)
    ),
    "one row of a table": OperandCase(lambda acc, t, i: acc + t[i], ("float32[9,7]", "int32[]"), IMAGE, (2, 5)),
    "table of a table": OperandCase(
        lambda acc, t, u, i: acc + t[u[i]], ("float32[9,7]", "int32[4]", "int32[2,3,5]"), IMAGE, (0, 3)
    ),
    "table and gate": OperandCase(
        lambda acc, t, i, g: acc * g + t[i], ("float32[9,7]", "int32[2,3,5]", "float32[2,1,1,7]"), IMAGE, (-4, 8)
    ),
}


def distances() -> Any:
    """Coordinates: an array that the function closes over could not be in a kernel."""
    return jnp.arange(KEYS) - jnp.arange(QUERIES)[:, None]
