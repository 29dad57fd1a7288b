"""Which batches of scores add to one element of an array that has not all of the batch's dimensions."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from jaxdnn.engines.product.element_epilogue import place_parameters
from jaxdnn.engines.product.problem import EpilogueOperand, dense_operand
from jaxdnn.engines.unit import Parameter, numbers
from jaxdnn.pointwise import AffineLoad, Term, Terms


@dataclass(frozen=True)
class Summed:
    """Which batches add to one element: target i of `count` has the batches of its own plus those of each member.

    Attributes:
      batch: of target i and member j, the batch: as the place of coordinates i and j.
    """

    count: int
    members: int
    batch: EpilogueOperand

    def parameters(self) -> list[Parameter]:
        """The fields `summed` and `members` of a kernel's call."""
        return [*place_parameters("summed", "summed", self.batch), *numbers(members=self.members)]


def summed(place: EpilogueOperand, batches: int) -> Summed:
    """Of an array, of which a batch may have a part only."""
    terms = (Term(place.batch_stride),) if place.batch_stride else place.terms[0]
    own: list[tuple[int, int]] = []  # of the batch coordinate's digits, the factor and the count
    others: list[tuple[int, int]] = []
    size = 1
    for term in sorted(terms, key=lambda term: term.divisor):
        if term.divisor > size:
            others.append((size, term.divisor // size))
        own.append((term.divisor, term.modulus or batches // term.divisor))
        size = term.divisor * own[-1][1]
    if size < batches:
        others.append((size, batches // size))
    load = AffineLoad(0, (_number(own), _number(others), ()))
    return Summed(prod(n for _, n in own), prod(n for _, n in others), dense_operand(load, place.buffer, place.dtype))


def _number(digits: Sequence[tuple[int, int]]) -> Terms:
    """What a coordinate of these digits, the first one the lowest, is as a sum of them times their factors."""
    found, divisor = [], 1
    for i, (factor, count) in enumerate(digits):
        found.append(Term(factor, divisor, 0 if i == len(digits) - 1 else count))
        divisor *= count
    return tuple(found)
