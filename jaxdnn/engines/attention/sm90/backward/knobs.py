"""Knobs of attention's backward kernel for Hopper (cpp/kernels/attention/sm90_backward.cuh), and which fit a call."""

from dataclasses import dataclass

from jaxdnn.engines.attention.function import mask_function, slope_function
from jaxdnn.engines.attention.problem import Attention
from jaxdnn.engines.attention.score_tile import function_and_tile, score_tile
from jaxdnn.engines.attention.sm90.knobs import TILE_QUEUE
from jaxdnn.engines.base import check_least
from jaxdnn.engines.product.tma import CHUNK, DEPTH_BYTES

TILE_N = 128
TILES = (64, 128)
THREADS = 384
SUMS = (2, 1)
SIZES = (32, 64, 96, 128)  # of vectors: columns of a multiply whose other operand is in registers
MOST_HELD = 240 - 16  # registers of a thread; what is left takes addresses and rows' numbers
FEWEST_FETCHED = 16  # queries of a fragment
_OF_SCORE = _OF_DROPOUT = 16  # of these, what they compute
_OF_MASK = 24


@dataclass(frozen=True)
class AttentionSm90BackwardKnobs:
    """How attention's backward pass is cut into tiles; cpp/kernels/attention/sm90_backward.cuh draws it.

    Attributes:
      tile_m: queries of a block; a tile is 128 keys.
      swizzle: of the rasterization: key heads that are worked through together, for the L2 cache.
      parts: of all heads, computed one after the other, so that the sums of their queries' gradient take less memory.
      shares: of the query heads of a key head, which have tiles of their own, whose gradients are added up in the end.
      score_tiles: whether TMA brings tiles of an array that scores read, with the queries of a block.
      sums: buffers of a block of queries' gradient, from which it is added to that of all keys.
    """

    tile_m: int = 64
    swizzle: int = 1
    parts: int = 1
    shares: int = 1
    score_tiles: bool = False
    sums: int = 2

    def __post_init__(self) -> None:
        check_least(self, 1, "swizzle", "parts", "shares")
        if self.tile_m not in TILES:
            raise ValueError(f"AttentionSm90BackwardKnobs: tile_m is {self.tile_m}; expected one of {TILES}")
        if self.sums not in SUMS:
            raise ValueError(f"AttentionSm90BackwardKnobs: sums is {self.sums}; expected one of {SUMS}")


def padded_size(size: int) -> int:
    """Of a vector in shared memory and in accumulators."""
    return next(one for one in SIZES if size <= one)


def sums_bytes(problem: Attention, knobs: AttentionSm90BackwardKnobs) -> int:
    """Of the float32 sums of a block of queries' gradient."""
    return knobs.tile_m * chunks(problem.head_size) * CHUNK * 4


def chunks(size: int) -> int:
    """Boxes of a vector."""
    return -(-padded_size(size) // CHUNK)


def backward_shared_memory(problem: Attention, knobs: AttentionSm90BackwardKnobs) -> int:
    """Bytes of shared memory; what the kernel's own `kSharedBytes` says, which the unit asserts."""
    backward = problem.backward
    assert backward is not None
    key, value = chunks(problem.head_size), chunks(problem.value_head_size)
    vectors = knobs.tile_m * DEPTH_BYTES * (key + (value if backward.d_out is not None else 0))
    scores = knobs.score_tiles * knobs.tile_m * DEPTH_BYTES * (TILE_N // CHUNK)
    stage = -(-(vectors + scores + knobs.tile_m * 8) // 1024) * 1024
    query_sums = 0
    if backward.d_query is not None:
        query_sums = 2 * TILE_N * DEPTH_BYTES * (knobs.tile_m // CHUNK) + knobs.sums * sums_bytes(problem, knobs)
    barriers = 16 * (1 + 2)
    return TILE_N * DEPTH_BYTES * (key + value) + 2 * stage + query_sums + barriers + TILE_QUEUE


def held_registers(problem: Attention, knobs: AttentionSm90BackwardKnobs) -> int:
    """Of a thread, for sums, scores and weights."""
    sums = (padded_size(problem.head_size) + padded_size(problem.value_head_size)) // 2
    return sums + knobs.tile_m // 2 * 2 + knobs.tile_m // 4


def function_registers(problem: Attention) -> int:
    """Of a thread, for what functions and dropout compute."""
    score = _OF_SCORE if problem.score is not None else 0
    mask = _OF_MASK if mask_function(problem) is not None else 0
    return score + mask + (_OF_DROPOUT if problem.dropout is not None else 0)


def held_with_functions(problem: Attention, knobs: AttentionSm90BackwardKnobs) -> tuple[int, int]:
    """The same with what functions take, and of how many queries what the score's loads is fetched at once."""
    score, _ = function_and_tile(problem, slope_function(problem), tiled=knobs.score_tiles)
    held = held_registers(problem, knobs) + function_registers(problem)
    if score is None:
        return held, FEWEST_FETCHED
    score = score.transpose(problem.query_length)
    for fetched in (knobs.tile_m, FEWEST_FETCHED):
        if (whole := held + score.registers(fetched)) <= MOST_HELD:
            return whole, fetched
    return held + score.registers(FEWEST_FETCHED), FEWEST_FETCHED


def backward_knobs_reason(
    problem: Attention, knobs: AttentionSm90BackwardKnobs, shared_memory_limit: int
) -> str | None:
    """Why the knobs don't fit the call, or None."""
    if (held := held_registers(problem, knobs)) > MOST_HELD:
        return f"a thread would hold {held} numbers; expected at most {MOST_HELD}"
    if knobs.tile_m == 128 and chunks(problem.head_size) > 1:
        return "128 queries at once are for head sizes up to 64"
    if knobs.score_tiles and isinstance(why := score_tile(problem, slope_function(problem)), str):
        return why
    if (needed := backward_shared_memory(problem, knobs)) > shared_memory_limit:
        return f"it would use {needed} bytes of shared memory, and a block has {shared_memory_limit}"
    heads = problem.batch * problem.key_heads
    if heads % knobs.parts:
        return f"{heads} key heads in a batch are no {knobs.parts} equal parts"
    if problem.group % knobs.shares:
        return f"{problem.group} query heads of a key head are no {knobs.shares} equal shares"
    return None
