"""Products of matrices with fused epilogues: `matmul`, `dot_general` and `gated_linear_unit`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Concatenate, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxdnn.api_boundary import api_boundary
from jaxdnn.primitives.arguments import as_array
from jaxdnn.primitives.fused.aliases import checked_aliases
from jaxdnn.primitives.fused.dtypes import as_weak, checked_dtype, preferred_type, promoted
from jaxdnn.primitives.fused.messages import described
from jaxdnn.primitives.fused.sharding import sharded_product
from jaxdnn.primitives.matmul.call import apply, product_spec, product_type, wrong_form
from jaxdnn.primitives.matmul.dimensions import Labels

R = TypeVar("R")  # what an epilogue returns


@overload
def matmul(
    a: jax.typing.ArrayLike,
    b: jax.typing.ArrayLike,
    *,
    epilogue: None = None,
    out_dtype: jax.typing.DTypeLike | None = None,
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
    input_output_aliases: Mapping[int, int] | None = None,
) -> jax.Array: ...


@overload
def matmul(
    a: jax.typing.ArrayLike,
    b: jax.typing.ArrayLike,
    *operands: jax.typing.ArrayLike,
    epilogue: Callable[Concatenate[jax.Array, ...], R],
    out_dtype: jax.typing.DTypeLike | None = None,
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
    input_output_aliases: Mapping[int, int] | None = None,
) -> R: ...


@api_boundary(
    "matmul",
    activation="write epilogue=lambda acc: jax.nn.gelu(acc)",
    bias="write matmul(a, b, bias, epilogue=lambda acc, bias: acc + bias)",
)
def matmul(
    a: jax.typing.ArrayLike,
    b: jax.typing.ArrayLike,
    *operands: jax.typing.ArrayLike,
    epilogue: Callable[..., Any] | None = None,
    out_dtype: jax.typing.DTypeLike | None = None,
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
    input_output_aliases: Mapping[int, int] | None = None,
) -> Any:
    """The product of two arrays, as `jax.numpy.matmul` defines it, with a function of it computed in the same kernel.

    Products are summed in float32 (float64 for float64, int32 for small integers), and `epilogue` is applied to the
    accumulators before anything is rounded or stored. Where its derivative needs them they are stored as well: in the
    operands' dtype, or unrounded if results are wider or accumulators might not fit (float16, integers).

    Args:
      a: array of shape (..., m, k), or (k,).
      b: array of shape (..., k, n), or (k,). Dimensions in front of the matrices broadcast.
      *operands: further arrays for the epilogue: scalars, biases, residuals, scales, ...
      epilogue: called as `epilogue(accumulator, *operands)`, once, with tracers. `accumulator` has the product's whole
        shape; JAX's elementwise functions and broadcasts become part of the kernel. It returns one array or a pytree of
        them, each of the product's shape, or as its last step a sum, maximum or minimum of such an array over rows,
        columns or everything. What can't be fused runs after the kernel instead; `explain` tells, and
        `options(fallback=False)` makes it an error.
      out_dtype: what results that the epilogue leaves in the accumulator's dtype are rounded to; reductions, and
        results that it casts itself, keep theirs. None for `preferred_element_type`, or else the promoted dtype of a
        and b.
      precision: as `jax.lax.dot_general` takes it. For float32 on GPUs, only HIGHEST forbids tf32; of float8, only an
        algorithm with fast accumulation, such as `jax.lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32_FAST_ACCUM`, lets
        Hopper's tensor cores sum with 14 bits.
      preferred_element_type: the result's dtype; the accumulator has at least this one.
      out_sharding: as `jax.numpy.matmul` takes it. With it, the epilogue follows the kernel, and its sum over devices.
      input_output_aliases: numbers of operands, and of the results (as the epilogue returns them, flattened) that are
        to take their place in memory, as `jax.ffi.ffi_call` has it. Each two have one shape and dtype. It changes
        memory, never results: an operand that is donated, or needed no more, gives its buffer to the result; one that
        lives on is copied before, which without an alias it would not be.

    Returns:
      The product, or what the epilogue returns.

    Raises:
      TypeError: a or b is no array of numbers, the epilogue returns no array or closes over a traced one, or an operand
        would be taken for a setting: a parameter with a default, as `negative_slope` of `jax.nn.leaky_relu` is.
      ValueError: shapes do not fit, the epilogue has side effects, holds an array of several elements, or returns
        another shape, or a result can't take the place of an operand.
      jaxdnn.NoEngineError, jaxdnn.UnsupportedOperation: under `options(fallback=False)`, no kernel serves the call.

    Example:
      >>> import jax, jax.numpy as jnp, jaxdnn
      >>> x, w, bias = jnp.ones((4, 8)), jnp.ones((8, 16)), jnp.zeros(16)
      >>> y = jaxdnn.matmul(x, w, bias, epilogue=lambda acc, bias: jax.nn.gelu(acc + bias))
      >>> y, largest = jaxdnn.matmul(x, w, epilogue=lambda acc: (acc, jnp.max(jnp.abs(acc))))
      >>> y.shape, float(largest)
      ((4, 16), 8.0)

      Gradients are accumulated where they lie:

      >>> accumulate = lambda acc, total: total + acc
      >>> step = lambda total, x, dy: jaxdnn.matmul(x.T, dy, total, epilogue=accumulate, input_output_aliases={0: 0})
      >>> total = jax.jit(step, donate_argnums=0)(jnp.zeros((8, 16)), x, y)
    """
    aliases = checked_aliases("matmul", input_output_aliases, operands, epilogue)
    preferred = preferred_type("matmul", a, b, preferred_element_type)
    if out_sharding is not None:
        of_jax = partial(jnp.matmul, precision=precision, out_sharding=out_sharding)
        ours = partial(matmul, precision=precision)
        return sharded_product("matmul", of_jax, ours, (a, b), preferred, operands, epilogue, out_dtype, aliases)
    type_of = product_type("matmul", {"a": a, "b": b}, precision, preferred)
    dtype = type_of.dtype
    a, b = promoted(a, b, dtype)

    count = max(a.ndim, b.ndim, 2) - 2
    of_a, of_b = (_matmul_labels(array, count, side) for side, array in enumerate((a, b)))
    a, of_a = _without_stretched(a, of_a, b, of_b)
    b, of_b = _without_stretched(b, of_b, a, of_a)
    leading = tuple(label for label in range(count) if label in of_a or label in of_b)
    # Dimensions of a alone that come after all of b's are more rows.
    batch = leading[: max((i + 1 for i, label in enumerate(leading) if label in of_b), default=0)]
    result = (*leading, *(label for label in ("rows", "columns") if label in (*of_a, *of_b)))
    spec = product_spec(a.dtype, b.dtype, dtype, precision)
    y = apply("matmul", spec, (a, of_a), [(b, of_b)], result, batch, operands, epilogue, out_dtype, aliases)
    return as_weak(y, type_of, epilogue, out_dtype)


@overload
def dot_general(
    lhs: jax.typing.ArrayLike,
    rhs: jax.typing.ArrayLike,
    dimension_numbers: Any,
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    *,
    operands: Sequence[jax.typing.ArrayLike] = (),
    epilogue: None = None,
    out_dtype: jax.typing.DTypeLike | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
    input_output_aliases: Mapping[int, int] | None = None,
) -> jax.Array: ...


@overload
def dot_general(
    lhs: jax.typing.ArrayLike,
    rhs: jax.typing.ArrayLike,
    dimension_numbers: Any,
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    *,
    operands: Sequence[jax.typing.ArrayLike] = (),
    epilogue: Callable[Concatenate[jax.Array, ...], R],
    out_dtype: jax.typing.DTypeLike | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
    input_output_aliases: Mapping[int, int] | None = None,
) -> R: ...


@api_boundary(
    "dot_general",
    activation="write epilogue=lambda acc: jax.nn.gelu(acc)",
    bias="write operands=[bias], epilogue=lambda acc, bias: acc + bias",
)
def dot_general(
    lhs: jax.typing.ArrayLike,
    rhs: jax.typing.ArrayLike,
    dimension_numbers: Any,
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    *,
    operands: Sequence[jax.typing.ArrayLike] = (),
    epilogue: Callable[..., Any] | None = None,
    out_dtype: jax.typing.DTypeLike | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
    input_output_aliases: Mapping[int, int] | None = None,
) -> Any:
    """The contraction that `jax.lax.dot_general` defines, with a function of it computed in the same kernel.

    Args:
      lhs: array.
      rhs: array.
      dimension_numbers: `((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch))`, each a sequence of dimensions.
      precision: as `jax.lax.dot_general` takes it.
      preferred_element_type: the result's dtype; the accumulator has at least this one.
      operands: further arrays for the epilogue.
      epilogue: as in `matmul`. The accumulator has the result's shape: batch dimensions, then those left of lhs, then
        those left of rhs.
      out_dtype: as in `matmul`.
      out_sharding: as `jax.lax.dot_general` takes it; else as in `matmul`.
      input_output_aliases: as in `matmul`.

    Returns:
      The contraction, or what the epilogue returns.

    Raises:
      TypeError, ValueError: as `jax.lax.dot_general` and `matmul` do.

    Example:
      >>> import jax.numpy as jnp, jaxdnn
      >>> queries, keys = jnp.ones((2, 5, 8)), jnp.ones((2, 7, 8))
      >>> numbers = (((2,), (2,)), ((0,), (0,)))
      >>> jaxdnn.dot_general(queries, keys, numbers, epilogue=lambda acc: acc / 8.0).shape
      (2, 5, 7)
    """
    aliases = checked_aliases("dot_general", input_output_aliases, operands, epilogue)
    preferred = checked_dtype("dot_general: preferred_element_type", preferred_element_type)
    settings = {"dimension_numbers": dimension_numbers, "precision": precision}
    if out_sharding is not None:
        of_jax, ours = partial(lax.dot_general, **settings, out_sharding=out_sharding), partial(dot_general, **settings)
        given = (lhs, rhs), preferred, operands, epilogue, out_dtype, aliases
        return sharded_product("dot_general", of_jax, ours, *given)
    with described("dot_general", {"lhs": lhs, "rhs": rhs}, wrong_form(dimension_numbers)):
        type_of = jax.eval_shape(partial(lax.dot_general, lhs, rhs, **settings, preferred_element_type=preferred))
    dtype = type_of.dtype
    lhs, rhs = promoted(lhs, rhs, dtype)

    if dimension_numbers is None:  # as `jax.lax` has it for vectors and matrices
        dimension_numbers = (((lhs.ndim - 1,), (0,)), ((), ()))
    # JAX takes a single dimension for a sequence of it.
    (lhs_contracted, rhs_contracted), (lhs_batch, rhs_batch) = (
        [[one] if isinstance(one, (int, np.integer)) else one for one in pair] for pair in dimension_numbers
    )
    of_lhs: list[tuple[str, int]] = [("lhs", i) for i in range(lhs.ndim)]
    of_rhs: list[tuple[str, int]] = [("rhs", i) for i in range(rhs.ndim)]
    for i, (left, right) in enumerate(zip(lhs_contracted, rhs_contracted, strict=True)):
        of_lhs[left] = of_rhs[right] = ("contracted", i)
    batch = tuple(("batch", i) for i in range(len(lhs_batch)))
    for label, left, right in zip(batch, lhs_batch, rhs_batch, strict=True):
        of_lhs[left] = of_rhs[right] = label
    result = (*batch, *(label for label in (*of_lhs, *of_rhs) if label[0] in ("lhs", "rhs")))
    spec = product_spec(lhs.dtype, rhs.dtype, dtype, precision)
    sides = (lhs, tuple(of_lhs)), [(rhs, tuple(of_rhs))]
    y = apply("dot_general", spec, *sides, result, batch, operands, epilogue, out_dtype, aliases)
    return as_weak(y, type_of, epilogue, out_dtype)


@api_boundary("gated_linear_unit", bias="gate_bias= and up_bias= are added to the two products")
def gated_linear_unit(
    x: jax.typing.ArrayLike,
    gate: jax.typing.ArrayLike,
    up: jax.typing.ArrayLike,
    gate_bias: jax.typing.ArrayLike | None = None,
    up_bias: jax.typing.ArrayLike | None = None,
    *,
    activation: Callable[[jax.Array], jax.Array] = jax.nn.silu,
    out_dtype: jax.typing.DTypeLike | None = None,
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
) -> jax.Array:
    """A gated linear unit, `activation(x @ gate + gate_bias) * (x @ up + up_bias)`, in one kernel that reads x once.

    With silu, the default, it is SwiGLU. See Shazeer, "GLU Variants Improve Transformer", arXiv:2002.05202.

    Args:
      x: array of shape (..., m, k), or (k,).
      gate: array of shape (k, n).
      up: array of gate's shape and dtype.
      gate_bias: array of shape (n,), or None for zero.
      up_bias: likewise.
      activation: an elementwise function, as `matmul` takes epilogues.
      out_dtype: as in `matmul`.
      precision: as in `matmul`.
      preferred_element_type: as in `matmul`.

    Returns:
      Array of shape (..., m, n).

    Raises:
      TypeError, ValueError: as `matmul` does; or gate and up differ in shape or dtype, or a bias has another shape.

    Example:
      >>> import jax.numpy as jnp, jaxdnn
      >>> jaxdnn.gated_linear_unit(jnp.ones((4, 8)), jnp.ones((8, 16)), jnp.ones((8, 16))).shape
      (4, 16)
    """
    caller = "gated_linear_unit"
    preferred = preferred_type(caller, x, gate, preferred_element_type)
    dtype = product_type(caller, {"x": x, "gate": gate}, precision, preferred).dtype
    gate, up = jnp.asarray(gate), as_array(f"{caller}: up", up)
    if gate.ndim != 2 or (gate.shape, gate.dtype) != (up.shape, up.dtype):
        types = f"{gate.dtype.name}{list(gate.shape)} and {up.dtype.name}{list(up.shape)}"
        raise ValueError(f"{caller}: gate and up must be two matrices of one shape (k, n) and one dtype; got {types}")
    if not callable(activation):
        raise TypeError(f"{caller}: activation must be a function of an array; got {activation!r}")
    given = {"gate_bias": gate_bias, "up_bias": up_bias}
    biases = {name: as_array(f"{caller}: {name}", b) for name, b in given.items() if b is not None}
    for name, bias in biases.items():
        if bias.shape != gate.shape[1:]:
            raise ValueError(f"{caller}: {name} must have shape {gate.shape[1:]}; got {bias.shape}")

    def gated(gate: jax.Array, up: jax.Array, *rest: jax.Array) -> jax.Array:
        added = dict(zip(biases, rest, strict=True))

        def biased(acc: jax.Array, name: str) -> jax.Array:
            return acc + jnp.broadcast_to(added[name].astype(acc.dtype), acc.shape) if name in added else acc

        return activation(biased(gate, "gate_bias")) * biased(up, "up_bias")

    name = getattr(activation, "__name__", type(activation).__name__)
    gated.__name__ = f"{name}(gate) * up"
    x, gate = promoted(x, gate, dtype)
    _, up = promoted(x, up, dtype)
    of_x = (*range(x.ndim - 1), "contracted")
    of_b = ("contracted", "columns")
    spec = product_spec(x.dtype, gate.dtype, dtype, precision)
    rhs = [(gate, of_b), (up, of_b)]
    result = (*of_x[:-1], "columns")
    return apply(caller, spec, (x, of_x), rhs, result, (), tuple(biases.values()), gated, out_dtype, {})


def _matmul_labels(array: jax.Array, count: int, side: int) -> Labels:
    """Leading dimensions are numbered from the left of the result; the others have names."""
    own = (("rows", "contracted"), ("contracted", "columns"))[side]
    if array.ndim == 1:
        return ("contracted",)
    return (*range(count - (array.ndim - 2), count), *own)


def _without_stretched(array: jax.Array, of: Labels, other: jax.Array, of_other: Labels) -> tuple[jax.Array, Labels]:
    """The array without the leading dimensions of size one that stretch to the other's."""
    sizes = dict(zip(of_other, other.shape, strict=True))
    stretched = [
        i
        for i, label in enumerate(of)
        if isinstance(label, int) and _is_one(array.shape[i]) and label in sizes and not _is_one(sizes[label])
    ]
    return lax.squeeze(array, stretched), tuple(label for i, label in enumerate(of) if i not in stretched)


def _is_one(size: object) -> bool:
    return isinstance(size, int) and size == 1
