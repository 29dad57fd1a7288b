"""What a matmul is: `MatmulSpec`. Everything about its epilogue is `FusedSpec`'s."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray

from jaxdnn.engines.product.problem import Matrix, Product
from jaxdnn.plan import Operand
from jaxdnn.primitives._define import MultilinearOp, bind
from jaxdnn.primitives.fused.dtypes import allows_fast_accumulation, allows_rounding, gradient_dtype, summed
from jaxdnn.primitives.fused.sharding import explicit_sharding, rearranged
from jaxdnn.primitives.fused.spec import FusedSpec
from jaxdnn.primitives.matmul.dimensions import Dimensions, Labels, arrange
from jaxdnn.spec import Arrays, Signature, Typed


@dataclass(frozen=True, repr=False)
class MatmulSpec(FusedSpec):
    """epilogue(a @ b, operands...), or epilogue(a @ b0, a @ b1, operands...).

    Attributes:
      dimensions: of a, b and the result.
      algorithm: what JAX calls precision, in its canonical form.
    """

    op = "matmul"
    problems = (Product,)

    dimensions: Dimensions = Dimensions()
    algorithm: Any = None

    @property
    def exact(self) -> bool:
        """Whether float32 operands may not be rounded to tf32."""
        return not allows_rounding(self.algorithm)

    def shape(self, operands: Mapping[str, Typed]) -> tuple[int, ...]:
        return self.dimensions.shape(jnp.shape(operands["a"]), jnp.shape(operands[self.rhs[0]]))

    @property
    def groups(self) -> tuple[int, int, int]:
        batch, rows, columns, _ = self.seen_by_engines[0].counts.values()
        return batch, rows, columns

    @property
    def seen_by_engines(self) -> tuple[Dimensions, tuple[str, ...]]:
        """The dimensions of the product that engines see, and the names of its a and b.

        Where one matrix multiplies many vectors (`jax.vmap(lambda x: w @ x)`), they are the rows of a, and it is b.
        """
        theirs = self.dimensions.of_vectors()  # never of two b, which are matrices
        return (theirs, (self.rhs[0], "a")) if theirs else (self.dimensions, ("a", *self.rhs))

    def multiply(self, a: jax.Array, b: jax.Array, dtype: str) -> jax.Array:
        of_a, of_b, of_y = (self.dimensions.labels(which) for which in ("a", "b", "y"))
        numbers = self.dimensions.numbers
        batch = [of_a[i] for i in numbers[1][0]]
        got = [*batch, *(label for label in (*of_a, *of_b) if label in of_y and label not in batch)]
        sharding = rearranged(self.sharding, [of_y.index(label) for label in got])
        y = summed(a, b, numbers, self.algorithm, self.accumulator, sharding, dtype)
        return y if tuple(got) == of_y else jnp.transpose(y, list(map(got.index, of_y)))

    def mapped_product(self, axes: Mapping[str, int | None]) -> tuple[Self, Mapping[str, int]]:
        # More rows if a alone carries the axis, so that b is read once; else one more batch dimension.
        of_b = next((axes[name] for name in self.rhs if axes[name] is not None), None)
        carried = (axes["a"] is not None or of_b is None, of_b is not None)
        reduces = self.epilogue is not None and any(output.reduction for output in self.epilogue.program.outputs)
        if carried == (True, False) and not self.dimensions.batched and not reduces:
            new, dimensions = ("m", 0), self.dimensions.with_rows()
        else:
            new, dimensions = ("b", 0), self.dimensions.with_batch(axes["a"], of_b, carried)
        own = {"a": dimensions.labels("a"), **dict.fromkeys(self.rhs, dimensions.labels("b"))}
        places = {name: labels.index(new) for name, labels in own.items() if new in labels}
        return self.replace(dimensions=dimensions), places

    def untransposed(self, orders: Mapping[str, Sequence[int]]) -> tuple[Self, tuple[str, ...]]:
        dimensions, taken = self.dimensions, []
        sides: dict[Literal["a", "b"], tuple[str, ...]] = {"a": ("a",), "b": self.rhs}
        for which, names in sides.items():
            ways = {(*(self.carries[name]), *orders.get(name, ())) for name in names}
            mapped, order = sum(self.carries[names[0]]), tuple(orders.get(names[0], ()))
            if len(ways) != 1 or not order or order[:mapped] != tuple(range(mapped)):
                continue
            labels = dict(zip(order[mapped:], dimensions.labels(which), strict=True))
            found = dimensions.lying(which, tuple(labels[number] for number in sorted(labels)))
            if found is not None:
                dimensions, taken = found, [*taken, *names]
        return self.replace(dimensions=dimensions), tuple(taken)

    def transpose_product(
        self, name: str, wanted: ShapedArray, cotangent: jax.Array, operands: Mapping[str, Any]
    ) -> Arrays:
        which, other = ("a", "b") if name == "a" else ("b", "a")
        dtype = gradient_dtype(operands[other].dtype)
        gradient = contract(
            self.plain(wanted.dtype.name).replace(sharding=explicit_sharding(wanted)),
            (cotangent.astype(dtype), self.dimensions.labels("y")),
            (operands[other].astype(dtype), self.dimensions.labels(other)),
            self.dimensions.labels(which),
        )
        return {name: gradient}

    @property
    def seen(self) -> tuple[Any, Mapping[str, Any]]:
        # Mapped axes come first, and those that both carry are more batch dimensions.
        carried = [self.carries[name] for name in ("a", self.rhs[0])]
        both = [level for level, flags in enumerate(zip(*carried, strict=True)) if all(flags)]
        sides = []
        for side, flags in enumerate(carried):
            contracting, batch = (of[side] for of in self.dimensions.numbers)
            own = (sum(flags[:level]) for level in both)
            sides.append([tuple(i + sum(flags) for i in contracting), (*own, *(i + sum(flags) for i in batch))])
        return lax.dot_general_p, {
            "dimension_numbers": tuple(zip(*sides, strict=True)),
            "precision": self.algorithm,
            "preferred_element_type": jnp.dtype(self.accumulator),
            "out_sharding": self.sharding,
        }

    def product_factors(self) -> tuple[Mapping[str, tuple[str, ...]], tuple[str, ...], frozenset[str], frozenset[str]]:
        a, b, y = (tuple(f"{g}_{i}" for g, i in self.dimensions.labels(which)) for which in ("a", "b", "y"))
        return {"a": a, **dict.fromkeys(self.rhs, b)}, y, frozenset(a) - frozenset(y), frozenset()

    def flops(self, signature: Signature) -> int:
        sizes = self.dimensions.sizes(*(self._shape(signature, name) for name in ("a", self.rhs[0])))
        mapped = next(iter(signature.results.values())).shape[: len(self.batch)]
        return 2 * len(self.rhs) * math.prod((*mapped, *sizes.values()))

    def _shape(self, signature: Signature, name: str) -> tuple[int, ...]:
        """That of a or b, without mapped axes."""
        return signature.operands[name].shape[sum(self.carries[name]) :]

    def problem(self, signature: Signature) -> Product | str:
        if signature.reason:
            return signature.reason
        dimensions, names = self.seen_by_engines
        shapes = [self._shape(signature, name) for name in names[:2]]
        fused = self.fused_problem(signature, dimensions.shape(*shapes))
        if isinstance(fused, str):
            return fused
        groups = dimensions.groups(*shapes)
        matrices: list[Matrix] = []
        for name in names:
            matrix = _matrix(name, dimensions, 0 if name == names[0] else 1, signature, groups)
            if isinstance(matrix, str):
                return matrix
            matrices.append(matrix)
        program, operands, results = fused
        a_order, b_order = dimensions.a_order, dimensions.b_order
        return Product(
            m=math.prod(groups["m"]),
            n=math.prod(groups["n"]),
            k=math.prod(groups["k"]),
            batch=math.prod(groups["b"]),
            a=matrices[0],
            b=tuple(matrices[1:]),
            program=program,
            results=results,
            operands=operands,
            a_transposed=a_order.index("k") < a_order.index("m"),
            b_transposed=b_order.index("n") < b_order.index("k"),
            exact=self.exact,
            fast=allows_fast_accumulation(self.algorithm),
        )


matmul = MultilinearOp(MatmulSpec)


def contract(
    spec: MatmulSpec, left: tuple[jax.Array, Labels], right: tuple[jax.Array, Labels], result: Labels
) -> jax.Array:
    """The sum over what `result` lacks of the product of two arrays, each given with its labels.

    `spec` is a plain one, whose dimensions are replaced.
    """
    batch, natural = tuple(label for label in result if label in left[1] and label in right[1]), ()
    for first, second in ((left, right), (right, left)):
        free = [[label for label in result if label in of and label not in batch] for _, of in (first, second)]
        natural = (*batch, *free[0], *free[1])
        if natural == result:
            break
    order = list(map(natural.index, result))
    dimensions, (a, b) = arrange(first, (second,), natural, batch)
    sharding = rearranged(spec.sharding, list(map(result.index, natural)))
    y = bind(spec.replace(dimensions=dimensions, sharding=sharding), {"a": a, "b": b})["y"]
    return y if natural == result else jnp.transpose(y, order)


def _matrix(
    name: str, dimensions: Dimensions, side: int, signature: Signature, groups: Mapping[str, tuple[int, ...]]
) -> Matrix | str:
    """One of the matrices that are multiplied, the left one or a right one, or why it is none."""
    order = (dimensions.a_order, dimensions.b_order)[side]
    pairs = zip(dimensions.batched, groups["b"], strict=True)
    carried = [flags[side] for flags, size in pairs if size != 1]
    if any(carried) and not all(carried):
        return f"{name} carries some of the batch dimensions and not others"
    lengths = {group: math.prod(sizes) for group, sizes in groups.items()}
    if not any(carried):
        lengths["b"] = 1
    strides, step = {}, 1
    for group in reversed(order):
        strides[group] = step
        step *= lengths[group]
    outer, inner = (group for group in order if group != "b")
    if strides[inner] != 1:
        return f"the batch is the innermost dimension of {name}"
    batch_stride = strides["b"] if any(carried) else 0
    buffer, dtype = Operand(signature.operand_index(name)), signature.operands[name].dtype.name
    return Matrix(buffer, dtype, lengths[outer], lengths[inner], strides[outer], batch_stride)
