"""The derivative of a matmul's epilogue, which is pointwise too: an op whose backward direction is one pass.

d_accumulator = f'(accumulators, operands) * dy, and what of it is summed for operands that broadcast: the gradient of a
bias.
"""

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from inspect import Parameter
from math import prod
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.jet import jet

from jaxdnn.config import Options
from jaxdnn.engines.pointwise.problem import Pointwise
from jaxdnn.engines.product.problem import dense_operand, dense_results
from jaxdnn.plan import Operand
from jaxdnn.pointwise import Meaning, Program, UnsupportedOperation, collapse, evaluate, trace
from jaxdnn.primitives._define import Op
from jaxdnn.primitives.fused.epilogue import Epilogue, program_factors
from jaxdnn.spec import Arrays, DirectedSpec, Signature


@dataclass(frozen=True, repr=False)
class EpilogueSpec(DirectedSpec):
    """An epilogue's floating outputs, as a function of the accumulator, as they were saved, and of its operands.

    Attributes:
      epilogue: what is differentiated.
      derivative: tells apart epilogues that compute the same and differ in their derivative.
      accumulator_count, operand_count: how many of its inputs are accumulators, and how many are not.
      accumulator: the dtype that the epilogue takes the accumulators in, and gives their tangents in.
      saved_dtype: the dtype that they were saved in, and that their cotangents are rounded to.
      groups: how many of the accumulator's dimensions, in order, are batch, row and column dimensions.
      computes: what the call does to one element, where shapes may be others than those of the epilogue's jaxpr.
    """

    op = "epilogue"
    problems = (Pointwise,)

    epilogue: Epilogue | None = None
    derivative: tuple[Hashable, ...] = ()
    accumulator_count: int = 1
    operand_count: int = 0
    accumulator: str = "float32"
    saved_dtype: str = "float32"
    groups: tuple[int, int, int] = (0, 1, 1)
    computes: Program | None = None

    @property
    def program(self) -> Program:
        assert self.epilogue is not None
        return self.epilogue.program

    @property
    def accumulators(self) -> tuple[str, ...]:
        """Names of the accumulators."""
        return tuple(f"accumulator{i}" for i in range(self.accumulator_count))

    @property
    def inputs(self) -> tuple[str, ...]:
        return (*self.accumulators, *(f"operand{i}" for i in range(self.operand_count)))

    @property
    def outputs(self) -> tuple[str, ...]:
        floating = (jnp.issubdtype(output.dtype, jnp.floating) for output in self.program.outputs)
        return tuple(f"y{i}" for i, is_floating in enumerate(floating) if is_floating)

    def reference(self, inputs: Arrays) -> tuple[jax.Array, ...]:
        assert self.epilogue is not None
        results = self.epilogue.function(*(inputs[name] for name in self.inputs))
        return tuple(results[int(name.removeprefix("y"))] for name in self.outputs)

    def evaluate_unbatched(self, *operands: jax.Array) -> tuple[jax.Array, ...]:
        if self.computes is not None:
            return evaluate(self.computes, operands[0].shape, (), operands)
        accumulators = [array.astype(self.accumulator) for array in operands[: self.accumulator_count]]
        results = super().evaluate_unbatched(*accumulators, *operands[self.accumulator_count :])
        if self.direction != "backward":
            return results
        rounded = {f"d_{name}" for name in self.accumulators}
        pairs = zip(self.results, results, strict=True)
        return tuple(result.astype(self.saved_dtype) if name in rounded else result for name, result in pairs)

    def factors(self, signature: Signature) -> tuple[Mapping[str, tuple[str, ...]], frozenset[str]]:
        accumulators = tuple(f"d{i}" for i in range(sum(self.groups)))
        types = zip(self.operands, self._types(signature), strict=True)
        ndims = {name.removeprefix("d_"): len(array.shape) for name, array in types}
        operands = {f"operand{i}": ndims[f"operand{i}"] for i in range(self.operand_count)}
        outputs = {f"y{i}": len(output.dimensions) for i, output in enumerate(self.program.outputs)}
        dimensions, whole = program_factors(self.program, accumulators, operands, outputs)
        dimensions |= dict.fromkeys(self.accumulators, accumulators)
        arrays = (*self.operands, *self.results)
        return {name: dimensions[name.removeprefix("d_")] for name in arrays}, whole

    def _types(self, signature: Signature) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The operands without their mapped axes."""
        mapped = {name: sum(axes) for name, axes in self.carries.items()}
        pairs = signature.operands.items()
        return tuple(jax.ShapeDtypeStruct(array.shape[mapped[name] :], array.dtype) for name, array in pairs)

    def share(self, signature: Signature) -> Self | None:
        # A derivative has rules of the user's, and jaxprs have shapes: what fits a share is a program.
        types = self._types(signature)
        program = _program(self.replace(batch=()), types[0].shape, types)
        return None if isinstance(program, str) or self._turns(program, signature) else self.replace(computes=program)

    def _turns(self, program: Program, signature: Signature) -> bool:
        """Whether the program reads or stores a square array otherwise than the epilogue's arrays lie, so that a share
        is not what it needs.
        """
        dimensions, _ = self.factors(signature)
        along = dimensions[self.accumulators[0]]
        runs = [(self.operands[load.operand], d, o) for load in program.loads for o, d in enumerate(load.dimensions)]
        stored = zip(self.results, program.outputs, strict=True)
        runs += [(name, d, o) for name, output in stored for d, o in enumerate(output.dimensions)]
        stated = ((dimensions[name][d], along[o]) for name, d, o in runs if d is not None and o is not None)
        return any(factor != own for factor, own in stated)

    def _whole(self, signature: Signature) -> tuple[tuple[int, ...], Program | str]:
        """The shape of the accumulator with all mapped axes, which results have, and what is done to its elements."""
        mapped = next(iter(signature.results.values())).shape[: len(self.batch)]
        shape = (*mapped, *self._types(signature)[0].shape)
        types = tuple(signature.operands.values())
        return shape, self.computes if self.computes and not mapped else _program(self, shape, types)

    def problem(self, signature: Signature) -> Pointwise | str:
        if signature.reason:
            return signature.reason
        types = tuple(signature.operands.values())
        shape, program = self._whole(signature)
        if isinstance(program, str):
            return program
        # Mapped axes join the batch.
        groups = (len(self.batch) + self.groups[0], *self.groups[1:])
        program = collapse(program, shape, [one.shape for one in types], groups)
        if isinstance(program, str):
            return program
        first_row, first_column = groups[0], groups[0] + groups[1]
        batch, rows, columns = map(prod, (shape[:first_row], shape[first_row:first_column], shape[first_column:]))
        dtypes = [array.dtype.name for array in signature.results.values()]
        stored = dense_results(program, {"b": batch, "m": rows, "n": columns}, dtypes)
        if isinstance(stored, str):
            return stored
        loads = tuple(
            dense_operand(load, Operand(load.operand), types[load.operand].dtype.name) for load in program.affine_loads
        )
        wide = [load.dtype for load in loads if load.broadcast == "full" and load.dtype not in ("bfloat16", "float16")]
        return Pointwise(batch, rows, columns, program, loads, stored, approximate=not wide)

    def aliases(self, signature: Signature) -> Mapping[int, int]:
        """What was saved gives its memory to its cotangent, if each element is read where that is written alone."""
        shape, program = self._whole(signature)
        if self.direction != "backward" or isinstance(program, str):
            return {}
        elsewhere = {load.operand for load in program.loads if not load.at_own_place(shape)}
        active = [name for name in self.accumulators if name in self.active]
        alike = [name for name in active if signature.operands[name] == signature.results[f"d_{name}"]]
        pairs = {signature.operand_index(name): signature.result_index(f"d_{name}") for name in alike}
        return {operand: result for operand, result in pairs.items() if operand not in elsewhere}

    @property
    def fused(self) -> tuple[str, ...]:
        return (self.program.title, *self.program.operations)

    def flops(self, signature: Signature) -> int:
        return prod(signature.operands[self.accumulators[0]].shape) * len(self.program.operations)


@lru_cache(maxsize=256)
def _program(spec: EpilogueSpec, shape: tuple[int, ...], types: tuple[jax.ShapeDtypeStruct, ...]) -> Program | str:
    """What a call does to one element, or why that is no pointwise function. `shape` is of the mapped accumulator."""

    def function(*arrays: jax.Array) -> Any:
        return spec.evaluate(*arrays)

    named = [Parameter(name, Parameter.POSITIONAL_ONLY) for name in spec.operands]
    function.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
    function.__name__ = f"{spec.direction} of {spec.program.title}"
    try:
        return trace(function, shape, (), types)
    except UnsupportedOperation as error:
        return f"`{error.primitive}`: {error.reason}"
    except (TypeError, ValueError) as error:
        return f"it is no pointwise function: {error}"


_epilogue = Op(EpilogueSpec)


def beside_product(options: Options) -> Options:
    """The options of an epilogue that runs after its product.

    What serves a product does not serve it, and that XLA does, where no kernel of ours can, is no fallback.
    """
    options = replace(options, fallback=True)
    return options if options.engine in ("xla", "pointwise") else replace(options, engine=None, knobs=())


def tangents_of(
    spec: EpilogueSpec, meaning: Meaning, used: tuple[bool, ...], arrays: Arrays, tangents: Arrays
) -> Mapping[int, jax.Array] | None:
    """The tangents of an epilogue's floating outputs, by their number; or None if its derivative holds an array of the
    program around it, which no call of ours can, and a compiled one should not.

    Args:
      spec: of the epilogue.
      meaning: of its tangent.
      used: which inputs and tangents that takes.
      arrays: the saved accumulators and the operands, by the names of the spec's inputs.
      tangents: of those that have one.
    """
    active = tuple(name for name in spec.inputs if name in tangents)
    meanings = [meaning]
    if meaning.transposed:
        inputs = [jax.typeof(arrays[name]) for name in spec.inputs]
        outputs = jax.make_jaxpr(spec.evaluate)(*inputs).out_avals
        backward = spec.replace(direction="backward", active=active, seeded=spec.outputs)
        meanings.append(Meaning(jax.make_jaxpr(backward.evaluate)(*inputs, *outputs)))
    if any(isinstance(held, (jax.Array, np.ndarray)) for one in meanings for held in one.held):
        return None
    tangent = spec.replace(direction="tangent", active=active, derivative=(*meanings, used))
    results = _epilogue(tangent, {**arrays, **{f"d_{name}": tangents[name] for name in active}})
    return {int(name.removeprefix("d_y")): d_y for name, d_y in results.items()}


def taylor_of(function: Callable[..., Any], terms: Sequence[Sequence[jax.Array]]) -> list[list[jax.Array]]:
    """The terms of the Taylor series, without factorials, of a function's results from those of its arguments."""
    firsts, rests = zip(*((first, rest) for first, *rest in terms), strict=True)
    results, series = jet(function, firsts, rests, factorial_scaled=False)
    return [[result, *rest] for result, rest in zip(results, series, strict=True)]
