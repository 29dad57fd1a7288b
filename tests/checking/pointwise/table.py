"""The table of calls that pointwise programs are run with."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from checking.pointwise.cases import ACTIVATIONS, FLOATING, INTEGERS, PAIRS, jvp, vjp
from checking.pointwise.runs import Call, values
from jaxdnn.pointwise.operations import NARROW_FLOATS

SHAPE = (5, 67)


def pair(function: Callable[..., Any], dtype: str) -> Call:
    return Call(function, SHAPE, (values(dtype, SHAPE, "x"),), (values(dtype, SHAPE, "y"),))


def single(function: Callable[..., Any], dtype: str) -> Call:
    return Call(function, SHAPE, (values(dtype, SHAPE, "x"),))


def table() -> dict[str, Call]:
    calls = {}
    for name, function in ACTIVATIONS.items():
        calls[name] = single(function, "float32")
        calls[f"{name}, vjp"] = pair(vjp(function), "float32")
        calls[f"{name}, jvp"] = pair(jvp(function), "float32")
        calls[f"{name}, second derivative"] = pair(vjp(lambda x, f=function: vjp(f)(x, jnp.cos(x))), "float32")
    for dtype in ("float32", "float64", "bfloat16", "float16"):
        calls |= {f"{name}, {dtype}": single(function, dtype) for name, function in FLOATING.items()}
        calls |= {f"{name}, {dtype}": pair(function, dtype) for name, function in PAIRS.items()}
    calls["literals after a minus"] = single(lambda x: x * (1 - jnp.tanh(-0.5)) - -2.0, "float32")
    calls |= {f"/ 2^-9, {dtype}": single(lambda x: x / x.dtype.type(2**-9), dtype) for dtype in NARROW_FLOATS}
    for dtype in ("int32", "uint32", "int8", "uint16", "uint64"):
        calls |= {f"{name}, {dtype}": pair(function, dtype) for name, function in INTEGERS.items()}
    return calls


TABLE = table()
