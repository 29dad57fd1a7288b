"""Transposes that operands are: an array and the order of its dimensions."""

from collections.abc import Mapping, Sequence
from math import prod

from jaxdnn.spec import Spec

Order = Sequence[int]  # for each dimension of the transpose, the number of the array's


def composed(outer: Order, inner: Order) -> Order:
    """Of the transpose of a transpose."""
    return [inner[number] for number in outer]


def inverse(order: Order) -> Sequence[int]:
    """Of the array, for each of its dimensions the number of the transpose's."""
    return sorted(range(len(order)), key=order.__getitem__)


def turned_results(spec: Spec, turned: Spec) -> Mapping[str, Order]:
    """Of results that lie otherwise since `spec.untransposed` made it `turned`."""
    return {name: order for name, order in turned.result_orders.items() if name not in spec.result_orders}


def split(order: Order, before: Sequence[int], after: Sequence[int]) -> tuple[Sequence[int], Order] | None:
    """A transpose, of shape `before`, whose dimensions are split to those of `after`, as the transpose of an array
    whose dimensions are: its shape, and its order. None if a dimension is a part of two.
    """
    parts: list[list[int]] = []
    place = 0
    for size in before:
        first = place
        while place < len(after) and (place == first or prod(after[first:place]) < size):
            place += 1
        # Of dimensions of size one those come along that are more than there were.
        while place < len(after) and after[place] == 1 and len(after) - place > len(before) - len(parts) - 1:
            place += 1
        if prod(after[first:place]) != size:
            return None
        parts.append(list(range(first, place)))
    if place != len(after):
        return None
    lying = [part for _, part in sorted(zip(order, parts, strict=True))]
    dimensions = [dimension for part in lying for dimension in part]
    return [after[dimension] for dimension in dimensions], [dimensions.index(d) for d in range(len(after))]
