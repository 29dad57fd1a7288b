"""Products whose sharding the caller states, and XLA's partitioner brings about."""

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
    of_jax: Callable[..., jax.Array],
    product: Callable[..., jax.Array],
    factors: tuple[jax.typing.ArrayLike, jax.typing.ArrayLike],
    preferred: jax.typing.DTypeLike | None,
    operands: Sequence[jax.typing.ArrayLike],
    epilogue: Callable[..., Any] | None,
    out_dtype: jax.typing.DTypeLike | None,
    aliases: Mapping[int, int],
) -> Any:
    """The epilogue of a product of `factors` that lies as the caller states.

    Of both functions, which take a `preferred_element_type`, JAX's has that sharding, and says what is wrong with it.
    Ours is split by the partitioner. What it sums over devices is in the result's dtype, or where an epilogue follows
    in the accumulator's, which nothing has rounded before the sum. `caller` is the public function, for messages.
    """
    operands = checked_operands(caller, epilogue, operands, 1)
    if epilogue is not None and not current_options().fallback:
        raise NoEngineError(
            f"{caller}: with out_sharding the epilogue follows the kernel, which options(fallback=False) forbids"
        )
    if aliases:
        raise ValueError(
            f"{caller}: with out_sharding the epilogue follows the kernel, without input_output_aliases; drop one of "
            f"the two"
        )
    (type_of,) = jax.make_jaxpr(partial(of_jax, preferred_element_type=preferred))(*factors).out_avals
    dtype = type_of.dtype if epilogue is None else accumulator(type_of.dtype, type_of.dtype)
    acc = partitioned(partial(product, preferred_element_type=dtype), type_of.sharding)(*factors)
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
