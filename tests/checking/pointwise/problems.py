"""What a problem's program computes and loads, for every element at once, in numpy."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from jaxdnn.pointwise import AffineLoad, Index

_RENAMED = {"and": np.logical_and, "or": np.logical_or, "not": np.logical_not}


class Elements:
    """Elements at (batch, row, column), and the operands in memory that programs read."""

    def __init__(self, extents: tuple[int, int, int], operands: Sequence[np.ndarray]) -> None:
        self.extents = extents
        self.at = np.indices(extents)
        self.operands = [np.ravel(array) for array in operands]

    def program(self, program: Any, operands: Sequence[Any], accumulators: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The outputs, in the program's dtypes."""
        loads, values = iter(operands), []
        for instruction in program.instructions:
            arguments = [values[argument] for argument in instruction.arguments]
            match instruction.operation, instruction.immediate:
                case "accumulator", int(number):
                    value = accumulators[number].astype(instruction.dtype)
                case "operand", AffineLoad():
                    value = self.load(next(loads), arguments)
                case "index", Index(dimension, divisor, modulus):
                    value = self.at[dimension] // divisor
                    value = (value % modulus if modulus else value).astype(instruction.dtype)
                case "literal", _:
                    value = np.full(self.extents, instruction.literal)
                case "convert", _:
                    value = arguments[0].astype(instruction.dtype)
                case name, _:
                    value = np.asarray((_RENAMED.get(name) or getattr(lax, name))(*arguments))
            values.append(value)
        return [values[output.value] for output in program.outputs]

    def offsets(self, place: Any, indices: Sequence[np.ndarray] = ()) -> np.ndarray:
        """Where the element of each score lies."""
        strides = (place.batch_stride, place.row_stride, place.column_stride)
        found = sum(at * stride for at, stride in zip(self.at, strides, strict=True))
        for at, terms in zip(self.at, place.terms, strict=True):
            for term in terms:
                coordinate = at // term.divisor
                found = found + (coordinate % term.modulus if term.modulus else coordinate) * term.stride
        for gathered, index in zip(place.gathered, indices, strict=True):
            found = found + np.clip(index, 0, gathered.bound) * gathered.stride
        return found

    def load(self, place: Any, indices: Sequence[np.ndarray] = ()) -> np.ndarray:
        return self.operands[place.buffer.index][self.offsets(place, indices)]
