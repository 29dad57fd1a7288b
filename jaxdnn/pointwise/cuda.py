"""A program as a CUDA functor: `functor`. What it calls is in cpp/kernels/core/math.cuh."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from jaxdnn.pointwise.operations import DTYPES, NARROW_FLOATS, TABLE, kind
from jaxdnn.pointwise.program import AffineLoad, Index, Instruction, Program

# Names that an argument of the user's function can't keep: C++'s own, and those of the emitted source.
_KEYWORDS = """
alignas alignof and and_eq asm auto bitand bitor bool break case catch char class compl const constexpr const_cast
continue decltype default delete do double dynamic_cast else enum explicit export extern false float for friend goto
if inline int long mutable namespace new noexcept not not_eq nullptr operator or or_eq private protected public
register reinterpret_cast return short signed sizeof static static_assert static_cast struct switch template this
thread_local throw true try typedef typeid typename union unsigned using virtual void volatile wchar_t while xor
xor_eq
"""
_RESERVED = frozenset(
    (*_KEYWORDS.split(), *DTYPES, "apply", "batch", "column", "compute", "math", "round_to", "row", "widen", "Table")
)

_COORDINATES = ("batch", "row", "column")

_TEMPLATE = """\
{title}struct {name} {{
    static __forceinline__ void compute({parameters}) {{
{statements}
    }}

    template <class Sums, class Operands, class Place, class Results>
    static __forceinline__ void apply(const Sums& sum, const Operands& operand, const Place& place, Results& result) {{
        compute({arguments});
    }}
}};
"""


@dataclass(frozen=True)
class Field:
    """An operand as the functor takes it.

    Attributes:
      name: of the parameter.
      dtype: of the array in memory.
      register: the C++ type that the kernel widens its elements to.
      load: which operand, and how it runs along batch, row and column.
    """

    name: str
    dtype: str
    register: str
    load: AffineLoad

    @property
    def table(self) -> str:
        """Its C++ type, if it is looked up by integers that the functor computes; else empty."""
        indices = len(self.load.gathered)
        return f"Table<{self.dtype}, {indices}>" if indices else ""


@dataclass(frozen=True)
class Functor:
    """A struct of CUDA C++ without data:

      static void compute(accumulators..., operands..., the coordinates that are used..., results&...)
      static void apply(const Sums& sum, const Operands& operand, const Place& place, Results& result)

    All are scalars in `compute`; `apply`, for generic code, takes them from `sum[i]`, `operand[i]` and `place.batch`,
    `place.row`, `place.column`, and leaves them in `result[i]`. An operand that is looked up by integers is a `Table`
    (core/table.cuh) instead, `place.table<T, indices>(i)`.

    Attributes:
      name: the struct's.
      source: its definition, for namespace jaxdnn of a unit that includes core/math.cuh.
      operands: one for each of the program's loads, in order.
      results: the C++ types of the results, before they are rounded to the outputs' dtypes and stored.
    """

    name: str
    source: str
    operands: tuple[Field, ...]
    results: tuple[str, ...]


def register_type(dtype: str) -> str:
    """The C++ type that a kernel computes values of `dtype` in."""
    return {"float32": "float", "float64": "double", "bool": "bool"}.get(
        dtype, "float" if kind(dtype) == "f" else dtype
    )


def functor(program: Program, name: str = "Epilogue", *, approximate: bool = False) -> Functor:
    """Emits a collapsed program as the struct `name`.

    What is rounded to 16 bits when it is stored may be off by 2^-17, relative to the largest value on the way.
    `approximate` allows that of everything.
    """
    if program.rank != 3:
        raise ValueError(f"functor: the program has {program.rank} dimensions; collapse it to batch, row and column")
    return _Emitter(program, name, approximate).functor()


@dataclass(frozen=True)
class _ShiftedTanh:
    """1 + tanh(argument), 1 - tanh(argument), or times * (1 + tanh(argument)); of positions of instructions."""

    argument: int
    negated: bool = False
    times: int | None = None

    @property
    def arguments(self) -> tuple[int, ...]:
        return (self.argument,) if self.times is None else (self.argument, self.times)


class _Emitter:
    def __init__(self, program: Program, name: str, approximate: bool) -> None:
        self.program, self.name = program, name
        self.taken: set[str] = {name}
        self.accumulators = [self._unique(argument.name) for argument in program.accumulators]
        self.operands = [
            Field(self._unique(argument.name), argument.dtype, register_type(argument.dtype), load)
            for load in program.affine_loads
            for argument in [program.operands[load.operand]]
        ]
        several = len(program.outputs) > 1
        self.outputs = [self._unique(f"out{i}" if several else "out") for i in range(len(program.outputs))]
        self.results = tuple(register_type(program.instructions[output.value].dtype) for output in program.outputs)
        used = {i.immediate.dimension for i in program.instructions if isinstance(i.immediate, Index)}
        # What is off by 2^-17 rounds to the same 16 bits, or next to a tie to a neighbour.
        self.approximate = approximate or all(np.dtype(output.dtype).itemsize <= 2 for output in program.outputs)
        self.coordinates = [_COORDINATES[dimension] for dimension in sorted(used)]

    def functor(self) -> Functor:
        program = self.program
        parameters = [
            f"{register_type(argument.dtype)} {name}"
            for name, argument in zip(self.accumulators, program.accumulators, strict=True)
        ]
        parameters += [
            f"const {operand.table}& {operand.name}" if operand.table else f"{operand.register} {operand.name}"
            for operand in self.operands
        ]
        parameters += [f"int64 {coordinate}" for coordinate in self.coordinates]
        parameters += [f"{register}& {name}" for register, name in zip(self.results, self.outputs, strict=True)]
        arguments = [f"sum[{i}]" for i in range(len(self.accumulators))]
        arguments += [
            f"place.template {operand.table.replace('Table', 'table')}({i})" if operand.table else f"operand[{i}]"
            for i, operand in enumerate(self.operands)
        ]
        arguments += [f"place.{coordinate}" for coordinate in self.coordinates]
        arguments += [f"result[{i}]" for i in range(len(self.outputs))]
        source = _TEMPLATE.format(
            title=f"// {program.title}\n" if program.title else "",
            name=self.name,
            parameters=", ".join(parameters),
            statements="\n".join(f"        {statement}" for statement in self._statements()),
            arguments=", ".join(arguments),
        )
        return Functor(self.name, source, tuple(self.operands), self.results)

    def _unique(self, name: str) -> str:
        name = re.sub(r"\W", "_", name, flags=re.ASCII)
        while name in self.taken or name in _RESERVED or re.fullmatch(r"v\d+", name):
            name += "_"
        self.taken.add(name)
        return name

    def _shifted_tanh(self) -> dict[int, "_ShiftedTanh"]:
        """Sums of 1 and a tanh, as in gelu and its derivative, which cancel where the tanh is near the other one."""
        instructions = self.program.instructions

        def argument_of_tanh(position: int) -> int | None:
            one = instructions[position]
            return one.arguments[0] if one.operation == "tanh" else None

        found = {}
        for i, instruction in enumerate(instructions):
            if instruction.operation not in ("add", "sub") or instruction.dtype not in ("float32", "float64"):
                continue
            for one, other in (instruction.arguments, instruction.arguments[::-1]):
                tanh = argument_of_tanh(other)
                is_one = instructions[one].operation == "literal" and instructions[one].literal == 1
                subtracted = instruction.operation == "sub"
                if tanh is not None and is_one and not (subtracted and one == instruction.arguments[1]):
                    found[i] = _ShiftedTanh(tanh, negated=subtracted)
                # x + x * tanh
                product = instructions[other]
                if instruction.operation == "add" and product.operation == "mul" and one in product.arguments:
                    factor = product.arguments[1] if product.arguments[0] == one else product.arguments[0]
                    tanh = argument_of_tanh(factor)
                    if tanh is not None:
                        found[i] = _ShiftedTanh(tanh, times=one)
        return found

    def _needed(self, shifted: dict[int, "_ShiftedTanh"]) -> set[int]:
        """The instructions that the outputs depend on."""
        needed: set[int] = set()
        waiting = [output.value for output in self.program.outputs]
        while waiting:
            position = waiting.pop()
            if position not in needed:
                needed.add(position)
                own = self.program.instructions[position].arguments
                waiting += shifted[position].arguments if position in shifted else own
        return needed

    def _statements(self) -> Iterable[str]:
        names: list[str] = []
        shifted = self._shifted_tanh()
        needed = self._needed(shifted)
        operands = iter(self.operands)
        computed = 0
        for position, instruction in enumerate(self.program.instructions):
            arguments = [names[argument] for argument in instruction.arguments]
            dtypes = [self.program.instructions[argument].dtype for argument in instruction.arguments]
            match instruction.operation:
                case "accumulator":
                    assert isinstance(instruction.immediate, int)
                    expression = self.accumulators[instruction.immediate]
                case "operand":
                    operand = next(operands)
                    expression = operand.name
                    if operand.table:
                        expression = f"v{computed}"
                        computed += 1
                        value = f"widen({operand.name}.at({', '.join(arguments)}))"
                        yield f"const {operand.register} {expression} = {value};"
                case "literal":
                    literal = _literal(instruction)
                    # So that a minus before it stays one.
                    expression = f"({literal})" if literal.startswith("-") else literal
                case "convert" if _widens(dtypes[0], instruction.dtype):
                    expression = arguments[0]
                case _ if position not in needed:
                    expression = ""
                case _:
                    expression = f"v{computed}"
                    computed += 1
                    approximate = "approximate_" if self.approximate and instruction.dtype == "float32" else ""
                    if position in shifted:
                        one = shifted[position]
                        value = f"math::{approximate}one_plus_tanh({'-' * one.negated}{names[one.argument]})"
                        value = value if one.times is None else f"{names[one.times]} * {value}"
                    elif instruction.operation in ("logistic", "tanh") and approximate:
                        value = f"math::approximate_{instruction.operation}({arguments[0]})"
                    else:
                        value = _expression(instruction, arguments, dtypes)
                    yield f"const {register_type(instruction.dtype)} {expression} = {value};"
            names.append(expression)
        for name, output in zip(self.outputs, self.program.outputs, strict=True):
            yield f"{name} = {names[output.value]};"


def _widens(source: str, to: str) -> bool:
    """Whether a value of dtype `source` already lies in its register as one of dtype `to`."""
    return to == "float32" and source in NARROW_FLOATS


def _expression(instruction: Instruction, arguments: list[str], dtypes: list[str]) -> str:
    dtype = instruction.dtype
    if isinstance(instruction.immediate, Index):
        index = instruction.immediate
        position = _COORDINATES[index.dimension]
        position += f" / {index.divisor}" if index.divisor != 1 else ""
        position += f" % {index.modulus}" if index.modulus else ""
        return _rounded(dtype, f"static_cast<{register_type(dtype)}>({position})")
    if instruction.operation == "convert":
        return _conversion(dtypes[0], dtype, arguments[0])
    row = TABLE[instruction.operation]
    expression = (row.floating if kind(dtypes[-1]) == "f" else row.integer).format(*arguments)
    return expression if row.exact else _rounded(dtype, expression)


def _rounded(dtype: str, expression: str) -> str:
    return f"round_to<{dtype}>({expression})" if dtype in NARROW_FLOATS else expression


def _conversion(source: str, to: str, argument: str) -> str:
    if to == "bool":
        return f"{argument} != 0"
    if kind(source) == "f" and kind(to) == "f":
        return f"static_cast<{register_type(to)}>({argument})" if to not in NARROW_FLOATS else _rounded(to, argument)
    if kind(source) == "f":
        return f"math::convert<{to}>({argument})"
    return _rounded(to, f"static_cast<{register_type(to)}>({argument})")


def _literal(instruction: Instruction) -> str:
    value, dtype = instruction.literal, instruction.dtype
    match kind(dtype):
        case "b":
            return "true" if value else "false"
        case "f":
            register = register_type(dtype)
            number = np.float64(value) if register == "double" else np.float32(value)
            if np.isnan(number):
                return f"math::not_a_number<{register}>()"
            if np.isinf(number):
                return f"{'-' if number < 0 else ''}math::infinity<{register}>()"
            return f"{number!s}{'f' if register == 'float' else ''}"
        case _ if dtype == "int32" and int(value) > -(2**31):
            return str(value)
        case _ if value == -(2**63):
            return f"{dtype}({-(2**63) + 1} - 1)"
        case _:
            return f"{dtype}({value}{'ull' if dtype == 'uint64' else ''})"
