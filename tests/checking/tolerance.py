"""Tolerances, derived from the dtype and the reduction length by perturbing what is rounded.

The float64 reference is evaluated several times. Once it is exact. Otherwise every value that an implementation rounds
is multiplied by 1 + unit * e, where `unit` is the unit roundoff of the op's arithmetic (2^-24 for float32) and e is
random with mean square 1: Monte Carlo arithmetic (Parker, "Monte Carlo arithmetic: exploiting the floating-point
properties of numerical programs", 1997). Since transformations apply to the perturbed function as to the exact one, the
perturbation reaches derivatives as well, and no op or transformation needs an error analysis of its own.

A sum of n terms has n - 1 roundings, each relative to a partial sum. Terms of equal sign make the partial sums grow
linearly, and the error unit * sqrt(n / 3) * |sum|; terms of random sign make the error unit * sqrt(n / 2) * rms(terms)
* sqrt(n). Both are covered by perturbing the sum by unit * sqrt(n), and each of its terms by the same.
(Blocked and pairwise summation err less. The bound n * unit, which no summation passes, is hardly ever approached:
Higham and Mary, "A new approach to probabilistic rounding error analysis", 2019.)

The tolerance of an element is then

  DEVIATIONS * (root mean square of the perturbation's effects) + the rounding to the result's dtype,

with 6 standard deviations: one more source of error of equal size for the steps that an implementation does in another
way (a reciprocal and a product for a quotient, say), and room for the largest of 10^6 elements.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from checking.compiling import QUICKLY
from checking.reference import terms

DEVIATIONS = 6.0
REPLAYS = 24  # of 12, the root mean square is below half of what it is for one element in some hundreds


class Rounding:
    """Perturbs values as rounding would, by `unit` relatively; does nothing if `amplitude` is 0.

    Args:
      unit: unit roundoff of the arithmetic.
      replay: any number; another one perturbs differently.
      amplitude: factor on all perturbations.
    """

    def __init__(self, unit: float, replay: Any = 0.0, amplitude: Any = 0.0) -> None:
        self._unit, self._replay, self._amplitude = unit, replay, amplitude
        self._calls = 0

    def each(self, value: Any, axes: tuple[int, ...] = ()) -> Any:
        """The result of one operation, or what errs as much as a sum over `axes` does."""
        growth = self._unit * np.sqrt(max(1, terms(value.shape, axes)))
        return value * (1 + self._noise(growth, value.shape))

    def mean(self, value: Any, axes: tuple[int, ...]) -> Any:
        """A mean over `axes`, of sums in any order."""
        growth = self._unit * np.sqrt(max(1, terms(value.shape, axes)))
        mean = jnp.mean(value * (1 + self._noise(growth, value.shape)), axes)
        return mean * (1 + self._noise(growth, mean.shape))

    def broadcast(self, value: Any, shape: tuple[int, ...]) -> Any:
        """A broadcast, whose transpose is a sum: cotangents err like one."""
        repeated = [axis for axis, size in enumerate(value.shape) if size != shape[axis]]
        growth = self._unit * np.sqrt(max(1, terms(shape, tuple(repeated))))
        return self.derivative(jnp.broadcast_to(self.derivative(value, growth), shape), growth)

    def looked_up_by(self, value: Any, count: int) -> Any:
        """What is computed of elements that `count` others look up, too: cotangents are terms of so long a sum."""
        return self.derivative(value, self._unit * np.sqrt(max(1, count)))

    def exponential(self, value: Any, dtype: str) -> Any:
        """Its exponential, which may be flushed to zero where it is below the smallest normal number of `dtype`."""
        flushed = _with_derivative_of(jnp.ones_like(value), value)
        return self.each(jnp.exp(value)) + flushed * self._noise(float(jnp.finfo(dtype).tiny), value.shape)

    def under_tanh(self, value: Any) -> Any:
        """What a hyperbolic tangent is taken of: its derivative is made of it as it was rounded, which is near one."""
        tanh = jnp.tanh(jax.lax.stop_gradient(value))
        return value + tanh * self._noise(self._unit, value.shape) / jnp.maximum(1 - tanh * tanh, self._unit)

    def stored(self, value: Any, dtype: str) -> Any:
        """A value that is rounded to `dtype` for good, as all that come after it see; derivatives round likewise."""
        rounded = jax.lax.stop_gradient(value).astype(dtype).astype(value.dtype)
        return rounded + self.converted(value - jax.lax.stop_gradient(value), dtype)

    def converted(self, value: Any, dtype: str) -> Any:
        """A conversion from `dtype`, to which cotangents are therefore rounded."""
        return self.derivative(value, float(jnp.finfo(dtype).eps) / 2)

    def product(self, multiply: Callable[..., Any], a: Any, b: Any, length: int, unit: float) -> Any:
        """Sums of `length` products of elements that are rounded to `unit` before they are multiplied.

        Each factor is perturbed, since it is a term of the sums in the other one's gradient; and its tangent apart from
        itself, since they are multiplied by different things.
        """
        growth = self._unit * np.sqrt(length) + unit
        acc = multiply(*(self._moved(array, growth) for array in (a, b)))
        return acc * (1 + self._noise(growth, acc.shape))

    def epilogue(self, function: Callable[..., Any], acc: Sequence[Any], operands: Sequence[Any], unit: float) -> Any:
        """A pointwise function of sums, whose derivatives see the sums, and get cotangents, rounded to `unit`.

        Some 8 operations each err relatively to an argument, to one, or to a sum of such.
        """
        fixed = jax.lax.stop_gradient((*acc, *operands))
        shape, count = acc[0].shape, acc[0].size
        size = 1 + sum(jnp.max(jnp.abs(jnp.nan_to_num(a, posinf=0, neginf=0)), initial=0.0) for a in fixed)
        # An operand's gradient is a sum over all the elements that it is broadcast to.
        repeated = max((count // max(1, operand.size) for operand in operands), default=1)
        growth = 8 * self._unit * np.sqrt(max(1, repeated))
        moving = [self._moved(one, unit) + size * self._noise(8 * self._unit, shape) for one in acc]
        moving += [operand * (1 + self._noise(growth, operand.shape)) for operand in operands]

        def perturbed(value: Any, moved: Any) -> Any:
            added = 8 * self._unit * np.sqrt(max(1, count // max(1, value.size)))
            moved = moved * (1 + self._noise(growth, moved.shape))
            if value.shape == shape:
                moved = moved + sum(self._noise(growth, shape) * one for one in acc)
            return _with_derivative_of(value + size * self._noise(added, value.shape), moved)

        return jax.tree.map(perturbed, function(*fixed), function(*moving))

    def _moved(self, value: Any, unit: float) -> Any:
        """A value that is off by `unit` relatively, and so are, independently, its derivatives."""
        fixed = jax.lax.stop_gradient(value)
        off = jnp.where(jnp.isfinite(fixed), fixed, 0) * self._noise(unit, value.shape)
        return self.derivative(value, unit) + off

    def derivative(self, value: Any, unit: Any) -> Any:
        """A value of which derivatives are off by `unit` relatively."""
        return _with_derivative_of(value, value * (1 + self._noise(unit, value.shape)))

    def _noise(self, unit: Any, shape: tuple[int, ...]) -> Any:
        self._calls += 1
        return _noise(shape, self._replay, np.uint32(self._calls * 0x27D4EB2F % 2**32), self._amplitude * unit)


@functools.partial(jax.jit, static_argnums=0)
def _noise(shape: tuple[int, ...], replay: Any, call: Any, size: Any) -> Any:
    """Numbers of mean square `size` squared: a hash of few integer operations, which compile and run in no time.

    Jitted, so that each shape is traced once and not each call.
    """
    index = jnp.arange(terms(shape, tuple(range(len(shape)))), dtype=jnp.uint32).reshape(shape)
    replay = jnp.asarray(replay).astype(jnp.uint32) * np.uint32(0x9E3779B1)
    bits = (index + replay + call) * np.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 15)) * np.uint32(0x2C1B3C6D)
    bits = (bits ^ (bits >> 12)) * np.uint32(0x297A2D39)
    uniform = (bits ^ (bits >> 15)).astype(jnp.float64) * 2.0**-31 - 1
    return size * np.sqrt(3.0) * uniform


@jax.custom_jvp
def _with_derivative_of(value: Any, other: Any) -> Any:
    """`value`, which need not be finite, with the derivatives of `other`."""
    del other
    return value


@_with_derivative_of.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return _with_derivative_of(*primals), tangents[1]


def exact_and_tolerance(transform: Callable[..., Any], case: Any, arguments: Any) -> tuple[Any, Any]:
    """The float64 results of `transform(reference, *arguments)`, and how far an implementation's may be from them.

    The second one leaves out the rounding to a result's dtype, which `tolerated` adds.
    """

    def replayed(replay: Any) -> Any:
        rounding = Rounding(case.unit, replay, jnp.where(replay > 0, 1.0, 0.0))
        return transform(lambda *arrays: case.reference(rounding, *arrays), *wide)

    def widened(array: Any) -> Any:
        return jnp.asarray(array, jnp.float64 if jnp.issubdtype(array.dtype, jnp.floating) else array.dtype)

    with jax.default_device(jax.devices("cpu")[0]):
        wide = jax.tree.map(widened, arguments)
        # One after another, since all replays at once could need more memory than there is.
        compiled = jax.jit(replayed, compiler_options=QUICKLY)
        replays = [jax.tree.map(np.asarray, compiled(float(replay))) for replay in range(REPLAYS + 1)]
        stacked = jax.tree.map(lambda *arrays: np.stack(arrays), *replays)
    exact = jax.tree.map(lambda a: a[0], stacked)

    def deviation(array: np.ndarray) -> np.ndarray:
        with np.errstate(invalid="ignore"):
            # Infinite where only some are infinite: that is near the threshold of overflow.
            moved = np.where(array[1:] == array[0], 0.0, array[1:] - array[0])
            return DEVIATIONS * np.sqrt(np.mean(np.square(moved), axis=0))

    return exact, jax.tree.map(deviation, stacked)


def around(unit: float, exact: np.ndarray, deviation: np.ndarray) -> np.ndarray:
    """`deviation`, and that of some 16 operations outside of the op, relative to the largest element."""
    return deviation + 16 * unit * np.max(np.abs(exact), initial=0.0, where=np.isfinite(exact))


def tolerated(exact: np.ndarray, deviation: np.ndarray, dtype: Any) -> np.ndarray:
    """The distance from `exact` at which an element of a result of `dtype` may be."""
    if not jnp.issubdtype(dtype, jnp.floating):
        return np.zeros_like(deviation)
    info = jnp.finfo(dtype)
    # A little more than half a unit in the last place: what is rounded is not the exact value. And what is below the
    # smallest normal number may be flushed to zero.
    size = np.where(np.isfinite(exact), np.abs(exact), 0.0)
    return deviation + 0.501 * float(info.eps) * size + float(info.tiny)


def within(got: np.ndarray, exact: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    """Which elements are right: NaN where that is exact, infinity of its sign, and else at most `allowed` away.

    What is so near the threshold of overflow that `allowed` reaches beyond it may be infinite, or NaN if the dtype has
    no infinity; so may what is infinite be finite, of its sign, if `allowed` says so by being infinite.
    """
    wide = got.astype(np.float64)
    if not jnp.issubdtype(got.dtype, jnp.floating):
        return (got == exact) | ((np.abs(wide - exact) <= allowed) & (allowed > 0))
    info = jnp.finfo(got.dtype)
    edge = float(info.max) + float(info.max) * float(info.eps) / 4
    with np.errstate(all="ignore"):
        close = np.isfinite(wide) & (np.abs(wide - exact) <= allowed)
        overflow = np.copysign(np.inf, exact).astype(got.dtype).astype(np.float64)
        overflown = (wide == overflow) | (np.isnan(wide) & np.isnan(overflow))
        right = close | (overflown & (np.abs(exact) + allowed >= edge))
        same_sign = np.isfinite(wide) & (np.sign(wide) == np.sign(exact)) & np.isinf(allowed)
        infinite = np.isinf(exact)
        right = np.where(infinite, overflown | same_sign, right)
        return np.where(np.isnan(exact), np.isnan(wide), right)
