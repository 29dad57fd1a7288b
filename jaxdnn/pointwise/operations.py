"""The operations of pointwise programs, as a table, and the dtypes of their values."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

# Every dtype that a value may have, in the order of `Dtype` in cpp/host/pointwise/interpreter.h.
DTYPES = (
    "float32",
    "float64",
    "int32",
    "int64",
    "uint32",
    "uint64",
    "bool",
    "int8",
    "int16",
    "uint8",
    "uint16",
    "bfloat16",
    "float16",
    "float8_e4m3fn",
    "float8_e5m2",
)

# The floating dtypes that registers don't hold: arithmetic is done in float32 and rounded after each operation.
NARROW_FLOATS = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


def kind(dtype: str) -> str:
    """Floating dtypes are "f", signed integers "i", unsigned ones "u", and bool is "b"."""
    return "f" if "float" in dtype else dtype[0]


@dataclass(frozen=True)
class Operation:
    """One operation on scalars. Its arguments have one dtype, but for `select` and `convert`.

    Attributes:
      name: JAX's name for the primitive, unless `trace` rewrites it.
      kinds: of the dtypes that it takes (see `kind`).
      floating: the CUDA expression for floating arguments; `math::` is cpp/kernels/core/math.cuh.
      integer: the CUDA expression for integers and bool.
      arity: how many arguments it takes.
      exact: whether no result of it needs rounding to the arguments' dtype.
      compares: whether the result is a bool.
      fold: the same on numpy scalars, where that agrees with XLA to the last bit; without it, constants are not folded.
    """

    name: str
    kinds: str
    floating: str = ""
    integer: str = ""
    arity: int = 1
    exact: bool = False
    compares: bool = False
    fold: Callable[..., Any] | None = None


def _function(name: str, arity: int = 1, called: str | None = None, **fields: Any) -> Operation:
    """A function of floating values that math.cuh has under the same name."""
    arguments = ", ".join(f"{{{i}}}" for i in range(arity))
    return Operation(name, "f", f"math::{called or name}({arguments})", arity=arity, **fields)


def _comparison(name: str, symbol: str, fold: Callable[..., Any]) -> Operation:
    expression = f"{{0}} {symbol} {{1}}"
    return Operation(name, "fiub", expression, expression, arity=2, exact=True, compares=True, fold=fold)


# In the order of JAXDNN_POINTWISE_OPERATIONS in cpp/host/pointwise/interpreter.h.
OPERATIONS = (
    Operation("add", "fiu", "{0} + {1}", "math::add({0}, {1})", arity=2, fold=np.add),
    Operation("sub", "fiu", "{0} - {1}", "math::subtract({0}, {1})", arity=2, fold=np.subtract),
    Operation("mul", "fiu", "{0} * {1}", "math::multiply({0}, {1})", arity=2, fold=np.multiply),
    Operation("div", "fiu", "math::divide({0}, {1})", "math::divide({0}, {1})", arity=2),
    Operation("rem", "fiu", "math::remainder({0}, {1})", "math::remainder({0}, {1})", arity=2),
    Operation(
        "max", "fiub", "math::maximum({0}, {1})", "math::maximum({0}, {1})", arity=2, exact=True, fold=np.maximum
    ),
    Operation(
        "min", "fiub", "math::minimum({0}, {1})", "math::minimum({0}, {1})", arity=2, exact=True, fold=np.minimum
    ),
    Operation("neg", "fiu", "-{0}", "math::negate({0})", exact=True, fold=np.negative),
    Operation("abs", "fiu", "math::abs({0})", "math::abs({0})", exact=True, fold=np.abs),
    Operation("sign", "fiu", "math::sign({0})", "math::sign({0})", exact=True),
    _function("floor", exact=True, fold=np.floor),
    _function("ceil", exact=True, fold=np.ceil),
    _function("round_half_even", exact=True, fold=np.rint),
    _function("round_half_away", exact=True),
    _function("sqrt", fold=np.sqrt),
    _function("rsqrt"),
    _function("cbrt"),
    _function("pow", 2),
    _function("atan2", 2),
    _function("exp"),
    _function("exp2"),
    _function("expm1"),
    _function("log"),
    _function("log1p"),
    _function("logistic"),
    _function("tanh"),
    _function("sin"),
    _function("cos"),
    _function("tan"),
    _function("asin"),
    _function("acos"),
    _function("atan"),
    _function("sinh"),
    _function("cosh"),
    _function("asinh"),
    _function("acosh"),
    _function("atanh"),
    _function("erf"),
    _function("erfc"),
    _comparison("eq", "==", np.equal),
    _comparison("ne", "!=", np.not_equal),
    _comparison("lt", "<", np.less),
    _comparison("le", "<=", np.less_equal),
    _comparison("gt", ">", np.greater),
    _comparison("ge", ">=", np.greater_equal),
    _function("is_finite", exact=True, compares=True, fold=np.isfinite),
    Operation("and", "iub", integer="{0} & {1}", arity=2, fold=np.bitwise_and),
    Operation("or", "iub", integer="{0} | {1}", arity=2, fold=np.bitwise_or),
    Operation("xor", "iub", integer="{0} ^ {1}", arity=2, fold=np.bitwise_xor),
    Operation("not", "iub", integer="math::invert({0})", fold=np.invert),
    Operation("shift_left", "iu", integer="math::shift_left({0}, {1})", arity=2),
    Operation("shift_right_logical", "iu", integer="math::shift_right_logical({0}, {1})", arity=2),
    Operation("shift_right_arithmetic", "iu", integer="math::shift_right_arithmetic({0}, {1})", arity=2),
    Operation("population_count", "iu", integer="math::population_count({0})"),
    Operation("clz", "iu", integer="math::count_leading_zeros({0})"),
    # select(condition, where it is true, where it is false)
    Operation("select", "fiub", "{0} ? {1} : {2}", "{0} ? {1} : {2}", arity=3, exact=True),
    # To the instruction's dtype; what it is in CUDA depends on both (see cuda.py).
    Operation("convert", "fiub"),
)

TABLE = {operation.name: operation for operation in OPERATIONS}
