"""The unit and the launches of attention on any GPU."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from types import MappingProxyType
from typing import Any

from jaxdnn.engines.attention.problem import Attention, LoadGradient
from jaxdnn.engines.attention.simt.knobs import (
    AttentionSimtKnobs,
    Kernel,
    backward,
    copy,
    d_loaded,
    forward,
    itemsize,
    vectors,
)
from jaxdnn.engines.attention.summed import loaded_sum, summed
from jaxdnn.engines.product.element_epilogue import ctype, operand_parameters, operand_type
from jaxdnn.engines.product.problem import EpilogueOperand
from jaxdnn.engines.unit import (
    Constant,
    Parameter,
    Stage,
    arguments,
    entry_text,
    joined,
    numbers,
    shared_memory_text,
    struct_text,
)
from jaxdnn.plan import Launch, Scalar, Scratch
from jaxdnn.pointwise import Functor, Program, functor
from jaxdnn.pointwise.cuda import register_type

MOST_BOUND = 2**30  # of a band: more than any distance
DELTA_WARPS, SINK_THREADS = 8, 512  # kDeltaWarps and kSinkThreads in attention/simt/backward.cuh
# Of a sum of what scores add: operations a second of a block, reckoned, and a multiprocessor's blocks at work at once.
FLOPS, BLOCKS = 0.1e12, 2
# The members of a struct in attention/simt/call.cuh, which a `Config` states only where it differs.
DEFAULTS = ("jaxdnn::AttentionSimtDefaults", {"Left": False, "Right": False})
BASE, DELTA = Scratch(0), Scratch(1)
NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Function:
    """A function of scores, named as its struct."""

    name: str
    program: Program
    operands: tuple[EpilogueOperand, ...]

    @cached_property
    def functor(self) -> Functor:
        return functor(self.program, self.name)

    def text(self) -> str:
        return f"namespace jaxdnn {{\n{self.functor.source}}}  // namespace jaxdnn\n"

    def types(self) -> dict[str, str]:
        operands = ", ".join(
            operand_type(one, ctype(one.dtype), "table" if one.gathered else "single", "jaxdnn::")
            for one in self.operands
        )
        found = {self.name: f"jaxdnn::{self.name}", f"{self.name}Operands": f"jaxdnn::TypeList<{operands}>"}
        if self.name == "Gradient":
            found["GradientRegisters"] = f"jaxdnn::TypeList<{', '.join(map(ctype, self.functor.results))}>"
        return found

    def parameters(self) -> list[Parameter]:
        name = self.name.lower()
        return [
            parameter
            for i, operand in enumerate(self.operands)
            for parameter in operand_parameters(f"{name}{i}", f"{name}_operands[{i}]", operand)
        ]


def functions(problem: Attention) -> list[Function]:
    """Those that the call has."""
    found = [("Score", problem.score, problem.operands), ("Mask", problem.mask.program, problem.mask.operands)]
    if problem.backward is not None:
        found.append(("Gradient", problem.backward.gradient, problem.backward.operands))
    return [Function(name, program, operands) for name, program, operands in found if program is not None]


def places(problem: Attention) -> dict[str, EpilogueOperand]:
    """The arrays of numbers, by the fields of the kernels' call; those that are there."""
    mask, backward = problem.mask, problem.backward
    found = {
        "log_sum_exp": problem.log_sum_exp,
        "sinks": problem.sinks,
        "seeds": None if problem.dropout is None else problem.dropout.seeds,
        "query_positions": mask.query_positions,
        "key_positions": mask.key_positions,
        "query_offset": mask.query_offset,
        "query_lengths": mask.query_lengths,
        "key_lengths": mask.key_lengths,
        "query_segments": mask.query_segments,
        "key_segments": mask.key_segments,
        "d_log_sum_exp": None if backward is None else backward.d_log_sum_exp,
        "d_sinks": None if backward is None else backward.d_sinks,
    }
    return {name: place for name, place in found.items() if place is not None}


def camel_case(name: str) -> str:
    """A field's name as that of a type or a constant."""
    return name.title().replace("_", "")


@dataclass(frozen=True)
class Tiled:
    """A kernel that is cut into tiles.

    Attributes:
      name, header: the function's, and where it is.
      struct: the C++ one's that says how much shared memory it takes.
    """

    name: str
    header: str
    struct: str
    needs: Kernel


@dataclass(frozen=True)
class Unit:
    """One call under its knobs."""

    problem: Attention
    knobs: AttentionSimtKnobs
    sm_count: int

    @property
    def rows(self) -> int:
        return self.problem.batch * self.problem.query_heads

    def stage(self) -> Stage:
        """Everything that the call does."""
        problem, gradients = self.problem, self.problem.backward
        text = "".join(function.text() for function in functions(problem))
        text += struct_text("Call", self._types(), self._constants(), DEFAULTS)
        stages = [Stage(text=f"\n{text}")]
        if gradients is None:
            tiles = ceil(problem.query_length / self.knobs.tile_m)
            kernel = Tiled("attention_simt", "simt.cuh", "Forward", forward(problem, self.knobs))
            return joined([*stages, self._tiled(kernel, self.rows * tiles, "attention_simt")])
        size = self.rows * problem.query_length * itemsize(problem)
        stages += [self._delta(), Stage(scratch=(size, size))]
        if gradients.d_query is not None:
            stages.append(self._backward("d_query", problem.query_length, self.rows, keys=False))
        if gradients.d_key is not None or gradients.d_value is not None:
            heads = problem.batch * problem.key_heads
            stages.append(self._backward("d_key_value", problem.key_length, heads, keys=True))
        if gradients.d_sinks is not None:
            stages.append(self._d_sinks(gradients.d_sinks))
        for number, gradient in enumerate(gradients.load_gradients):
            stages += self._d_loaded(gradient, number, joined(stages))
        return joined(stages)

    # ---- Kernels -----------------------------------------------------------------------------------------------------

    def _delta(self) -> Stage:
        blocks = ceil(self.rows * self.problem.query_length / DELTA_WARPS)
        return self._plain("attention_simt_delta", blocks, 32 * DELTA_WARPS)

    def _d_sinks(self, place: EpilogueOperand) -> Stage:
        found = summed(place, self.rows)
        return self._plain("attention_simt_d_sinks", found.count, SINK_THREADS, found.parameters())

    def _backward(self, name: str, length: int, heads: int, *, keys: bool) -> Stage:
        needs = backward(self.problem, self.knobs, keys=keys)
        kernel = Tiled("attention_simt_backward", "simt/backward.cuh", "Backward", needs)
        blocks = heads * ceil(length / self.knobs.tile_m)
        return self._tiled(kernel, blocks, f"attention_simt_{name}", constants={"KeysStay": keys})

    def _d_loaded(self, gradient: LoadGradient, number: int, before: Stage) -> list[Stage]:
        """The sum of what scores add, in parts where there are few blocks, and the sum of those."""
        problem, knobs = self.problem, self.knobs
        whole = loaded_sum(problem, gradient, (knobs.tile_m, knobs.tile_n), BLOCKS * self.sm_count, FLOPS)
        found, (stored, stages) = whole.stages(len(before.scratch), ctype(register_type(problem.accumulator)), number)
        kernel = Tiled("attention_simt_d_loaded", "simt/d_loaded.cuh", "DLoaded", d_loaded(problem, knobs))
        own: dict[str, str] = {"DLoaded": operand_type(gradient.place, stored, "single", "jaxdnn::")}
        entry = f"attention_simt_d_loaded_{number}"
        blocks = whole.owners * whole.parts
        return [self._tiled(kernel, blocks, entry, found, own, {"Output": gradient.output}), *stages]

    # ---- Launches ----------------------------------------------------------------------------------------------------

    def _tiled(
        self,
        kernel: Tiled,
        blocks: int,
        entry: str,
        others: Sequence[Parameter] = (),
        types: Mapping[str, str] = NOTHING,
        constants: Mapping[str, Constant] = NOTHING,
    ) -> Stage:
        """A launch that is cut into tiles."""
        knobs, needs = self.knobs, kernel.needs
        sizes: dict[str, Constant] = {
            "TileM": knobs.tile_m,
            "TileN": knobs.tile_n,
            "WarpsM": knobs.warps_m,
            "WarpsN": knobs.warps_n,
            "Tensor": knobs.tensor,
            "HeadSize": needs.head_size,
            "ValueSize": needs.value_size,
        }
        config, found = f"{camel_case(entry)}Config", [*self._parameters(), *others]
        call = f"jaxdnn::AttentionSimt<{config}>"
        text = (
            struct_text(config, types, {**sizes, **constants}, ("Call", {}))
            + shared_memory_text(f"jaxdnn::AttentionSimt{kernel.struct}<{config}>", needs.shared_memory)
            + entry_text(kernel.name, call, f"{knobs.threads}, {knobs.resident}", found, entry)
        )
        shape = {"grid": (blocks, 1, 1), "block": (knobs.threads, 1, 1), "shared_memory": needs.shared_memory}
        return Stage((f"attention/{kernel.header}",), text, (Launch(entry, arguments(found), **shape),))

    def _plain(self, kernel: str, blocks: int, threads: int, others: Sequence[Parameter] = ()) -> Stage:
        """A launch that is not."""
        found = [*self._parameters(), *others]
        text = entry_text(kernel, "jaxdnn::AttentionSimt<Call>", f"{threads}", found)
        launch = Launch(kernel, arguments(found), (blocks, 1, 1), (threads, 1, 1))
        return Stage(("attention/simt/backward.cuh",), text, (launch,))

    # ---- What all launches have --------------------------------------------------------------------------------------

    def _types(self) -> dict[str, str]:
        problem = self.problem
        found = {"Element": ctype(register_type(problem.accumulator))}
        arrays = {name: heads.place for name, heads in vectors(problem).items()} | places(problem)
        for name, place in arrays.items():
            found[camel_case(name)] = operand_type(place, ctype(place.dtype), "single", "jaxdnn::")
        for function in functions(problem):
            found |= function.types()
        return found

    def _constants(self) -> dict[str, Constant]:
        problem, band = self.problem, self.problem.mask.band
        sizes = dict.fromkeys(("query", "key"), problem.head_size)
        sizes |= dict.fromkeys(("value", "d_out"), problem.value_head_size)
        there = vectors(problem)
        copies: dict[str, Constant] = {
            f"{camel_case(name)}Copy": copy(there[name], size) for name, size in sizes.items() if name in there
        }
        return {"Left": band.left is not None, "Right": band.right is not None, **copies}

    def _parameters(self) -> list[Parameter]:
        problem, band = self.problem, self.problem.mask.band
        number = {"float32": "float", "float64": "double"}[problem.accumulator]
        found: list[Parameter] = []
        for name, heads in vectors(problem).items():
            found += operand_parameters(name, name, heads.place)
            if heads.feature_stride != 1:
                stride = Scalar("int64", heads.feature_stride)
                found.append(Parameter("long long", f"{name}_feature", f"{name}.feature_stride", stride))
        for name, place in places(problem).items():
            found += operand_parameters(name, name, place)
        for function in functions(problem):
            found += function.parameters()
        found += numbers(batches=self.rows, query_heads=problem.query_heads, group=problem.group)
        found += numbers(query_length=problem.query_length, key_length=problem.key_length)
        found += numbers(head_size=problem.head_size, value_size=problem.value_head_size)
        for name, bound in (("left", band.left), ("right", band.right)):
            if bound is not None:
                limited = Scalar("int32", max(-MOST_BOUND, min(bound, MOST_BOUND)))
                found.append(Parameter("int", name, name, limited))
        if problem.dropout is not None:
            found += numbers("long long", threshold=problem.dropout.threshold)
            factor = Scalar(problem.accumulator, problem.dropout.factor)
            found.append(Parameter(number, "factor", "factor", factor))
        found.append(Parameter(number, "scale", "scale", Scalar(problem.accumulator, problem.scale)))
        if problem.backward is not None:
            found += [
                Parameter(f"{number}*", name, name, scratch) for name, scratch in (("base", BASE), ("delta", DELTA))
            ]
        return found
