"""Lists of the blocks of scores that attention's kernels visit, where masks are not arithmetic of coordinates.

The kernels are in cpp/kernels/attention/lists.cuh and spans.cuh.
"""

from dataclasses import dataclass
from math import ceil

from jaxdnn.engines.attention.function import ScoreFunction, counted_band, mask_function, place_parameters, place_types
from jaxdnn.engines.attention.problem import Attention, Band
from jaxdnn.engines.product.problem import EpilogueOperand
from jaxdnn.engines.unit import Parameter, Stage, arguments, entry_text, numbers, shared_memory_text, struct_text
from jaxdnn.plan import Launch, Scalar, Scratch
from jaxdnn.pointwise import Index

THREADS = 256  # of a kernel whose warps work by themselves
SPAN_LANES = 4  # of a query, of the kernel that asks a function for spans
SEGMENTS_THREADS = 1024  # of the kernel of segments
SEEN_KEYS_BYTES = 12  # that it keeps of a query
MOST_KEY_BLOCKS = 2**15  # that its shared memory has room for
MOST_BOUND = 2**30  # of a band: more than any distance
UNBOUNDED = 2**40  # of positions: more than any distance of theirs
_DEFAULTS = (
    "jaxdnn::AttentionBlocksDefaults",
    {"Left": False, "Right": False, "Positions": False, "Function": False, "Spanned": False},
)


@dataclass(frozen=True)
class _Kernel:
    """One of those kernels, by so many warps; `call` is what it is called with."""

    name: str
    call: str
    parameters: list[Parameter]
    warps: int
    threads: int = THREADS
    shared_memory: int = 0

    def text(self, suffix: str) -> str:
        call = f"jaxdnn::Attention{self.call}"
        return entry_text(self.name, call, str(self.threads), self.parameters, self.name + suffix)

    def launch(self, suffix: str) -> Launch:
        grid, block = (ceil(32 * self.warps / self.threads), 1, 1), (self.threads, 1, 1)
        return Launch(self.name + suffix, arguments(self.parameters), grid, block, shared_memory=self.shared_memory)


@dataclass(frozen=True)
class BlockLists:
    """The lists of blocks of keys, or of queries, of one call.

    Attributes:
      by_element, by_head: whether the mask, and with it the lists, differ between elements of the batch, and heads.
      by_key: whether there is one for each block of keys, of blocks of queries.
      ranked: whether there is a table, too, of how many blocks of less keys the queries of each block see.
      spanned: whether there is one of the first and the last key that each query sees; lists then know of which blocks
        that says all.
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
    spanned: bool = False
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
        """What writes lists, in the second of the scratch buffers from `scratch` on; in the third ranks, or spans."""
        of_queries, of_keys = self.blocks
        rows = self.matrices * of_queries
        lists, of_each = self.matrices * self.listed, self.blocks[not self.by_key]
        blocks = f"Blocks{self.name.title().replace('_', '')}"
        kernels = self._of_segments(blocks, scratch) if self._segments_alone else self._kernels(blocks, scratch)
        text = struct_text(blocks, *self._config(), _DEFAULTS) + "".join(one.text(self.name) for one in kernels)
        if self._segments_alone:
            text += shared_memory_text(f"jaxdnn::AttentionSegments<{blocks}>", self._segments_memory)
        sizes = [rows * of_keys, 4 * lists * (1 + of_each)]
        sizes += [4 * rows * of_keys] * self.ranked + [8 * self.matrices * self.problem.query_length] * self.spanned
        header = "attention/spans.cuh" if self.spanned or self._segments_alone else "attention/lists.cuh"
        return Stage((header,), text, tuple(one.launch(self.name) for one in kernels), tuple(sizes))

    @property
    def _segments_alone(self) -> bool:
        """Whether one kernel writes all that is wanted."""
        wanted = not self.by_key and not self.ranked and self.blocks[1] <= MOST_KEY_BLOCKS
        return wanted and segments_alone(self.problem)

    @property
    def _segments_memory(self) -> int:
        """Bytes that a block of theirs shares, but for one for each block of keys."""
        return SEEN_KEYS_BYTES * (SEGMENTS_THREADS // self.tile_m * self.tile_m) + 16

    def _of_segments(self, blocks: str, scratch: int) -> list[_Kernel]:
        found = [
            *self._parameters(Scratch(scratch)),
            Parameter("int*", "lists", "lists", Scratch(scratch + 1)),
            *self._spans(scratch + 2),
        ]
        warps = self.matrices * self.blocks[0] * SEGMENTS_THREADS // 32
        shared = self._segments_memory + self.blocks[1]
        return [_Kernel("attention_segments", f"Segments<{blocks}>", found, warps, SEGMENTS_THREADS, shared)]

    def _kernels(self, blocks: str, scratch: int) -> list[_Kernel]:
        of_queries, of_keys = self.blocks
        rows, lists = self.matrices * of_queries, self.matrices * self.listed
        seen = Scratch(scratch)
        found = self._parameters(seen)
        writing = [
            Parameter("const jaxdnn::Visible*", "seen", "seen", seen),
            Parameter("int*", "lists", "lists", Scratch(scratch + 1)),
            *numbers("unsigned", lists_count=lists, listed=self.listed),
            *numbers(of_each=self.blocks[not self.by_key]),
            *numbers("unsigned", matrix_stride=of_queries * of_keys),
            *numbers("unsigned", listed_stride=1 if self.by_key else of_keys),
            *numbers("unsigned", block_stride=of_keys if self.by_key else 1),
        ]
        kernels = [_Kernel("attention_blocks", f"Blocks<{blocks}>", found, warps=rows * of_keys)]
        if self.spanned:
            threads = SPAN_LANES * self.tile_m
            spanning = [*found, *self._spans(scratch + 2)]
            kernels.append(_Kernel("attention_spans", f"Spans<{blocks}>", spanning, rows * threads // 32, threads, 4))
        kernels.append(_Kernel("attention_lists", "Lists", writing, warps=lists))
        if self.ranked:
            ranking = [
                Parameter("const jaxdnn::Visible*", "seen", "seen", seen),
                Parameter("int*", "ranks", "ranks", Scratch(scratch + 2)),
                *numbers("unsigned", rows=rows, query_blocks=of_queries),
                *numbers(key_blocks=of_keys),
            ]
            kernels.append(_Kernel("attention_ranks", "Ranks", ranking, warps=rows))
        return kernels

    def _spans(self, scratch: int) -> list[Parameter]:
        return [Parameter("jaxdnn::KeySpan*", "spans", "spans", Scratch(scratch))] * self.spanned

    def parameters(self, scratch: int) -> list[Parameter]:
        """What a kernel that walks through the lists is told of them."""
        found = [Parameter("const int*", "lists", "lists", Scratch(scratch + 1)), *self._strides("list", self.listed)]
        beside = Scratch(scratch + 2)
        if self.ranked:
            found.append(Parameter("const int*", "ranks", "ranks", beside))
        if self.spanned:
            found.append(Parameter("const jaxdnn::KeySpan*", "spans", "spans", beside))
            found += self._strides("span", self.problem.query_length)
        return found

    def seen_parameters(self, scratch: int) -> list[Parameter]:
        """What a kernel is told that asks how much of a block is visible."""
        return [
            Parameter("const jaxdnn::Visible*", "seen", "seen", Scratch(scratch)),
            *self._strides("seen", 1),
        ]

    def _strides(self, name: str, of_matrix: int) -> list[Parameter]:
        """Of elements and heads, where a matrix of blocks has so many of something."""
        element, head = self.heads * of_matrix if self.by_element else 0, of_matrix if self.by_head else 0
        return numbers("long long", **{f"{name}_element": element, f"{name}_head": head})

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
            "Spanned": self.spanned and self._segments_alone,
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
    problem: Attention,
    tile_m: int,
    tile_n: int,
    *,
    by_key: bool = False,
    ranked: bool = False,
    spanned: bool = False,
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
    return BlockLists(problem, function, tile_m, tile_n, by_element, by_head, by_key, ranked, spanned)


def segments_alone(problem: Attention) -> bool:
    """Whether segments are all that a mask has besides arithmetic of coordinates."""
    mask = problem.mask
    return mask.query_segments is not None and mask.program is None and counted_band(mask) == mask.band


def mask_places(problem: Attention) -> dict[str, EpilogueOperand]:
    """The numbers of a batch that a mask has, by the fields of a kernel's call; those that are there."""
    mask = problem.mask
    found = {"query_lengths": mask.query_lengths, "key_lengths": mask.key_lengths}
    if counted_band(mask) == mask.band:
        found["query_offset"] = mask.query_offset
    return {name: place for name, place in found.items() if place is not None}


def differ_in_group(problem: Attention) -> bool:
    """Whether heads that share keys have lengths, or offsets, of their own."""
    places = mask_places(problem).values()
    return any(one.batch_stride or any(term.divisor % problem.group for term in one.terms[0]) for one in places)


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
