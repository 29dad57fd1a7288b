"""What a matmul is: `MatmulSpec`, with its rules, and `contract`, which brings a contraction of arrays to that form.

The dimensions of its arrays, and their groups "b", "m", "n" and "k", are those of layout.py.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from jaxdnn.pointwise import Program, UnsupportedOperation, trace
from jaxdnn.primitives._define import MultilinearOp, live
from jaxdnn.primitives.fused.derivative import EpilogueSpec, Rule, tangents_of
from jaxdnn.primitives.fused.dtypes import gradient_dtype, saved_dtype, summed
from jaxdnn.primitives.fused.epilogue import Epilogue, program_factors
from jaxdnn.primitives.matmul.dimensions import contract, explicit_sharding, moved, rearranged, with_batch
from jaxdnn.spec import Signature, Spec

# What an array of float32 may be rounded to before it is multiplied.
# (For HIGH too, JAX documents tf32 on GPUs.)
_LEVELS = dict.fromkeys((None, lax.Precision.DEFAULT, lax.Precision.HIGH), "default")
_ALGORITHM_LEVELS = {"DEFAULT": "default", "TF32_TF32_F32": "default"}


@dataclass(frozen=True, repr=False)
class MatmulSpec(Spec):
    """epilogue(a @ b, operands...), or epilogue(a @ b0, a @ b1, operands...).

    A result has the batch dimensions, then those of the rows, then those of the columns.

    Attributes:
      a_order, b_order: the groups of an operand's dimensions, in the order in which it has them.
      batched: for each batch dimension, whether a carries it, and whether b does.
      row_ndim, column_ndim, contracted_ndim: the number of dimensions in the other groups.
      pair: whether there are two arrays b.
      accumulator: the dtype that products are summed in.
      dtype: of the results, if there is no epilogue.
      algorithm: what JAX calls precision, in its canonical form.
      epilogue: None to store the sums.
      operand_count: how many operands the epilogue has.
      out_sharding: of the result, where it can't be told from the operands' because a contracted dimension is sharded
        (under explicit axes); without an epilogue alone.
      unfused: why the user's epilogue runs after this call instead of in it; else empty.
    """

    op = "matmul"

    a_order: str = "bmk"
    b_order: str = "bkn"
    batched: tuple[tuple[bool, bool], ...] = ()
    row_ndim: int = 1
    column_ndim: int = 1
    contracted_ndim: int = 1
    pair: bool = False
    accumulator: str = "float32"
    dtype: str = "float32"
    algorithm: Any = None
    epilogue: Epilogue | None = None
    operand_count: int = 0
    out_sharding: NamedSharding | None = None
    unfused: str = ""

    # ------------------------------------------------------------ arrays

    @property
    def title(self) -> str:
        return self.op

    @property
    def rights(self) -> tuple[str, ...]:
        """Names of the arrays that a is multiplied by."""
        return ("b0", "b1") if self.pair else ("b",)

    @property
    def extras(self) -> tuple[str, ...]:
        """Names of the epilogue's operands."""
        return tuple(f"operand{i}" for i in range(self.operand_count))

    @property
    def inputs(self) -> tuple[str, ...]:
        return ("a", *self.rights, *self.extras)

    @property
    def outputs(self) -> tuple[str, ...]:
        count = len(self.rights) if self.epilogue is None else len(self.epilogue.program.outputs)
        return tuple(f"y{i}" for i in range(count)) if count > 1 else ("y",)

    @property
    def saved(self) -> tuple[str, ...]:
        return ()

    @property
    def aliases(self) -> Mapping[int, int]:
        in_place = () if self.epilogue is None or self.batch else self.epilogue.in_place
        return {self.inputs.index(self.extras[operand]): output for operand, output in in_place}

    @property
    def unaliased(self) -> Self:
        return self.replace(epilogue=self.epilogue and replace(self.epilogue, in_place=()))

    @property
    def precision(self) -> str:
        """Of float32 operands: "default" may round them to tf32, "highest" may not."""
        both = self.algorithm if isinstance(self.algorithm, tuple) else (self.algorithm,)
        levels = {_LEVELS.get(one) or _ALGORITHM_LEVELS.get(getattr(one, "name", ""), "highest") for one in both}
        return "highest" if "highest" in levels else "default"

    @property
    def _counts(self) -> Mapping[str, int]:
        return {"m": self.row_ndim, "n": self.column_ndim, "k": self.contracted_ndim}

    def labels(self, name: str) -> tuple[tuple[str, int], ...]:
        """The dimensions of a, of b or of the sums ("y")."""
        counts = {"b": len(self.batched), **self._counts}
        order = {"a": self.a_order, "y": "bmn"}.get(name, self.b_order)
        dimensions = [(group, i) for group in order for i in range(counts[group])]
        if name == "y":
            return tuple(dimensions)
        side = 0 if name == "a" else 1
        return tuple(label for label in dimensions if label[0] != "b" or self.batched[label[1]][side])

    def sizes(self, operands: Mapping[str, Any]) -> Mapping[tuple[str, int], int]:
        """The size of each dimension, by its label."""
        pairs = (zip(self.labels(name), jnp.shape(operands[name]), strict=True) for name in ("a", self.rights[0]))
        return {label: size for pair in pairs for label, size in pair}

    def groups(self, operands: Mapping[str, Any]) -> Mapping[str, tuple[int, ...]]:
        """The sizes of each group's dimensions."""
        sizes = self.sizes(operands)
        labels = (*self.labels("y"), *(("k", i) for i in range(self.contracted_ndim)))
        return {group: tuple(sizes[label] for label in labels if label[0] == group) for group in "bmnk"}

    # ------------------------------------------------------------ meaning

    def reference(self, inputs: Mapping[str, Any]) -> tuple[Any, ...]:
        dtype = self.dtype if self.epilogue is None else self.accumulator
        sums = [self._sum(inputs["a"], inputs[name], dtype) for name in self.rights]
        if self.epilogue is None:
            return tuple(sums)
        return tuple(self.epilogue.function(*sums, *(inputs[name] for name in self.extras)))

    def _sum(self, a: Any, b: Any, dtype: str) -> Any:
        of_a, of_b, of_y = self.labels("a"), self.labels("b"), self.labels("y")
        batch = [label for label in of_y if label in of_a and label in of_b]
        contracted = [label for label in of_a if label not in of_y]
        contracting, batching = ((list(map(of_a.index, ls)), list(map(of_b.index, ls))) for ls in (contracted, batch))
        got = [*batch, *(label for label in (*of_a, *of_b) if label not in (*batch, *contracted))]
        sharding = rearranged(self.out_sharding, [of_y.index(label) for label in got])
        y = summed(a, b, (contracting, batching), self.algorithm, self.accumulator, sharding).astype(dtype)
        return y if tuple(got) == of_y else jnp.transpose(y, list(map(got.index, of_y)))

    def mapped(
        self, operands: Mapping[str, Any], axes: Mapping[str, int | None]
    ) -> tuple[Self, Mapping[str, int], Sequence[int]]:
        # More rows if a alone carries the axis, so that b is read once; else one more batch dimension.
        right = next((axes[name] for name in self.rights if axes[name] is not None), None)
        flags = (axes["a"] is not None or right is None, right is not None)
        reduces = self.epilogue is not None and any(output.reduction for output in self.epilogue.program.outputs)
        if flags == (True, False) and not self.batched and not reduces:
            new, spec = ("m", 0), self.replace(row_ndim=self.row_ndim + 1)
        else:
            new, spec = ("b", 0), self.replace(batched=(flags, *self.batched))
            if not any(of_a for of_a, _ in self.batched):
                spec = spec.replace(a_order=with_batch(self.a_order, self._counts, axes["a"]))
            if not any(of_b for _, of_b in self.batched):
                spec = spec.replace(b_order=with_batch(self.b_order, self._counts, right))
        carrying = [name for name in ("a", *self.rights) if new in spec.labels(name)]
        places = {name: spec.labels(name).index(new) for name in carrying}
        places |= {name: 0 for name in self.extras if axes[name] is not None}
        size = next(operands[name].shape[axis] for name, axis in axes.items() if axis is not None)
        spec = spec.replace(out_sharding=rearranged(self.out_sharding, [None, *range(len(self.labels("y")))]))
        if self.epilogue is not None:
            front = [0] * len(self.rights) + [None if axes[name] is None else 0 for name in self.extras]
            function = jax.vmap(self.epilogue.function, front)
            types = {name: moved(operands[name], axes[name], places.get(name), size) for name in self.inputs}
            try:
                program = spec.traced(function, types)
            except UnsupportedOperation:
                return super().mapped(operands, axes)
            spec = spec.replace(epilogue=self.epilogue.mapped(program, function, front[len(self.rights) :]))
        return spec, places, (0,) * len(self.outputs)

    def traced(self, function: Callable[..., Any], operands: Mapping[str, Any]) -> Program:
        """The program of an epilogue, for arrays of these shapes."""
        sizes = self.sizes(operands)
        shape = tuple(sizes[label] for label in self.labels("y"))
        extras = [jax.ShapeDtypeStruct(operands[n].shape, operands[n].dtype) for n in self.extras]
        return trace(function, shape, (self.accumulator,) * len(self.rights), extras)

    # ------------------------------------------------------------ derivatives

    def differentiate(
        self, inputs: Mapping[str, Any], tangents: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """The outputs, and the tangents of those that have one."""
        if self.batch:
            return self._differentiate_reference(inputs, tangents)
        if self.epilogue is None:
            pairs = zip(self.outputs, self.rights, strict=True)
            d_outputs = {y: self._tangent(inputs, tangents, right, self.dtype) for y, right in pairs}
            return matmul(self, inputs), {name: d_y for name, d_y in d_outputs.items() if d_y is not None}

        # y = f(sums, extras): JAX differentiates f, at the sums that the kernel stores where f's derivative needs them.
        count, function = len(self.rights), self.epilogue.function
        d_sums = [self._tangent(inputs, tangents, right, self.accumulator) for right in self.rights]
        directions = [*d_sums, *(tangents.get(name) for name in self.extras)]
        moving = [i for i, direction in enumerate(directions) if direction is not None]
        directions = [directions[i] for i in moving]
        extras = [inputs[name] for name in self.extras]

        def push_forward(arguments: Sequence[Any], directions: Sequence[Any]) -> Any:
            def along(*active: Any) -> tuple[Any, ...]:
                merged = dict(enumerate(arguments)) | dict(zip(moving, active, strict=True))
                return function(*merged.values())

            return jax.jvp(along, [arguments[i] for i in moving], directions)[1]

        pair = [jax.typeof(inputs[name]) for name in ("a", self.rights[0])]
        sums = jax.make_jaxpr(self.plain(self.accumulator).evaluate)(*pair).out_avals * count
        traced = jax.make_jaxpr(push_forward)([*sums, *map(jax.typeof, extras)], [*map(jax.typeof, directions)])
        jaxpr, used = live(traced)
        form = self._saving(inputs) if any(used[:count]) else self
        outputs = matmul(form, inputs)
        kept = dict(zip(self.outputs, (outputs[name] for name in form.outputs), strict=False))
        assert form.epilogue is not None
        if form.epilogue.saved:
            saved = [outputs[name] for name in form.outputs[-count:]]
            spec = EpilogueSpec(
                epilogue=self.epilogue,
                sum_count=count,
                operand_count=self.operand_count,
                accumulator=self.accumulator,
                saved_dtype=saved[0].dtype.name,
                groups=(len(self.batched), self.row_ndim, self.column_ndim),
                options=self.options,
            )
            arrays = dict(zip(spec.inputs, [*saved, *extras], strict=True))
            d_arrays = {spec.inputs[i]: direction for i, direction in zip(moving, directions, strict=True)}
            d_outputs = tangents_of(spec, Rule.of(jaxpr, used), arrays, d_arrays)
            return kept, {name: d_outputs[i] for i, name in enumerate(self.outputs) if i in d_outputs}
        # The derivative does not depend on the sums, whatever they are.
        like = next((d_sum for d_sum in d_sums if d_sum is not None), None)
        zero = jnp.zeros(sums[0].shape, self.accumulator) if like is None else jnp.zeros_like(like)
        d_outputs = push_forward([*[zero] * count, *extras], directions)
        return kept, dict(zip(self.outputs, d_outputs, strict=True))

    def _differentiate_reference(self, inputs: Mapping[str, Any], tangents: Mapping[str, Any]) -> Any:
        def along(*active: Any) -> tuple[Any, ...]:
            merged = {**inputs, **dict(zip(tangents, active, strict=True))}
            return self.evaluate(*(merged[name] for name in self.inputs))

        _, d_outputs = jax.jvp(along, [inputs[name] for name in tangents], list(tangents.values()))
        return matmul(self, inputs), dict(zip(self.outputs, d_outputs, strict=True))

    def _tangent(self, inputs: Mapping[str, Any], tangents: Mapping[str, Any], right: str, dtype: str) -> Any:
        """The tangent of a sum; None if it is constant."""
        moved = [name for name in ("a", right) if name in tangents]
        # Two terms are added before they are rounded.
        plain = self.plain(self.accumulator if len(moved) > 1 else dtype)
        arrays = [{**inputs, name: tangents[name]} for name in moved]
        terms = [matmul(plain, {"a": term["a"], "b": term[right]})["y"] for term in arrays]
        return functools.reduce(jnp.add, terms).astype(dtype) if terms else None

    def plain(self, dtype: str) -> Self:
        """The product of a and one b alone, as a `dtype`."""
        return self.replace(epilogue=None, operand_count=0, pair=False, dtype=dtype, out_sharding=None, unfused="")

    def _saving(self, inputs: Mapping[str, Any]) -> Self:
        """The same call with the sums among its outputs, for the derivative of the epilogue."""
        assert self.epilogue is not None
        function, count = self.epilogue.function, len(self.rights)
        if self.epilogue.saved:
            return self
        results = [jnp.dtype(output.dtype) for output in self.epilogue.program.outputs if not output.reduction]
        dtype = saved_dtype(inputs["a"].dtype, results, jnp.dtype(self.accumulator))

        def saving(*arrays: Any) -> tuple[Any, ...]:
            return (*function(*arrays), *(array.astype(dtype) for array in arrays[:count]))

        program = replace(self.traced(saving, inputs), title=self.epilogue.program.title)
        return self.replace(epilogue=Epilogue(saving, program, count, self.epilogue.in_place))

    def transpose(
        self, cotangents: Mapping[str, Any], inputs: Mapping[str, Any], wanted: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """The cotangents of the inputs that are None, whose types are `wanted`."""
        if self.epilogue is not None or self.pair or self.batch or len(wanted) > 1:
            return self._transpose_reference(cotangents, inputs, wanted)
        ((name, aval),) = wanted.items()
        other = "b" if name == "a" else "a"
        dtype = gradient_dtype(inputs[other].dtype)
        gradient = contract(
            matmul,
            self.plain(aval.dtype.name).replace(out_sharding=explicit_sharding(aval)),
            (cotangents["y"].astype(dtype), self.labels("y")),
            (inputs[other].astype(dtype), self.labels(other)),
            self.labels(name),
        )
        return {name: gradient}

    def _transpose_reference(self, cotangents: Any, inputs: Any, wanted: Any) -> Mapping[str, Any]:
        def linear(*unknown: Any) -> tuple[Any, ...]:
            merged = {**inputs, **dict(zip(wanted, unknown, strict=True))}
            return self.evaluate(*(merged[name] for name in self.inputs))

        types = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in wanted.values()]
        results = jax.eval_shape(linear, *types)
        pairs = zip(self.outputs, results, strict=True)
        seeds = tuple(cotangents.get(name, jnp.zeros(result.shape, result.dtype)) for name, result in pairs)
        return dict(zip(wanted, jax.linear_transpose(linear, *types)(seeds), strict=True))

    # ------------------------------------------------------------ planning

    def factors(self, signature: Signature) -> tuple[Mapping[str, tuple[str, ...]], frozenset[str]]:
        def named(labels: tuple[tuple[str, int], ...]) -> tuple[str, ...]:
            return tuple(f"{group}_{i}" for group, i in labels)

        sums = named(self.labels("y"))
        dimensions = {"a": named(self.labels("a")), **dict.fromkeys(self.rights, named(self.labels("b")))}
        if self.epilogue is None:
            return {**dimensions, **dict.fromkeys(self.outputs, sums)}, frozenset()
        # An epilogue is of whole sums.
        contracted = {f"k_{i}" for i in range(self.contracted_ndim)}
        arrays = {**signature.operands, **signature.results}
        extras, outputs = ({name: len(arrays[name].shape) for name in names} for names in (self.extras, self.outputs))
        of_epilogue, whole = program_factors(self.epilogue.program, sums, extras, outputs, self.epilogue.in_place)
        return {**dimensions, **of_epilogue}, whole | contracted

    @property
    def on_one_device(self) -> Self:
        return self.replace(out_sharding=None)

    @property
    def fused(self) -> tuple[str, ...]:
        if self.unfused:
            return (f"not the epilogue: {self.unfused}",)
        return () if self.epilogue is None else self.epilogue.words

    def flops(self, signature: Signature) -> int:
        sizes = self.groups(signature.operands).values()
        return 2 * len(self.rights) * math.prod(size for group in sizes for size in group)


matmul = MultilinearOp(MatmulSpec)
