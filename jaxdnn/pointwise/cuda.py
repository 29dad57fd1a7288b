"""A program as a CUDA functor: `functor`. What it calls is in cpp/kernels/core/math.cuh."""

import re
from collections import Counter
from dataclasses import dataclass

import numpy as np

from jaxdnn.pointwise.cancellation import without_cancellation
from jaxdnn.pointwise.expression import PRIMARY, UNARY, Expression, composed
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

# Functions with a variant that is 2^-17 off.
_APPROXIMATED = ("logistic", "tanh", "one_plus_tanh")

# Characters of an expression, so that it fits in 120 columns after "const double v999 = ".
_LONGEST = 90

_COORDINATES = ("batch", "row", "column")

_TEMPLATE = """\
{title}struct {name} {{
    static __forceinline__ void compute({parameters}) {{
{statements}
    }}

    template <class Accumulators, class Operands, class Context, class Results>
    static __forceinline__ void apply(const Accumulators& accumulator, const Operands& operand, const Context& context,
                                      Results& result) {{
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
      static void apply(const Accumulators& accumulator, const Operands& operand, const Context& context,
                        Results& result)

    All are scalars in `compute`; `apply`, for generic code, takes them from `accumulator[i]`, `operand[i]` and
    `context.batch`, `context.row`, `context.column`, and leaves them in `result[i]`. An operand that is looked up by
    integers is a `Table` (core/table.cuh) instead, `context.table<T, indices>(i)`.

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


def functor(
    program: Program, name: str = "Epilogue", *, approximate: bool = False, hardware_tanh: bool = False
) -> Functor:
    """Emits a collapsed program as the struct `name`.

    What is rounded to 16 bits when it is stored may be off by 2^-17, relative to the largest value on the way.
    `approximate` allows that of everything; `hardware_tanh`, of tanh, the special function units', 2^-11 off.
    """
    if program.rank != 3:
        raise ValueError(f"functor: the program has {program.rank} dimensions; collapse it to batch, row and column")
    return _Emitter(program, name, approximate, hardware_tanh).functor()


class _Emitter:
    def __init__(self, program: Program, name: str, approximate: bool, hardware_tanh: bool) -> None:
        self.program = program = without_cancellation(program)
        self.name = name
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
        self.hardware_tanh = hardware_tanh
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
        arguments = [f"accumulator[{i}]" for i in range(len(self.accumulators))]
        arguments += [
            f"context.template {operand.table.replace('Table', 'table')}({i})" if operand.table else f"operand[{i}]"
            for i, operand in enumerate(self.operands)
        ]
        arguments += [f"context.{coordinate}" for coordinate in self.coordinates]
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

    def _statements(self) -> list[str]:
        """What is used once stands where it is used, if the line is no longer than people read; the rest has a name."""
        instructions = self.program.instructions
        uses = Counter(argument for instruction in instructions for argument in instruction.arguments)
        uses.update(output.value for output in self.program.outputs)
        statements: list[str] = []
        values: list[Expression] = []
        operands = iter(self.operands)

        def name(position: int) -> None:
            value = values[position]
            if not value.leaf:
                values[position] = Expression(f"v{len(statements)}", leaf=True)
                register = register_type(instructions[position].dtype)
                statements.append(f"const {register} {values[position].text} = {value.text};")

        for position, instruction in enumerate(instructions):
            operand = next(operands) if instruction.operation == "operand" else None
            if instruction.operation == "select":
                for side in instruction.arguments[1:]:
                    name(side)  # or the compiler may branch around it
            while True:
                value = self._value(instruction, [values[argument] for argument in instruction.arguments], operand)
                inner = [argument for argument in instruction.arguments if not values[argument].leaf]
                if len(value.text) <= _LONGEST or not inner:
                    break
                name(max(inner, key=lambda argument: len(values[argument].text)))
            values.append(value)
            if uses[position] > 1 or _promoted(instruction):
                name(position)
        for result, output in zip(self.outputs, self.program.outputs, strict=True):
            statements.append(f"{result} = {values[output.value].text};")
        return statements

    def _value(self, instruction: Instruction, arguments: list[Expression], operand: Field | None) -> Expression:
        dtype = instruction.dtype
        dtypes = [self.program.instructions[argument].dtype for argument in instruction.arguments]
        match instruction.operation:
            case "accumulator":
                assert isinstance(instruction.immediate, int)
                return Expression(self.accumulators[instruction.immediate], leaf=True)
            case "operand":
                assert operand
                if operand.table:
                    return Expression(f"widen({operand.name}.at({', '.join(one.text for one in arguments)}))")
                return Expression(operand.name, leaf=True)
            case "literal":
                literal = _literal(instruction)
                return Expression(literal, UNARY if literal.startswith("-") else PRIMARY, leaf=True)
            case "index":
                assert isinstance(instruction.immediate, Index)
                return _index(instruction.immediate, dtype)
            case "convert":
                return _conversion(dtypes[0], dtype, arguments[0])
            case "tanh" if self.hardware_tanh and dtype == "float32":
                return composed("ptx::tanh_approx({0})", arguments)
            case operation if operation in _APPROXIMATED and self.approximate and dtype == "float32":
                return composed(f"math::approximate_{operation}({{0}})", arguments)
            case "one_plus_tanh":
                return composed("math::one_plus_tanh({0})", arguments)
            case operation:
                row = TABLE[operation]
                value = composed(row.floating if kind(dtypes[-1]) == "f" else row.integer, arguments)
                return value if row.exact else _rounded(dtype, value)


def _promoted(instruction: Instruction) -> bool:
    """Whether C++ makes an int of what is narrower."""
    return instruction.operation in ("and", "or", "xor") and np.dtype(instruction.dtype).itemsize < 4


def _index(index: Index, dtype: str) -> Expression:
    position = _COORDINATES[index.dimension]
    position += f" / {index.divisor}" if index.divisor != 1 else ""
    position += f" % {index.modulus}" if index.modulus else ""
    return _rounded(dtype, Expression(f"static_cast<{register_type(dtype)}>({position})"))


def _rounded(dtype: str, value: Expression) -> Expression:
    return composed(f"round_to<{dtype}>({{0}})", [value]) if dtype in NARROW_FLOATS else value


def _conversion(source: str, to: str, value: Expression) -> Expression:
    if to == "bool":
        return composed("{0} != 0", [value])
    if kind(source) == kind(to) == "f" and (to in NARROW_FLOATS or register_type(source) == register_type(to)):
        return _rounded(to, value)
    if kind(source) == "f" and kind(to) != "f":
        return composed(f"math::convert<{to}>({{0}})", [value])
    return _rounded(to, composed(f"static_cast<{register_type(to)}>({{0}})", [value]))


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
