"""Calls whose operands lie in memory in many ways, and whose results belong in many places."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from checking.cases.dtypes import BF16, F32
from checking.pointwise.runs import Call, values


def array(type_: str, name: str) -> np.ndarray:
    """Of a type such as "float32[3,4]"."""
    dtype, shape = type_.removesuffix("]").split("[")
    return values(dtype, tuple(int(size) for size in shape.split(",") if size), name)


def call(function: Callable[..., Any], acc: str, *operands: str) -> Call:
    """`acc` are types, separated by spaces."""
    accumulators = tuple(array(type_, f"sum {i}") for i, type_ in enumerate(acc.split()))
    others = tuple(array(type_, f"operand {i}") for i, type_ in enumerate(operands))
    return Call(function, accumulators[0].shape, accumulators, others)


BATCHED = "float32[3,7,300]"
TWO, THREE = np.float32(2), jnp.array([3.0], F32)
MATRIX = "float32[7,300]"

LAYOUTS = {
    # Broadcast over a batch of matrices.
    "scalar": call(lambda acc, s: acc * s, BATCHED, "float32[]"),
    "one a matrix": call(lambda acc, b: acc * b[:, None, None], BATCHED, "float32[3]"),
    "one a matrix, of rank three": call(lambda acc, b: acc + b, BATCHED, "float32[3,1,1]"),
    "one a column": call(lambda acc, b: acc + b, BATCHED, "bfloat16[300]"),
    "one a row": call(lambda acc, b: acc + b[:, None], BATCHED, "float16[7]"),
    "one a row, of rank two": call(lambda acc, b: acc + b, BATCHED, "float32[7,1]"),
    "one a column and matrix": call(lambda acc, b: acc + b[:, None], BATCHED, "float32[3,300]"),
    "one matrix": call(lambda acc, b: acc + b, BATCHED, "float32[7,300]"),
    "transposed matrix": call(lambda acc, b: acc + b.T, BATCHED, "float32[300,7]"),
    "full": call(lambda acc, b: acc + b, BATCHED, "bfloat16[3,7,300]"),
    "full, batch last": call(lambda acc, b: acc + b.transpose(2, 0, 1), BATCHED, "float32[7,300,3]"),
    "outer product": call(lambda acc, a, b: acc + a[:, None] * b, BATCHED, "float32[7]", "float32[300]"),
    "one operand in two ways": call(lambda acc, b: acc * b + b[:, None], "float32[9,9]", "float32[9]"),
    "transposed twice": call(lambda acc, b: (acc.T * b).T, "float32[9,8]", "float32[9]"),
    "unused operand": call(lambda acc, _, b: acc + b, BATCHED, "float32[3,2]", "float32[300]"),
    "dimensions of size one": call(lambda acc, b: acc * b, "float32[1,4,1]", "float32[1,4,1]"),
    "added dimensions": call(lambda acc, b: (acc[None] * b)[0], MATRIX, "float32[1,1,300]"),
    "vector": call(lambda acc, b: acc * b, "float32[300]", "float32[300]"),
    "number": call(lambda acc, b: acc * b, "float32[]", "float32[]"),
    "narrow": call(lambda acc, b: acc * b + jnp.arange(5)[:, None], "float32[2,5,3]", "float32[3]"),
    "wide": call(lambda acc, b: acc * b, "float32[2,1025]", "float32[1025]"),
    # Types.
    "mask": call(lambda acc, m: jnp.where(m, acc, 0), BATCHED, "bool[7,300]"),
    "int8 operand": call(lambda acc, i: acc * i, BATCHED, "int8[300]"),
    "float8 operand": call(lambda acc, f: acc * f.astype(F32), BATCHED, "float8_e4m3fn[3,7,300]"),
    "int32 acc": call(lambda acc, b: (acc.astype(F32) * 1e-6 + b).astype(BF16), "int32[4,40]", "float32[40]"),
    "float64 acc": call(lambda acc, b: jnp.tanh(acc) * b, "float64[4,40]", "float64[40]"),
    "two sums": call(lambda gate, up, b: jax.nn.silu(gate + b) * up, f"{MATRIX} {MATRIX}", "float32[300]"),
    "several results": call(
        lambda acc, b: {
            "y": (acc + b).astype(BF16),
            "mask": acc > 0,
            "q": jnp.round(acc * 9).astype("int8"),
            "acc": acc,
        },
        BATCHED,
        "float32[300]",
    ),
    # Constants and coordinates.
    "constant": call(lambda acc: jnp.full_like(acc, 3), BATCHED),
    "captured": call(lambda acc: acc * TWO + THREE, BATCHED),
    "coordinates": call(
        lambda acc: acc + lax.broadcasted_iota(F32, acc.shape, 0) * jnp.arange(7)[:, None] - jnp.arange(300), BATCHED
    ),
    "causal": call(lambda acc: jnp.where(jnp.arange(7)[:, None] >= jnp.arange(300), acc, -jnp.inf), BATCHED),
    "narrow coordinates": call(lambda acc: (lax.iota("int8", 300) + acc.astype("int8")).astype(BF16), MATRIX),
    # Reductions.
    **{
        f"{name} over {where}": call(lambda acc, b, f=function, a=axis: f(acc * b, axis=a), MATRIX, "float32[300]")
        for name, function in {"sum": jnp.sum, "max": jnp.max, "min": jnp.min}.items()
        for where, axis in {"rows": 0, "columns": 1, "all": None}.items()
    },
    "bias gradient": call(lambda acc: (acc.astype(BF16), acc.astype(BF16).sum(0)), MATRIX),
    "amax": call(lambda acc: (acc.astype("float8_e4m3fn"), jnp.max(jnp.abs(acc), keepdims=True)), MATRIX),
    "max of integers": call(lambda acc: jnp.max(acc, axis=1, keepdims=True), "int32[4,9]"),
    "sum of integers": call(lambda acc: jnp.sum(acc, axis=0, dtype="int32"), "int32[4,9]"),
    "sum, transposed": call(lambda acc: jnp.sum(acc, axis=1)[None], MATRIX),
    "sum of a masked array": call(lambda acc, m: jnp.sum(acc, axis=0, where=m), MATRIX, "bool[7,300]"),
}
LAYOUTS["no sums"] = Call(lambda a, b: a * b, (7, 300), (), (array("float32[7,1]", "a"), array("float32[300]", "b")))
