"""What matmul kernels share whose epilogue works on one element at a time (cpp/kernels/core/epilogue_element.cuh).

Operands and results may be of any dtype and anywhere in memory. A result that the epilogue reduces is left whole in
scratch memory, and reduced from there one axis at a time (cpp/kernels/product/reduce.cuh).
"""

import math
from dataclasses import dataclass

import numpy as np

from jaxdnn.engines.product.affine import term_parameters
from jaxdnn.engines.product.problem import EpilogueOperand, Matrix, Product, Reduced
from jaxdnn.engines.product.reduce import reduce_stage, reduction
from jaxdnn.engines.unit import Parameter, Stage, joined
from jaxdnn.plan import Operand, Result, Scalar, Scratch
from jaxdnn.pointwise import Functor, functor

MAX_GRID = 2**31 - 1


def operand_type(operand: EpilogueOperand, dtype: str, columns: str, scope: str = "") -> str:
    """The C++ type of an operand of the C++ type `dtype`, whose neighbouring columns lie as `columns` says."""
    lie = "" if columns == "single" else f", {scope}Columns::{columns}"
    own = f"{scope}EpilogueOperand<{dtype}, {scope}Broadcast::{operand.broadcast}{lie}>"
    if not any(operand.terms):
        return own
    _, *others = (str(bool(terms)).lower() for terms in operand.terms)  # of a batch, of rows and of columns
    besides = f", {', '.join(others)}" if "true" in others else ""
    return f"{scope}Affine<{own}{besides}>"


@dataclass(frozen=True)
class Stored:
    """Where a result goes, in the C++ type that it lies there as. Strides count elements; columns are dense."""

    buffer: Operand | Result | Scratch
    ctype: str
    row_stride: int
    batch_stride: int


@dataclass(frozen=True)
class ElementEpilogue:
    """A functor, and where its operands and results lie.

    Attributes:
      functor, operands, results: as they are named.
      scattered: numbers of operands of which a thread's neighbouring columns are no vector.
    """

    functor: Functor
    operands: tuple[EpilogueOperand, ...]
    results: tuple[Stored, ...]
    scattered: tuple[int, ...] = ()

    def text(self) -> str:
        """The functor's definition."""
        return f"namespace jaxdnn {{\n{self.functor.source}}}  // namespace jaxdnn\n"

    def types(self) -> dict[str, str]:
        """The types of a `Config`."""
        operands = ", ".join(
            operand_type(operand, ctype(operand.dtype), columns, "jaxdnn::")
            for operand, columns in zip(self.operands, self._columns(), strict=True)
        )
        results = ", ".join(result.ctype for result in self.results)
        return {
            "Epilogue": f"jaxdnn::{self.functor.name}",
            "Operands": f"jaxdnn::TypeList<{operands}>",
            "Results": f"jaxdnn::TypeList<{results}>",
            "Registers": f"jaxdnn::TypeList<{', '.join(map(ctype, self.functor.results))}>",
        }

    def _columns(self) -> list[str]:
        """How each operand's columns lie."""
        tables = ("table" if operand.gathered else "" for operand in self.operands)
        return [way or ("strided" if i in self.scattered else "single") for i, way in enumerate(tables)]

    def parameters(self) -> list[Parameter]:
        """The addresses, with those strides that are not zero."""
        found = []
        for i, operand in enumerate(self.operands):
            found += operand_parameters(f"operand{i}", f"operands[{i}]", operand)
        for i, result in enumerate(self.results):
            found.append(Parameter(f"{result.ctype}*", f"result{i}", f"results[{i}].data", result.buffer))
            found += _strides(f"result{i}", f"results[{i}]", (result.row_stride, 1, result.batch_stride))
        return found


def operand_parameters(name: str, field: str, operand: EpilogueOperand) -> list[Parameter]:
    """The address of an operand, with what says where its elements lie."""
    pointer = Parameter(f"const {ctype(operand.dtype)}*", name, f"{field}.data", operand.buffer)
    return [pointer, *place_parameters(name, field, operand)]


def place_parameters(name: str, field: str, operand: EpilogueOperand) -> list[Parameter]:
    """Where an operand's elements lie: the strides that are not zero, and terms."""
    strides = (operand.row_stride, operand.column_stride, operand.batch_stride)
    return _strides(name, field, strides) + term_parameters(name, field, operand)


def ctype(dtype: str) -> str:
    """The C++ type of elements of `dtype`."""
    return dtype if dtype in ("bool", "float", "double") else f"jaxdnn::{dtype}"


def itemsize(ctype: str) -> int:
    """Bytes of an element of a C++ type."""
    name = ctype.removeprefix("jaxdnn::")
    return np.dtype({"float": "float32", "double": "float64"}.get(name, name)).itemsize


def _strides(name: str, field: str, strides: tuple[int, int, int]) -> list[Parameter]:
    named = zip(("row_stride", "column_stride", "batch_stride"), strides, strict=True)
    return [
        Parameter("long long", f"{name}_{kind}", f"{field}.{kind}", Scalar("int64", stride) if stride > 1 else stride)
        for kind, stride in named
        if stride
    ]


def element_epilogue(product: Product, scratch: int) -> tuple[ElementEpilogue, Stage]:
    """The product's epilogue, and the steps after it; their scratch buffers are numbered from `scratch`."""
    emitted = functor(product.program)
    stored: list[Stored] = []
    stages: list[Stage] = []
    for result, register in zip(product.results, emitted.results, strict=True):
        if isinstance(result, Matrix):
            stored.append(Stored(result.buffer, ctype(result.dtype), result.row_stride, result.batch_stride))
            continue
        used = scratch + sum(len(stage.scratch) for stage in stages)
        stored.append(Stored(Scratch(used), ctype(register), product.n, product.m * product.n))
        stages.append(_reduce(product, result, ctype(register), used, sum(len(s.launches) for s in stages)))
    return ElementEpilogue(emitted, product.operands, tuple(stored)), joined(stages)


def reductions_reason(product: Product) -> str | None:
    """Why what the epilogue reduces can't be reduced, or None."""
    rows = product.batch * product.m
    if rows > MAX_GRID and product.reduced:
        return f"its epilogue reduces {rows} rows, and a grid has at most {MAX_GRID} thread blocks"
    return None


def _reduce(product: Product, result: Reduced, register: str, scratch: int, number: int) -> Stage:
    """Reduces the values in a scratch buffer, an axis at a time, the innermost first."""
    sizes = [product.batch, product.m, product.n]
    source, stages, buffers = Scratch(scratch), list[Stage](), [math.prod(sizes) * itemsize(register)]
    axes = sorted(result.axes, reverse=True)
    for axis in axes:
        extents = (math.prod(sizes[:axis]), sizes[axis], math.prod(sizes[axis + 1 :]))
        sizes[axis] = 1
        between = Scratch(scratch + len(buffers))
        to = (between, register)
        if axis == axes[-1]:
            to = (result.buffer, ctype(result.dtype))
        else:
            buffers.append(math.prod(sizes) * itemsize(register))
        stages.append(reduce_stage(reduction(result, register), source, to, extents, number + len(stages)))
        source = between
    return joined([*stages, Stage(scratch=tuple(buffers))])
