"""The table of functions that pointwise programs are tested with."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# Names of jax.nn's activations, and of what is built from them; functions of one array.
_ACTIVATIONS = """
relu relu6 silu softplus elu selu celu leaky_relu hard_tanh hard_sigmoid hard_swish mish sigmoid log_sigmoid soft_sign
squareplus tanh sparse_plus sparse_sigmoid identity
"""
ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    **{name: getattr(jax.nn, name) for name in _ACTIVATIONS.split()},
    "gelu tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu erf": lambda x: jax.nn.gelu(x, approximate=False),
    "softcap": lambda x: 30 * jnp.tanh(x / 30),
    "quick gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "squared relu": lambda x: jnp.square(jax.nn.relu(x)),
    "logit": lambda x: jax.scipy.special.logit(jax.nn.sigmoid(x)),
    "sinc": jnp.sinc,
    "nan to num": jnp.nan_to_num,
    "remat": jax.checkpoint(jax.nn.mish),
    "jit": jax.jit(jax.nn.silu),
}


def sums_with(function: Any, x: Any) -> tuple[Any, ...]:
    """Sums and differences of a function with one and with its multiples, some of which cancel."""
    product = x * function
    sums = (1 + function, function + 1, x + product, product + x, function + x)
    return (*sums, 1 - function, function - 1, x - product, product - x, 2 - function)


# Functions of one floating array.
_FLOATING = """
abs acos acosh asin asinh atan atanh cbrt ceil cos cosh erf erfc exp exp2 expm1 floor is_finite log log1p logistic
neg rsqrt sign sin sinh sqrt square tan tanh
"""
FLOATING: dict[str, Callable[..., Any]] = {name: getattr(lax, name) for name in _FLOATING.split()}
FLOATING |= {
    "round half even": jnp.round,
    "round half away": lax.round,
    "reciprocal": lax.reciprocal,
    "powers": lambda x: (x**0, x**2, x**3, x**7, x**-1, x**-3),
    "clamp": lambda x: lax.clamp(np.float32(-1).astype(x.dtype), x, np.float32(1.5).astype(x.dtype)),
    "divided by constants": lambda x: x / 2 + x / 3 + x / 1 - 0.0,
    "sums with tanh": lambda x: sums_with(jnp.tanh(x), x),
    "stop gradient": lambda x: lax.stop_gradient(x) * 2,
    "to integers": lambda x: tuple(
        x.astype(t) for t in ("int8", "uint8", "int16", "uint16", "int32", "uint32", "bool")
    ),
    "to floats": lambda x: tuple(x.astype(t) for t in ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")),
    "there and back": lambda x: tuple(
        x.astype(t).astype(x.dtype) for t in ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int32", "int8")
    ),
    "in bfloat16": lambda x: jax.nn.gelu(x.astype(jnp.bfloat16) * 2 + 1),
    "in float16": lambda x: jnp.exp(-jnp.abs(x.astype(jnp.float16)) / 3),
    "in float8": lambda x: (x.astype(jnp.float8_e5m2) + jnp.float8_e5m2(1)).astype(jnp.float32),
}

# Functions of two arrays of one floating dtype.
_PAIRS = """
add atan2 div eq ge gt le lt max min mul ne pow rem sub
"""
PAIRS: dict[str, Callable[..., Any]] = {name: getattr(lax, name) for name in _PAIRS.split()}
PAIRS |= {
    "mod": jnp.mod,
    "floor divide": jnp.floor_divide,
    "logaddexp": jnp.logaddexp,
    "hypot": jnp.hypot,
    "copysign": lambda x, y: jnp.where(y < 0, -jnp.abs(x), jnp.abs(x)),
    "select": lambda x, y: jnp.where(x > y, x, y),
    "select of three": lambda x, y: lax.select_n((x > 0).astype(jnp.int32) + (y > 0).astype(jnp.int32), x, y, x + y),
    "logic": lambda x, y: ((x > 0) & (y > 0)) | ~(x < y) ^ jnp.isfinite(y),
    "glu": lambda x, y: jax.nn.silu(x) * y,
    "geglu": lambda x, y: jax.nn.gelu(x) * y,
    "integer power": lambda x, y: x ** jnp.round(y).astype(jnp.int32),
    "clamp to bounds that cross": lambda x, y: (lax.clamp(y, x, -y), lax.clamp(jnp.ones_like(x), y, x)),
}

# Functions of two arrays of one integer dtype.
_INTEGERS = """
add bitwise_and bitwise_or bitwise_xor div eq ge gt le lt max min mul ne rem shift_left  shift_right_arithmetic
shift_right_logical sub
"""
INTEGERS: dict[str, Callable[..., Any]] = {name: getattr(lax, name) for name in _INTEGERS.split()}
INTEGERS |= {
    "one": lambda x, _: (lax.neg(x), jnp.abs(x), lax.sign(x), lax.bitwise_not(x), lax.population_count(x), lax.clz(x)),
    "power": lambda x, _: x**3,
    "floor divide": jnp.floor_divide,
    "mod": jnp.mod,
    "clip": lambda x, y: jnp.clip(x, 3, 100) + y,
    "clamp to bounds that cross": lambda x, y: lax.clamp(y, x, jnp.full_like(x, 3)),
    "to others": lambda x, y: tuple(
        (x + y).astype(t)
        for t in ("int8", "uint8", "int16", "uint16", "int32", "uint32", "bool", "float32", "bfloat16")
    ),
    "dequantize": lambda x, y: (x.astype(jnp.float32) - 3) * 0.25 + y.astype(jnp.float32),
}


# Values that functions are singular at, or overflow near.
SPECIAL = np.array(
    (
        *(0, -0.0, np.inf, -np.inf, np.nan, 1, -1, 0.5, -0.5, 1.5, 2.5, -2.5, 3.4e38, -3.4e38, 1.2e-38, -1.2e-38),
        *(88.5, 89, -87, -104, 1e-8, -1e-8, 11, -11, 1e10, -1e10, 2**31, -(2.0**31), 300, -300, 448, 464, 65504, 65520),
    ),
    np.float32,
)


def vjp(function: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    """The derivative of an activation, as a backward kernel has it: of the saved input and the gradient."""
    return lambda x, gradient: jax.vjp(function, x)[1](gradient)[0]


def jvp(function: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda x, tangent: jax.jvp(function, (x,), (tangent,))
