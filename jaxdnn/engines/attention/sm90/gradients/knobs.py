"""Knobs of attention's gradients for Hopper as two kernels (cpp/kernels/attention/sm90_query_gradient.cuh and
sm90_key_gradient.cuh), and which of them fit a call.
"""

from dataclasses import dataclass
from math import ceil

from jaxdnn.engines.attention.problem import Attention
from jaxdnn.engines.attention.sm90.knobs import TILE_QUEUE, TILE_WIDTHS, VALUE_SIZES, value_size
from jaxdnn.engines.attention.transposed import by_feature, feature_lines, lines_reason
from jaxdnn.engines.base import check_least
from jaxdnn.engines.product.tma import DEPTH_BYTES

QUERY_TILES = (64, 128)
KEY_TILE = 64
KEY_GRADIENT_THREADS = 384
CLUSTERS = (1, 2)
BLOCK_WIDTHS = (32, *TILE_WIDTHS)
# Registers of a thread for accumulators, what it multiplies by and rows' numbers; what is left takes addresses.
QUERY_REGISTERS, KEY_REGISTERS = 200, 208


@dataclass(frozen=True)
class AttentionSm90GradientKnobs:
    """How attention's gradients are cut into tiles, those of queries and those of keys; their kernels draw it.

    Attributes:
      query_tile: queries of a tile, 64 for each warp group that multiplies.
      key_block: keys that are streamed at once.
      key_stages, value_stages: blocks of them in flight.
      turns: whether warp groups take turns to start multiplies.
      query_swizzle: of the rasterization of these tiles: heads that are worked through together, for the L2 cache.
      query_block: queries that are streamed at once, where a tile is 64 keys.
      query_stages: blocks of them in flight.
      cluster: blocks of threads that share what they load of queries.
      key_swizzle: as `query_swizzle`, of shares of key heads.
      shares: of the query heads of a key head, which have tiles of their own, whose gradients are added up in the end.
    """

    query_tile: int = 128
    key_block: int = 64
    key_stages: int = 2
    value_stages: int = 1
    turns: bool = True
    query_swizzle: int = 1
    query_block: int = 64
    query_stages: int = 2
    cluster: int = 2
    key_swizzle: int = 1
    shares: int = 1

    def __post_init__(self) -> None:
        check_least(self, 1, "value_stages", "query_swizzle", "query_stages", "key_swizzle", "shares")
        check_least(self, 2, "key_stages")  # those of a block are needed until the next one's have been multiplied
        allowed = {
            "query_tile": QUERY_TILES,
            "key_block": BLOCK_WIDTHS,
            "query_block": BLOCK_WIDTHS,
            "cluster": CLUSTERS,
        }
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise ValueError(
                    f"AttentionSm90GradientKnobs: {name} is {getattr(self, name)}; expected one of {values}"
                )

    @property
    def query_threads(self) -> int:
        return 2 * self.query_tile + 128


def gradient_size(problem: Attention) -> int:
    """Columns of gradients of queries and keys."""
    return next(size for size in VALUE_SIZES if problem.head_size <= size)


def chunks(problem: Attention) -> tuple[int, int]:
    """Boxes of a query, and of a value."""
    chunk = DEPTH_BYTES // problem.query.itemsize
    return ceil(gradient_size(problem) / chunk), ceil(value_size(problem) / chunk)


def query_shared_memory(problem: Attention, knobs: AttentionSm90GradientKnobs) -> int:
    """Bytes of shared memory; what the kernel's own `kSharedBytes` says, which the unit asserts."""
    key, value = chunks(problem)
    stages = knobs.key_stages * key + knobs.value_stages * value
    lines = knobs.query_tile * (key + value) + knobs.key_block * stages
    if by_feature(problem):
        lines += knobs.key_stages * feature_lines(problem, gradient_size(problem), knobs.key_block)
    return DEPTH_BYTES * lines + 16 * (1 + knobs.key_stages + knobs.value_stages) + TILE_QUEUE


def key_shared_memory(problem: Attention, knobs: AttentionSm90GradientKnobs) -> int:
    """The same of the other kernel."""
    lines = sum(chunks(problem)) * (KEY_TILE + knobs.query_stages * knobs.query_block)
    if by_feature(problem):
        sizes = gradient_size(problem) + value_size(problem)
        lines += knobs.query_stages * feature_lines(problem, sizes, knobs.query_block)
    probabilities = knobs.query_stages * KEY_TILE * knobs.query_block * problem.query.itemsize
    return DEPTH_BYTES * lines + probabilities + 16 * (2 + 2 * knobs.query_stages) + TILE_QUEUE


def query_registers(problem: Attention, knobs: AttentionSm90GradientKnobs) -> int:
    """Of a thread, for accumulators and what it multiplies by."""
    return knobs.key_block + _more_weights(problem, knobs.key_block) + gradient_size(problem) // 2


def key_registers(problem: Attention, knobs: AttentionSm90GradientKnobs) -> int:
    """The same of the other kernel."""
    sums = max(gradient_size(problem), value_size(problem)) // 2
    return knobs.query_block + _more_weights(problem, knobs.query_block) + sums


def _more_weights(problem: Attention, block: int) -> int:
    """Registers that weights of float32 take beyond those of 16 bits."""
    return block // 4 if by_feature(problem) else 0


def query_knobs_reason(problem: Attention, knobs: AttentionSm90GradientKnobs, limit: int) -> str | None:
    """Why the knobs don't fit the gradient of queries, or None."""
    if why := lines_reason(problem, knobs.key_block, "keys"):
        return why
    held = query_registers(problem, knobs)
    return _reason(held, QUERY_REGISTERS, query_shared_memory(problem, knobs), limit)


def key_knobs_reason(problem: Attention, knobs: AttentionSm90GradientKnobs, limit: int) -> str | None:
    """Why the knobs don't fit the gradients of keys and values, or None."""
    if why := lines_reason(problem, knobs.query_block, "queries"):
        return why
    held = key_registers(problem, knobs)
    return _reason(held, KEY_REGISTERS, key_shared_memory(problem, knobs), limit)


def gradient_knobs_reason(problem: Attention, knobs: AttentionSm90GradientKnobs, limit: int) -> str | None:
    """Why the knobs don't fit the call, or None."""
    if problem.group % knobs.shares:
        return f"{problem.group} query heads of a key head are no {knobs.shares} equal shares"
    return query_knobs_reason(problem, knobs, limit) or key_knobs_reason(problem, knobs, limit)


def _reason(held: int, most: int, shared_memory: int, limit: int) -> str | None:
    if held > most:
        return f"a thread would hold {held} numbers; expected at most {most}"
    if shared_memory > limit:
        return f"it would use {shared_memory} bytes of shared memory, and a block has {limit}"
    return None
