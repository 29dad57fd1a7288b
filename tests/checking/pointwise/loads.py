"""Calls whose operands have some of the dimensions that a coordinate joins, or are tables."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from checking.pointwise.layouts import array
from checking.pointwise.runs import Call


def call(function: Callable[..., Any], shape: str, *operands: str, groups: tuple[int, int, int]) -> Call:
    one = array(shape, "sum")
    return Call(function, one.shape, (one,), tuple(array(type_, str(i)) for i, type_ in enumerate(operands)), groups)


DEEP = "float32[2,3,4,5]"
LOADS = {
    "some of a batch's": call(lambda acc, b: acc * b, DEEP, "float32[2,1,4,5]", groups=(2, 1, 1)),
    "last of the rows'": call(lambda acc, b: acc * b, DEEP, "float32[4,1]", groups=(0, 3, 1)),
    "first of the rows'": call(lambda acc, b: acc * b, DEEP, "bfloat16[2,1,1,5]", groups=(0, 3, 1)),
    "middle of the rows'": call(lambda acc, b: acc * b, DEEP, "float16[3,1,1]", groups=(0, 3, 1)),
    "first and last of the rows'": call(lambda acc, b: acc * b, DEEP, "int8[2,1,4,1]", groups=(0, 3, 1)),
    "last of the columns'": call(lambda acc, b: acc * b, DEEP, "float32[5]", groups=(0, 1, 3)),
    "first of the columns'": call(lambda acc, b: acc * b, DEEP, "float32[3,1,1]", groups=(0, 1, 3)),
    "middle of the columns'": call(lambda acc, b: acc * b, DEEP, "float32[2,1,4,1]", groups=(0, 1, 3)),
    "all in one": call(lambda acc, b, c: acc * b + c, DEEP, "float32[3,1,5]", "bool[2,1,4,1]", groups=(0, 0, 4)),
    "transposed rows": call(
        lambda acc, b: acc * b.transpose(1, 0, 2)[..., None], DEEP, "float32[3,2,4]", groups=(0, 3, 1)
    ),
    "transposed columns": call(lambda acc, b: acc * b.transpose(2, 1, 0), DEEP, "float32[5,4,3]", groups=(1, 0, 3)),
    "transposed over groups": call(
        lambda acc, b: acc * b.transpose(3, 1, 2, 0), DEEP, "float32[5,3,4,2]", groups=(1, 1, 2)
    ),
    "a dimension of size one": call(
        lambda acc, b: acc * b, "float32[2,3,1,4,1,5]", "float32[3,1,1,1,5]", groups=(0, 4, 2)
    ),
    "long": call(lambda acc, b, c: acc * b + c, "float32[6,9,700]", "float32[700]", "float32[9,1]", groups=(0, 0, 3)),
    "table": call(
        lambda acc, t: acc + t[:, jnp.arange(4)[:, None] - jnp.arange(5)], DEEP, "float16[3,8]", groups=(1, 2, 1)
    ),
    "table of columns": call(
        lambda acc, t, i: acc + jnp.take(t, i, axis=0, mode="clip"),
        DEEP,
        "float32[9,4,5]",
        "int32[3]",
        groups=(1, 1, 2),
    ),
    "steady table": call(
        lambda acc, t, i: acc + jnp.take(t, i, axis=0, mode="clip").astype("float32"),
        DEEP,
        "float8_e5m2[9]",
        "int8[5]",
        groups=(1, 2, 1),
    ),
    "table of three": call(
        lambda acc, t, i, j, k: acc + t.at[i[:, None, None, None], j[:, None, None], k].get(mode="clip"),
        DEEP,
        "bool[3,4,5]",
        "uint8[2]",
        "int32[3]",
        "int16[5]",
        groups=(2, 1, 1),
    ),
    "long table": call(
        lambda acc, t, i: acc + t.at[i].get(mode="clip"),
        "float32[3,1100]",
        "float32[50]",
        "int32[1,1100]",
        groups=(0, 1, 1),
    ),
    "wide indices": call(
        lambda acc, t, i, j: acc + t.at[i].get(mode="clip") + t.at[j].get(mode="fill", fill_value=2),
        DEEP,
        "float64[5]",
        "uint64[5]",
        "int64[4,1]",
        groups=(2, 1, 1),
    ),
}
