"""Functions of `Bounded` arrays, under the names that `jax.numpy` and `jax.nn` have for them wherever that can be."""

from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import special

from checking.fuzz.bounded import (
    STEP,
    Bounded,
    Link,
    broadcast_to,
    constant,
    exact,
    made,
    multiply,
    summed,
    together,
    unit,
)

# The error of a function, in units of roundoff.
_FUNCTION = 16.0


def where(condition: Bounded, a: Any, b: Any) -> Bounded:
    a, b = together(a, b)
    shape = np.broadcast_shapes(condition.shape, a.shape)
    a, b = broadcast_to(a, shape), broadcast_to(b, shape)
    unsure = np.broadcast_to(condition.error > 0, shape)
    with np.errstate(all="ignore"):
        either = np.maximum(a.error, b.error) + np.abs(a.value - b.value)
    value = np.where(condition.value, a.value, b.value)
    error = np.where(unsure, either, np.where(condition.value, a.error, b.error))
    if not a.floating:
        return Bounded(value, error, a.dtype)

    def chosen(which: bool) -> Bounded:
        taken = np.broadcast_to(condition.value == which, shape).astype(float)
        return Bounded(taken, unsure.astype(float), a.dtype)

    return made(value, error, a.dtype, 0, (a, lambda: chosen(True)), (b, lambda: chosen(False)))


def _extreme(a: Any, b: Any, function: Callable[..., Any], sign: int) -> Bounded:
    a, b = together(a, b)
    value, error = function(a.value, b.value), np.maximum(a.error, b.error)
    if not a.floating:
        return Bounded(value, error, a.dtype)

    def share(difference: np.ndarray) -> Bounded:
        tied = np.abs(difference) <= a.error + b.error
        return Bounded((difference > 0) + 0.5 * (difference == 0), tied.astype(float), a.dtype)

    ahead = sign * (a.value - b.value)
    return made(value, error, a.dtype, 0, (a, lambda: share(ahead)), (b, lambda: share(-ahead)))


def maximum(a: Any, b: Any) -> Bounded:
    return _extreme(a, b, np.maximum, 1)


def minimum(a: Any, b: Any) -> Bounded:
    return _extreme(a, b, np.minimum, -1)


def clip(x: Bounded, low: float, high: float) -> Bounded:
    return minimum(maximum(x, low), high)


def absolute(x: Bounded) -> Bounded:
    if not x.floating:
        return Bounded(np.abs(x.value), x.error, x.dtype)
    slope = Bounded(np.sign(x.value), 2.0 * (np.abs(x.value) <= x.error), x.dtype)
    return made(np.abs(x.value), x.error, x.dtype, 0, (x, lambda: slope))


# ---------------------------------------------------------------- functions


def _monotone(function: Callable[..., Any], slope: Callable[[Bounded, Bounded], Bounded] | None) -> Any:
    """A function whose values at the ends of an interval bound those between; its slope at x, where it is y."""

    def apply(x: Bounded) -> Bounded:
        with np.errstate(all="ignore"):
            y = function(x.value)
            ends = [np.abs(function(x.value + e) - y) for e in (x.error, -x.error)]
            error = np.where(np.isinf(x.error), np.inf, np.maximum(*ends))
            plain = made(y, error, x.dtype, _FUNCTION if slope else 0)
            if slope is None:
                return plain
            return made(y, plain.error, x.dtype, 0, (x, lambda: slope(x.alone, plain)))

    return apply


def _exponential(x: np.ndarray) -> np.ndarray:
    return np.exp(np.minimum(x, 700))


tanh = _monotone(np.tanh, lambda _, y: constant(1.0, y) - y * y)
logistic = _monotone(special.expit, lambda _, y: y * (constant(1.0, y) - y))
sqrt = _monotone(lambda x: np.sqrt(np.maximum(x, 0)), lambda _, y: constant(0.5, y) / y)
log1p = _monotone(np.log1p, lambda x, _: constant(1.0, x) / (x + 1.0))
erf = _monotone(special.erf, lambda x, _: _gauss(x))
arctan = _monotone(np.arctan, lambda x, _: constant(1.0, x) / (x * x + 1.0))
_exp = _monotone(_exponential, lambda _, y: y)
expm1 = _monotone(lambda x: np.expm1(np.minimum(x, 700)), lambda x, _: exp(x))
_log_exp1 = _monotone(lambda x: np.logaddexp(x, 0), lambda x, _: logistic(x))
floor, ceil, nearest, sign = (_monotone(function, None) for function in (np.floor, np.ceil, np.round, np.sign))


def exp(x: Bounded) -> Bounded:
    """The exponential, whose argument kernels multiply by a rounded constant."""
    rounded = made(x.value, x.error, x.dtype, STEP)
    return _exp(Bounded(rounded.value, rounded.error, x.dtype, x.links))


def _gauss(x: Bounded) -> Bounded:
    return constant(2 / np.sqrt(np.pi), x) * exp(-(x * x))


def _wave(function: Callable[..., Any], slope: Callable[[Bounded], Bounded]) -> Any:
    def apply(x: Bounded) -> Bounded:
        # Reducing the argument errs relatively to it.
        error = np.minimum(x.error + STEP * unit(x.dtype) * np.abs(x.value), 2) + _FUNCTION * unit(x.dtype)
        return made(function(x.value), error, x.dtype, 0, (x, lambda: slope(x.alone)))

    return apply


sin = _wave(np.sin, lambda x: cos(x))
cos = _wave(np.cos, lambda x: -sin(x))


def softplus(x: Bounded) -> Bounded:
    y = _log_exp1(x)
    # The larger of x and 0 is added in the dtype of x.
    return Bounded(y.value, y.error + STEP * unit(x.dtype) * (1 + np.abs(x.value)), y.dtype, y.links)


def square(x: Bounded) -> Bounded:
    return x * x


def sigmoid(x: Bounded) -> Bounded:
    return logistic(x)


def relu(x: Bounded) -> Bounded:
    return maximum(x, 0.0)


def silu(x: Bounded) -> Bounded:
    return x * logistic(x)


def gelu(x: Bounded, approximate: bool = True) -> Bounded:
    if approximate:
        return x * 0.5 * (tanh((x + x * x * x * 0.044715) * np.sqrt(2 / np.pi)) + 1.0)
    return x * 0.5 * (erf(x * np.sqrt(0.5)) + 1.0)


def elu(x: Bounded) -> Bounded:
    return where(x < 0.0, expm1(minimum(x, 0.0)), x)


def mish(x: Bounded) -> Bounded:
    return x * tanh(softplus(x))


def hard_swish(x: Bounded) -> Bounded:
    return x * clip(x + 3.0, 0.0, 6.0) / 6.0


def leaky_relu(x: Bounded) -> Bounded:
    return where(x < 0.0, x * 0.01, x)


# ---------------------------------------------------------------- layout and reductions


def _moved(x: Bounded, there: Callable[..., Any], back: Callable[..., Any]) -> Bounded:
    def moved(t: Bounded, move: Callable[..., Any]) -> Bounded:
        return Bounded(move(t.value), move(t.error), t.dtype)

    link = Link(x, lambda t: moved(t, there), lambda t: moved(t, back))
    wide = moved(x, there)
    return Bounded(wide.value, wide.error, x.dtype, (link,) if x.floating else ())


def expand_dims(x: Bounded, axis: int) -> Bounded:
    return _moved(x, lambda v: np.expand_dims(v, axis), lambda v: np.squeeze(v, axis))


def swapaxes(x: Bounded, a: int, b: int) -> Bounded:
    return _moved(x, lambda v: np.swapaxes(v, a, b), lambda v: np.swapaxes(v, a, b))


def iota(like: Bounded, axis: int) -> Bounded:
    """The index along an axis of `like`'s shape, as float32."""
    index = np.arange(like.shape[axis]).reshape([-1 if i == axis else 1 for i in range(len(like.shape))])
    return exact(np.broadcast_to(index, like.shape).astype(np.float32))


def total(x: Bounded, axis: Any = None, keepdims: bool = False) -> Bounded:
    axes = _axes(x, axis)

    def push(t: Bounded) -> Bounded:
        return summed(t, axes, keepdims)

    def pull(t: Bounded) -> Bounded:
        return broadcast_to(_kept(t.alone, axes, keepdims), x.shape).alone

    wide = push(x)
    return Bounded(wide.value, wide.error, x.dtype, (Link(x, push, pull),))


def _reduced_to_extreme(x: Bounded, axis: Any, keepdims: bool, function: Callable[..., Any]) -> Bounded:
    axes = _axes(x, axis)
    whole = function(x.value, axes, keepdims=True)
    error = np.max(x.error, axes, keepdims=True)
    near = np.abs(x.value - whole) <= x.error + error
    count = np.sum(near, axes, keepdims=True)
    # Elements that may be tied share the derivative, in whatever way.
    share = Bounded(near / count, (near & (count > 1)).astype(float), x.dtype)

    def push(t: Bounded) -> Bounded:
        return summed(multiply(share, t.alone), axes, keepdims)

    def pull(t: Bounded) -> Bounded:
        return multiply(share, broadcast_to(_kept(t.alone, axes, keepdims), x.shape).alone).alone

    kept = [v if keepdims else np.squeeze(v, axes) for v in (whole, error)]
    return Bounded(kept[0], kept[1], x.dtype, (Link(x, push, pull),))


def largest(x: Bounded, axis: Any = None, keepdims: bool = False) -> Bounded:
    return _reduced_to_extreme(x, axis, keepdims, np.max)


def least(x: Bounded, axis: Any = None, keepdims: bool = False) -> Bounded:
    return _reduced_to_extreme(x, axis, keepdims, np.min)


def _axes(x: Bounded, axis: Any) -> tuple[int, ...]:
    axes = range(len(x.shape)) if axis is None else (axis,) if isinstance(axis, int) else axis
    return tuple(sorted(i % len(x.shape) for i in axes))


def _kept(t: Bounded, axes: tuple[int, ...], keepdims: bool) -> Bounded:
    """What a reduction over `axes` returned, with dimensions of size one for them."""
    return t if keepdims else Bounded(np.expand_dims(t.value, axes), np.expand_dims(t.error, axes), t.dtype)
