"""The dimensions of a matmul's arrays: labels and groups. `arrange` makes matrices of arrays with labels.

A dimension of an array goes by a label, which two arrays share where they have that dimension in common. Labels fall in
four groups: "b" (batch: in the result, and in one operand or both), "m" (rows: in a and the result), "n" (columns: in b
and the result) and "k" (contracted: in a and b).
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import jax
import jax.numpy as jnp
from jax.lax import DotDimensionNumbers

from jaxdnn.spec import changed

Labels = tuple[Hashable, ...]
Label = tuple[str, int]  # group and number
Which = Literal["a", "b", "y"]

# Orders of an operand's groups in which it is a matrix, or a batch of them, as it lies in memory.
_A_ORDERS = ("bmk", "bkm", "mbk", "kbm")
_B_ORDERS = ("bkn", "bnk", "nbk", "kbn")


@dataclass(frozen=True, repr=False)
class Dimensions:
    """Where the dimensions of a, of b and of their product ("y") are: y has those of the batch, of rows, of columns.

    Attributes:
      a_order, b_order: the groups of an operand's dimensions, in the order in which it has them.
      batched: for each batch dimension, whether a carries it, and whether b does.
      rows, columns, contracted: the number of dimensions in the other groups.
    """

    a_order: str = "bmk"
    b_order: str = "bkn"
    batched: tuple[tuple[bool, bool], ...] = ()
    rows: int = 1
    columns: int = 1
    contracted: int = 1

    def __repr__(self) -> str:
        return changed(self)

    @property
    def counts(self) -> Mapping[str, int]:
        """How many dimensions each group has."""
        return {"b": len(self.batched), "m": self.rows, "n": self.columns, "k": self.contracted}

    def labels(self, which: Which) -> tuple[Label, ...]:
        """The dimensions of an array, in order."""
        order = {"a": self.a_order, "b": self.b_order, "y": "bmn"}[which]
        found = tuple((group, i) for group in order for i in range(self.counts[group]))
        if which == "y":
            return found
        side = 0 if which == "a" else 1
        return tuple(label for label in found if label[0] != "b" or self.batched[label[1]][side])

    def sizes(self, a: Sequence[int], b: Sequence[int]) -> Mapping[Label, int]:
        """The size of each dimension, from the shapes of a and b."""
        return dict(zip((*self.labels("a"), *self.labels("b")), (*a, *b), strict=True))

    def shape(self, a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
        """The shape of y."""
        sizes = self.sizes(a, b)
        return tuple(sizes[label] for label in self.labels("y"))

    def groups(self, a: Sequence[int], b: Sequence[int]) -> Mapping[str, tuple[int, ...]]:
        """The sizes of each group's dimensions."""
        sizes = self.sizes(a, b)
        return {group: tuple(sizes[group, i] for i in range(count)) for group, count in self.counts.items()}

    @property
    def numbers(self) -> DotDimensionNumbers:
        """As `lax.dot_general` takes them."""
        a, b, y = (self.labels(which) for which in ("a", "b", "y"))
        batch = [label for label in y if label in a and label in b]
        contracted = [label for label in a if label not in y]
        return (
            (tuple(map(a.index, contracted)), tuple(map(b.index, contracted))),
            (tuple(map(a.index, batch)), tuple(map(b.index, batch))),
        )

    def lying(self, which: Literal["a", "b"], labels: Labels) -> "Dimensions | None":
        """These with an operand whose dimensions lie in the order of `labels`, if that is a matrix's."""
        if which == "a":
            ways = [replace(self, a_order=order) for order in _A_ORDERS]
        else:
            ways = [replace(self, b_order=order) for order in _B_ORDERS]
        return next((way for way in ways if way.labels(which) == labels), None)

    def with_rows(self) -> "Dimensions":
        """With one more dimension of rows, the first one."""
        return replace(self, rows=self.rows + 1)

    def with_batch(self, a_axis: int | None, b_axis: int | None, carried: tuple[bool, bool]) -> "Dimensions":
        """With one more batch dimension, the first one, which comes from these places in a and in b."""
        of_a, of_b = (any(flags[side] for flags in self.batched) for side in (0, 1))
        return replace(
            self,
            batched=(carried, *self.batched),
            a_order=self.a_order if of_a else self._batch_placed(self.a_order, a_axis),
            b_order=self.b_order if of_b else self._batch_placed(self.b_order, b_axis),
        )

    def of_vectors(self) -> "Dimensions | None":
        """Of a batch of vectors of b times one a: those of the product of all of them with it; else None."""
        if self.columns or not self.batched or any(flags != (False, True) for flags in self.batched):
            return None
        vectors = "b" + self.b_order.replace("n", "").replace("b", "m")
        matrix = "b" + self.a_order.replace("b", "").replace("m", "n")
        return Dimensions(vectors, matrix, (), rows=len(self.batched), columns=self.rows, contracted=self.contracted)

    def _batch_placed(self, order: str, axis: int | None) -> str:
        """`order` with a batch, for which there was none, where the mapped axis is, or else in front."""
        first, second = order.replace("b", "")
        return f"{first}b{second}" if axis == self.counts[first] and axis else f"b{first}{second}"


def arrange(
    left: tuple[jax.Array, Labels], rhs: Sequence[tuple[jax.Array, Labels]], result: Labels, batch: Labels
) -> tuple[Dimensions, list[jax.Array]]:
    """The dimensions of a contraction, and its arrays, transposed where their order is no matrix's.

    Args:
      left: a and its labels.
      rhs: every b and its labels, which are the same.
      result: the labels of the result: `batch`, then those of the rows, then those of the columns.
      batch: labels that a or b may lack.
    """
    of_a, of_b = left[1], rhs[0][1]
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
    arrays = [left[0], *(array for array, _ in rhs)]
    if a_order is None:
        target = (*(label for label in batch if label in of_a), *groups["m"], *contracted)
        arrays[0] = jnp.transpose(arrays[0], list(map(of_a.index, target)))
    if b_order is None:
        target = (*(label for label in batch if label in of_b), *contracted, *groups["n"])
        arrays[1:] = [jnp.transpose(array, list(map(of_b.index, target))) for array in arrays[1:]]
    dimensions = Dimensions(
        a_order=a_order or _A_ORDERS[0],
        b_order=b_order or _B_ORDERS[0],
        batched=tuple((label in of_a, label in of_b) for label in batch),
        rows=len(groups["m"]),
        columns=len(groups["n"]),
        contracted=len(contracted),
    )
    return dimensions, arrays
