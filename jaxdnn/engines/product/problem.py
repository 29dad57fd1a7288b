"""A product of matrices with its epilogue, as every matmul engine sees it: `product(spec, signature)`.

An engine that takes a `Product` inherits from `ProductEngine`, and never sees a spec.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np

from jaxdnn.device import Target
from jaxdnn.engines.base import MAX_ARGUMENTS, sizes_reason
from jaxdnn.plan import Operand, Plan, Result, Scratch
from jaxdnn.pointwise import AffineLoad, Gathered, Output, Program, Terms, collapse, trace
from jaxdnn.pointwise.operations import DTYPES
from jaxdnn.spec import Signature, Spec


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

    buffer: Operand
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


@dataclass(frozen=True)
class Product:
    """results = epilogue(a @ b[0], a @ b[1], ..., operands...), for each matrix of a batch.

    Attributes:
      m, n, k, batch: sizes of one product, and how many.
      a: (m, k) in memory, or (k, m) if `a_transposed`.
      b: one or two, each (k, n) in memory, or (n, k) if `b_transposed`.
      program: the epilogue, over (batch, row, column): its accumulators are the sums, in the dtype that they are summed
        in; its loads are `operands` and its outputs are `results`, in order.
      operands: what the epilogue reads.
      results: `Matrix` (m, n), dense; or `Reduced`. A matrix may be the same memory as an operand of its shape: so an
        engine writes an element of it once, when everything that depends on the operand's element there has been
        computed, and has no other use for a result's memory.
      precision: of float32 operands: "default" may round them to tf32, "highest" may not.
    """

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
    precision: Literal["default", "highest"] = "default"

    @property
    def accumulator(self) -> str:
        """The dtype that sums are in."""
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
        """Whether the epilogue does nothing but store the sums."""
        return not self.program.operations and not any(output.reduction for output in self.program.outputs)


OTHER_ARGUMENTS = 13  # of a launch, at most, besides those of an epilogue's arrays; of simt with two sums


def arguments_reason(operands: Sequence[EpilogueOperand], results: Sequence[Matrix | Reduced]) -> str | None:
    """Why no launch on a GPU can have all of an epilogue's arrays, or None."""
    # Addresses and strides: those that are 0, and of columns those that are 1, are part of the code.
    strides = [(bool(one.batch_stride), bool(one.row_stride), one.column_stride > 1) for one in operands]
    count = sum(1 + sum(of_one) for of_one in strides) + 3 * len(results)
    terms = [term for one in operands for of_axis in one.terms for term in of_axis]
    count += sum(1 + (term.divisor != 1) + 2 * bool(term.modulus) for term in terms)
    count += sum(2 * len(one.gathered) for one in operands)
    if count > (room := MAX_ARGUMENTS - OTHER_ARGUMENTS):
        return f"its epilogue's operands and results would be {count} arguments, and a launch has room for {room}"
    return None


@cache
def identity(sums: int, accumulator: str, dtype: str) -> Program:
    """The epilogue that returns each sum, as a `dtype`."""
    program = trace(lambda *sums: sums, (1, 1, 1), (accumulator,) * sums)
    return program.with_output_dtype(dtype)


def product(spec: Any, signature: Signature) -> Product | str:
    """A `MatmulSpec`'s call as a `Product`, or the reason why it is none."""
    if reason := sizes_reason(signature):
        return reason
    if spec.accumulator not in DTYPES:
        return f"kernels have no sums of {spec.accumulator}"
    if spec.batch:
        return "its epilogue, mapped, is no pointwise program"
    groups = spec.groups(signature.operands)
    sizes = {name: math.prod(group) for name, group in groups.items()}
    matrices: dict[str, Matrix] = {}
    for name in ("a", *spec.rights):
        matrix = _matrix(spec, signature, name, sizes)
        if isinstance(matrix, str):
            return matrix
        matrices[name] = matrix
    shape = (*groups["b"], *groups["m"], *groups["n"])
    counts = (len(groups["b"]), len(groups["m"]), len(groups["n"]))
    if spec.epilogue is None:
        program = identity(len(spec.rights), spec.accumulator, spec.dtype)
    else:
        shapes = [signature.operands[name].shape for name in spec.extras]
        program = collapse(spec.epilogue.program, shape, shapes, counts)
        if isinstance(program, str):
            return program

    def operand(load: AffineLoad) -> EpilogueOperand:
        name = spec.extras[load.operand]
        return dense_operand(load, Operand(signature.operand_index(name)), signature.operands[name].dtype.name)

    results = []
    for index, (output, array) in enumerate(zip(program.outputs, signature.results.values(), strict=True)):
        result = dense_result(output, index, sizes, array.dtype.name)
        if isinstance(result, str):
            return result
        results.append(result)
    return Product(
        m=sizes["m"],
        n=sizes["n"],
        k=sizes["k"],
        batch=sizes["b"],
        a=matrices["a"],
        b=tuple(matrices[name] for name in spec.rights),
        program=program,
        results=tuple(results),
        operands=tuple(operand(load) for load in program.affine_loads),
        a_transposed=spec.a_order.index("k") < spec.a_order.index("m"),
        b_transposed=spec.b_order.index("n") < spec.b_order.index("k"),
        precision=spec.precision,
    )


def _matrix(spec: Any, signature: Signature, name: str, sizes: dict[str, int]) -> Matrix | str:
    """One of the matrices that are multiplied."""
    order, side = (spec.a_order, 0) if name == "a" else (spec.b_order, 1)
    carried = [
        flags[side] for flags, size in zip(spec.batched, spec.groups(signature.operands)["b"], strict=True) if size != 1
    ]
    if any(carried) and not all(carried):
        return f"{name} carries some of the batch dimensions and not others"
    lengths = {**sizes, "b": sizes["b"] if any(carried) else 1}
    strides, step = {}, 1
    for group in reversed(order):
        strides[group] = step
        step *= lengths[group]
    outer, inner = (group for group in order if group != "b")
    if strides[inner] != 1:
        return f"the batch is the innermost dimension of {name}"
    index = signature.operand_index(name)
    dtype = signature.operands[name].dtype.name
    batch = strides["b"] if any(carried) else 0
    return Matrix(Operand(index), dtype, lengths[outer], lengths[inner], strides[outer], batch)


def dense_operand(load: AffineLoad, buffer: Operand, dtype: str) -> EpilogueOperand:
    """What is read of a dense array."""
    _, by_row, by_column = load.varies
    broadcast = ("full" if by_row else "row") if by_column else ("column" if by_row else "scalar")
    return EpilogueOperand(buffer, dtype, broadcast, *load.strides, load.others, load.gathered)


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


class ProductEngine:
    """An engine of matmul: it says what it has against a product, offers configurations, and plans one of them."""

    op = "matmul"

    def reason(self, product: Product, target: Target) -> str | None:
        """Why the engine can't serve the product, or None."""
        raise NotImplementedError

    def configurations(self, product: Product, target: Target) -> Iterable[Any]:
        """Configurations that work for the product, the heuristic's choice first; at least one."""
        raise NotImplementedError

    def build(self, config: Any, product: Product, target: Target, title: str) -> Plan:
        """The plan of one configuration, for the call named `title`."""
        raise NotImplementedError

    def supports(self, spec: Spec, signature: Signature, target: Target) -> str | None:
        one = product(spec, signature)
        return one if isinstance(one, str) else self.reason(one, target)

    def candidates(self, spec: Spec, signature: Signature, target: Target) -> Iterable[Any]:
        one = product(spec, signature)
        assert not isinstance(one, str), "the call is supported"
        return self.configurations(one, target)

    def plan(self, config: Any, spec: Spec, signature: Signature, target: Target) -> Plan:
        one = product(spec, signature)
        assert not isinstance(one, str), "the call is supported"
        return self.build(config, one, target, spec.title)
