"""`Builder` collects the instructions of a program: each one once, constants folded, trivial ones left out."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from jaxdnn.pointwise.operations import NARROW_FLOATS, TABLE, kind
from jaxdnn.pointwise.program import Instruction, Output, literal_bits


class Builder:
    """Instructions in order; a value is the position of its instruction."""

    def __init__(self) -> None:
        self._instructions: list[Instruction] = []
        self._positions: dict[Instruction, int] = {}

    def dtype(self, value: int) -> str:
        return self._instructions[value].dtype

    def add(self, instruction: Instruction) -> int:
        """The position of `instruction`, which is stored once."""
        if instruction not in self._positions:
            self._positions[instruction] = len(self._instructions)
            self._instructions.append(instruction)
        return self._positions[instruction]

    def literal(self, value: npt.ArrayLike, dtype: str) -> int:
        return self.add(Instruction("literal", dtype, immediate=literal_bits(value, dtype)))

    def operation(self, name: str, *arguments: int) -> int:
        """A row of the table, on arguments of one dtype (`select`: after the condition)."""
        operation = TABLE[name]
        dtype = "bool" if operation.compares else self.dtype(arguments[-1])
        literals = [self._literal(argument) for argument in arguments]
        if operation.fold and None not in literals:
            with np.errstate(all="ignore"):
                return self.literal(operation.fold(*literals), dtype)
        if (simpler := self._simplify(name, arguments, literals)) is not None:
            return simpler
        return self.add(Instruction(name, dtype, arguments))

    def convert(self, value: int, dtype: str) -> int:
        if self.dtype(value) == dtype:
            return value
        literal = self._literal(value)
        # A float out of an integer's range has its own rule, which numpy does not follow.
        if literal is not None and not (kind(self.dtype(value)) == "f" and kind(dtype) in "iu"):
            return self.literal(literal, dtype)
        return self.add(Instruction("convert", dtype, (value,)))

    def power(self, value: int, exponent: int) -> int:
        """value to a whole power, by repeated squaring, rounded once."""
        dtype = self.dtype(value)
        if dtype in NARROW_FLOATS:
            return self.convert(self.power(self.convert(value, "float32"), exponent), dtype)
        if exponent < 0:
            return self.operation("div", self.literal(1, dtype), self.power(value, -exponent))
        if exponent == 0:
            return self.literal(1, dtype)
        half = value if exponent < 4 else self.power(value, exponent // 2)
        if exponent == 1:
            return half
        square = self.operation("mul", half, half)
        return self.operation("mul", value, square) if exponent % 2 else square

    def finish(self, outputs: tuple[Output, ...]) -> tuple[tuple[Instruction, ...], tuple[Output, ...]]:
        """The instructions that the outputs need, and the outputs that refer to them."""
        needed = {output.value for output in outputs}
        for position in reversed(range(len(self._instructions))):
            if position in needed:
                needed.update(self._instructions[position].arguments)
        place = {position: i for i, position in enumerate(sorted(needed))}
        kept = tuple(
            replace(instruction, arguments=tuple(place[a] for a in instruction.arguments))
            for position, instruction in enumerate(self._instructions)
            if position in place
        )
        return kept, tuple(replace(output, value=place[output.value]) for output in outputs)

    def _literal(self, value: int) -> np.generic | None:
        instruction = self._instructions[value]
        return instruction.literal if instruction.operation == "literal" else None

    def _simplify(self, name: str, arguments: tuple[int, ...], literals: list[np.generic | None]) -> int | None:
        """A value with the same bits that takes less work, for any argument, NaN and -0 included."""
        if name == "select":
            _, on_true, on_false = arguments
            if literals[0] is not None:
                return on_true if literals[0] else on_false
            return on_true if on_true == on_false else None
        if len(arguments) != 2:
            return None
        (x, y), (left, right) = arguments, literals
        match name:
            case "lt" | "ge" if right is not None and right == 0 and kind(self.dtype(x)) == "u":
                return self.literal(name == "ge", "bool")  # as of indices, which jax.numpy lets be negative
            case "mul" if left is not None and left == 1:
                return y
            case "mul" | "div" if right is not None and right == 1:
                return x
            case "sub" if right is not None and right == 0 and not np.signbit(right.astype(np.float64)):
                return x
            case "div" if right is not None and kind(self.dtype(y)) == "f":
                # The reciprocal of a power of two is exact, where the dtype has it, and so then is the product.
                mantissa, exponent = np.frexp(right.astype(np.float64))
                if abs(mantissa) == 0.5 and abs(exponent) <= 12:
                    reciprocal = 1 / right.astype(np.float64)
                    position = self.literal(reciprocal, self.dtype(y))
                    if self._literal(position) == reciprocal:
                        return self.operation("mul", x, position)
        return None
