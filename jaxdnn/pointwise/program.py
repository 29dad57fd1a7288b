"""`Program`: a pointwise function as frozen data, independent of the shapes that it is applied to.

A program computes, for one element of a result, scalars from scalars. What it reads and writes is described by
*dimensions*: those of the whole output that the function was traced on.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jaxdnn.pointwise.operations import kind

Reduction = Literal["sum", "max", "min"]
Groups = tuple[int, int, int]


@dataclass(frozen=True)
class Argument:
    """An array that the function takes."""

    name: str
    dtype: str


@dataclass(frozen=True)
class Load:
    """One element of an operand for each element of the output.

    Attributes:
      operand: which operand.
      dimensions: for each dimension of the output, the operand's dimension that runs along it; None where the element
        stays the same.
      gathered: the operand's dimensions along which the instruction's arguments say which element it is, in order.
    """

    operand: int
    dimensions: tuple[int | None, ...]
    gathered: tuple[int, ...] = ()

    def strides(self, shape: Sequence[int]) -> tuple[int, ...]:
        """In elements, along each dimension of the output, for a dense operand of `shape`."""
        return tuple(0 if d is None else prod(shape[d + 1 :]) for d in self.dimensions)

    def at_own_place(self, shape: Sequence[int]) -> bool:
        """Whether it is, of an operand of the output's `shape`, the element at the output's own place."""
        return all(d == place or shape[place] == 1 for place, d in enumerate(self.dimensions))


@dataclass(frozen=True)
class Term:
    """What a coordinate adds to an offset: coordinate // divisor % modulus * stride; without a modulus where it is 0.

    One with neither a divisor nor a modulus is plain: no other term has the same coordinate.
    """

    stride: int
    divisor: int = 1
    modulus: int = 0

    @property
    def plain(self) -> bool:
        return self.divisor == 1 and not self.modulus


Terms = tuple[Term, ...]


@dataclass(frozen=True)
class Gathered:
    """What an integer value adds to an offset: the value, brought to 0 .. bound, times stride."""

    stride: int
    bound: int


@dataclass(frozen=True)
class AffineLoad:
    """A `Load` of a collapsed program: the element's offset is a sum of terms, each of one coordinate.

    Attributes:
      operand: which operand.
      terms: of the batch, of the row and of the column; strides count elements.
      gathered: of each of the instruction's arguments.
    """

    operand: int
    terms: tuple[Terms, Terms, Terms]
    gathered: tuple[Gathered, ...] = ()

    @property
    def varies(self) -> tuple[bool, bool, bool]:
        """Whether the element changes with the batch, the row and the column, but for what is gathered."""
        batch, row, column = self.terms
        return bool(batch), bool(row), bool(column)

    @property
    def strides(self) -> tuple[int, int, int]:
        """Of the plain terms, for batch, row and column; 0 where there is none."""
        batch, row, column = (sum(term.stride for term in terms if term.plain) for terms in self.terms)
        return batch, row, column

    @property
    def others(self) -> tuple[Terms, Terms, Terms]:
        """The terms that are not plain, of batch, row and column."""
        batch, row, column = (tuple(term for term in terms if not term.plain) for terms in self.terms)
        return batch, row, column


def merged_terms(sizes: Sequence[int], strides: Sequence[int]) -> Terms:
    """The fewest terms for a coordinate that joins dimensions of these sizes, of which each has a stride."""
    pieces: list[tuple[int, int]] = []  # size and stride, the outermost first
    for size, stride in zip(sizes, strides, strict=True):
        if size == 1:
            continue
        if pieces and pieces[-1][1] == stride * size:
            pieces[-1] = (pieces[-1][0] * size, stride)
        else:
            pieces.append((size, stride))
    divisors = [prod(size for size, _ in pieces[i + 1 :]) for i in range(len(pieces))]
    return tuple(
        Term(stride, divisor, size if i else 0)
        for i, ((size, stride), divisor) in enumerate(zip(pieces, divisors, strict=True))
        if stride
    )


@dataclass(frozen=True)
class Index:
    """A coordinate of the output's element: `index // divisor`, modulo `modulus` where that is not zero."""

    dimension: int
    divisor: int = 1
    modulus: int = 0


def literal_bits(value: npt.ArrayLike, dtype: str) -> int:
    """The bytes of `value` as a `dtype`, as an unsigned number. Unlike numbers, bits tell 0.0 from -0.0."""
    with np.errstate(all="ignore"):
        return int.from_bytes(np.asarray(value).astype(jnp.dtype(dtype)).tobytes(), "little")


@dataclass(frozen=True)
class Instruction:
    """A value, computed from earlier ones.

    Attributes:
      operation: a row of `operations.TABLE`, or the value's source: "accumulator", "operand", "index" or "literal".
      dtype: the value's.
      arguments: positions of earlier instructions; of an "operand", the indices that it is gathered by.
      immediate: the number of the accumulator, the `Load`, the `Index`, or the literal's bits.
    """

    operation: str
    dtype: str
    arguments: tuple[int, ...] = ()
    immediate: int | Load | AffineLoad | Index | None = None

    @property
    def literal(self) -> np.generic:
        """The value of a literal."""
        assert isinstance(self.immediate, int)
        dtype = jnp.dtype(self.dtype)
        return np.frombuffer(self.immediate.to_bytes(8, "little")[: dtype.itemsize], dtype)[0]


@dataclass(frozen=True)
class Output:
    """One array that the function returns.

    Attributes:
      value: position of the instruction.
      dtype: what the value is rounded to when it is stored.
      dimensions: for each dimension of the array, the output's one that it runs along; None where its size is one.
      reduction: how the values along the dimensions in `axes` become one.
      axes: the dimensions of the output that are reduced.
    """

    value: int
    dtype: str
    dimensions: tuple[int | None, ...]
    reduction: Reduction | None = None
    axes: tuple[int, ...] = ()

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The array's shape, where the function is applied to `shape`."""
        return tuple(1 if d is None else shape[d] for d in self.dimensions)


@dataclass(frozen=True, repr=False)
class Program:
    """A pointwise function, in static single assignment form.

    Attributes:
      accumulators: arrays of the output's shape that the kernel has in registers, with their names in the function.
      operands: arrays that the kernel loads from.
      instructions: every one is used.
      outputs: the leaves of what the function returns.
      rank: of the output; three (batch, row, column) once it is collapsed.
      tree: how the outputs are arranged in what the function returns (a `PyTreeDef`).
      title: the function in a few words, for people.
    """

    accumulators: tuple[Argument, ...]
    operands: tuple[Argument, ...]
    instructions: tuple[Instruction, ...]
    outputs: tuple[Output, ...]
    rank: int
    tree: Any
    title: str = field(default="", compare=False)

    @property
    def loads(self) -> tuple[Load, ...]:
        """What is read from operands, without repetition, before the program is collapsed."""
        return tuple(i.immediate for i in self.instructions if isinstance(i.immediate, Load))

    @property
    def affine_loads(self) -> tuple[AffineLoad, ...]:
        """The same of a collapsed program."""
        return tuple(i.immediate for i in self.instructions if isinstance(i.immediate, AffineLoad))

    @property
    def indexed(self) -> bool:
        """Whether the program uses the coordinates of the element."""
        return any(isinstance(instruction.immediate, Index) for instruction in self.instructions)

    @property
    def operations(self) -> tuple[str, ...]:
        """The operations that are done for each element, in order."""
        sources = {"accumulator", "operand", "index", "literal"}
        return tuple(i.operation for i in self.instructions if i.operation not in sources)

    def with_output_dtype(self, dtype: str) -> "Program":
        """The program with `dtype` for outputs in the accumulators' dtype; reductions and what is cast keep theirs."""
        instructions, outputs = list(self.instructions), list(self.outputs)
        own = {argument.dtype for argument in self.accumulators}
        for i, output in enumerate(outputs):
            if output.reduction or output.dtype not in own or output.dtype == dtype:
                continue
            value = output.value
            # Storing rounds a float; any other change of dtype is an instruction.
            if not (kind(output.dtype) == kind(dtype) == "f"):
                instructions.append(Instruction("convert", dtype, (value,)))
                value = len(instructions) - 1
            outputs[i] = replace(output, value=value, dtype=dtype)
        return replace(self, instructions=tuple(instructions), outputs=tuple(outputs))

    def with_accumulators(self, dtype: str) -> tuple["Program", tuple[int, ...]]:
        """The program with the accumulators, rounded to `dtype`, among its outputs, and the numbers of these: of the
        program's own, or of ones that are added behind them.
        """
        instructions, outputs, numbers = list(self.instructions), list(self.outputs), list[int]()
        for number, argument in enumerate(self.accumulators):
            accumulator = Instruction("accumulator", argument.dtype, immediate=number)
            if accumulator not in instructions:
                instructions.append(accumulator)
            output = Output(instructions.index(accumulator), dtype, tuple(range(self.rank)))
            if output not in outputs:
                outputs.append(output)
            numbers.append(outputs.index(output))
        return replace(self, instructions=tuple(instructions), outputs=tuple(outputs)), tuple(numbers)

    def __repr__(self) -> str:
        return f"Program({self.title!r})"


def collapse(
    program: Program, shape: Sequence[int], operand_shapes: Sequence[Sequence[int]], groups: Groups
) -> Program | str:
    """The program with the output's dimensions joined to three: batch, row and column. Or why that can't be.

    Args:
      program: over the dimensions of `shape`.
      shape: the output's.
      operand_shapes: of the (dense) operands.
      groups: how many of the output's dimensions, in order, are batch, row and column dimensions.
    """
    if len(shape) != program.rank or sum(groups) != program.rank:
        raise ValueError(
            f"collapse: groups {groups} of shape {tuple(shape)}, for a program of {program.rank} dimensions"
        )
    ends = np.cumsum((0, *groups)).tolist()
    members = [range(ends[g], ends[g + 1]) for g in range(3)]
    names = ("batch", "row", "column")

    def load(value: Load) -> AffineLoad:
        own = operand_shapes[value.operand]
        strides = value.strides(own)
        batch, row, column = (merged_terms([shape[d] for d in group], [strides[d] for d in group]) for group in members)
        gathered = tuple(Gathered(prod(own[d + 1 :]), own[d] - 1) for d in value.gathered)
        return AffineLoad(value.operand, (batch, row, column), gathered)

    def index(value: Index) -> Index:
        group = next(g for g in range(3) if value.dimension in members[g])
        divisor = prod(shape[value.dimension + 1 : ends[group + 1]])
        outermost = all(shape[d] == 1 for d in range(ends[group], value.dimension))
        return Index(group, divisor, 0 if outermost else shape[value.dimension])

    def output(value: Output) -> Output | str:
        if all(shape[d] == 1 for d in value.axes):
            return replace(value, axes=(), reduction=None)  # each element is all that is reduced
        axes = []
        for g, group in enumerate(members):
            reduced = {d in value.axes for d in group if shape[d] != 1} or {d in value.axes for d in group}
            if reduced == {True, False} and any(shape[d] != 1 for d in group):
                return f"a {value.reduction} is over only some of the output's {names[g]} dimensions"
            if True in reduced:
                axes.append(g)
        return replace(value, axes=tuple(axes))

    instructions: list[Instruction] = []
    for instruction in program.instructions:
        immediate = instruction.immediate
        if isinstance(immediate, Load):
            immediate = load(immediate)
        elif isinstance(immediate, Index):
            immediate = index(immediate)
        instructions.append(replace(instruction, immediate=immediate))
    outputs = [output(value) for value in program.outputs]
    if reasons := [value for value in outputs if isinstance(value, str)]:
        return reasons[0]
    kept = tuple(value for value in outputs if isinstance(value, Output))
    return replace(program, instructions=tuple(instructions), outputs=kept, rank=3)
