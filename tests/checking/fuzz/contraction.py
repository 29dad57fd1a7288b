"""`Contraction`: the bilinear part of a random product, of which the evaluation in exact arithmetic is made."""

from typing import Any

import numpy as np

from checking.fuzz.bounded import Bounded


class Contraction:
    """A product of two of three arrays, which go by `a`, `b` and `y`, that yields what is left of the third.

    Attributes:
      shape: of y.
    """

    a: Any
    b: Any
    y: Any
    shape: tuple[int, ...]

    def terms(self, of: Any, left: Any, right: Any) -> int:
        """How many products are added for an element of `of`, at most."""
        raise NotImplementedError

    def summed(self, of: Any, left: tuple[Any, np.ndarray], right: tuple[Any, np.ndarray]) -> np.ndarray:
        """The sums, for the array `of`, of two arrays that are given with what they go by."""
        raise NotImplementedError

    def product(self, of: Any, left: tuple[Any, Bounded], right: tuple[Any, Bounded], roundoff: Any) -> Bounded:
        """The same of values that are off.

        `roundoff` is a function of the number of terms: how the sums err relatively to the sum of their terms' sizes.
        """
        x, y = (array for _, array in (left, right))

        def summed(first: np.ndarray, second: np.ndarray) -> np.ndarray:
            return self.summed(of, (left[0], first), (right[0], second))

        off = roundoff(self.terms(of, left[0], right[0]))
        value, error = summed(x.value, y.value), off * summed(np.abs(x.value), np.abs(y.value))
        for first, second in ((x.error, np.abs(y.value)), (np.abs(x.value), y.error), (x.error, y.error)):
            if np.any(first) and np.any(second):
                with np.errstate(invalid="ignore"):
                    error = error + (1 + off) * np.nan_to_num(summed(first, second), nan=np.inf, posinf=np.inf)
        return Bounded(value, error, x.dtype)
