"""Dimensions of the arrays of a matmul: labels and groups. `arrange` makes matrices of them, `contract` multiplies.

A dimension of an array goes by a label, which two arrays share where they have that dimension in common. Labels fall in
four groups: "b" (batch: in the result, and in one operand or both), "m" (rows: in a and the result), "n" (columns: in b
and the result) and "k" (contracted: in a and b).
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec, get_abstract_mesh

Labels = tuple[Hashable, ...]

# Orders of an operand's groups in which it is a matrix, or a batch of them, as it lies in memory.
_A_ORDERS = ("bmk", "bkm", "mbk", "kbm")
_B_ORDERS = ("bkn", "bnk", "nbk", "kbn")


def arrange(
    spec: Any, left: tuple[Any, Labels], rights: Sequence[tuple[Any, Labels]], result: Labels, batch: Labels
) -> tuple[Any, list[Any]]:
    """`spec` with the dimensions of a contraction, and the arrays, transposed where their order is no matrix's.

    Args:
      spec: a `MatmulSpec`, whose dimensions are replaced.
      left: a and its labels.
      rights: every b and its labels, which are the same.
      result: the labels of the result: `batch`, then those of the rows, then those of the columns.
      batch: labels that a or b may lack.
    """
    of_a, of_b = left[1], rights[0][1]
    groups = {
        "m": tuple(label for label in result if label in of_a and label not in batch),
        "n": tuple(label for label in result if label in of_b and label not in batch),
    }

    def ordered(of: Labels, orders: Sequence[str], contracted: Labels) -> str | None:
        own = {**groups, "b": tuple(label for label in batch if label in of), "k": contracted}
        return next((order for order in orders if of == tuple(label for group in order for label in own[group])), None)

    def contracted_as(of: Labels) -> Labels:
        return tuple(label for label in of if label in of_a and label in of_b and label not in batch)

    def both(contracted: Labels) -> tuple[str | None, str | None]:
        return ordered(of_a, _A_ORDERS, contracted), ordered(of_b, _B_ORDERS, contracted)

    contracted = next((ks for ks in map(contracted_as, (of_a, of_b)) if None not in both(ks)), contracted_as(of_a))
    a_order, b_order = both(contracted)
    arrays = [left[0], *(array for array, _ in rights)]
    if a_order is None:
        target = (*(label for label in batch if label in of_a), *groups["m"], *contracted)
        arrays[0] = jnp.transpose(arrays[0], list(map(of_a.index, target)))
    if b_order is None:
        target = (*(label for label in batch if label in of_b), *contracted, *groups["n"])
        arrays[1:] = [jnp.transpose(array, list(map(of_b.index, target))) for array in arrays[1:]]
    spec = spec.replace(
        a_order=a_order or _A_ORDERS[0],
        b_order=b_order or _B_ORDERS[0],
        batched=tuple((label in of_a, label in of_b) for label in batch),
        row_ndim=len(groups["m"]),
        column_ndim=len(groups["n"]),
        contracted_ndim=len(contracted),
        pair=len(rights) == 2,
    )
    return spec, arrays


def contract(
    matmul: Callable[..., Any], spec: Any, left: tuple[Any, Labels], right: tuple[Any, Labels], result: Labels
) -> Any:
    """The sum over what `result` lacks of the product of two arrays, each given with its labels.

    `spec` is a plain `MatmulSpec`, whose dimensions are replaced; `matmul` applies it.
    """
    batch, natural = tuple(label for label in result if label in left[1] and label in right[1]), ()
    for first, second in ((left, right), (right, left)):
        free = [[label for label in result if label in of and label not in batch] for _, of in (first, second)]
        natural = (*batch, *free[0], *free[1])
        if natural == result:
            break
    order = list(map(natural.index, result))
    spec = spec.replace(out_sharding=rearranged(spec.out_sharding, list(map(result.index, natural))))
    arranged, (a, b) = arrange(spec, first, (second,), natural, batch)
    y = matmul(arranged, {"a": a, "b": b})["y"]
    return y if natural == result else jnp.transpose(y, order)


def with_batch(order: str, counts: Mapping[str, int], axis: int | None) -> str:
    """`order` with a batch, for which there was none, where the mapped axis is, or else in front."""
    first, second = order.replace("b", "")
    return f"{first}b{second}" if axis == counts[first] and axis else f"b{first}{second}"


def moved(array: Any, axis: int | None, place: int | None, size: int) -> jax.ShapeDtypeStruct:
    """The type of an array whose mapped axis, of `size`, has gone to `place`."""
    shape = [length for i, length in enumerate(jnp.shape(array)) if i != axis]
    if place is not None:
        shape.insert(place, size)
    return jax.ShapeDtypeStruct(tuple(shape), array.dtype)


def explicit_sharding(aval: Any) -> NamedSharding | None:
    """The sharding of an array's type, if axes of the mesh are explicit, so that types carry it."""
    mesh = get_abstract_mesh()
    if AxisType.Explicit not in mesh.axis_types:
        return None
    return NamedSharding(mesh, PartitionSpec(*aval.sharding.spec))


def rearranged(sharding: NamedSharding | None, dimensions: Sequence[int | None]) -> NamedSharding | None:
    """The sharding of an array whose dimensions are these ones of an array of `sharding`; None for a new one."""
    if sharding is None:
        return None
    split = [None if d is None or d >= len(sharding.spec) else sharding.spec[d] for d in dimensions]
    return NamedSharding(sharding.mesh, PartitionSpec(*split))
