"""How far an element of an epilogue of products may be from its exact value, from what the element itself adds up.

Let x be the exact sum of k products p_i, and q the root of the sum of p_i^2. (|x| and q are at most |a| @ |b|, and of
random products q is some sqrt(k) times less than it.) Every source of error has a mean relative to x and a deviation;
6 deviations are allowed, as in checking/tolerance.py.

Addition, in any order that does not know the products: the j-th partial sum has the mean square (j x / k)^2 +
(j / k) (1 - j / k) q^2. Each is rounded by u = 2^-24 relatively at most, and each product too if it is no exact one:
  deviation  u sqrt(k (x^2 / 3 + q^2 / 6) + q^2).
In float64, where the reference errs as much, twice that.

Tensor cores cut what an instruction has added (8 products of tf32, 16 of 16-bit elements, 32 of 8-bit floats) to
float32, and its terms at about a quarter of that: less than 2^-22 of a partial sum, whose mean size is at most |x| + q,
always towards zero, so that it adds up over the k / depth instructions:
  k / depth * 2^-22 (|x| + q).

tf32 cuts 0 to 2^-10 of each factor: a product errs by 2^-10 in the mean, and by 2^-11 in deviation at most
(the two are uniform, of deviation 2^-10 / sqrt(12) each):
  2^-10 |x|, and the deviation 2^-11 q.

8-bit floats are added with 14 bits, up to 256 at a time before float32 takes over (PROMOTION stages of 128). An
instruction cuts each of its 32 products, and the sum so far, at 2^-13 of the largest of them, M, and what it has added
to 14 bits, all towards zero. Let the products be normally distributed factors', of random sign and an rms of 1 (sums of
positive ones lose more: 0.2%). q of 256 is 16; the sum after j instructions is some sqrt(32 j), and M some 8.
  A product of two e4m3 has 7 bits at M's scale, so that only those below 2^-7 M lose any, an eighth of them, and up to
  2^-13 M each: sqrt(256 / 8) * 8 * 2^-13 / sqrt(3) = 26 * 2^-13.
  A sum s loses between 0 and 2^-13 of its power of two, 0.36 * 2^-13 |s| in the mean. The 8 of them, whose products
  are added up to 8 times, come to sqrt(32 * 204) = 81, of which 0.36 are 29 * 2^-13. Of x they are a part: the sums
  on the way to x alone are 4.5 x, and lose 4.5 * 2^-13 |x| at most.
Together that is 39 * 2^-13, or 2.4 * 2^-13 q, and so is its sum in squares over all the 256s. (Such sums, imitated bit
by bit, and those of an H200 are off by 1.7 * 2^-13 q.) Where only one 256 is, its M follows a large sum: 3 instead of
2.4.
  2^-11 |x|, and the deviation 3 * 2^-13 q.

These errors go through the epilogue. Its values at both ends of what an accumulator may be bound those of a monotone
function, and a little more than those of a smooth one, since the ends are close; comparisons and conversions to
integers so may give another result only where a threshold is between the ends. Sums over elements, whose errors are
independent but for what is relative to x, get random ones instead. The epilogue's own operations are perturbed as in
tests/checking/pointwise/tolerance.py.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from checking.pointwise.tolerance import APPROXIMATE, OPERATION, Wide
from checking.product.calls import ProductCase
from checking.tolerance import DEVIATIONS, REPLAYS, within

_DEPTH = {"float32": 8, "bfloat16": 16, "float16": 16, "float8_e4m3fn": 32, "float8_e5m2": 32}


@dataclass(frozen=True)
class Accumulator:
    """Exact sums; what each may be off by, and the part of that which is relative to the sum, and so not random."""

    exact: np.ndarray
    spread: np.ndarray
    relative: float


@dataclass(frozen=True)
class Expected:
    """An exact result, and the smallest and largest values that it may have before it is rounded to its dtype."""

    exact: np.ndarray
    low: np.ndarray
    high: np.ndarray


def accumulators(case: ProductCase, arrays: Sequence[np.ndarray]) -> list[Accumulator]:
    a, *bs = case.matrices(arrays)
    found = []
    for b in bs:
        with np.errstate(invalid="ignore"):
            exact = np.broadcast_to(np.matmul(a, b), case.shape)
        if case.accumulator == "int32":
            found.append(Accumulator(exact.astype(np.int32), np.zeros(case.shape), 0.0))
            continue
        square = np.broadcast_to(np.matmul(np.square(a), np.square(b)), case.shape)
        found.append(Accumulator(exact, *_spread(case, exact, square)))
    return found


def _spread(case: ProductCase, exact: np.ndarray, square: np.ndarray) -> tuple[np.ndarray, float]:
    unit = 2.0**-52 if case.accumulator == "float64" else 2.0**-24
    size, norm, relative = np.abs(exact), np.sqrt(square), 0.0
    spread = DEVIATIONS * unit * np.sqrt(case.k * (np.square(exact) / 3 + square / 6) + square)
    if case.precision == "default" and case.dtype in _DEPTH:
        cut = case.k / _DEPTH[case.dtype] * 2.0**-22
        operand = {4: 2.0**-11, 2: 0.0, 1: 3 * 2.0**-13}[jnp.dtype(case.dtype).itemsize]
        relative = cut + {4: 2.0**-10, 2: 0.0, 1: 2.0**-11}[jnp.dtype(case.dtype).itemsize]
        spread = spread + relative * size + (cut + DEVIATIONS * operand) * norm
    return np.where(np.isfinite(exact), spread, 0.0), relative


@functools.lru_cache(maxsize=4)
def expected(case: ProductCase) -> list[Expected]:
    """Of the arrays that are the case's own."""
    return expected_of(case, case.arrays())


def expected_of(case: ProductCase, arrays: Sequence[np.ndarray]) -> list[Expected]:
    sums = accumulators(case, arrays)
    if case.epilogue is None:
        return [Expected(one.exact, one.exact - one.spread, one.exact + one.spread) for one in sums]
    program = case.product().program
    operands = arrays[1 + case.accumulators :]
    avals = [jax.ShapeDtypeStruct(case.shape, case.accumulator)] * case.accumulators
    approximate = all(jnp.dtype(output.dtype).itemsize <= 2 for output in program.outputs)
    error = APPROXIMATE if approximate else OPERATION  # whatever the precision of the product
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]), np.errstate(all="ignore"):
        closed = jax.make_jaxpr(case.epilogue)(*avals, *operands)

        def evaluate(replay: int | None, *moved: np.ndarray) -> list[np.ndarray]:
            return [np.asarray(one) for one in Wide(replay, error).run(closed, [*moved, *operands])]

        own = [one.exact for one in sums]
        exact = evaluate(None, *own)
        ends = [evaluate(None, *moved) for moved in _ends(sums)]
        narrowed = any(_is_narrow(output.dtype) for output in program.outputs) and case.accumulator == "float64"
        through = [evaluate(None, *moved) for moved in _ends(_as_float32(sums))] if narrowed else ends
        operations = [evaluate(replay, *own) for replay in range(REPLAYS)]
        added = any(output.reduction == "sum" for output in program.outputs)
        both = [evaluate(replay, *_moved(sums, replay)) for replay in range(REPLAYS)] if added else []
    results = []
    for i, output in enumerate(program.outputs):
        if not jnp.issubdtype(exact[i].dtype, jnp.floating):
            results.append(_between(exact[i], [one[i] for one in (*ends, *operations)], output.dtype))
        elif output.reduction == "sum":
            off = _deviation(exact[i], [one[i] for one in both])
            results.append(Expected(exact[i], exact[i] - off, exact[i] + off))
        else:
            off = _deviation(exact[i], [one[i] for one in operations])
            found = _between(exact[i], [one[i] for one in (through if _is_narrow(output.dtype) else ends)])
            results.append(Expected(exact[i], found.low - off, found.high + off))
    return results


def _is_narrow(dtype: str) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize <= 2


def _as_float32(sums: Sequence[Accumulator]) -> list[Accumulator]:
    """float64 becomes a narrow float through float32: XLA's 16-bit floats, numpy's 8-bit ones and a GPU's do so."""
    return [replace(one, spread=np.maximum(one.spread, 2.0**-24 * np.abs(one.exact))) for one in sums]


def _ends(sums: Sequence[Accumulator]) -> list[list[np.ndarray]]:
    """Both ends of each accumulator, and all of them larger or smaller in magnitude, for maxima of those."""
    if not any(one.spread.any() for one in sums):
        return []
    ways: list[tuple[Callable[..., Any], ...]] = [
        *itertools.product((lambda one: one.spread, lambda one: -one.spread), repeat=len(sums)),
        (lambda one: np.copysign(one.spread, one.exact),) * len(sums),
        (lambda one: -np.copysign(one.spread, one.exact),) * len(sums),
    ]
    return [[one.exact + move(one) for one, move in zip(sums, moves, strict=True)] for moves in ways]


def _moved(sums: Sequence[Accumulator], replay: int) -> list[np.ndarray]:
    random = np.random.default_rng(1000 + replay)
    found = []
    for one in sums:
        off = one.spread / DEVIATIONS * random.standard_normal(one.exact.shape)
        found.append(one.exact * (1 + one.relative * random.uniform(-1, 1)) + off if one.spread.any() else one.exact)
    return found


def _between(exact: np.ndarray, others: Sequence[np.ndarray], dtype: Any = None) -> Expected:
    every = [one.astype(dtype or one.dtype) for one in (exact, *others)]
    return Expected(every[0], functools.reduce(np.minimum, every), functools.reduce(np.maximum, every))


def _distance(one: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Infinite where the exact value alone is: it lies at the threshold of overflow. `within` finds the opposite."""
    distance = np.where(one == exact, 0.0, np.abs(one - exact))
    return np.where(np.isfinite(exact), np.nan_to_num(distance, posinf=0), distance)


def _deviation(exact: np.ndarray, others: Sequence[np.ndarray]) -> np.ndarray:
    moved = [np.nan_to_num(np.where(one == exact, 0.0, one - exact), posinf=0, neginf=0) for one in others]
    return DEVIATIONS * np.sqrt(np.mean(np.square(moved), axis=0))


def tolerated(expected: Expected, dtype: Any) -> np.ndarray:
    """The distance from the exact value at which an element of a floating-point result may be."""
    about = jnp.finfo(dtype)
    with np.errstate(all="ignore"):
        sides = (expected.low, expected.high)
        spread = np.maximum(*(_distance(one, expected.exact) for one in sides))
        sizes = (np.abs(np.nan_to_num(one, posinf=0, neginf=0)) for one in (*sides, expected.exact))
        largest = functools.reduce(np.maximum, sizes)
        # A little more than half a unit in the last place, and what is subnormal may be flushed to zero.
        least = float(about.smallest_subnormal) / 2 if about.bits <= 16 else float(about.tiny)
        last_place = np.ldexp(float(about.eps), np.frexp(largest)[1] - 1)
        return spread + 0.501 * last_place + least


def wrong_elements(result: np.ndarray, expected: Expected) -> np.ndarray:
    """Which elements are not within their bounds; for integers and bool they are exact where both bounds are."""
    if jnp.issubdtype(result.dtype, jnp.floating):
        return ~within(result, expected.exact, tolerated(expected, result.dtype))
    exact, low, high = (one.astype(result.dtype) for one in (expected.exact, expected.low, expected.high))
    return ~((result == exact) | ((low <= result) & (result <= high)))


def check(case: ProductCase, results: Sequence[np.ndarray]) -> None:
    """Asserts that every element of the results, of the case's own arrays, is within its own bound."""
    outputs = case.product().program.outputs
    for output, result, want in zip(outputs, results, expected(case), strict=True):
        assert result.shape == want.exact.shape
        assert result.dtype == output.dtype
        wrong = wrong_elements(result, want)
        if wrong.any():
            at = tuple(map(int, np.argwhere(wrong)[0]))
            raise AssertionError(
                f"{output}: {wrong.sum()} of {wrong.size} elements are wrong; at {list(at)} {result[at]!r} for "
                f"{want.exact[at]!r}, between {want.low[at]!r} and {want.high[at]!r}"
            )
