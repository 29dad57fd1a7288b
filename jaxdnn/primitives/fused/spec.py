"""`FusedSpec`: a product of any kind with an epilogue. An op adds its own dimensions, and how it multiplies them."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.sharding import NamedSharding, PartitionSpec

from jaxdnn.engines.product.problem import (
    EpilogueOperand,
    Matrix,
    Reduced,
    dense_operand,
    dense_results,
    identity,
)
from jaxdnn.plan import Operand
from jaxdnn.pointwise import AffineLoad, Meaning, Program, UnsupportedOperation, collapse, trace
from jaxdnn.pointwise.operations import DTYPES
from jaxdnn.primitives._define import bind, live, split_of_mapped
from jaxdnn.primitives.fused.derivative import EpilogueSpec, beside_product, tangents_of, taylor_of
from jaxdnn.primitives.fused.dtypes import saved_dtype
from jaxdnn.primitives.fused.epilogue import Epilogue, program_factors
from jaxdnn.spec import Arrays, MultilinearSpec, Signature, Spec, Typed


@dataclass(frozen=True, repr=False)
class FusedSpec(MultilinearSpec):
    """epilogue(a * b, operands...), or epilogue(a * b0, a * b1, operands...), for a bilinear `*`.

    Attributes:
      dual: whether there are two arrays b.
      accumulator: the dtype that products are summed in.
      dtype: of the results, if there is no epilogue.
      epilogue: None to store the accumulators.
      operand_count: how many operands the epilogue has.
      sharding: of the result, where it can't be told from the operands' because a contracted dimension is sharded
        (under explicit axes); without an epilogue alone.
    """

    dual: bool = False
    accumulator: str = "float32"
    dtype: str = "float32"
    epilogue: Epilogue | None = None
    operand_count: int = 0
    sharding: NamedSharding | None = None

    # ------------------------------------------------------------ what an op says of its product

    def multiply(self, a: jax.Array, b: jax.Array, dtype: str) -> jax.Array:
        """a * b in plain JAX, summed in the accumulator's dtype and rounded to `dtype`."""
        raise NotImplementedError

    def shape(self, operands: Mapping[str, Typed]) -> tuple[int, ...]:
        """The shape of a * b."""
        raise NotImplementedError

    @property
    def groups(self) -> tuple[int, int, int]:
        """How many of the dimensions of a * b, in order, are batch, row and column dimensions."""
        raise NotImplementedError

    def mapped_product(self, axes: Mapping[str, int | None]) -> tuple[Self, Mapping[str, int]]:
        """The product with one more mapped axis, the first one of a * b, and where it wants that axis in a and b."""
        raise NotImplementedError

    def transpose_product(
        self, name: str, wanted: ShapedArray, cotangent: jax.Array, operands: Mapping[str, Any]
    ) -> Arrays:
        """The cotangent of a or b, of the type `wanted`, by name."""
        raise NotImplementedError

    def product_factors(self) -> tuple[Mapping[str, tuple[str, ...]], tuple[str, ...], frozenset[str], frozenset[str]]:
        """Names of the dimensions of a and b, of a * b, of those that are summed over, and of those that can't be split
        over devices.
        """
        raise NotImplementedError

    # ------------------------------------------------------------ arrays

    @property
    def rhs(self) -> tuple[str, ...]:
        """Names of the arrays that a is multiplied by."""
        return ("b0", "b1") if self.dual else ("b",)

    @property
    def epilogue_operands(self) -> tuple[str, ...]:
        """Names of the epilogue's operands."""
        return tuple(f"operand{i}" for i in range(self.operand_count))

    @property
    def operands(self) -> tuple[str, ...]:
        return ("a", *self.rhs, *self.epilogue_operands)

    @property
    def results(self) -> tuple[str, ...]:
        count = len(self.rhs) if self.epilogue is None else len(self.epilogue.program.outputs)
        return tuple(f"y{i}" for i in range(count)) if count > 1 else ("y",)

    def aliases(self, signature: Signature) -> Mapping[int, int]:
        del signature
        in_place = () if self.epilogue is None or self.batch else self.epilogue.in_place
        return {self.operands.index(self.epilogue_operands[operand]): result for operand, result in in_place}

    @property
    def unaliased(self) -> Self:
        return self.replace(epilogue=self.epilogue and replace(self.epilogue, in_place=()))

    # ------------------------------------------------------------ meaning

    def reference(self, operands: Arrays) -> tuple[jax.Array, ...]:
        dtype = self.dtype if self.epilogue is None else self.accumulator
        accumulators = [self.multiply(operands["a"], operands[name], dtype) for name in self.rhs]
        if self.epilogue is None:
            return tuple(accumulators)
        return tuple(self.epilogue.function(*accumulators, *(operands[name] for name in self.epilogue_operands)))

    def plain(self, dtype: str) -> Self:
        """The product of a and one b alone, as a `dtype`."""
        return self.replace(epilogue=None, operand_count=0, dual=False, dtype=dtype, unfused="")

    def traced(self, function: Callable[..., Any], operands: Mapping[str, Typed]) -> Program:
        """The program of an epilogue, for arrays of these shapes."""
        types = [jax.ShapeDtypeStruct(operands[n].shape, operands[n].dtype) for n in self.epilogue_operands]
        return trace(function, self.shape(operands), (self.accumulator,) * len(self.rhs), types)

    def mapped(self, operands: Arrays, axes: Mapping[str, int | None]) -> tuple[Self, Mapping[str, int], Sequence[int]]:
        spec, of_product = self.mapped_product(axes)
        if self.sharding is not None:
            split = split_of_mapped(operands, axes)
            new = [None] if split is None else split.spec
            spec = spec.replace(sharding=self.sharding.update(spec=PartitionSpec(*new, *self.sharding.spec)))
        places = {**of_product, **{name: 0 for name in self.epilogue_operands if axes[name] is not None}}
        if self.epilogue is not None:
            size = next(operands[name].shape[axis] for name, axis in axes.items() if axis is not None)
            front = [None if axes[name] is None else 0 for name in self.epilogue_operands]
            function = jax.vmap(self.epilogue.function, [0] * len(self.rhs) + front)
            types = {name: _moved(operands[name], axes[name], places.get(name), size) for name in self.operands}
            try:
                program = spec.traced(function, types)
            except UnsupportedOperation:
                return super().mapped(operands, axes)
            spec = spec.replace(epilogue=self.epilogue.mapped(program, function, front))
        return spec, places, (0,) * len(self.results)

    # ------------------------------------------------------------ derivatives

    def differentiate(self, operands: Arrays, tangents: Arrays) -> tuple[Arrays, Arrays]:
        if self.batch:
            return self._differentiate_reference(operands, tangents)
        if self.epilogue is None:
            pairs = zip(self.results, self.rhs, strict=True)
            d_results = {y: self._tangent(operands, tangents, rhs, self.dtype) for y, rhs in pairs}
            return bind(self, operands), {name: d_y for name, d_y in d_results.items() if d_y is not None}

        # y = f(accumulators, operands): JAX differentiates f, at the accumulators that the kernel stores where f's
        # derivative needs them.
        count, function = len(self.rhs), self.epilogue.function
        d_accumulators = [self._tangent(operands, tangents, rhs, self.accumulator) for rhs in self.rhs]
        directions = [*d_accumulators, *(tangents.get(name) for name in self.epilogue_operands)]
        moving = [i for i, direction in enumerate(directions) if direction is not None]
        directions = [directions[i] for i in moving]
        own = [operands[name] for name in self.epilogue_operands]

        def push_forward(arguments: Sequence[jax.Array], directions: Sequence[jax.Array]) -> Any:
            def along(*active: jax.Array) -> tuple[jax.Array, ...]:
                merged = dict(enumerate(arguments)) | dict(zip(moving, active, strict=True))
                return function(*merged.values())

            return jax.jvp(along, [arguments[i] for i in moving], directions)[1]

        factors = [jax.typeof(operands[name]) for name in ("a", self.rhs[0])]
        accumulators = jax.make_jaxpr(self.plain(self.accumulator).evaluate)(*factors).out_avals * count
        traced = jax.make_jaxpr(push_forward)([*accumulators, *map(jax.typeof, own)], [*map(jax.typeof, directions)])
        jaxpr, used = live(traced)
        form = self._saving(operands) if any(used[:count]) else self
        results = bind(form, operands)
        kept = dict(zip(self.results, (results[name] for name in form.results), strict=False))
        assert form.epilogue is not None
        saved = [results[form.results[number]] for number in form.epilogue.saved]
        if saved:
            spec = self._after(self.epilogue, saved[0].dtype.name)
            arrays = dict(zip(spec.inputs, [*saved, *own], strict=True))
            d_arrays = {spec.inputs[i]: direction for i, direction in zip(moving, directions, strict=True)}
            d_results = tangents_of(spec, Meaning(jaxpr), used, arrays, d_arrays)
            if d_results is not None:
                return kept, {name: d_results[i] for i, name in enumerate(self.results) if i in d_results}
        # The derivative is no call of ours; or it does not depend on the accumulators, whatever they are.
        like = next((d_accumulator for d_accumulator in d_accumulators if d_accumulator is not None), None)
        zero = jnp.zeros(accumulators[0].shape, self.accumulator) if like is None else jnp.zeros_like(like)
        at = [array.astype(self.accumulator) for array in saved] or [zero] * count
        d_results = push_forward([*at, *own], directions)
        return kept, dict(zip(self.results, d_results, strict=True))

    def taylor(self, terms: Mapping[str, Sequence[jax.Array]]) -> list[list[jax.Array]]:
        if self.batch:
            return taylor_of(self.evaluate, list(terms.values()))
        # Of a product they are sums of products.
        plain = self.plain(self.dtype if self.epilogue is None else self.accumulator)

        def product(rhs: str, order: int) -> jax.Array:
            pairs = zip(terms["a"][: order + 1], reversed(terms[rhs][: order + 1]), strict=True)
            return functools.reduce(jnp.add, (bind(plain, {"a": a, "b": b})["y"] for a, b in pairs))

        products = [[product(rhs, order) for order in range(len(terms["a"]))] for rhs in self.rhs]
        if self.epilogue is None:
            return products
        return taylor_of(self.epilogue.function, [*products, *(terms[name] for name in self.epilogue_operands)])

    def _differentiate_reference(self, operands: Arrays, tangents: Arrays) -> tuple[Arrays, Arrays]:
        def along(*active: jax.Array) -> tuple[jax.Array, ...]:
            merged = {**operands, **dict(zip(tangents, active, strict=True))}
            return self.evaluate(*(merged[name] for name in self.operands))

        _, d_results = jax.jvp(along, [operands[name] for name in tangents], list(tangents.values()))
        return bind(self, operands), dict(zip(self.results, d_results, strict=True))

    def _tangent(self, operands: Arrays, tangents: Arrays, rhs: str, dtype: str) -> Any:
        """The tangent of a product; None if it is constant."""
        moving = [name for name in ("a", rhs) if name in tangents]
        # Two terms are added before they are rounded.
        plain = self.plain(self.accumulator if len(moving) > 1 else dtype)
        arrays = [{**operands, name: tangents[name]} for name in moving]
        terms = [bind(plain, {"a": term["a"], "b": term[rhs]})["y"] for term in arrays]
        return functools.reduce(jnp.add, terms).astype(dtype) if terms else None

    def _saving(self, operands: Arrays) -> Self:
        """The same call with the accumulators among its results, for the derivative of the epilogue."""
        assert self.epilogue is not None
        if self.epilogue.saved:
            return self
        function = self.epilogue.function
        results = [jnp.dtype(output.dtype) for output in self.epilogue.program.outputs if not output.reduction]
        dtype = saved_dtype(operands["a"].dtype, results, jnp.dtype(self.accumulator))
        program, saved = self.epilogue.program.with_accumulators(dtype.name)
        added = [i for i, number in enumerate(saved) if number >= len(self.epilogue.program.outputs)]

        def saving(*arrays: jax.Array) -> tuple[jax.Array, ...]:
            return (*function(*arrays), *(arrays[i].astype(dtype) for i in added))

        return self.replace(epilogue=Epilogue(saving, program, saved, self.epilogue.in_place))

    def _after(self, epilogue: Epilogue, saved_dtype: str) -> EpilogueSpec:
        """The epilogue alone, of accumulators that were saved in `saved_dtype`."""
        return EpilogueSpec(
            epilogue=epilogue,
            accumulator_count=len(self.rhs),
            operand_count=self.operand_count,
            accumulator=self.accumulator,
            saved_dtype=saved_dtype,
            groups=self.groups,
            options=beside_product(self.options),
        )

    @property
    def remade(self) -> tuple[Spec, tuple[str, ...], tuple[str, ...]] | None:
        if self.epilogue is None or not self.epilogue.saved or self.batch:
            return None
        saved = tuple(self.results[number] for number in self.epilogue.saved)
        spec = self._after(self.epilogue.unsaved, self.epilogue.program.outputs[self.epilogue.saved[0]].dtype)
        made = tuple(self.results[self.epilogue.others[int(name.removeprefix("y"))]] for name in spec.outputs)
        return (spec, (*saved, *self.epilogue_operands), made) if made else None

    def transpose(
        self,
        cotangents: Arrays,
        operands: Mapping[str, jax.Array | None],
        wanted: Mapping[str, ShapedArray],
    ) -> Arrays:
        if self.epilogue is not None or self.dual or self.batch or len(wanted) > 1:
            return self._transpose_reference(cotangents, operands, wanted)
        ((name, aval),) = wanted.items()
        return self.transpose_product(name, aval, cotangents["y"], operands)

    def _transpose_reference(
        self,
        cotangents: Arrays,
        operands: Mapping[str, jax.Array | None],
        wanted: Mapping[str, ShapedArray],
    ) -> Arrays:
        def linear(*unknown: jax.Array) -> tuple[jax.Array, ...]:
            merged = {**operands, **dict(zip(wanted, unknown, strict=True))}
            return self.evaluate(*(merged[name] for name in self.operands))

        types = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in wanted.values()]
        results = jax.eval_shape(linear, *types)
        pairs = zip(self.results, results, strict=True)
        seeds = tuple(cotangents.get(name, jnp.zeros(result.shape, result.dtype)) for name, result in pairs)
        return dict(zip(wanted, jax.linear_transpose(linear, *types)(seeds), strict=True))

    # ------------------------------------------------------------ planning

    def fused_problem(
        self, signature: Signature, shape: Sequence[int]
    ) -> tuple[Program, tuple[EpilogueOperand, ...], tuple[Matrix | Reduced, ...]] | str:
        """The epilogue over batch, rows and columns of a * b, which has this shape, with what it reads and returns.

        Or the reason why engines can't have it.
        """
        if self.accumulator not in DTYPES:
            return f"kernels have no accumulators of {self.accumulator}"
        if self.batch:
            return "its epilogue, mapped, is no pointwise program"
        if self.epilogue is None:
            program = identity(len(self.rhs), self.accumulator, self.dtype)
        else:
            shapes = [signature.operands[name].shape for name in self.epilogue_operands]
            program = collapse(self.epilogue.program, shape, shapes, self.groups)
            if isinstance(program, str):
                return program

        def operand(load: AffineLoad) -> EpilogueOperand:
            name = self.epilogue_operands[load.operand]
            return dense_operand(load, Operand(signature.operand_index(name)), signature.operands[name].dtype.name)

        batch, rows = self.groups[0], self.groups[0] + self.groups[1]
        sizes = dict(zip("bmn", map(prod, (shape[:batch], shape[batch:rows], shape[rows:])), strict=True))
        results = dense_results(program, sizes, [array.dtype.name for array in signature.results.values()])
        return results if isinstance(results, str) else (program, tuple(map(operand, program.affine_loads)), results)

    def factors(self, signature: Signature) -> tuple[Mapping[str, tuple[str, ...]], frozenset[str]]:
        of_product, accumulators, summed, unsplit = self.product_factors()
        if self.epilogue is None:
            return {**of_product, **dict.fromkeys(self.results, accumulators)}, unsplit
        # An epilogue is of whole accumulators.
        own = {n: len(signature.operands[n].shape) - sum(self.carries[n]) for n in self.epilogue_operands}
        results = {n: len(array.shape) - len(self.batch) for n, array in signature.results.items()}
        of_epilogue, whole = program_factors(self.epilogue.program, accumulators, own, results, self.epilogue.in_place)
        return {**of_product, **of_epilogue}, whole | summed | unsplit

    def share(self, signature: Signature) -> Self | None:
        del signature
        return self.replace(sharding=None)

    @property
    def fused(self) -> tuple[str, ...]:
        return () if self.epilogue is None else self.epilogue.words


def _moved(array: jax.Array, axis: int | None, place: int | None, size: int) -> jax.ShapeDtypeStruct:
    """The type of an array whose mapped axis, of `size`, has gone to `place`."""
    shape = [length for i, length in enumerate(jnp.shape(array)) if i != axis]
    if place is not None:
        shape.insert(place, size)
    return jax.ShapeDtypeStruct(tuple(shape), array.dtype)
