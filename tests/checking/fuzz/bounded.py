"""Pointwise arithmetic in float64 with a bound on what rounding adds, and its first derivatives; in numpy alone.

The fuzzer of epilogues evaluates its programs in this namespace, since it compiles nothing, and gives the same programs
`jax.numpy`'s functions of the same names. A `Bounded` is an array, how far from it an implementation's may be, and the
dtype that the implementation has it in. Bounds are propagated to first order, or by evaluating a monotone function at
both ends of an interval: a step that the interval crosses, as of `floor`, a comparison or the slope of `relu`, so
counts as uncertain by the whole of its height.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

# The error of an addition or a product, in units of roundoff, however it is done.
STEP = 4.0


class Link(NamedTuple):
    """How a value depends on a source: what takes a tangent of the source there, and a cotangent back."""

    source: "Bounded"
    push: Callable[["Bounded"], "Bounded"]
    pull: Callable[["Bounded"], "Bounded"]


@dataclass(frozen=True, eq=False)
class Bounded:
    """An array with a bound on its error. The error of a bool is whether it may be the other one."""

    value: np.ndarray
    error: np.ndarray
    dtype: str
    links: tuple[Link, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    @property
    def floating(self) -> bool:
        return bool(jnp.issubdtype(self.dtype, jnp.floating))

    @property
    def alone(self) -> "Bounded":
        """The same without what it depends on."""
        return Bounded(self.value, self.error, self.dtype)

    def astype(self, dtype: str) -> "Bounded":
        """Rounded to `dtype`, as derivatives are."""
        dtype = jnp.dtype(dtype).name
        if dtype == self.dtype:
            return self
        if not jnp.issubdtype(dtype, jnp.floating):
            return Bounded(self.value.astype(dtype), np.zeros(self.shape), dtype)
        source = self.dtype
        push, pull = (lambda t: _rounded(t, dtype)), (lambda t: _rounded(t, source))
        return _rounded(self.alone, dtype, *([Link(self, push, pull)] if self.floating else []))

    def __add__(self, other: Any) -> "Bounded":
        return _binary(self, other, _add)

    def __sub__(self, other: Any) -> "Bounded":
        return _binary(self, other, lambda a, b: _add(a, -b))

    def __mul__(self, other: Any) -> "Bounded":
        return _binary(self, other, multiply)

    def __truediv__(self, other: Any) -> "Bounded":
        return _binary(self, other, _divide)

    def __neg__(self) -> "Bounded":
        if not self.floating:
            return Bounded(-self.value, self.error, self.dtype)
        return made(-self.value, self.error, self.dtype, 0, (self, lambda: constant(-1.0, self)))

    def __lt__(self, other: Any) -> "Bounded":
        return _binary(self, other, lambda a, b: _compared(a, b, np.less))

    def __ge__(self, other: Any) -> "Bounded":
        return _binary(self, other, lambda a, b: _compared(a, b, np.greater_equal))

    def __invert__(self) -> "Bounded":
        return Bounded(~self.value, self.error, self.dtype)

    def __and__(self, other: "Bounded") -> "Bounded":
        a, b = together(self, other)
        return Bounded(a.value & b.value, (a.error + b.error > 0).astype(float), a.dtype)


# ---------------------------------------------------------------- making values


def exact(array: Any, dtype: str | None = None) -> Bounded:
    """An array that an implementation has as it is."""
    array = np.asarray(array)
    dtype = dtype or array.dtype.name
    wide = array.astype(np.float64) if jnp.issubdtype(array.dtype, jnp.floating) else array
    return Bounded(wide, np.zeros(array.shape), dtype)


def constant(value: float, like: Bounded) -> Bounded:
    return Bounded(np.full((), value), np.zeros(()), like.dtype)


def unit(dtype: str) -> float:
    """The unit roundoff of a floating-point dtype."""
    return float(jnp.finfo(dtype).eps) / 2


def made(value: Any, error: Any, dtype: str, roundings: float, *sources: Any) -> Bounded:
    """A value, rounded some times, with its sources, each with a function that computes the partial derivative."""
    links = []
    for source, partial in sources:
        if source.floating:
            push = lambda t, partial=partial: _scaled(partial(), t, dtype)  # noqa: E731
            pull = lambda t, partial=partial, source=source: _scaled(partial(), t, source.dtype)  # noqa: E731
            links.append(Link(source, push, pull))
    with np.errstate(all="ignore"):
        # Whatever it is, up to its error, is what gets rounded.
        rounded = roundings * unit(dtype) * (np.abs(value) + error) + float(jnp.finfo(dtype).tiny)
        error = error + (rounded if roundings else 0.0)
        # Where the dtype's range is left, or nothing is known of an error, anything may be.
        known = np.abs(value) + error <= float(jnp.finfo(dtype).max)
    return Bounded(value, np.where(known, error, np.inf), dtype, tuple(links))


def _scaled(partial: Bounded, along: Bounded, dtype: str) -> Bounded:
    product = multiply(partial.alone, along.alone)
    return Bounded(product.value, product.error + STEP * unit(dtype) * np.abs(product.value), dtype)


def _rounded(value: Bounded, dtype: str, *links: Link) -> Bounded:
    wide = value.value.astype(np.float64)
    once = made(wide, value.error, dtype, 1)
    return Bounded(once.value, once.error, dtype, links)


def together(a: Any, b: Any) -> tuple[Bounded, Bounded]:
    """Two values in their common dtype and shape. A Python number takes on the other's dtype."""
    if not isinstance(a, Bounded) or not isinstance(b, Bounded):
        known = a if isinstance(a, Bounded) else b
        number = np.asarray(b if isinstance(a, Bounded) else a, np.float64 if known.floating else known.dtype)
        other = Bounded(number, np.zeros(()), known.dtype)
        a, b = (known, other) if isinstance(a, Bounded) else (other, known)
    dtype = jnp.promote_types(a.dtype, b.dtype).name
    shape = np.broadcast_shapes(a.shape, b.shape)
    return broadcast_to(a.astype(dtype), shape), broadcast_to(b.astype(dtype), shape)


def _binary(a: Any, b: Any, function: Callable[[Bounded, Bounded], Bounded]) -> Bounded:
    with np.errstate(all="ignore"):
        return function(*together(a, b))


# ---------------------------------------------------------------- arithmetic


def _add(a: Bounded, b: Bounded) -> Bounded:
    if not a.floating:
        return Bounded(a.value + b.value, a.error, a.dtype)
    one = constant(1.0, a)
    return made(a.value + b.value, a.error + b.error, a.dtype, STEP, (a, lambda: one), (b, lambda: one))


def multiply(a: Bounded, b: Bounded) -> Bounded:
    if not a.floating:
        return Bounded(a.value * b.value, a.error, a.dtype)
    with np.errstate(all="ignore"):
        # What is exactly zero stays so, however little is known of the other.
        left, right = (np.where(x == 0, 0, x * y) for x, y in ((a.error, np.abs(b.value)), (b.error, np.abs(a.value))))
        error = left + right + np.where((a.error == 0) | (b.error == 0), 0, a.error * b.error)
    return made(a.value * b.value, error, a.dtype, STEP, (a, lambda: b.alone), (b, lambda: a.alone))


def _divide(a: Bounded, b: Bounded) -> Bounded:
    quotient = a.value / b.value
    error = (a.error + np.abs(quotient) * b.error) / np.maximum(np.abs(b.value) - b.error, 0)

    def of_b() -> Bounded:
        return -(a.alone / b.alone / b.alone)

    return made(quotient, error, a.dtype, STEP, (a, lambda: constant(1.0, b) / b.alone), (b, of_b))


def _compared(a: Bounded, b: Bounded, relation: Callable[..., Any]) -> Bounded:
    spread = a.error + b.error
    unsure = (spread > 0) & (np.abs(a.value - b.value) <= spread)
    return Bounded(relation(a.value, b.value), unsure.astype(float), "bool")


# ---------------------------------------------------------------- layout


def broadcast_to(x: Bounded, shape: tuple[int, ...]) -> Bounded:
    if x.shape == tuple(shape):
        return x
    padded = (1,) * (len(shape) - len(x.shape)) + x.shape
    repeated = tuple(i for i, size in enumerate(shape) if padded[i] != size)

    def push(t: Bounded) -> Bounded:
        return Bounded(np.broadcast_to(t.value, shape), np.broadcast_to(t.error, shape), t.dtype)

    def pull(t: Bounded) -> Bounded:
        acc = summed(t, repeated, True)
        return Bounded(acc.value.reshape(x.shape), acc.error.reshape(x.shape), t.dtype)

    wide = push(x)
    return Bounded(wide.value, wide.error, x.dtype, (Link(x, push, pull),) if x.floating else ())


def summed(x: Bounded, axes: tuple[int, ...], keepdims: bool) -> Bounded:
    terms = max(1, int(np.prod([x.shape[axis] for axis in axes])))
    # Derivatives of what is in 16 bits are summed in them; and terms that are alike, as where a window meets nothing,
    # are rounded alike.
    _, alike = np.unique(x.value, return_counts=True)
    independent = unit(x.dtype) < 2.0**-20 and np.max(alike, initial=0) * np.sqrt(terms) <= x.value.size
    growth = np.sqrt(terms) if independent else terms
    value, error = (np.sum(v, axes, keepdims=keepdims) for v in (x.value, x.error))
    return Bounded(
        value, error + 2 * growth * unit(x.dtype) * np.sum(np.abs(x.value), axes, keepdims=keepdims), x.dtype
    )


# ---------------------------------------------------------------- derivatives


def push_forward(outputs: Sequence[Bounded], tangents: Mapping[Bounded, Bounded]) -> list[Bounded]:
    """The tangents of outputs, of those of the values that they depend on."""
    known = dict(tangents)
    for value in _ordered(outputs):
        if value not in known:
            terms = [link.push(known[link.source]) for link in value.links]
            known[value] = _sum_of(terms, value)
    return [known[value] for value in outputs]


def pull_back(outputs: Sequence[Bounded], cotangents: Sequence[Bounded], sources: Sequence[Bounded]) -> list[Bounded]:
    """The cotangents of sources, of those of outputs."""
    terms: dict[Bounded, list[Bounded]] = {}
    for output, cotangent in zip(outputs, cotangents, strict=True):
        terms.setdefault(output, []).append(cotangent)
    for value in reversed(_ordered(outputs)):
        cotangent = _sum_of(terms.get(value, []), value)
        for link in value.links:
            terms.setdefault(link.source, []).append(link.pull(cotangent))
    return [_sum_of(terms.get(source, []), source) for source in sources]


def _sum_of(terms: Sequence[Bounded], like: Bounded) -> Bounded:
    result = Bounded(np.zeros(like.shape), np.zeros(like.shape), like.dtype)
    for i, term in enumerate(terms):
        result = _add(result, term).alone if i else term.alone
    return result


def _ordered(outputs: Sequence[Bounded]) -> list[Bounded]:
    """Everything that outputs depend on, each after what it depends on."""
    done: dict[Bounded, None] = {}

    def visit(value: Bounded) -> None:
        if value not in done:
            for link in value.links:
                visit(link.source)
            done[value] = None

    for output in outputs:
        visit(output)
    return list(done)
