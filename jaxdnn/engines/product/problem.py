"""A product of matrices with its epilogue, as engines see it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import numpy as np

from jaxdnn.engines.base import MAX_ARGUMENTS, Problem
from jaxdnn.plan import Operand, Result, Scratch
from jaxdnn.pointwise import AffineLoad, Gathered, Output, Program, Terms, trace


@dataclass(frozen=True)
class Matrix:
    """An array of matrices in memory: rows of dense columns. Strides count elements; one of 0 repeats the matrix."""

    buffer: Operand | Result | Scratch
    dtype: str
    rows: int
    columns: int
    row_stride: int
    batch_stride: int = 0

    @property
    def itemsize(self) -> int:
        return np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class EpilogueOperand:
    """An array that the epilogue reads, as one value ("scalar"), one a column ("row"), one a row ("column") or "full".

    Strides count elements, and are 0 along what the operand does not vary with. Where a coordinate joins dimensions of
    which the operand has not all, or in another order, it has terms and no stride.

    Attributes:
      terms: those of batch, row and column that are no plain strides.
      gathered: what the values add to the offset that the operand is looked up by, if it is.
    """

    buffer: Operand | Result | Scratch
    dtype: str
    broadcast: Literal["scalar", "row", "column", "full"]
    batch_stride: int = 0
    row_stride: int = 0
    column_stride: int = 0
    terms: tuple[Terms, Terms, Terms] = ((), (), ())
    gathered: tuple[Gathered, ...] = ()

    @property
    def pairs(self) -> bool:
        """Whether pairs of columns, starting at an even one, are aligned words."""
        offset = self.buffer.offset // np.dtype(self.dtype).itemsize
        strides = [term.stride for terms in self.terms for term in terms] + [self.row_stride, self.batch_stride]
        return self.column_stride <= 1 and not self.terms[2] and not any(one & 1 for one in (offset, *strides))

    @property
    def transposed(self) -> "EpilogueOperand":
        """As an epilogue reads it that has rows for columns."""
        batch, row, column = self.terms
        return replace(
            self,
            broadcast={"row": "column", "column": "row"}.get(self.broadcast, self.broadcast),
            row_stride=self.column_stride,
            column_stride=self.row_stride,
            terms=(batch, column, row),
        )

    def columns(self, count: int) -> Literal["table", "strided", "pairs", "single"]:
        """How columns lie, of so many, for threads that have pairs of them (cpp/kernels/core/epilogue_operands.cuh)."""
        if self.gathered:
            return "table"
        if self.column_stride > 1 or self.terms[2]:
            return "strided"
        return "pairs" if self.pairs and count % 2 == 0 else "single"


@dataclass(frozen=True)
class Reduced:
    """A result that the epilogue reduces over batch, rows or columns, where its stride (in elements) is 0."""

    buffer: Result
    dtype: str
    reduction: Literal["sum", "max", "min"]
    batch_stride: int = 0
    row_stride: int = 0
    column_stride: int = 0
    axes: tuple[int, ...] = ()  # of (batch, row, column), those that are reduced

    @property
    def transposed(self) -> "Reduced":
        """Of the transposed product."""
        axes = tuple(sorted((0, 2, 1)[axis] for axis in self.axes))
        return replace(self, row_stride=self.column_stride, column_stride=self.row_stride, axes=axes)


@dataclass(frozen=True)
class Product(Problem):
    """results = epilogue(a @ b[0], a @ b[1], ..., operands...), for each matrix of a batch.

    Attributes:
      m, n, k, batch: sizes of one product, and how many.
      a: (m, k) in memory, or (k, m) if `a_transposed`.
      b: one or two, each (k, n) in memory, or (n, k) if `b_transposed`.
      program: the epilogue, over (batch, row, column): its accumulators are what is summed over k; its loads are
        `operands` and its outputs are `results`, in order.
      operands: what the epilogue reads.
      results: `Matrix` (m, n), dense; or `Reduced`. A matrix may be the same memory as an operand of its shape: so an
        engine writes an element of it once, when everything that depends on the operand's element there has been
        computed, and has no other use for a result's memory.
      exact: whether float32 operands may not be rounded to tf32, which is what tensor cores multiply.
      fast: whether products of float8 may be summed with as few bits as tensor cores sum them.
      by_columns: whether results, and operands of their shape, lie in memory by columns, (n, m).
    """

    family = "product"

    m: int
    n: int
    k: int
    batch: int
    a: Matrix
    b: tuple[Matrix, ...]
    program: Program
    results: tuple[Matrix | Reduced, ...]
    operands: tuple[EpilogueOperand, ...] = ()
    a_transposed: bool = False
    b_transposed: bool = False
    exact: bool = False
    fast: bool = False
    by_columns: bool = False

    @property
    def rounding_reason(self) -> str | None:
        """Why tensor cores can't multiply float32 operands, or None."""
        if self.a.dtype == "float32" and self.exact:
            return "it rounds float32 operands to tf32, and precision HIGHEST forbids that"
        return None

    @property
    def accumulator(self) -> str:
        """The dtype of the accumulators."""
        return self.program.accumulators[0].dtype

    @property
    def stored(self) -> tuple[Matrix, ...]:
        """The results that are stored as matrices."""
        return tuple(result for result in self.results if isinstance(result, Matrix))

    @property
    def reduced(self) -> tuple[Reduced, ...]:
        """The results that are reduced."""
        return tuple(result for result in self.results if isinstance(result, Reduced))

    @property
    def is_plain(self) -> bool:
        """Whether the epilogue does nothing but store the accumulators."""
        return not self.program.operations and not any(output.reduction for output in self.program.outputs)


OTHER_ARGUMENTS = 13  # of a launch, at most, besides those of an epilogue's arrays; of simt with two accumulators


def arguments_reason(
    operands: Sequence[EpilogueOperand], results: Sequence[Matrix | Reduced], others: int = OTHER_ARGUMENTS
) -> str | None:
    """Why no launch on a GPU can have all of an epilogue's arrays, besides so many other arguments, or None."""
    # Addresses and strides: those that are 0, and of columns those that are 1, are part of the code.
    strides = [(bool(one.batch_stride), bool(one.row_stride), one.column_stride > 1) for one in operands]
    count = sum(1 + sum(of_one) for of_one in strides) + 3 * len(results)
    terms = [term for one in operands for of_axis in one.terms for term in of_axis]
    count += sum(1 + (term.divisor != 1) + 2 * bool(term.modulus) for term in terms)
    count += sum(2 * len(one.gathered) for one in operands)
    if count > (room := MAX_ARGUMENTS - others):
        return f"its epilogue's operands and results would be {count} arguments, and a launch has room for {room}"
    return None


@cache
def identity(count: int, accumulator: str, dtype: str) -> Program:
    """The epilogue that returns each sum, as a `dtype`."""
    program = trace(lambda *accumulators: accumulators, (1, 1, 1), (accumulator,) * count)
    return program.with_output_dtype(dtype)


def dense_operand(load: AffineLoad, buffer: Operand | Result | Scratch, dtype: str) -> EpilogueOperand:
    """What is read of a dense array."""
    _, by_row, by_column = load.varies
    broadcast = ("full" if by_row else "row") if by_column else ("column" if by_row else "scalar")
    return EpilogueOperand(buffer, dtype, broadcast, *load.strides, load.others, load.gathered)


def dense_results(
    program: Program, sizes: Mapping[str, int], dtypes: Sequence[str]
) -> tuple[Matrix | Reduced, ...] | str:
    """A program's outputs as dense arrays of these dtypes, or why that can't be; `sizes` as `dense_result` has them."""
    found = []
    for index, (output, dtype) in enumerate(zip(program.outputs, dtypes, strict=True)):
        result = dense_result(output, index, sizes, dtype)
        if isinstance(result, str):
            return result
        found.append(result)
    return tuple(found)


def dense_result(output: Output, index: int, sizes: Mapping[str, int], dtype: str) -> Matrix | Reduced | str:
    """An output as the dense array of this dtype, given the sizes of batch ("b"), rows ("m") and columns ("n")."""
    m, n = sizes["m"], sizes["n"]
    if output.dtype != dtype:  # what is stored would not fit where it goes
        return f"its program returns {output.dtype}, and the call {dtype}"
    if list(_kept(output.dimensions)) != sorted(_kept(output.dimensions)):
        return "what is left of a reduction is stored transposed"
    if output.reduction is None:
        return Matrix(Result(index), output.dtype, m, n, n, m * n)
    strides, step = [0, 0, 0], 1
    for axis, group in reversed(list(enumerate("bmn"))):
        if axis not in output.axes:
            strides[axis] = step
            step *= sizes[group]
    batch, row, column = strides
    return Reduced(Result(index), output.dtype, output.reduction, batch, row, column, output.axes)


def _kept(dimensions: Sequence[int | None]) -> list[int]:
    return [dimension for dimension in dimensions if dimension is not None]
