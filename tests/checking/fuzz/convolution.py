"""Random convolutions with random epilogues, and what they return in exact arithmetic: of any arguments."""

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from checking.cases import BF16, F16, F32, F64, ConvolutionCase
from checking.cases.dtypes import E4M3, I8
from checking.fuzz import matmul
from checking.fuzz.contraction import Contraction
from checking.fuzz.matmul import Drawn

evaluate = matmul.evaluate

_DTYPES = (F32, F32, F32, BF16, BF16, F16, F64, E4M3, I8)
_LARGEST, _LARGEST_OF_MANY = 1 << 18, 1 << 28  # products of elements of the filter and the result
_MANY = (32, 40, 64, 72, 96, 128, 136, 160, 192)  # channels, of which kernels have whole lines, or several tiles


@dataclass(frozen=True, repr=False)
class DrawnConvolution(Drawn, ConvolutionCase):
    """A convolution whose epilogue is a program."""

    @property
    def contraction(self) -> Contraction:
        return _places(self)


@dataclass(frozen=True)
class _Places(Contraction):
    """A convolution's arrays as (batch, groups and features, places); those of a window are visited in turn."""

    case: DrawnConvolution
    shape: tuple[int, ...]
    meetings: tuple[np.ndarray, ...]  # of each dimension, the place of lhs for a place of y and of the filter, or -1

    a, b, y = "a", "b", "y"

    @property
    def _sizes(self) -> dict[str, int]:
        """Parts of the batch, images of one, groups, features of lhs and of the result in one."""
        g = self.case.geometry
        of_a, of_b, _ = g.orders
        out, in_ = self.case.b[of_b[0]], self.case.b[of_b[1]]
        p, n = g.batch_groups, self.case.a[of_a[0]] // g.batch_groups
        return {"p": p, "n": n, "g": g.groups, "c": in_, "o": out // (g.groups * p)}

    def _split(self, name: str, array: np.ndarray) -> np.ndarray:
        letters, order = _LETTERS[name], self._order(name)
        turned = np.transpose(array.reshape(self._shape(name)), order)
        split = turned.reshape([*(self._sizes[letter] for letter in letters), *turned.shape[2:]])
        return np.flip(split, range(len(letters), split.ndim)) if name == "b" and self.case.geometry.flip else split

    def _joined(self, name: str, split: np.ndarray) -> np.ndarray:
        front = len(_LETTERS[name])
        split = np.flip(split, range(front, split.ndim)) if name == "b" and self.case.geometry.flip else split
        order, shape = self._order(name), self._shape(name)
        return np.transpose(split.reshape([shape[d] for d in order]), np.argsort(order))

    def _order(self, name: str) -> tuple[int, ...]:
        return self.case.geometry.orders["aby".index(name)]

    def _shape(self, name: str) -> tuple[int, ...]:
        return {"a": self.case.a, "b": self.case.b, "y": self.shape}[name]

    def terms(self, of: str, left: str, right: str) -> int:
        del left, right
        window = int(np.prod([found.shape[1] for found in self.meetings]))
        places = int(np.prod([found.shape[0] for found in self.meetings]))
        sizes = self._sizes
        return {"y": window * sizes["c"], "a": window * sizes["o"], "b": places * sizes["n"]}[of]

    def summed(self, of: str, left: tuple[str, np.ndarray], right: tuple[str, np.ndarray]) -> np.ndarray:
        names, arrays = zip(left, right, strict=True)
        known = [self._split(name, array) for name, array in zip(names, arrays, strict=True)]
        places = [self._shape(of)[d] for d in self._order(of)[2:]]
        dtype = np.result_type(*known)
        found = np.zeros([*(self._sizes[letter] for letter in _LETTERS[of]), *places], dtype)
        spatial = "uvwxyz"[: len(self.meetings)]
        letters = {name: own + ("" if name == "b" else spatial) for name, own in _LETTERS.items()}
        equation = f"{letters[names[0]]},{letters[names[1]]}->{letters[of]}"
        for tap in itertools.product(*(range(one.shape[1]) for one in self.meetings)):
            results = [np.flatnonzero(one[:, at] >= 0) for one, at in zip(self.meetings, tap, strict=True)]
            sources = [one[own, at] for one, own, at in zip(self.meetings, results, tap, strict=True)]
            here = {"a": np.ix_(*sources), "y": np.ix_(*results), "b": tap}

            def at(name: str, here: Any = here) -> tuple[Any, ...]:
                return (*(slice(None) for _ in _LETTERS[name]), *here[name])

            terms = [array[at(name)] for name, array in zip(names, known, strict=True)]
            found[at(of)] += np.einsum(equation, *terms)
        return self._joined(of, found)


_LETTERS = {"a": "pngc", "b": "gpoc", "y": "ngpo"}


@functools.lru_cache(maxsize=8)
def _places(case: DrawnConvolution) -> _Places:
    g = case.geometry
    of_a, of_b, of_y = g.orders
    columns = zip(of_a[2:], of_b[2:], g.strides, g.padding, g.lhs_dilation, g.rhs_dilation, strict=True)
    meetings = []
    for in_a, in_b, stride, (low, high), spread, step in columns:
        image, window = case.a[in_a], case.b[in_b]
        padded = low + high + ((image - 1) * spread + 1 if image else 0)
        count = max(0, (padded - (window - 1) * step - 1) // stride + 1)
        at = np.arange(count)[:, None] * stride + np.arange(window) * step - low
        there = (at >= 0) & (at % spread == 0) & (at < image * spread)
        meetings.append(np.where(there, at // spread, -1))
    sizes = [case.a[of_a[0]] // g.batch_groups, case.b[of_b[0]], *(len(one) for one in meetings)]
    return _Places(case, tuple(sizes[of_y.index(d)] for d in range(len(sizes))), tuple(meetings))


def draw(random: np.random.Generator) -> DrawnConvolution:
    """A random case."""
    dtype = _DTYPES[random.integers(len(_DTYPES))]
    many = bool(random.random() < 0.15)
    largest = _LARGEST_OF_MANY if many else _LARGEST
    while True:
        case = _shapes(random, many)
        cut = any(low + high < -((size - 1) * spread + 1 if size else 0) for size, low, high, spread in _paddings(case))
        if not cut and np.prod(case.b) * np.prod(case.contraction.shape) <= largest:
            case = matmul.described(random, case, (dtype, dtype))
            # JAX refuses what is narrower.
            return case.replace(preferred=None) if (dtype, case.preferred) == (F64, F32) else case


def _paddings(case: DrawnConvolution) -> Iterator[tuple[int, int, int, int]]:
    """Of each dimension of a: its size, what it is padded by, and the distance of its places."""
    g = case.geometry
    for d, pads, spread in zip(g.orders[0][2:], g.padding, g.lhs_dilation, strict=True):
        yield case.a[d], *pads, spread


def _shapes(random: np.random.Generator, many: bool) -> DrawnConvolution:
    def chance(probability: float) -> bool:
        return bool(random.random() < probability)

    def one(options: Sequence[Any]) -> Any:
        return options[random.integers(len(options))]

    def size(largest: int) -> int:
        return 0 if chance(0.02) else int(random.integers(1, largest + 1))

    def channels() -> int:
        return one(_MANY) if many and chance(0.8) else size(20)

    spatial = one((0, 1, 1, 1, 2, 2, 2, 3))
    places = [size((1, 40, 12, 6)[spatial]) for _ in range(spatial)]
    window = [int(random.integers(1, (1, 7, 4, 3)[spatial] + 1)) for _ in range(spatial)]
    transposed = spatial > 0 and chance(0.15)
    groups, batch_groups = 1, 1
    if not transposed and chance(0.35):
        groups, batch_groups = (one((2, 3, 5)), 1) if chance(0.7) else (1, one((2, 3)))
    c, k = (1, one((1, 1, 2))) if groups > 1 and chance(0.4) else (channels(), channels())
    sizes = dict(zip("HWD", places, strict=False), N=size(4) * batch_groups, C=c * groups)
    of_filter = dict(zip("HWD", window, strict=False), O=k * groups * batch_groups, I=c)
    letters = "HWD"[:spatial]
    numbers = tuple("".join(random.permutation([*letters, *more])) for more in ("NC", "OI", "NC"))
    numbers = one((tuple(order.format(letters) for order in ("N{}C", "{}IO", "N{}C")), numbers))
    if one((True, False)):
        padding: Any = one(("SAME", "VALID")) if transposed else one(("SAME", "VALID", "SAME_LOWER"))
    else:
        padding = tuple((int(random.integers(-2, 6)), int(random.integers(-2, 6))) for _ in window)
    tiles = not transposed and chance(0.15)
    strides = tuple(window) if tiles else tuple(one((1, 1, 2, 3)) for _ in window)
    spread = (
        () if transposed or tiles or isinstance(padding, str) or chance(0.6) else tuple(one((1, 2, 3)) for _ in window)
    )
    flip = chance(0.3)
    if transposed and flip:
        of_filter |= {"O": sizes["C"], "I": k}
    return DrawnConvolution(
        "conv_transpose" if transposed else "conv_general_dilated",
        tuple(sizes[letter] for letter in numbers[0]),
        tuple(of_filter[letter] for letter in numbers[1]),
        numbers=numbers,
        strides=strides,
        padding="VALID" if tiles else padding,
        lhs_dilation=spread,
        rhs_dilation=() if tiles or chance(0.6) else tuple(one((1, 2, 3)) for _ in window),
        groups=groups,
        batch_groups=batch_groups,
        flip=flip,
    )
