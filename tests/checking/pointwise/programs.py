"""Functions traced to programs, of accumulators of one small shape."""

from typing import Any

import jax

from jaxdnn.pointwise import Program, trace

SHAPE = (4, 6)
F32 = jax.ShapeDtypeStruct(SHAPE, "float32")
ROW = jax.ShapeDtypeStruct((6,), "float32")


def traced(
    function: Any, *operands: Any, shape: tuple[int, ...] = SHAPE, sums: tuple[str, ...] = ("float32",)
) -> Program:
    return trace(function, shape, sums, operands)
