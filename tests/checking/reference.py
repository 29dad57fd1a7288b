"""The ops' definitions, written down a second time: in float64, from the papers, and apart from the package's own.

Each is a function of a case, a `Rounding` and float64 arrays. It passes what an implementation in the case's precision
rounds through the `Rounding`, which leaves exact values exact or perturbs them as rounding might: that yields the
tolerance (see tolerance.py). Derivatives of all orders are JAX's derivatives of these functions.
"""

import functools
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from checking.cases.epilogues import EPILOGUES
from checking.cases.modifiers import UNDER_TANH


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


def convolution(case: Any, rounding: Any, lhs: Any, rhs: Any, *operands: Any) -> Any:
    """The sum, over the places of a window, of products of matrices (arXiv:1603.07285), and the case's epilogue."""
    lhs, rhs = lhs.astype(jnp.float64), rhs.astype(jnp.float64)
    acc = rounding.product(functools.partial(convolved, case.geometry), lhs, rhs, case.length, case.input_unit)
    epilogue = EPILOGUES[case.epilogue] if case.epilogue else lambda acc: acc
    return rounding.epilogue(epilogue, [acc], operands, case.multiplied)


def convolved(geometry: Any, lhs: Any, rhs: Any) -> Any:
    """A convolution, of arrays of any dtype: `geometry` says where and which."""
    of_lhs, of_rhs, of_result = geometry.orders
    lhs, rhs = jnp.transpose(lhs, of_lhs), jnp.transpose(rhs, of_rhs)  # (batch, features, places), (out, in, window)
    rhs = jnp.flip(rhs, range(2, rhs.ndim)) if geometry.flip else rhs
    groups, parts = geometry.groups, geometry.batch_groups
    rows = zip(geometry.padding, geometry.lhs_dilation, strict=True)
    padded = jax.lax.pad(lhs, jnp.zeros((), lhs.dtype), [(0, 0, 0)] * 2 + [(*pad, step - 1) for pad, step in rows])
    window, n, out = rhs.shape[2:], lhs.shape[0] // parts, rhs.shape[0] // (groups * parts)
    seen = padded.reshape(parts, n, groups, rhs.shape[1], *padded.shape[2:])
    axes = zip(padded.shape[2:], window, geometry.rhs_dilation, geometry.strides, strict=True)
    for axis, (size, taps, step, stride) in enumerate(axes):
        # Of each result's place the taps' ones, as an axis behind it.
        starts = np.arange(0, max(0, size - (taps - 1) * step), stride)
        seen = jnp.take(seen, starts[:, None] + step * np.arange(taps), 4 + 2 * axis, mode="clip")
    places, taps = "uvw"[: len(window)], "xyz"[: len(window)]
    pairs = "".join(map("".join, zip(places, taps, strict=True)))
    weights = rhs.reshape(groups, parts, out, *rhs.shape[1:])
    y = jnp.einsum(f"pngi{pairs},gpoi{taps}->ngpo{places}", seen, weights)
    y = y.reshape(n, groups * parts * out, *y.shape[4:])
    return jnp.transpose(y, [of_result.index(d) for d in range(y.ndim)])


def _sum_of(there: Any) -> Any:
    """The sum of values by weights, of which those that aren't there are no terms of gradients either."""

    def weigh(weights: Any, value: Any) -> Any:
        terms = weights[..., None] * jnp.swapaxes(value, 1, 2)[:, :, None]
        return jnp.sum(jnp.where(there[..., None], terms, 0), 3)

    return weigh


def attention(
    case: Any,
    rounding: Any,
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    sinks: Any = None,
    **operands: Any,
) -> tuple[Any, ...]:
    """Scaled dot-product attention (arXiv:1706.03762), with all scores at once."""
    query, key, value = (array if array.ndim == 4 else array[None] for array in (query, key, value))
    key, value = (jnp.repeat(array, case.heads // max(1, case.key_heads), 2) for array in (key, value))
    shape = case.scores

    def dot(numbers: str) -> Any:
        return lambda a, b: jnp.einsum(numbers, a, b)

    score = rounding.product(dot("btnh,bsnh->bnts"), query, key, case.size, case.input_unit)
    score = rounding.each(score * (1.0 if case.size == 0 else case.size**-0.5))
    if bias is not None:
        wide = bias.reshape((1,) * (4 - bias.ndim) + bias.shape)
        score = rounding.each(score + rounding.broadcast(wide, shape))
    if case.soft_cap is not None:
        score = rounding.each(score / case.soft_cap)
        score = rounding.each(case.soft_cap * jnp.tanh(rounding.under_tanh(score)))
    if case.score_mod:
        moved = [rounding.each(operand) for operand in operands.values()]
        for number in UNDER_TANH.get(case.score_mod, ()):
            moved[number] = rounding.under_tanh(moved[number])
        score = rounding.each(case.modified(score, *moved))
        score = rounding.looked_up_by(score, score.size)
    there = jnp.asarray(case.visible())
    score = jnp.where(there, score, -jnp.inf)
    wide_sinks = None if sinks is None else rounding.broadcast(sinks[None, :, None], shape[:3])
    every = [jnp.max(score, -1, initial=-jnp.inf), *([] if wide_sinks is None else [wide_sinks])]
    largest = jax.lax.stop_gradient(functools.reduce(jnp.maximum, every))
    largest = jnp.where(largest == -jnp.inf, 0, largest)
    weights = rounding.exponential(rounding.each(score - largest[..., None]), case.compute_dtype)
    weights = jnp.where(there, weights, 0)
    if case.score_unit:  # of the backward pass, which computes them again, by another engine where one serves only that
        weights = rounding.derivative(weights, case.score_unit * jnp.where(there, jnp.abs(score), 0))
    total = case.keys * rounding.mean(weights, (3,)) if case.keys else jnp.zeros(shape[:3])
    if wide_sinks is not None:
        total = total + rounding.exponential(rounding.each(wide_sinks - largest), case.compute_dtype)
    nothing = total == 0
    total = rounding.each(jnp.where(nothing, 1, total))
    log_sum_exp = jnp.where(nothing, -jnp.inf, rounding.each(largest + jnp.log(total)))
    kept = weights * case.kept() if case.dropout else weights
    # A row that is NaN says nothing of values that it doesn't see, as zero times NaN would.
    weigh = _sum_of(there) if case.data == "nan" else dot("bnts,bsnd->bntd")
    weighted = rounding.product(weigh, kept, value, max(1, case.keys), case.input_unit)
    # The total's cotangent is a sum over a query's results as they were stored, of values as they were multiplied.
    totals = rounding.derivative(rounding.broadcast(total[..., None], weighted.shape), case.input_unit)
    out = rounding.each(weighted / totals)
    results = tuple(jnp.swapaxes(result, 1, 2) for result in (out, log_sum_exp)[: len(case.outputs)])
    return results if case.batch is not None else tuple(result[0] for result in results)
