"""Lists of the blocks of scores that attention's kernels visit, where masks are not arithmetic of coordinates.

The kernels are in cpp/kernels/attention/lists.cuh.
"""

from dataclasses import dataclass
from math import ceil

from jaxdnn.engines.attention.function import ScoreFunction, counted_band, mask_function, place_parameters, place_types
from jaxdnn.engines.attention.problem import Attention, Band
from jaxdnn.engines.product.problem import EpilogueOperand
from jaxdnn.engines.unit import Parameter, Stage, arguments, entry_text, numbers, struct_text
from jaxdnn.plan import Launch, Scalar, Scratch
from jaxdnn.pointwise import Index

THREADS = 256  # of each kernel
MOST_BOUND = 2**30  # of a band: more than any distance
UNBOUNDED = 2**40  # of positions: more than any distance of theirs
_DEFAULTS = ("jaxdnn::AttentionBlocksDefaults", {"Left": False, "Right": False, "Positions": False, "Function": False})


@dataclass(frozen=True)
class BlockLists:
    """The lists of blocks of keys, or of queries, of one call.

    Attributes:
      by_element, by_head: whether the mask, and with it the lists, differ between elements of the batch, and heads.
      by_key: whether there is one for each block of keys, of blocks of queries.
      ranked: whether there is a table, too, of how many blocks of less keys the queries of each block see.
      name: of their kernels' entry points, after those' own.
    """

    problem: Attention
    function: ScoreFunction
    tile_m: int
    tile_n: int
    by_element: bool
    by_head: bool
    by_key: bool = False
    ranked: bool = False
    name: str = ""

    @property
    def blocks(self) -> tuple[int, int]:
        """Of queries and of keys."""
        return ceil(self.problem.query_length / self.tile_m), ceil(self.problem.key_length / self.tile_n)

    @property
    def matrices(self) -> int:
        """Of blocks."""
        return (self.problem.batch if self.by_element else 1) * self.heads

    @property
    def heads(self) -> int:
        """That have lists of their own."""
        return self.problem.query_heads if self.by_head else 1

    @property
    def listed(self) -> int:
        """Lists of a matrix of blocks."""
        return self.blocks[self.by_key]

    def stage(self, scratch: int) -> Stage:
        """What writes the lists, in the second of the scratch buffers from `scratch` on, and ranks in the third."""
        of_queries, of_keys = self.blocks
        count = self.matrices * of_queries * of_keys
        lists, of_each = self.matrices * self.listed, self.blocks[not self.by_key]
        seen, written = Scratch(scratch), Scratch(scratch + 1)
        found = self._parameters(seen)
        writing = [
            Parameter("const jaxdnn::Visible*", "seen", "seen", seen),
            Parameter("int*", "lists", "lists", written),
            *numbers("unsigned", lists_count=lists, listed=self.listed),
            *numbers(of_each=of_each),
            *numbers("unsigned", matrix_stride=of_queries * of_keys),
            *numbers("unsigned", listed_stride=1 if self.by_key else of_keys),
            *numbers("unsigned", block_stride=of_keys if self.by_key else 1),
        ]
        blocks = f"Blocks{self.name.title().replace('_', '')}"
        kernels = [
            ("attention_blocks", f"Blocks<{blocks}>", found, count),
            ("attention_lists", "Lists", writing, lists),
        ]
        if self.ranked:
            ranking = [
                Parameter("const jaxdnn::Visible*", "seen", "seen", seen),
                Parameter("int*", "ranks", "ranks", Scratch(scratch + 2)),
                *numbers("unsigned", rows=self.matrices * of_queries, query_blocks=of_queries),
                *numbers(key_blocks=of_keys),
            ]
            kernels.append(("attention_ranks", "Ranks", ranking, self.matrices * of_queries))
        text = struct_text(blocks, *self._config(), _DEFAULTS) + "".join(
            entry_text(kernel, f"jaxdnn::Attention{call}", str(THREADS), parameters, kernel + self.name)
            for kernel, call, parameters, _ in kernels
        )
        launches = tuple(
            Launch(kernel + self.name, arguments(parameters), (ceil(32 * warps / THREADS), 1, 1), (THREADS, 1, 1))
            for kernel, _, parameters, warps in kernels
        )
        sizes = (count, 4 * lists * (1 + of_each), *([4 * count] if self.ranked else []))
        return Stage(("attention/lists.cuh",), text, launches, sizes)

    def parameters(self, scratch: int) -> list[Parameter]:
        """What a kernel that walks through the lists is told of them."""
        head = self.listed if self.by_head else 0
        element = self.heads * self.listed if self.by_element else 0
        return [
            Parameter("const int*", "lists", "lists", Scratch(scratch + 1)),
            *([Parameter("const int*", "ranks", "ranks", Scratch(scratch + 2))] if self.ranked else []),
            *numbers("long long", list_element=element, list_head=head),
        ]

    def seen_parameters(self, scratch: int) -> list[Parameter]:
        """What a kernel is told that asks how much of a block is visible."""
        return [
            Parameter("const jaxdnn::Visible*", "seen", "seen", Scratch(scratch)),
            *numbers("long long", seen_element=self.heads if self.by_element else 0, seen_head=int(self.by_head)),
        ]

    def _config(self) -> tuple[dict[str, str], dict[str, bool | int | str]]:
        mask, band = self.problem.mask, counted_band(self.problem.mask)
        places = mask_places(self.problem) | self._sides()
        constants = {
            "TileM": self.tile_m,
            "TileN": self.tile_n,
            "Left": band.left is not None,
            "Right": band.right is not None,
            "Positions": band != mask.band,
            "Function": mask.program is not None,
        }
        return place_types(places) | {"Mask": self.function.config}, constants

    def _parameters(self, seen: Scratch) -> list[Parameter]:
        problem, mask = self.problem, self.problem.mask
        of_queries, of_keys = self.blocks
        found = [
            Parameter("jaxdnn::Visible*", "seen", "seen", seen),
            *mask_parameters(problem),
            *(p for name, place in self._sides().items() for p in place_parameters(name, place)),
            *self.function.parameters(),
            *numbers(heads=self.heads),
            *numbers("unsigned", query_blocks=of_queries, key_blocks=of_keys),
            *numbers("unsigned", blocks=self.matrices * of_queries * of_keys),
        ]
        if counted_band(mask) != mask.band:
            for side, bound in (("left", mask.band.left), ("right", mask.band.right)):
                found += numbers("long long", **{f"position_{side}": UNBOUNDED if bound is None else bound})
        return found

    def _sides(self) -> dict[str, EpilogueOperand]:
        """What rows and columns have, by the fields of the call; those that are there."""
        mask = self.problem.mask
        found = {name: getattr(mask, name) for name in ("query_segments", "key_segments")}
        if counted_band(mask) != mask.band:
            found |= {name: getattr(mask, name) for name in ("query_positions", "key_positions")}
        return {name: place for name, place in found.items() if place is not None}


def block_lists(
    problem: Attention, tile_m: int, tile_n: int, *, by_key: bool = False, ranked: bool = False
) -> BlockLists | None:
    """The lists that a call needs, if any."""
    function = mask_function(problem)
    if function is None:
        return None
    heads = problem.query_heads
    found = set[tuple[int, int]]()  # divisors and moduli of the coordinate element * heads + head
    for place in (*mask_places(problem).values(), *function.operands):
        found |= {(1, 0)} if place.batch_stride else set()
        found |= {(term.divisor, term.modulus) for term in place.terms[0]}
    for instruction in function.program.instructions:
        if isinstance(instruction.immediate, Index) and instruction.immediate.dimension == 0:
            found.add((instruction.immediate.divisor, instruction.immediate.modulus))
    by_element = any(not modulus or heads % (divisor * modulus) for divisor, modulus in found)
    by_head = any(divisor % heads for divisor, _ in found)
    return BlockLists(problem, function, tile_m, tile_n, by_element, by_head, by_key, ranked)


def mask_places(problem: Attention) -> dict[str, EpilogueOperand]:
    """The numbers of a batch that a mask has, by the fields of a kernel's call; those that are there."""
    mask = problem.mask
    found = {"query_lengths": mask.query_lengths, "key_lengths": mask.key_lengths}
    if counted_band(mask) == mask.band:
        found["query_offset"] = mask.query_offset
    return {name: place for name, place in found.items() if place is not None}


def mask_parameters(problem: Attention) -> list[Parameter]:
    """What every kernel is told of a mask besides its function (cpp/kernels/attention/key_range.cuh)."""
    band = counted_band(problem.mask)
    found = [p for name, place in mask_places(problem).items() for p in place_parameters(name, place)]
    found += numbers(query_heads=problem.query_heads)
    found += numbers(query_length=problem.query_length, key_length=problem.key_length)
    return found + band_parameters(band)


def band_parameters(band: Band) -> list[Parameter]:
    """The bounds that are there."""
    return [
        Parameter("int", name, name, Scalar("int32", max(-MOST_BOUND, min(bound, MOST_BOUND))))
        for name, bound in (("left", band.left), ("right", band.right))
        if bound is not None
    ]
