"""A program in plain JAX, on arrays of any size: what a function that was traced once computes of a device's share."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxdnn.pointwise.program import Index, Instruction, Load, Output, Program

# Operations that `jax.lax` knows by another name.
_RENAMED: dict[str, Callable[..., Any]] = {
    "and": lax.bitwise_and,
    "or": lax.bitwise_or,
    "xor": lax.bitwise_xor,
    "not": lax.bitwise_not,
    "round_half_even": partial(lax.round, rounding_method=lax.RoundingMethod.TO_NEAREST_EVEN),
    "round_half_away": partial(lax.round, rounding_method=lax.RoundingMethod.AWAY_FROM_ZERO),
}
_REDUCTIONS = {"sum": lax.reduce_sum, "max": lax.reduce_max, "min": lax.reduce_min}


def evaluate(
    program: Program,
    shape: Sequence[int],
    accumulators: Sequence[jax.Array],
    operands: Sequence[jax.Array],
    found: Mapping[Load, jax.Array] = MappingProxyType({}),
) -> tuple[jax.Array, ...]:
    """The program's outputs.

    Args:
      program: as it was traced, not collapsed.
      shape: of the whole output here.
      accumulators: arrays of that shape.
      operands: the others.
      found: what some loads have loaded, in arrays of that shape.
    """

    def value(instruction: Instruction, arguments: Sequence[jax.Array]) -> jax.Array:
        match instruction.operation, instruction.immediate:
            case "accumulator", int(number):
                return accumulators[number]
            case "operand", Load() as load:
                return found[load] if load in found else loaded(load, operands[load.operand], shape, arguments)
            case "index", Index() as index:
                return lax.broadcasted_iota(instruction.dtype, tuple(shape), index.dimension)
            case "literal", _:
                return jnp.full(tuple(shape), jnp.asarray(instruction.literal))
            case "convert", _:
                return lax.convert_element_type(arguments[0], instruction.dtype)
        operation = _RENAMED.get(instruction.operation) or getattr(lax, instruction.operation)
        return operation(*arguments)

    values: list[jax.Array] = []
    for instruction in program.instructions:
        values.append(value(instruction, [values[argument] for argument in instruction.arguments]))
    return tuple(_stored(output, values[output.value]) for output in program.outputs)


def loaded(load: Load, array: jax.Array, shape: Sequence[int], indices: Sequence[jax.Array] = ()) -> jax.Array:
    """The operand's element for each of the output's; of a dimension that is gathered, the one that an index says."""
    if load.gathered:
        places = {
            d: lax.broadcasted_iota("int32", tuple(shape), o) for o, d in enumerate(load.dimensions) if d is not None
        }
        places |= dict(zip(load.gathered, indices, strict=True))
        zeros = jnp.zeros(tuple(shape), "int32")
        return array.at[tuple(places.get(d, zeros) for d in range(array.ndim))].get(mode="clip")
    along = [d for d in load.dimensions if d is not None]
    array = lax.squeeze(array, [d for d in range(array.ndim) if d not in along])
    order = [sorted(along).index(d) for d in along]
    places = [place for place, d in enumerate(load.dimensions) if d is not None]
    return lax.broadcast_in_dim(lax.transpose(array, order), tuple(shape), places)


def _stored(output: Output, value: jax.Array) -> jax.Array:
    """The value as the array that the function returns."""
    if output.reduction is None:
        return value.astype(output.dtype)
    reduced = _REDUCTIONS[output.reduction](value, output.axes)
    kept = [d for d in range(value.ndim) if d not in output.axes]
    long = [d for d in output.dimensions if d is not None]
    reduced = lax.squeeze(reduced, [place for place, d in enumerate(kept) if d not in long])
    rest = [d for d in kept if d in long]
    arranged = lax.transpose(reduced, [rest.index(d) for d in long])
    ones = [place for place, d in enumerate(output.dimensions) if d is None]
    return lax.expand_dims(arranged, ones).astype(output.dtype)
