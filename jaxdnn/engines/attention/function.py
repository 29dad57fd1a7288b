"""A function of scores, as attention's kernels for the tensor cores apply it (cpp/kernels/attention/strip.cuh).

Their operands have 16 bits, and so have weights: a score that is off by a part in 2^11, as the hardware's tanh is, is
off by less than what rounding does to a query of its size, and a soft cap takes two special functions and not three.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from jaxdnn.engines.attention.problem import Attention, Band, Heads, Mask
from jaxdnn.engines.product.affine import term_parameters
from jaxdnn.engines.product.element_epilogue import ctype, operand_type
from jaxdnn.engines.product.length import is_long
from jaxdnn.engines.product.problem import EpilogueOperand, identity
from jaxdnn.engines.unit import Parameter, struct_text
from jaxdnn.plan import Scalar
from jaxdnn.pointwise import AffineLoad, Index, Output, Program, functor
from jaxdnn.pointwise.builder import Builder
from jaxdnn.pointwise.cuda import register_type
from jaxdnn.pointwise.program import Argument, Instruction

LOADED = ("bool", "int8", "int16", "int32", "uint8", "uint16", "uint32", "bfloat16", "float16", "float32")
_DEFAULTS = ("jaxdnn::StripFunctionDefaults", {"Results": 1, "LongEpilogue": False})


@dataclass(frozen=True)
class ScoreFunction:
    """A program over scores, of which there are so many columns, and what it loads.

    Attributes:
      name: of the call's field that has the operands' addresses, without `_operands`.
      prefix: of the names of what it is compiled as.
      tile: the number of the operand that lies in tiles of shared memory, if one does.
    """

    name: str
    program: Program
    operands: tuple[EpilogueOperand, ...]
    columns: int
    prefix: str = ""
    tile: int | None = None

    @property
    def config(self) -> str:
        """The name of what it is compiled as."""
        return f"{self._struct}Function"

    @property
    def _struct(self) -> str:
        return f"{self.prefix}{self.name.title()}"

    def transpose(self, rows: int) -> "ScoreFunction":
        """The function of transposed scores, of which there were so many rows."""
        swapped = tuple(
            replace(one, immediate=_transposed(one.immediate)) if isinstance(one.immediate, Index | AffineLoad) else one
            for one in self.program.instructions
        )
        operands = tuple(operand.transposed for operand in self.operands)
        program = replace(self.program, instructions=swapped)
        return replace(self, program=program, operands=operands, columns=rows, prefix="Transposed")

    def text(self) -> str:
        """Its definition."""
        emitted = functor(self.program, self._struct, approximate=True, hardware_tanh=True)
        operands = ", ".join(
            operand_type(self._typed(i), ctype(operand.dtype), self._lie(i), "jaxdnn::")
            for i, operand in enumerate(self.operands)
        )
        types = {"Epilogue": f"jaxdnn::{emitted.name}", "Operands": f"jaxdnn::TypeList<{operands}>"}
        constants = {"Results": len(self.program.outputs), "LongEpilogue": self._is_long}
        definition = struct_text(self.config, types, constants, _DEFAULTS)
        return f"namespace jaxdnn {{\n{emitted.source}}}  // namespace jaxdnn\n{definition}"

    @property
    def _is_long(self) -> bool:
        """Whether its code stands once for 8 elements: that of a mask, which few blocks of keys need, if it looks up.
        With lookups for each of 128 x 128 elements, at head size 128, registers of 428 bytes spill.
        """
        return is_long(self.program) or (self.name == "mask" and any(one.gathered for one in self.operands))

    def parameters(self) -> list[Parameter]:
        """Where its operands lie."""
        return [
            parameter
            for i, operand in enumerate(self.operands)
            if i != self.tile
            for parameter in place_parameters(f"{self.name}{i}", operand, f"{self.name}_operands[{i}]", "const ")
        ]

    def registers(self, columns: int) -> int:
        """Of a thread, for what it loads of a strip of so many columns."""
        fetched = (i for i, operand in enumerate(self.operands) if i != self.tile and not operand.gathered)
        return sum(self._registers(i, columns) for i in fetched)

    def _registers(self, number: int, columns: int) -> int:
        operand = self.operands[number]
        rows = 2 if operand.broadcast in ("column", "full") else 1
        if operand.broadcast not in ("row", "full"):
            return rows
        # A pair is a word, or two; what is single has one for itself.
        words = 2 if np.dtype(operand.dtype).itemsize == 4 or self._lie(number) != "pairs" else 1
        return rows * words * columns // 8

    def _typed(self, number: int) -> EpilogueOperand:
        """An operand as its type has it: the terms of a tile's are the tensor map's."""
        operand = self.operands[number]
        return replace(operand, terms=((), (), ())) if number == self.tile else operand

    def _lie(self, number: int) -> str:
        """How neighbouring columns lie."""
        if number == self.tile:
            return "tile"
        operand = self.operands[number]
        if operand.gathered:
            return "table"
        if operand.column_stride > 1 or operand.terms[2]:
            return "strided"
        return "pairs" if operand.pairs and self.columns % 2 == 0 else "single"


def _transposed(place: Index | AffineLoad) -> Index | AffineLoad:
    if isinstance(place, AffineLoad):
        batch, row, column = place.terms
        return replace(place, terms=(batch, column, row))
    return replace(place, dimension=(0, 2, 1)[place.dimension])


def score_function(problem: Attention) -> ScoreFunction | None:
    """What becomes of scaled products; None where scores are products but for a factor, which keeps their order."""
    if problem.score is None and problem.scale > 0:
        return None
    program = problem.score or identity(1, "float32", "float32")
    return ScoreFunction("score", program, problem.operands, problem.key_length)


def slope_function(problem: Attention, output: int = 0) -> ScoreFunction | None:
    """The score, and where that isn't one, its derivative by the scaled product, or by what an array's gradient adds,
    as `Backward.gradient` numbers them; None where scores are products.

    `Backward.gradient` is linear in the cotangents of scores, which are one here.
    """
    if problem.score is None or problem.backward is None or problem.backward.gradient is None:
        return None
    builder, places = Builder(), dict[AffineLoad, EpilogueOperand]()
    buffers = list(dict.fromkeys(one.buffer for one in (*problem.operands, *problem.backward.operands)))
    dtypes = {one.buffer: one.dtype for one in (*problem.operands, *problem.backward.operands)}

    def copied(program: Program, operands: tuple[EpilogueOperand, ...], output: int) -> int:
        """The output of this number."""
        loads, values = iter(operands), list[int]()
        for one in program.instructions:
            arguments = [values[argument] for argument in one.arguments]
            match one.operation, one.immediate:
                case "accumulator", 1:
                    values.append(builder.literal(1, one.dtype))
                case "operand", AffineLoad() as load:
                    place = next(loads)
                    load = replace(load, operand=buffers.index(place.buffer))
                    places[load] = place
                    values.append(builder.add(replace(one, arguments=tuple(arguments), immediate=load)))
                case "convert", _:
                    values.append(builder.convert(arguments[0], one.dtype))
                case name, None:
                    values.append(builder.operation(name, *arguments))
                case _:
                    values.append(builder.add(one))
        return values[program.outputs[output].value]

    gradient = problem.backward.gradient
    found = [copied(problem.score, problem.operands, 0), copied(gradient, problem.backward.operands, output)]
    if found[1] == builder.literal(1, problem.accumulator):
        found.pop()
    instructions, outputs = builder.finish(tuple(Output(one, problem.accumulator, (0, 1, 2)) for one in found))
    program = replace(
        problem.score,
        operands=tuple(Argument(f"operand{i}", dtypes[buffer]) for i, buffer in enumerate(buffers)),
        instructions=instructions,
        outputs=outputs,
    )
    operands = tuple(places[load] for load in program.affine_loads)
    return ScoreFunction("score", program, operands, problem.key_length)


def counted_band(mask: Mask) -> Band:
    """The band, if it counts coordinates; what counts positions that are arrays is part of `mask_function`."""
    return mask.band if mask.query_positions is None and mask.key_positions is None else Band()


def mask_function(problem: Attention) -> ScoreFunction | None:
    """Which keys are visible, but for what `counted_band` and lengths say; None if that is all there is."""
    mask, builder = problem.mask, Builder()
    arguments = list(mask.program.operands if mask.program else ())
    operands, allowed = list(mask.operands), list[int]()

    def load(place: EpilogueOperand) -> int:
        arguments.append(Argument(f"operand{len(operands)}", place.dtype))
        operands.append(place)
        where = AffineLoad(len(arguments) - 1, ((), (), ()))  # as the place says, which says all
        return builder.add(Instruction("operand", place.dtype, (), where))

    if mask.program is not None:
        values = list[int]()
        for one in mask.program.instructions:
            values.append(builder.add(replace(one, arguments=tuple(values[argument] for argument in one.arguments))))
        allowed.append(values[mask.program.outputs[0].value])
    if mask.query_segments is not None and mask.key_segments is not None:
        of_query, of_key = load(mask.query_segments), load(mask.key_segments)
        allowed.append(builder.operation("eq", of_query, of_key))
        allowed.append(builder.operation("ge", of_query, builder.literal(0, builder.dtype(of_query))))
    if counted_band(mask) != mask.band:
        places = (mask.query_positions, mask.key_positions)
        of_query, of_key = (
            builder.add(Instruction("index", "int32", (), Index(1 + i))) if place is None else load(place)
            for i, place in enumerate(places)
        )
        if mask.query_offset is not None:
            of_query = builder.operation("add", of_query, load(mask.query_offset))
        distance = builder.operation("sub", of_key, of_query)
        for comparison, bound in (("ge", mask.band.left and -mask.band.left), ("le", mask.band.right)):
            if bound is not None:
                limit = max(-(2**31), min(bound, 2**31 - 1))
                allowed.append(builder.operation(comparison, distance, builder.literal(limit, "int32")))
    if not allowed:
        return None
    visible = functools.reduce(lambda a, b: builder.operation("and", a, b), allowed)
    instructions, outputs = builder.finish((Output(visible, "bool", (0, 1, 2)),))
    program = Program((), tuple(arguments), instructions, outputs, 3, None, "which keys are visible")
    return ScoreFunction("mask", program, tuple(operands), problem.key_length)


def function_reason(function: ScoreFunction, dtype: str) -> str | None:
    """Why a program can't be applied to fragments, or None; `dtype` is what it has to return."""
    program = function.program
    if found := {output.dtype for output in program.outputs} - {dtype}:
        return f"a function of scores returns {found.pop()}, and its kernel wants {dtype}"
    if unknown := {operand.dtype for operand in function.operands} - set(LOADED):
        return f"a function of scores loads {' and '.join(sorted(unknown))}; it takes {', '.join(LOADED)}"
    for output in program.outputs:
        computed = register_type(program.instructions[output.value].dtype)
        if computed in ("double", "int64", "uint64"):
            return f"a function of scores is computed as a {computed}, and its registers have 32 bits"
    return None


def place_types(places: Mapping[str, EpilogueOperand]) -> dict[str, str]:
    """The types of a `Config` that say which arrays there are, by the fields of the call."""
    return {
        name.title().replace("_", ""): operand_type(place, ctype(place.dtype), "single", "jaxdnn::")
        for name, place in places.items()
    }


def place_parameters(name: str, place: EpilogueOperand, field: str = "", const: str = "") -> list[Parameter]:
    """An array of numbers, with those strides that are used."""
    field = field or name
    found = [Parameter(f"{const}{ctype(place.dtype)}*", name, f"{field}.data", place.buffer)]
    for axis in ("row_stride", "column_stride", "batch_stride"):
        if stride := getattr(place, axis):
            # Neighbouring columns are so in the code; any other stride is a number.
            argument = stride if (axis, stride) == ("column_stride", 1) else Scalar("int64", stride)
            found.append(Parameter("long long", f"{name}_{axis}", f"{field}.{axis}", argument))
    return found + term_parameters(name, field, place)


def heads_parameters(name: str, heads: Heads | None) -> list[Parameter]:
    """Where vectors lie, if they are there."""
    if heads is None:
        return []
    strides = {"row": heads.length_stride, "head": heads.head_stride, "batch": heads.batch_stride or 0}
    return [
        Parameter(f"{ctype(heads.dtype)}*", name, f"{name}.data", heads.buffer),
        *(
            Parameter("long long", f"{name}_{axis}", f"{name}.{axis}", Scalar("int64", stride))
            for axis, stride in strides.items()
        ),
    ]
