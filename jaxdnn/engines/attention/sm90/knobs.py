"""Knobs of attention's kernel for Hopper (cpp/kernels/attention/sm90.cuh), and which of them fit a call."""

from dataclasses import dataclass
from math import ceil

from jaxdnn.engines.attention.function import mask_function, score_function
from jaxdnn.engines.attention.lists import differ_in_group
from jaxdnn.engines.attention.problem import Attention
from jaxdnn.engines.attention.score_tile import score_tile
from jaxdnn.engines.attention.transposed import by_feature, feature_lines, lines_reason
from jaxdnn.engines.base import check_least, check_powers_of_two
from jaxdnn.engines.product.tma import DEPTH_BYTES

TILE_QUEUE = 136  # bytes of core/tile_queue.cuh's
MOST_CONSUMERS = 3
MOST_HEADS = 64  # rows of a warp group
MOST_SPLITS = 128  # for the counts of blocks and splits to multiply in 31 bits
STRIP = 16  # rows, of one head, that a function of scores is applied to
# Keys of a block: columns of a multiply that ptx/wgmma.cuh has, by 16 of which values are multiplied.
TILE_WIDTHS = (64, 80, 96, 112, 128, 160, 176, 192, 224, 256)
VALUE_SIZES = (32, 64, 96, 128, 160, 192, 224, 256)  # columns of a multiply of weights, which are in registers
# Registers of a thread for scores, weights and sums, by consumers; what is left takes addresses and rows' numbers.
FETCH = 16  # what their queries take besides, while they are fetched
REGISTERS = {1: 216, 2: 216, 3: 128}
HALVED = 128  # keys of a block, of which 64 are a multiply's columns, and whole lines of a swizzled tile


@dataclass(frozen=True)
class AttentionSm90Knobs:
    """How attention is cut into tiles; cpp/kernels/attention/sm90.cuh draws it.

    Attributes:
      tile_m: rows of a tile, 64 for each warp group that multiplies.
      tile_n: keys of a block.
      query_stages: tiles of queries in flight: 2 hides the loads of the next one.
      query_in_registers: whether consumers keep their queries there, and read them from shared memory once.
      stages: blocks of keys, and of values, in flight.
      score_stages: tiles in flight of an array that the score function reads; 0 where consumers load it themselves.
      swizzle: of the rasterization: rows of tiles that are worked through together, for the L2 cache.
      heads: query heads whose queries are rows of one tile, of a group that shares its keys.
      splits: parts of a tile's keys, whose results a second kernel combines.
      blocks: of a multiprocessor at a time, of 64 rows each: one's softmax runs behind the other's multiplies.
      cluster: blocks with the same tile of as many elements of the batch, which share what the score function reads.
      skips: whether a warp group lets blocks of keys pass that its own rows don't see.
      halves: whether it multiplies half of its first block of keys, where its own rows see no more of that.
    """

    tile_m: int = 128
    tile_n: int = 128
    query_stages: int = 1
    query_in_registers: bool = False
    stages: int = 2
    score_stages: int = 0
    swizzle: int = 1
    heads: int = 1
    splits: int = 1
    blocks: int = 1
    cluster: int = 1
    skips: bool = False
    halves: bool = False

    def __post_init__(self) -> None:
        check_least(self, 1, "tile_m", "tile_n", "query_stages", "stages", "swizzle", "splits", "blocks")
        check_least(self, 0, "score_stages")
        check_powers_of_two(self, "heads", "cluster")
        for name, greatest in (("heads", MOST_HEADS), ("splits", MOST_SPLITS)):
            if getattr(self, name) > greatest:
                raise ValueError(f"AttentionSm90Knobs: {name} is {getattr(self, name)}; expected at most {greatest}")
        if self.tile_m not in (most := tuple(64 * (i + 1) for i in range(MOST_CONSUMERS))):
            raise ValueError(f"AttentionSm90Knobs: tile_m is {self.tile_m}; expected one of {most}")
        if self.blocks > MOST_CONSUMERS - self.consumers and self.blocks > 1:
            raise ValueError(f"AttentionSm90Knobs: blocks is {self.blocks}; expected 1, or 2 of 64 rows")
        if self.tile_n not in TILE_WIDTHS:
            raise ValueError(f"AttentionSm90Knobs: tile_n is {self.tile_n}; expected one of {TILE_WIDTHS}")

    @property
    def consumers(self) -> int:
        return self.tile_m // 64

    @property
    def threads(self) -> int:
        return 128 * (self.consumers + 1)


def head_size(problem: Attention) -> int:
    """Elements of a query that are multiplied: 16 at once."""
    return ceil(problem.head_size / 16) * 16


def value_size(problem: Attention) -> int:
    """Columns of results."""
    return next(size for size in VALUE_SIZES if problem.value_head_size <= size)


def tile_count(problem: Attention, knobs: AttentionSm90Knobs) -> int:
    """Tiles of queries, for each of which there are all splits."""
    return tile_rows(problem, knobs) * ceil(problem.query_length / (knobs.tile_m // knobs.heads))


def tile_rows(problem: Attention, knobs: AttentionSm90Knobs) -> int:
    """Those of the same queries: of each head, or of neighbours that share keys."""
    return problem.batch * problem.key_heads * ceil(problem.group / knobs.heads)


def shared_memory(problem: Attention, knobs: AttentionSm90Knobs) -> int:
    """Bytes of shared memory; what the kernel's own `kSharedBytes` says, which the unit asserts."""
    chunk = DEPTH_BYTES // problem.query.itemsize
    chunks = ceil(head_size(problem) / chunk)
    value_lines = knobs.tile_n * ceil(value_size(problem) / chunk)
    if by_feature(problem):
        value_lines = feature_lines(problem, value_size(problem), knobs.tile_n)
    blocks = knobs.stages * (knobs.tile_n * chunks + value_lines)
    queries = knobs.query_stages * knobs.tile_m * chunks
    scores = knobs.score_stages * knobs.tile_m * ceil(knobs.tile_n / chunk)
    barriers = 16 * (knobs.query_stages + 2 * knobs.stages + knobs.score_stages)
    return DEPTH_BYTES * (queries + blocks + scores) + barriers + TILE_QUEUE


def shared_memory_of_block(knobs: AttentionSm90Knobs, limit: int) -> int:
    """What each of a multiprocessor's blocks may have, where one may have `limit`; the system takes 1 KiB for each."""
    return (limit + 1024) // knobs.blocks - 1024


def held_registers(problem: Attention, knobs: AttentionSm90Knobs) -> int:
    """Of a thread, for scores, weights and sums."""
    weights = knobs.tile_n * problem.query.itemsize // 8
    return knobs.tile_n // 2 + weights + value_size(problem) // 2


def knobs_reason(problem: Attention, knobs: AttentionSm90Knobs, shared_memory_limit: int) -> str | None:
    """Why the knobs don't fit the call, or None."""
    if knobs.heads > (most := most_heads(problem, knobs.tile_m)):
        return f"a tile would have rows of {knobs.heads} heads; expected at most {most}, which share keys and a mask"
    if knobs.splits > 1 and knobs.splits > (blocks := ceil(problem.key_length / knobs.tile_n)):
        return f"keys would be split in {knobs.splits}, and there are {blocks} blocks of them"
    if knobs.score_stages and isinstance(why := score_tile(problem, score_function(problem)), str):
        return why
    if knobs.score_stages and knobs.heads > 1:
        return f"rows of a tile are of {knobs.heads} heads, and a tile that scores read is of one"
    if knobs.cluster > 1 and (why := _cluster_reason(problem, knobs)):
        return why
    if knobs.skips and mask_function(problem) is not None:
        return "a list of blocks of keys is a tile's, of which warp groups skip none"
    if knobs.halves and (why := _halves_reason(problem, knobs)):
        return why
    if by_feature(problem) and knobs.query_in_registers:
        return "queries of float32 take too many registers"
    if why := lines_reason(problem, knobs.tile_n, "keys"):
        return why
    held = held_registers(problem, knobs)
    if knobs.query_in_registers:
        held += head_size(problem) // 4 + FETCH
    if held > (most := REGISTERS[knobs.consumers * knobs.blocks]):
        groups = knobs.consumers * knobs.blocks
        return f"a thread of {groups} warp groups would hold {held} numbers; expected at most {most}"
    if (needed := shared_memory(problem, knobs)) > (limit := shared_memory_of_block(knobs, shared_memory_limit)):
        return f"it would use {needed} bytes of shared memory, and a block has {limit}"
    return None


def _halves_reason(problem: Attention, knobs: AttentionSm90Knobs) -> str | None:
    """Why warp groups can't multiply half of their first block of keys, or None."""
    if problem.mask.band.right is None or mask_function(problem) is not None:
        return "halves are of a block that a band's right edge alone cuts"
    if score_function(problem) is not None or problem.dropout is not None:
        return "a function of scores, or dropout, is of whole blocks"
    if knobs.heads > 1 or knobs.consumers == 1:
        return "several warp groups of one head's rows see halves of a block, and those of others see it whole"
    if by_feature(problem) or knobs.tile_n != HALVED:
        return f"halves are of blocks of {HALVED} keys, of 16 bits an element"
    return None


def _cluster_reason(problem: Attention, knobs: AttentionSm90Knobs) -> str | None:
    """Why elements of the batch can't share score tiles, or None."""
    mask, tile = problem.mask, score_tile(problem, score_function(problem))
    if not knobs.score_stages or isinstance(tile, str) or tile.batch_stride:
        return "blocks of a cluster share tiles that scores read, and elements of the batch have no such array together"
    if problem.batch % knobs.cluster:
        return f"{problem.batch} elements of the batch are no clusters of {knobs.cluster}"
    if any((mask.query_offset, mask.query_lengths, mask.key_lengths, mask_function(problem))):
        return "blocks of a cluster visit the same keys, and the mask may differ from element to element"
    return None


def most_heads(problem: Attention, tile_m: int) -> int:
    """How many heads may have rows in one tile: those that share keys, if they have one mask, which is arithmetic."""
    if differ_in_group(problem) or mask_function(problem):
        return 1
    group, functions = problem.group, problem.dropout is not None or score_function(problem) is not None
    most = min(1 << (group - 1).bit_length(), tile_m // STRIP if functions else MOST_HEADS)
    return 1 << most.bit_length() - 1
