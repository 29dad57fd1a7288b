"""Rows that are normalized, or their gradients, as engines see them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from jaxdnn.engines.base import Problem
from jaxdnn.plan import Operand, Result
from jaxdnn.spec import Signature

DTYPES = ("float64", "float32", "float16", "bfloat16")


@dataclass(frozen=True)
class RowArray:
    """An array of the call: "x", "scale", "d_y", ...

    Attributes:
      name: its part in the normalization.
      buffer: where it lies, dense.
      dtype: of its elements.
      group_stride: elements between the same place in two neighbouring groups; 0 for one that all groups share.
    """

    name: str
    buffer: Operand | Result
    dtype: str
    group_stride: int = 0

    @property
    def itemsize(self) -> int:
        return np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Rows(Problem):
    """`groups` independent normalizations of `rows` rows of `columns` contiguous elements, or their backward pass.

    Attributes:
      groups: the product of the mapped sizes; parameters and their gradients belong to one group.
      rows: rows of one group.
      columns: elements of a row, which share one mean and one reciprocal standard deviation.
      centered: whether the mean is subtracted (layer_norm), or not (rms_norm).
      backward: whether results are gradients: of "x", the cotangent "d_x" is a result, and "d_y" an operand.
      factors: numbers that kernels take at run time, by the names that they have for them, in order.
      operands, results: the arrays that there are, in order.
    """

    family = "norm"

    groups: int
    rows: int
    columns: int
    centered: bool
    backward: bool
    factors: tuple[tuple[str, float], ...]
    operands: tuple[RowArray, ...]
    results: tuple[RowArray, ...]

    @property
    def arrays(self) -> Mapping[str, RowArray]:
        """All arrays, by name."""
        return {array.name: array for array in (*self.operands, *self.results)}

    @property
    def active(self) -> tuple[str, ...]:
        """The arrays whose gradients the backward pass returns."""
        return tuple(array.name.removeprefix("d_") for array in self.results) if self.backward else ()

    @property
    def compute_dtype(self) -> str:
        """The arithmetic's type and the statistics': "float64" if any array is, else "float32"."""
        return "float64" if any(array.dtype == "float64" for array in self.arrays.values()) else "float32"

    @property
    def title(self) -> str:
        """What a reader of the generated source wants to know."""
        return f"{'layer' if self.centered else 'rms'}_norm {'backward' if self.backward else 'forward'}"


def row_arrays(
    signature: Signature, carries: Mapping[str, tuple[bool, ...]], ndim: int
) -> tuple[tuple[int, int, int], tuple[RowArray, ...], tuple[RowArray, ...]] | str:
    """Groups, rows and columns of a call whose last `ndim` dimensions are a row, its operands and its results.

    Or the reason why kernels can't have them. `carries` says of each operand which of the mapped axes it has, in front;
    results have all of them.
    """
    if reason := signature.reason:
        return reason
    for name, of in signature.arrays.items():
        if of.dtype.name not in DTYPES:
            return f"{name} has dtype {of.dtype.name}, and the kernels take {', '.join(DTYPES)}"
    if mixed := [name for name, axes in carries.items() if any(axes) and not all(axes)]:
        return f"{mixed[0]} carries some of the mapped axes and not others"
    mapped = len(carries["x"])

    def array(name: str, buffer: Operand | Result, carried: bool) -> RowArray:
        of = signature.arrays[name]
        return RowArray(name, buffer, of.dtype.name, math.prod(of.shape[mapped:]) if carried else 0)

    operands = [array(name, Operand(i), bool(mapped) and all(carries[name])) for i, name in enumerate(carries)]
    results = [array(name, Result(i), carried=True) for i, name in enumerate(signature.results)]
    shape = signature.operands["x"].shape[mapped if all(carries["x"]) else 0 :]
    split = len(shape) - ndim
    groups = math.prod(next(iter(signature.results.values())).shape[:mapped])
    return (groups, math.prod(shape[:split]), math.prod(shape[split:])), tuple(operands), tuple(results)
