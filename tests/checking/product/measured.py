"""Products whose configurations were timed."""

from dataclasses import replace

from checking.product.calls import ProductCase
from checking.product.cases import gated, gelu


def problem(m, n, k, batch, dtype, a_transposed, b_transposed, epilogue):
    """Of a row of a table."""
    m, n, k, batch = map(int, (m, n, k, batch))
    fields = {
        "": {},
        "fast": {},
        "residual": {"epilogue": lambda acc, residual: acc + residual, "operands": ((dtype, (batch, m, n)),)},
        "gelu": {"epilogue": gelu, "operands": ((dtype, (batch, 1, n)),)},
        "swiglu": {"epilogue": gated, "accumulators": 2},
    }
    layout = {"a_transposed": a_transposed == "1", "b_transposed": b_transposed == "1"}
    case = ProductCase(m, n, k, dtype, out="bfloat16", batch=batch, precision=None, **layout, **fields[epilogue])
    return replace(case.product(), fast=epilogue == "fast")
