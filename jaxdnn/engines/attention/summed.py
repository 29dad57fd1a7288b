"""Sums over scores that load the same element of an array, which has not all of their dimensions."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod

from jaxdnn.engines.attention.problem import Attention, LoadGradient
from jaxdnn.engines.attention.score_tile import ScoreTile
from jaxdnn.engines.product.affine import MAX_TERMS
from jaxdnn.engines.product.element_epilogue import ctype, itemsize, place_parameters
from jaxdnn.engines.product.problem import EpilogueOperand, dense_operand
from jaxdnn.engines.product.reduce import reduce_stage
from jaxdnn.engines.unit import Parameter, Stage, numbers
from jaxdnn.plan import Result, Scratch
from jaxdnn.pointwise import AffineLoad, Term, Terms

_ADDED = 2.5e-6  # seconds that one more kernel takes, which adds parts up
_RATE = 3e12  # bytes a second that parts are written and read at


@dataclass(frozen=True)
class Summed:
    """Which batches add to one element: target i of `count` has the batches of its own plus those of each member.

    Attributes:
      batch: of target i and member j, the batch: as the place of coordinates i and j.
      digits: of the batch coordinate, the factors and counts of those that members differ by.
    """

    count: int
    members: int
    batch: EpilogueOperand
    digits: tuple[tuple[int, int], ...]

    def share(self, tile: ScoreTile, heads: int) -> bool:
        """Whether all members read the same tile; a batch is element * heads + head."""
        by_head = any(factor < heads for factor, _ in self.digits)
        by_element = any(factor * count > heads for factor, count in self.digits)
        return not (by_head and tile.head_stride) and not (by_element and tile.batch_stride)

    def parameters(self) -> list[Parameter]:
        """The fields `summed` and `members` of a kernel's call."""
        return [*place_parameters("summed", "summed", self.batch), *numbers(members=self.members)]


@dataclass(frozen=True)
class LoadedSum:
    """How the gradient of what scores load is cut: into tiles of the array, and the sum of each into parts.

    Attributes:
      batches: which add to one element.
      owners, steps: tiles of the array; tiles of scores that add to one of them.
      parts: arrays of sums, of which each has some of the steps; they are added up in the end.
      elements: of one of these.
    """

    gradient: LoadGradient
    batches: Summed
    owners: int
    steps: int
    parts: int
    elements: int

    def stages(self, scratch: int, element: str, number: int) -> tuple[list[Parameter], tuple[str, list[Stage]]]:
        """Where sums of the C++ type `element` go, and as what they are stored: what a kernel is told, and what follows
        it. Parts are in the scratch buffer of this number.
        """
        place = self.gradient.place
        buffer, stored, stages = place.buffer, ctype(place.dtype), list[Stage]()
        if self.parts > 1:
            assert isinstance(buffer, Result)
            extents = (1, self.parts, self.elements)
            reduction = f"jaxdnn::ReductionOf<jaxdnn::Reduction::sum, {element}>"
            size = Stage(scratch=(self.parts * self.elements * itemsize(element),))
            stages = [size, reduce_stage(reduction, Scratch(scratch), (buffer, stored), extents, number)]
            buffer, stored = Scratch(scratch), element
        found = [
            Parameter(f"{stored}*", "d_loaded", "d_loaded.data", buffer),
            *place_parameters("d_loaded", "d_loaded", place),
            *self.batches.parameters(),
            *numbers(parts=self.parts),
            *numbers("long long", part_stride=self.elements if self.parts > 1 else 0),
        ]
        return found, (stored, stages)


def loaded_sum(
    problem: Attention, gradient: LoadGradient, tile: tuple[int, int], blocks: int, flops: float
) -> LoadedSum:
    """Cut into tiles of so many rows and columns of scores, and in parts where these take less time: of so many blocks
    at work, each of which does so many operations a second.
    """
    place, lengths = gradient.place, (problem.query_length, problem.key_length)
    of_batches = summed(place, problem.batch * problem.query_heads)
    by = (bool(place.row_stride), bool(place.column_stride))
    tiles = [ceil(length / size) for length, size in zip(lengths, tile, strict=True)]
    owners = of_batches.count * prod(n for n, own in zip(tiles, by, strict=True) if own)
    steps = of_batches.members * prod(n for n, own in zip(tiles, by, strict=True) if not own)
    elements = of_batches.count * prod(n for n, own in zip(lengths, by, strict=True) if own)
    step = 2 * prod(tile) * (problem.head_size + problem.value_head_size) / flops

    def seconds(parts: int) -> float:
        time = max(1.0, owners * parts / blocks) * ceil(steps / parts) * step
        return time if parts == 1 else time + _ADDED + 2 * 4 * parts * elements / _RATE

    parts = min(range(1, min(steps, ceil(blocks / owners)) + 1), key=seconds)
    return LoadedSum(gradient, of_batches, owners, steps, parts, elements)


def summed_reason(places: Sequence[EpilogueOperand], batches: int) -> str | None:
    """Why gradients that are sums can't be said to kernels, or None."""
    if any(place.terms[1] or place.terms[2] for place in places):
        return "a gradient of what scores load is a part of a row's or column's dimension"
    if any(max(map(len, summed(place, batches).batch.terms)) > MAX_TERMS for place in places):
        return f"a gradient is a sum over more than {MAX_TERMS} parts of the batch's dimensions"
    return None


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
    batch = dense_operand(load, place.buffer, place.dtype)
    return Summed(prod(n for _, n in own), prod(n for _, n in others), batch, tuple(others))


def _number(digits: Sequence[tuple[int, int]]) -> Terms:
    """What a coordinate of these digits, the first one the lowest, is as a sum of them times their factors."""
    found, divisor = [], 1
    for i, (factor, count) in enumerate(digits):
        found.append(Term(factor, divisor, 0 if i == len(digits) - 1 else count))
        divisor *= count
    return tuple(found)
