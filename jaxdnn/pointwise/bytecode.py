"""A program as bytecode: `bytecode`, for the interpreter of the host engines (cpp/host/pointwise/interpreter.h).

Words of 64 bits. Six say how many bytes the element of a register takes, and how many registers, literals, steady
instructions (whose values are the same in every row), other instructions and outputs there are; then come two words for
each literal and instruction, in that order, and one for each output:

  instruction   operation | type << 16 | result << 32 | dtype << 48, then its arguments, 16 bits each, or its immediate
  output        register | type << 16 | dtype << 24 | reduction << 32

A gather's arguments are the indices, which are of int64, in the lowest 48 bits; the highest 16 say which operand.

After them comes where each operand's element lies but for its strides, as one word an operand: the number of the first
word of its terms, or 0 where it has none. There stand how many terms batch, row and column have, and how many indices;
then three words a term (stride, divisor, modulus), and two an index (stride, bound).

A register holds one value for each element of a block. Its type is one of the first six of `DTYPES`; values of narrower
dtypes live in wider registers, and a `narrow` instruction rounds or wraps them after each operation.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from jaxdnn.pointwise.operations import DTYPES, OPERATIONS, TABLE, kind
from jaxdnn.pointwise.program import Gathered, Index, Instruction, Program, Terms, literal_bits

# What a register can hold; the first of `DTYPES`.
REGISTER_TYPES = DTYPES[:6]

# Codes after those of the table.
EXTRA = ("narrow", "logical_not", "literal", "accumulator", "operand", "index", "gather")
MAX_INDICES = 3  # of a gather
_CODES = {name: code for code, name in enumerate((*(operation.name for operation in OPERATIONS), *EXTRA))}
_REDUCTIONS = (None, "sum", "max", "min")

# The least and greatest value of the integers that registers don't hold.
_RANGES = {
    "int8": (-(2**7), 2**7 - 1),
    "int16": (-(2**15), 2**15 - 1),
    "uint8": (0, 2**8 - 1),
    "uint16": (0, 2**16 - 1),
}

# Operations that see the bits of a register beyond those of a narrow integer, and which integer's they must be.
_OTHER_SIGN = {
    "shift_right_logical": "uint",
    "shift_right_arithmetic": "int",
    "population_count": "uint",
    "clz": "uint",
}


def register_type(dtype: str) -> str:
    """The type of the register that holds a value of `dtype`."""
    if dtype in REGISTER_TYPES:
        return dtype
    return "float32" if kind(dtype) == "f" else "uint32" if kind(dtype) == "u" else "int32"


@dataclass(frozen=True)
class _Step:
    """One instruction, before registers are assigned: `result` and `arguments` are values."""

    operation: str
    result: int
    type: str  # of the arguments
    dtype: str  # of the result
    arguments: tuple[int, ...] = ()
    immediate: int = 0


def bytecode(program: Program) -> tuple[int, ...]:
    """Encodes a collapsed program. Operand k of the interpreter is `program.affine_loads[k]`."""
    if program.rank != 3:
        raise ValueError(f"bytecode: the program has {program.rank} dimensions; collapse it to batch, row and column")
    steps, values = _Steps(program).steps()
    outputs = {values[output.value] for output in program.outputs}
    literals = [step for step in steps if step.operation == "literal"]
    steady = _steady(steps, program)
    others = [step for step in steps if step not in literals and step not in steady]
    registers, count = _registers(steps, {step.result for step in (*literals, *steady)}, outputs)
    wide = any(register_type(step.dtype).endswith("64") for step in steps)
    words = [8 if wide else 4, count, len(literals), len(steady), len(others), len(program.outputs)]
    for step in (*literals, *steady, *others):
        head = (_CODES[step.operation], DTYPES.index(step.type), registers[step.result], DTYPES.index(step.dtype))
        words.append(_packed(head))
        operand = step.immediate << 48 if step.operation == "gather" else 0
        arguments = _packed(registers[a] for a in step.arguments) | operand
        words.append(arguments if step.arguments else step.immediate)
    for output in program.outputs:
        value = program.instructions[output.value]
        words.append(
            registers[values[output.value]]
            | DTYPES.index(register_type(value.dtype)) << 16
            | DTYPES.index(output.dtype) << 24
            | _REDUCTIONS.index(output.reduction) << 32
        )
    first = len(words) + len(program.affine_loads)
    tables = list[int]()
    for load in program.affine_loads:
        table = terms_words(load.others, load.gathered)
        words.append(first + len(tables) if table else 0)
        tables += table
    return tuple(word - 2**64 if word >= 2**63 else word for word in (*words, *tables))


def terms_words(others: tuple[Terms, Terms, Terms], gathered: Sequence[Gathered] = ()) -> list[int]:
    """Where an array's element lies, but for its strides; nothing where they say it all."""
    if not any(others) and not gathered:
        return []
    terms = [word for one in others for term in one for word in (term.stride, term.divisor, term.modulus)]
    indices = [word for index in gathered for word in (index.stride, index.bound)]
    return [*map(len, others), len(gathered), *terms, *indices]


def _packed(fields: Iterable[int]) -> int:
    return sum(field << (16 * i) for i, field in enumerate(fields))


def _steady(steps: Sequence[_Step], program: Program) -> list[_Step]:
    """The steps besides literals whose values are the same in every row."""
    same = {step.result for step in steps if step.operation == "literal"}
    found: list[_Step] = []
    for step in steps:
        match step.operation:
            case "literal" | "accumulator":
                continue
            case "operand" | "gather":
                steady = not program.affine_loads[step.immediate].varies[1] and same.issuperset(step.arguments)
            case "index":
                steady = step.immediate != 1
            case _:
                steady = same.issuperset(step.arguments)
        if steady:
            same.add(step.result)
            found.append(step)
    return found


def _registers(steps: Sequence[_Step], early: Collection[int], outputs: Collection[int]) -> tuple[list[int], int]:
    """A register for each value, and how many there are. A result never shares a register with its arguments.

    Values in `early` are computed before all others, once for many blocks; `outputs` are stored after the last step.
    """
    last = {argument: step.result for step in steps for argument in step.arguments}
    kept = {*early, *outputs}
    registers: list[int] = []
    free: list[int] = []
    count = 0
    for step in steps:
        if free and step.result not in early:
            registers.append(free.pop())
        else:
            registers.append(count)
            count += 1
        ended = {value for value in step.arguments if value not in kept and last[value] == step.result}
        free += [registers[value] for value in sorted(ended)]
    return registers, count


class _Steps:
    """The interpreter's instructions for a program's."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.found: list[_Step] = []
        self.operands = 0

    def steps(self) -> tuple[list[_Step], list[int]]:
        """The steps, and the value that each instruction of the program becomes."""
        values: list[int] = []
        for instruction in self.program.instructions:
            values.append(self._lower(instruction, [values[argument] for argument in instruction.arguments]))
        return self.found, values

    def _emit(self, operation: str, type_: str, dtype: str, *arguments: int, immediate: int = 0) -> int:
        self.found.append(_Step(operation, len(self.found), type_, dtype, arguments, immediate))
        return len(self.found) - 1

    def _literal(self, value: int | float, type_: str) -> int:
        return self._emit("literal", type_, type_, immediate=literal_bits(value, type_))

    def _lower(self, instruction: Instruction, arguments: list[int]) -> int:
        dtype, operation = instruction.dtype, instruction.operation
        register = register_type(dtype)
        match operation:
            case "accumulator":
                assert isinstance(instruction.immediate, int)
                return self._emit("accumulator", register, dtype, immediate=instruction.immediate)
            case "operand":
                self.operands += 1
                if arguments:
                    indices = [self._wide_index(i, v) for i, v in zip(arguments, instruction.arguments, strict=True)]
                    return self._emit("gather", register, dtype, *indices, immediate=self.operands - 1)
                return self._emit("operand", register, dtype, immediate=self.operands - 1)
            case "literal":
                return self._literal(instruction.literal.item(), register)
            case "index":
                assert isinstance(instruction.immediate, Index)
                return self._index(instruction.immediate, dtype)
            case "convert":
                source = self.program.instructions[instruction.arguments[0]].dtype
                return self._convert(arguments[0], source, dtype)
            case "not" if dtype == "bool":
                return self._emit("logical_not", register, dtype, *arguments)
        # Of the arguments the last has the type that is computed in: the first of a `select` is its condition.
        compute = register_type(self.program.instructions[instruction.arguments[-1]].dtype)
        if dtype in _RANGES and operation in _OTHER_SIGN:
            # These see the bits beyond a narrow integer: zeros, or for an arithmetic shift copies of the highest.
            bits = dtype.removeprefix("u").removeprefix("int")
            seen = f"{_OTHER_SIGN[operation]}{bits}"
            arguments[0] = self._emit("narrow", compute, seen, arguments[0])
            value = self._emit(operation, compute, dtype, *arguments)
            if operation == "clz":
                value = self._emit("sub", compute, dtype, value, self._literal(32 - int(bits), compute))
            return self._narrow(value, dtype)
        value = self._emit(operation, compute, dtype, *arguments)
        return value if TABLE[operation].exact and kind(dtype) == "f" else self._narrow(value, dtype)

    def _wide_index(self, value: int, position: int) -> int:
        """An index as an int64, which holds all but the largest uint64s: those are out of any bounds as it is."""
        held = register_type(self.program.instructions[position].dtype)
        if held == "uint64":
            value = self._emit("min", held, held, value, self._literal(2**63 - 1, held))
        return value if held == "int64" else self._emit("convert", held, "int64", value)

    def _narrow(self, value: int, dtype: str) -> int:
        """Rounds or wraps what a register holds to `dtype`, where the register is wider."""
        register = register_type(dtype)
        return value if dtype in (register, "bool") else self._emit("narrow", register, dtype, value)

    def _convert(self, value: int, source: str, dtype: str) -> int:
        held, register = register_type(source), register_type(dtype)
        if dtype == "bool":
            return self._emit("ne", held, "bool", value, self._literal(0, held))
        if kind(source) == "f" and dtype in _RANGES:
            # Floats saturate where integers wrap.
            low, high = _RANGES[dtype]
            value = self._emit("max", held, held, value, self._literal(low, held))
            value = self._emit("min", held, held, value, self._literal(high, held))
            return self._emit("convert", held, register, value)
        if held == "float64" and kind(dtype) == "f" and dtype != register:
            # Once rounded to the narrow dtype, the value is exact in the narrower register.
            return self._emit("convert", held, register, self._emit("narrow", held, dtype, value))
        if held != register:
            value = self._emit("convert", held, register, value)
        return self._narrow(value, dtype)

    def _index(self, index: Index, dtype: str) -> int:
        if index.divisor == 1 and not index.modulus:
            register = register_type(dtype)
            return self._narrow(self._emit("index", register, register, immediate=index.dimension), dtype)
        value = self._emit("index", "int64", "int64", immediate=index.dimension)
        if index.divisor != 1:
            value = self._emit("div", "int64", "int64", value, self._literal(index.divisor, "int64"))
        if index.modulus:
            value = self._emit("rem", "int64", "int64", value, self._literal(index.modulus, "int64"))
        return self._convert(value, "int64", dtype)
