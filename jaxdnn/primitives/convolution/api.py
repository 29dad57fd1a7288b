"""Convolutions with fused epilogues: `conv_general_dilated` and `conv_transpose`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Concatenate, TypeVar, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxdnn.api_boundary import api_boundary
from jaxdnn.primitives.convolution.arguments import arguments
from jaxdnn.primitives.convolution.call import apply
from jaxdnn.primitives.fused.aliases import checked_aliases
from jaxdnn.primitives.fused.dtypes import checked_dtype
from jaxdnn.primitives.fused.sharding import sharded_product

R = TypeVar("R")  # what an epilogue returns
Padding = str | Sequence[tuple[int, int]]


@overload
def conv_general_dilated(
    lhs: jax.Array,
    rhs: jax.Array,
    window_strides: Sequence[int],
    padding: Padding,
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
    *,
    operands: Sequence[jax.typing.ArrayLike] = (),
    epilogue: None = None,
    out_dtype: jax.typing.DTypeLike | None = None,
    flip_kernel: bool = False,
    input_output_aliases: Mapping[int, int] | None = None,
) -> jax.Array: ...


@overload
def conv_general_dilated(
    lhs: jax.Array,
    rhs: jax.Array,
    window_strides: Sequence[int],
    padding: Padding,
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
    *,
    operands: Sequence[jax.typing.ArrayLike] = (),
    epilogue: Callable[Concatenate[jax.Array, ...], R],
    out_dtype: jax.typing.DTypeLike | None = None,
    flip_kernel: bool = False,
    input_output_aliases: Mapping[int, int] | None = None,
) -> R: ...


@api_boundary(
    "conv_general_dilated",
    activation="write epilogue=lambda acc: jax.nn.relu(acc)",
    bias="write operands=[bias], epilogue=lambda acc, bias: acc + bias",
    groups="did you mean feature_group_count=?",
    stride="did you mean window_strides=?",
    strides="did you mean window_strides=?",
    dilation="did you mean rhs_dilation=?",
)
def conv_general_dilated(
    lhs: jax.Array,
    rhs: jax.Array,
    window_strides: Sequence[int],
    padding: Padding,
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
    *,
    operands: Sequence[jax.typing.ArrayLike] = (),
    epilogue: Callable[..., Any] | None = None,
    out_dtype: jax.typing.DTypeLike | None = None,
    flip_kernel: bool = False,
    input_output_aliases: Mapping[int, int] | None = None,
) -> Any:
    """The convolution that `jax.lax.conv_general_dilated` defines, with a function of it computed in the same kernel.

    Products are summed in float32 (float64 for float64, int32 for small integers), and `epilogue` is applied to the
    accumulators before anything is rounded or stored.

    Args:
      lhs: images, an array of `n + 2` dimensions: batch, features and n spatial ones, in any order.
      rhs: the filter, of as many: output features, input features (of a group) and n spatial ones. Like JAX's, this
        "convolution" does not reverse it.
      window_strides: one for each spatial dimension.
      padding: "SAME", "SAME_LOWER", "VALID", or a pair (low, high) for each spatial dimension. Negative ones cut off.
        For one such dimension also "CAUSAL": results depend on nothing that comes later.
      lhs_dilation: the distance of the places of lhs, which zeros are put between; None for ones.
      rhs_dilation: likewise.
      dimension_numbers: which dimensions are which, as `jax.lax.conv_general_dilated` takes it: three strings, as in
        `("NHWC", "HWIO", "NHWC")`, a `ConvDimensionNumbers`, or None for ("NCHW", "OIHW", "NCHW").
      feature_group_count: features come in so many groups, and those of the result see one group of lhs each.
      batch_group_count: likewise of the batch.
      precision: as `jax.lax.conv_general_dilated` takes it. For float32 on GPUs, only HIGHEST forbids tf32.
      preferred_element_type: the result's dtype; the accumulator has at least this one.
      out_sharding: as `jax.lax.conv_general_dilated` takes it. With it, the epilogue follows the kernel.
      operands: further arrays for the epilogue: biases, residuals, scales, ...
      epilogue: called as `epilogue(accumulator, *operands)`, once, with tracers. The accumulator has the result's
        shape. It returns what one of `matmul` may: arrays of that shape, and sums, maxima or minima of such over
        everything but the features, say, for the statistics of a batch norm.
      out_dtype: as in `matmul`.
      flip_kernel: whether the places of rhs are reversed, as in the convolution of mathematics.
      input_output_aliases: as in `matmul`.

    Returns:
      The convolution, or what the epilogue returns.

    Raises:
      TypeError, ValueError: as `jax.lax.conv_general_dilated` and `matmul` do.

    Example:
      >>> import jax, jax.numpy as jnp, jaxdnn
      >>> x, w, bias = jnp.ones((2, 8, 8, 3)), jnp.ones((3, 3, 3, 16)), jnp.zeros(16)
      >>> layout = ("NHWC", "HWIO", "NHWC")
      >>> jaxdnn.conv_general_dilated(
      ...     x, w, (1, 1), "SAME", dimension_numbers=layout,
      ...     operands=[bias], epilogue=lambda acc, bias: jax.nn.relu(acc + bias),
      ... ).shape
      (2, 8, 8, 16)
    """
    caller = "conv_general_dilated"
    aliases = checked_aliases(caller, input_output_aliases, operands, epilogue)
    settings: dict[str, Any] = {
        "window_strides": window_strides,
        "padding": padding,
        "lhs_dilation": lhs_dilation,
        "rhs_dilation": rhs_dilation,
        "dimension_numbers": dimension_numbers,
        "feature_group_count": feature_group_count,
        "batch_group_count": batch_group_count,
        "precision": precision,
        "preferred_element_type": checked_dtype(f"{caller}: preferred_element_type", preferred_element_type),
    }
    given = arguments(caller, lhs, rhs, flip_kernel, settings)
    if out_sharding is not None:
        preferred = settings.pop("preferred_element_type")
        rhs = lax.rev(rhs, given.numbers.rhs_spec[2:]) if flip_kernel else rhs
        of_jax = partial(lax.conv_general_dilated, **settings, out_sharding=out_sharding)
        ours = partial(conv_general_dilated, **settings)
        return sharded_product(caller, of_jax, ours, (lhs, rhs), preferred, operands, epilogue, out_dtype, aliases)
    return apply(caller, given, jnp.asarray(lhs), jnp.asarray(rhs), operands, epilogue, out_dtype, aliases)


@overload
def conv_transpose(
    lhs: jax.Array,
    rhs: jax.Array,
    strides: Sequence[int],
    padding: Padding,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    transpose_kernel: bool = False,
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    use_consistent_padding: bool = False,
    *,
    operands: Sequence[jax.typing.ArrayLike] = (),
    epilogue: None = None,
    out_dtype: jax.typing.DTypeLike | None = None,
    input_output_aliases: Mapping[int, int] | None = None,
) -> jax.Array: ...


@overload
def conv_transpose(
    lhs: jax.Array,
    rhs: jax.Array,
    strides: Sequence[int],
    padding: Padding,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    transpose_kernel: bool = False,
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    use_consistent_padding: bool = False,
    *,
    operands: Sequence[jax.typing.ArrayLike] = (),
    epilogue: Callable[Concatenate[jax.Array, ...], R],
    out_dtype: jax.typing.DTypeLike | None = None,
    input_output_aliases: Mapping[int, int] | None = None,
) -> R: ...


@api_boundary(
    "conv_transpose",
    activation="write epilogue=lambda acc: jax.nn.relu(acc)",
    bias="write operands=[bias], epilogue=lambda acc, bias: acc + bias",
    window_strides="did you mean strides=?",
)
def conv_transpose(
    lhs: jax.Array,
    rhs: jax.Array,
    strides: Sequence[int],
    padding: Padding,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    transpose_kernel: bool = False,
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    use_consistent_padding: bool = False,
    *,
    operands: Sequence[jax.typing.ArrayLike] = (),
    epilogue: Callable[..., Any] | None = None,
    out_dtype: jax.typing.DTypeLike | None = None,
    input_output_aliases: Mapping[int, int] | None = None,
) -> Any:
    """The transposed convolution that `jax.lax.conv_transpose` defines, with a function of it computed in the same
    kernel. It is computed as the input gradient of a convolution with these strides, without zeros between places.

    Args:
      lhs: as in `conv_general_dilated`; by default channels are last.
      rhs: likewise.
      strides: the distance of the places of lhs in the result, one for each spatial dimension.
      padding: as `jax.lax.conv_transpose` takes it.
      rhs_dilation: as in `conv_general_dilated`.
      dimension_numbers: likewise; None for ("NHWC", "HWIO", "NHWC").
      transpose_kernel: whether the places of rhs are reversed, and its features exchanged, as in a gradient.
      precision: as in `conv_general_dilated`.
      preferred_element_type: likewise.
      use_consistent_padding: as `jax.lax.conv_transpose` takes it.
      operands: as in `conv_general_dilated`.
      epilogue: likewise.
      out_dtype: likewise.
      input_output_aliases: likewise.

    Returns:
      The transposed convolution, or what the epilogue returns.

    Raises:
      TypeError, ValueError: as `jax.lax.conv_transpose` and `matmul` do.

    Example:
      >>> import jax.numpy as jnp, jaxdnn
      >>> jaxdnn.conv_transpose(jnp.ones((2, 8, 8, 16)), jnp.ones((2, 2, 16, 4)), (2, 2), "VALID").shape
      (2, 16, 16, 4)
    """
    caller = "conv_transpose"
    aliases = checked_aliases(caller, input_output_aliases, operands, epilogue)
    settings = {
        "strides": strides,
        "padding": padding,
        "rhs_dilation": rhs_dilation,
        "dimension_numbers": dimension_numbers,
        "transpose_kernel": transpose_kernel,
        "precision": precision,
        "preferred_element_type": checked_dtype(f"{caller}: preferred_element_type", preferred_element_type),
        "use_consistent_padding": use_consistent_padding,
    }
    given = arguments(caller, lhs, rhs, False, settings)
    return apply(caller, given, jnp.asarray(lhs), jnp.asarray(rhs), operands, epilogue, out_dtype, aliases)
