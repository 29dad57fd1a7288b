"""Shares of the query heads of a key head, which have tiles of their own where there are few of these.

Each share leaves gradients of keys and values of its own; the kernel that adds them up is
cpp/kernels/attention/sm90/backward_shares.cuh.
"""

from dataclasses import dataclass
from math import ceil

from jaxdnn.device import Target
from jaxdnn.engines.attention.function import heads_parameters
from jaxdnn.engines.attention.problem import Attention, Heads
from jaxdnn.engines.product.element_epilogue import ctype
from jaxdnn.engines.unit import Parameter, Stage, arguments, entry_text, numbers
from jaxdnn.plan import Launch, Scratch
from jaxdnn.pointwise import Term

_THREADS = 256
_COLUMNS = 8  # of a thread
_FLOPS = 4.2e12  # a second, of a multiprocessor of the H100 (benchmarks/results/attention_kernels.md)
_TILE_START = 1.5  # the time of a tile besides its blocks, in blocks
_SUM = 4e-6  # seconds to start the kernels that add
_BANDWIDTH = 3e12  # bytes a second, where it is not known
_WORTH = 1.05
_MOST_BYTES = 2**28  # of scratch memory


@dataclass(frozen=True)
class Shares:
    """Where the kernel of keys' gradients leaves them, and what adds them up.

    Attributes:
      d_key, d_value: of each share; or the call's own, where a key head has one share.
      stages: that follow.
    """

    d_key: Heads | None
    d_value: Heads | None
    stages: tuple[Stage, ...]


def shared_gradients(problem: Attention, shares: int, scratch: int) -> Shares:
    """Of so many shares, whose scratch buffers are numbered from `scratch`."""
    assert problem.backward is not None
    backward, stages = problem.backward, list[Stage]()

    def shared(name: str, gradient: Heads | None, columns: int) -> Heads | None:
        if gradient is None or shares == 1:
            return gradient
        part = _part(problem, shares, columns, scratch + len(stages))
        stages.append(_sum(problem, shares, name, gradient, part, columns))
        return part

    d_key = shared("d_key", backward.d_key, problem.head_size)
    d_value = shared("d_value", backward.d_value, problem.value_head_size)
    return Shares(d_key, d_value, tuple(stages))


def best_shares(problem: Attention, tile: tuple[int, int], target: Target) -> int:
    """How many take the least time, with tiles of so many queries and keys; one, unless they save what is worth it."""
    equal = [n for n in range(2, problem.group + 1) if problem.group % n == 0 and _bytes(problem, n) <= _MOST_BYTES]
    return min((1, *equal), key=lambda n: time(problem, tile, n, target) * (_WORTH if n > 1 else 1))


def time(problem: Attention, tile: tuple[int, int], shares: int, target: Target) -> float:
    """About, in seconds: a multiprocessor's blocks; half a tile, for not all end together; and the sums of shares."""
    tile_m, tile_n = tile
    size = problem.head_size + problem.value_head_size
    block = tile_m * tile_n * (4 * size + 2 * problem.head_size) / _FLOPS
    heads = problem.group // shares
    times = [(heads * n + _TILE_START) * block for n in _blocks(problem, tile_m, tile_n)]
    tiles = len(times) * problem.batch * problem.key_heads * shares
    taken = sum(times) / len(times) * tiles / target.sm_count + (times[0] + times[-1]) / 4
    moved = 2 * _bytes(problem, shares) / (target.bandwidth or _BANDWIDTH)
    return max(taken, *times) + (_SUM + moved if shares > 1 else 0)


def _bytes(problem: Attention, shares: int) -> int:
    """Of their gradients."""
    size = problem.head_size + problem.value_head_size
    return 4 * problem.batch * problem.key_heads * shares * problem.key_length * size


def _blocks(problem: Attention, tile_m: int, tile_n: int) -> list[int]:
    """Of the queries of one head, that see each tile of keys."""
    band, found = problem.mask.band, list[int]()
    for key in range(0, problem.key_length, tile_n):
        last = min(key + tile_n, problem.key_length) - 1
        first_query = 0 if band.right is None else max(0, key - band.right)
        end_query = problem.query_length if band.left is None else min(problem.query_length, last + band.left + 1)
        found.append(max(0, ceil(end_query / tile_m) - first_query // tile_m))
    return found


def _part(problem: Attention, shares: int, columns: int, scratch: int) -> Heads:
    """[element, key head, share, key, column]."""
    head = problem.key_length * columns
    return Heads(Scratch(scratch), "float32", (Term(problem.key_heads * shares * head),), columns, head)


def _sum(problem: Attention, shares: int, name: str, gradient: Heads, part: Heads, columns: int) -> Stage:
    rows = problem.batch * problem.key_heads
    vectors = rows * problem.key_length * columns // _COLUMNS
    found = [
        *heads_parameters("sum", gradient),
        Parameter("const float*", "parts", "parts", part.buffer),
        *numbers(key_heads=problem.key_heads, shares=shares, key_length=problem.key_length, columns=columns),
        *numbers("long long", vectors=vectors),
    ]
    kernel, call = "attention_sm90_backward_shares", f"jaxdnn::AttentionSm90BackwardShares<{ctype(gradient.dtype)}>"
    text = entry_text(kernel, call, str(_THREADS), found, f"{kernel}_{name}")
    launch = Launch(f"{kernel}_{name}", arguments(found), (ceil(vectors / _THREADS), 1, 1), (_THREADS, 1, 1))
    scratch = 4 * rows * shares * problem.key_length * columns
    return Stage(("attention/sm90/backward_shares.cuh",), f"\n{text}", (launch,), (scratch,))
