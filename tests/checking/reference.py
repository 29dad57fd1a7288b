"""The ops' definitions, written down a second time: in float64, from the papers, and apart from the package's own.

Each is a function of a case, a `Rounding` and float64 arrays. It passes what an implementation in the case's precision
rounds through the `Rounding`, which leaves exact values exact or perturbs them as rounding might: that yields the
tolerance (see tolerance.py). Derivatives of all orders are JAX's derivatives of these functions.
"""

from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from checking.cases.epilogues import EPILOGUES


def norm(
    case: Any, rounding: Any, x: Any, residual: Any = None, scale: Any = None, bias: Any = None
) -> tuple[Any, ...]:
    """Layer normalization (arXiv:1607.06450) or root-mean-square normalization (arXiv:1910.07467) over `case.axes`."""
    total = x if residual is None else rounding.stored(x + residual, case.sum_dtype)
    # Gradients of the norm are rounded once to the sum's dtype, before the sum's own cotangent is added.
    wide = rounding.converted(total, case.sum_dtype)
    kept = tuple(1 if axis in case.axes else size for axis, size in enumerate(case.shape))
    normalized = tuple(size if axis in case.axes else 1 for axis, size in enumerate(case.shape))

    def per_row(value: Any) -> Any:
        return rounding.broadcast(value.reshape(kept), case.shape)

    def per_column(value: Any) -> Any:
        return rounding.broadcast(value.reshape(normalized), case.shape)

    statistics = []
    if case.kind == "layer_norm":
        mean = rounding.mean(wide, case.axes)
        # Backward kernels use that deviations from the mean add up to 0, which they don't when the mean is rounded.
        # That is no worse than elements that are off by as much as the mean is.
        wide = rounding.each(rounding.each(wide, case.axes) - per_row(mean))
        statistics.append(mean)
    rstd = rounding.each(1 / jnp.sqrt(rounding.mean(rounding.each(wide * wide), case.axes) + case.epsilon))
    statistics.append(rstd)
    y = rounding.each(wide * per_row(rstd))
    if scale is not None:
        y = rounding.each(y * rounding.each(per_column(scale) + case.scale_offset))
    if bias is not None:
        y = rounding.each(y + per_column(bias))
    return (y, *(() if residual is None else (total,)), *(statistics if case.statistics else ()))


def terms(shape: tuple[int, ...], axes: tuple[int, ...]) -> int:
    """How many terms a sum over `axes` has."""
    return prod(shape[axis] for axis in axes)


def matmul(case: Any, rounding: Any, a: Any, *arrays: Any) -> Any:
    """The product of a with one or two arrays, as `jax.numpy` defines it, and the case's epilogue of it."""
    count = 2 if case.kind == "gated_linear_unit" else 1

    def multiplied(a: Any, b: Any) -> Any:
        if case.numbers is None:
            return jnp.matmul(a, b)
        return jax.lax.dot_general(a, b, case.numbers)

    wide = [array.astype(jnp.float64) for array in (a, *arrays[:count])]
    acc = [rounding.product(multiplied, wide[0], b, case.length, case.input_unit) for b in wide[1:]]
    if case.kind == "gated_linear_unit":
        activation = getattr(jax.nn, case.epilogue or "silu")

        def epilogue(gate: Any, up: Any, gate_bias: Any = 0.0, up_bias: Any = 0.0) -> Any:
            return activation(gate + gate_bias) * (up + up_bias)

    else:
        epilogue = EPILOGUES[case.epilogue] if case.epilogue else lambda acc: acc
    return rounding.epilogue(epilogue, acc, arrays[count:], case.multiplied)
