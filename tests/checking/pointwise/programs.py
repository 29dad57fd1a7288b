"""Functions traced to programs, of accumulators of one small shape."""

from typing import Any

import jax

from jaxdnn.pointwise import Program, collapse, trace

SHAPE = (4, 6)
F32 = jax.ShapeDtypeStruct(SHAPE, "float32")
ROW = jax.ShapeDtypeStruct((6,), "float32")


def traced(
    function: Any, *operands: Any, shape: tuple[int, ...] = SHAPE, accumulators: tuple[str, ...] = ("float32",)
) -> Program:
    return trace(function, shape, accumulators, operands)


def collapsed(function: Any, *operands: Any, groups: tuple[int, int, int] = (0, 1, 1)) -> Program:
    program = collapse(traced(function, *operands), SHAPE, [operand.shape for operand in operands], groups)
    assert isinstance(program, Program)
    return program
