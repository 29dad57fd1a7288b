"""Products whose sharding the caller states: XLA's partitioner finds out how, so the product is XLA's as well."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
from jax.core import ShapedArray
from jax.sharding import AxisType, NamedSharding, PartitionSpec, auto_axes

from jaxdnn.config import current_options
from jaxdnn.planning.select import NoEngineError
from jaxdnn.primitives.fused.dtypes import accumulator, as_weak, checked_dtype
from jaxdnn.primitives.fused.epilogue import apply_after, checked_operands
from jaxdnn.primitives.fused.traced import located


def sharded_product(
    caller: str,
    product: Callable[..., jax.Array],
    preferred: jax.typing.DTypeLike | None,
    operands: Sequence[jax.typing.ArrayLike],
    epilogue: Callable[..., Any] | None,
    out_dtype: jax.typing.DTypeLike | None,
    aliases: Mapping[int, int],
) -> Any:
    """The epilogue of a product, a function of `preferred_element_type` that states its own sharding.

    `caller` is the public function, for messages.
    """
    operands = checked_operands(caller, epilogue, operands, 1)
    if not current_options().fallback:
        raise NoEngineError(f"{caller}: with out_sharding the call is XLA's, which options(fallback=False) forbids")
    if aliases:
        raise ValueError(
            f"{caller}: with out_sharding the call is XLA's, without input_output_aliases; drop one of the two"
        )
    type_of = jax.eval_shape(partial(product, preferred_element_type=preferred))
    acc = product(preferred_element_type=accumulator(type_of.dtype, type_of.dtype))
    function = epilogue and located(epilogue)
    dtype = checked_dtype(f"{caller}: out_dtype", out_dtype) or type_of.dtype.name
    y = apply_after([acc], operands, function, dtype)
    return as_weak(y, type_of, epilogue, out_dtype)


def explicit_sharding(aval: ShapedArray) -> NamedSharding | None:
    """The sharding of an array's type, if axes of its mesh are explicit, so that types carry it."""
    return aval.sharding if AxisType.Explicit in aval.sharding.mesh.axis_types else None


def partitioned(function: Callable[..., jax.Array], sharding: NamedSharding) -> Callable[..., jax.Array]:
    """A function that has no type where axes of a mesh are explicit: the partitioner finds out how its result comes to
    lie as `sharding` says.
    """
    typed: Any = auto_axes(function, axes=sharding.mesh.explicit_axes, out_sharding=sharding)  # manual ones stay so
    return typed


def rearranged(sharding: NamedSharding | None, dimensions: Sequence[int]) -> NamedSharding | None:
    """The sharding of an array whose dimensions are these ones of an array of `sharding`."""
    if sharding is None:
        return None
    return sharding.update(spec=PartitionSpec(*(sharding.spec[d] for d in dimensions)))
