"""An attention call as engines see it: `stated`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import Parameter
from math import prod
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr

from jaxdnn.engines.attention.problem import Attention, Backward, Dropout, Heads, LoadGradient, Mask
from jaxdnn.engines.product.problem import EpilogueOperand, dense_operand
from jaxdnn.plan import Operand, Result
from jaxdnn.pointwise import (
    AffineLoad,
    Load,
    Program,
    UnsupportedOperation,
    collapse,
    evaluate,
    loaded,
    merged_terms,
    trace,
)
from jaxdnn.primitives.attention.arrays import SCORES
from jaxdnn.primitives.attention.blocks import Spans
from jaxdnn.primitives.attention.scores import accumulator, modified, programmed
from jaxdnn.primitives.fused.dtypes import allows_rounding
from jaxdnn.primitives.fused.traced import RULED
from jaxdnn.spec import Signature

if TYPE_CHECKING:
    from jaxdnn.primitives.attention.spec import AttentionSpec

_POSITIONS = ("query_positions", "key_positions")
_COORDINATES = ("batch_index", "head_index", *_POSITIONS)
_OF_MASK = ("query_offset", "query_lengths", "key_lengths", "query_segments", "key_segments")


class _NoProblem(Exception):
    """Why a call can't be stated."""


def stated(spec: AttentionSpec, signature: Signature) -> Attention | str:
    """The problem; or, as a string, why there is none."""
    if signature.reason:
        return signature.reason
    if spec.direction == "tangent":
        return "it has no kernel for the tangent"
    try:
        return _Statement(spec, signature).problem()
    except _NoProblem as reason:
        return str(reason)


@dataclass(frozen=True)
class _Function:
    """A pointwise function of scores, and the names of the arrays that it loads from."""

    program: Program
    names: tuple[str, ...]


class _Statement:
    """A call, and the places of its arrays."""

    def __init__(self, spec: AttentionSpec, signature: Signature) -> None:
        self.spec, self.signature = spec, signature
        self.sizes = spec.sizes(signature)
        self.mapped = next(iter(signature.results.values())).shape[: len(spec.batch)]
        self.scores = (*self.mapped, *(self.sizes[label] for label in SCORES))
        self.block = {label: Spans(self.sizes[label], self.sizes[label])[0] for label in "ts"}
        self.dtype = accumulator(signature.operands["query"]).name

    def problem(self) -> Attention:
        spec, sizes = self.spec, self.sizes
        score, mask = self.score(), self.mask()
        bounded = (spec.band.left, spec.band.right) != (None, None)
        parts = {name: self.place(name) for name in (*_POSITIONS * bounded, *_OF_MASK)}
        seeds = self.place("seeds")
        return Attention(
            batch=prod((*self.mapped, sizes["b"])),
            query_length=sizes["t"],
            key_length=sizes["s"],
            query_heads=sizes["k"] * sizes["g"],
            key_heads=sizes["k"],
            head_size=sizes["h"],
            value_head_size=sizes["d"],
            query=self.heads("query"),
            key=self.heads("key"),
            value=self.heads("value"),
            out=self.heads("out"),
            log_sum_exp=self.place("log_sum_exp"),
            accumulator=self.dtype,
            scale=spec.scale,
            mask=Mask(spec.band, **parts, program=self.collapsed(mask), operands=self.loaded(mask)),
            score=self.collapsed(score),
            operands=self.loaded(score),
            sinks=self.place("sinks"),
            dropout=None if seeds is None else Dropout(spec.dropped, seeds),
            backward=self.backward(score) if spec.direction == "backward" else None,
            exact=not allows_rounding(spec.algorithm),
            deterministic=spec.options.deterministic,
        )

    def backward(self, score: _Function | None) -> Backward:
        there = self.signature.arrays
        loads = [] if score is None else [x for x in score.program.loads if score.names[x.operand] in self.spec.active]
        gradient = None if score is None else self.gradient(score, loads)
        return Backward(
            d_out=self.heads("d_out") if "d_out" in there else None,
            d_log_sum_exp=self.place("d_log_sum_exp"),
            d_query=self.heads("d_query") if "d_query" in there else None,
            d_key=self.heads("d_key") if "d_key" in there else None,
            d_value=self.heads("d_value") if "d_value" in there else None,
            d_sinks=self.place("d_sinks"),
            gradient=self.collapsed(gradient),
            operands=self.loaded(gradient),
            load_gradients=tuple(
                LoadGradient(1 + i, self.gradient_place(load, score))
                for i, load in enumerate(loads)
                if score is not None
            ),
        )

    # ---- Functions of scores -----------------------------------------------------------------------------------------

    def score(self) -> _Function | None:
        """What becomes of scaled products, if anything does."""
        spec = self.spec
        if "bias" not in spec.optional and spec.soft_cap is None and spec.score_mod is None:
            return None
        names = tuple(name for name in ("bias", *_COORDINATES, *spec.score_operands) if name in spec.inputs)

        def score(product: jax.Array, *arrays: jax.Array) -> jax.Array:
            named = dict(zip(names, arrays, strict=True))
            bias = {"bias": named["bias"].astype(self.dtype)} if "bias" in named else {}
            return modified(spec, {**named, **bias}, self.block, product)

        return self.traced(self.over_mapped(score, 1, names), 1, names)

    def mask(self) -> _Function | None:
        """Which keys are visible by the caller's array and function, if there is one."""
        spec = self.spec
        if "mask" not in spec.optional and spec.mask_mod is None:
            return None
        names = tuple(name for name in ("mask", *_COORDINATES, *spec.mask_operands) if name in spec.inputs)

        def mask(*arrays: jax.Array) -> jax.Array:
            visible = programmed(spec, dict(zip(names, arrays, strict=True)), self.block)
            return jnp.broadcast_to(jnp.asarray(visible), self.scores[len(self.mapped) :])

        return self.traced(self.over_mapped(mask, 0, names), 0, names)

    def gradient(self, score: _Function, loads: Sequence[Load]) -> _Function:
        """Of products and the cotangents of scores: the cotangents of products, and of what each of `loads` reads."""
        modifier = self.spec.score_mod
        if modifier is not None and any(name in RULED for name in _primitives(modifier.captured.jaxpr.jaxpr)):
            raise _NoProblem("its score_mod has a rule of its own for its derivative, which XLA runs")
        if any(load.gathered for load in loads):
            raise _NoProblem("the gradient of what its score_mod looks up is added where indices say, which XLA does")

        def gradient(product: jax.Array, d_score: jax.Array, *arrays: jax.Array) -> Any:
            def of_loaded(product: jax.Array, *values: jax.Array) -> jax.Array:
                found = dict(zip(loads, values, strict=True))
                return evaluate(score.program, self.scores, [product], arrays, found)[0]

            values = [loaded(load, arrays[load.operand], self.scores) for load in loads]
            return jax.vjp(of_loaded, product, *values)[1](d_score)

        return self.traced(gradient, 2, score.names)

    def over_mapped(self, function: Callable[..., Any], products: int, names: Sequence[str]) -> Callable[..., Any]:
        """The function, of arrays with their mapped axes."""
        for level, size in reversed(list(enumerate(self.mapped))):
            carried = [0 if self.spec.carries[name][level] else None for name in names]
            function = jax.vmap(function, [*([0] * products), *carried], axis_size=size)
        return function

    def traced(self, function: Callable[..., Any], products: int, names: tuple[str, ...]) -> _Function:
        def named(*arrays: jax.Array) -> Any:
            return function(*arrays)

        parameters = (*("product", "d_score")[:products], *names)
        kinds = [Parameter(name, Parameter.POSITIONAL_ONLY) for name in parameters]
        named.__signature__ = inspect.Signature(kinds)  # type: ignore[attr-defined]
        named.__name__ = ("mask", "score", "gradient of score")[products]
        types = [self.signature.operands[name] for name in names]
        try:
            return _Function(trace(named, self.scores, (self.dtype,) * products, types), names)
        except UnsupportedOperation as error:
            raise _NoProblem(f"`{error.primitive}` at {error.where}: {error.reason}") from None
        except (TypeError, ValueError) as error:
            raise _NoProblem(f"it is no pointwise function of scores: {error}") from None

    def collapsed(self, function: _Function | None) -> Program | None:
        """The program over batch, row and column."""
        return None if function is None else self.over_batch(function.program, function.names)

    def loaded(self, function: _Function | None) -> tuple[EpilogueOperand, ...]:
        """What a function loads."""
        program = self.collapsed(function)
        if function is None or program is None:
            return ()
        return tuple(self.operand(load, function.names[load.operand]) for load in program.affine_loads)

    def over_batch(self, program: Program, names: Sequence[str]) -> Program:
        shapes = [self.signature.arrays[name].shape for name in names]
        found = collapse(program, self.scores, shapes, (len(self.scores) - 2, 1, 1))
        if isinstance(found, str):
            raise _NoProblem(found)
        return found

    # ---- Places ------------------------------------------------------------------------------------------------------

    def gradient_place(self, load: Load, function: _Function) -> EpilogueOperand:
        """Where the gradient of what is loaded goes: in an array that has all mapped axes."""
        name = function.names[load.operand]
        carried, levels = sum(self.spec.carries[name]), len(self.mapped)
        own = [None if d is None else d - carried + levels for d in load.dimensions[levels:]]
        placed = Load(0, (*range(levels), *own))
        only = next(i for i in function.program.instructions if i.immediate == load)
        program = replace(function.program, instructions=(replace(only, immediate=placed),), outputs=())
        return self.operand(self.over_batch(program, [f"d_{name}"]).affine_loads[0], f"d_{name}")

    def place(self, name: str) -> EpilogueOperand | None:
        """Of an array over some dimensions of scores, the element for each score; None if there is no such array."""
        if name not in self.signature.arrays:
            return None
        along = self.strides(name)
        steps = [along.get(label, 0) for label in (*range(len(self.mapped)), *SCORES)]
        sizes = self.scores
        terms = (merged_terms(sizes[i:j], steps[i:j]) for i, j in ((0, -2), (-2, -1), (-1, None)))
        batch, row, column = terms
        return self.operand(AffineLoad(0, (batch, row, column)), name)

    def heads(self, name: str) -> Heads:
        along = self.strides(name)
        batch = merged_terms(
            (*self.mapped, self.sizes["b"]), [along.get(i, 0) for i in (*range(len(self.mapped)), "b")]
        )
        length = along["t" if "t" in along else "s"]
        # Where one query head has a key head for itself, it may lie anywhere among dimensions of size one.
        head = along["g" if self.sizes["g"] > 1 and "g" in along else "k"]
        return Heads(self.buffer(name), self.signature.arrays[name].dtype.name, batch, length, head)

    def strides(self, name: str) -> Mapping[str | int, int]:
        """In elements, along each dimension and mapped axis of an array; 0 for one that has one element for all."""
        shape = self.signature.arrays[name].shape
        flags = self.spec.carries.get(name, (True,) * len(self.mapped))
        labels = [*(level for level, carried in enumerate(flags) if carried), *self.spec.dimensions(name)]
        sizes = dict(enumerate(self.mapped)) | self.sizes
        steps = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
        pairs = zip(labels, shape, steps, strict=True)
        return {label: step if size == sizes.get(label, size) else 0 for label, size, step in pairs}

    def operand(self, load: AffineLoad, name: str) -> EpilogueOperand:
        return dense_operand(load, self.buffer(name), self.signature.arrays[name].dtype.name)

    def buffer(self, name: str) -> Operand | Result:
        if name in self.signature.operands:
            return Operand(self.signature.operand_index(name))
        return Result(self.signature.result_index(name))


def _primitives(jaxpr: Jaxpr) -> Iterator[str]:
    """The names of what a jaxpr does, and those that it calls."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for value in equation.params.values():
            if isinstance(value, (ClosedJaxpr, Jaxpr)):
                yield from _primitives(value.jaxpr if isinstance(value, ClosedJaxpr) else value)
