"""Knobs of the direct norm engine, and what it makes of a call before it knows them."""

import math
from dataclasses import dataclass, replace
from typing import Literal

from jaxdnn.engines.base import check_least, check_powers_of_two
from jaxdnn.engines.norm.problem import Rows

MAX_CLUSTER = 8  # the largest that every device with clusters takes
STREAMED = ("x", "residual", "d_y", "d_sum")  # operands of every row and column


@dataclass(frozen=True)
class NormKnobs:
    """How rows are laid over threads; cpp/kernels/norm/direct/row.cuh draws it.

    Attributes:
      vector: columns of one access.
      vectors: accesses of a thread in each row of each array.
      threads_per_row: threads that share one split of a row.
      rows_per_block: rows that a thread block works on at a time.
      stages: rows in flight in shared memory for each of these; 0 loads rows straight into registers.
      blocks_per_sm: thread blocks that a multiprocessor can hold, which bounds their registers.
      turns: rows that each of these works through; 0 for as many as it takes when no more blocks run than the device
        holds at once.
      splits: thread blocks that share a row.
      join: how these add their sums: as one cluster, or in two launches.
      parameters: where a block's threads find scale and bias: in their registers, in shared memory, or row after row
        in the caches.
      ahead: vectors of each parameter that a thread of the forward pass loads from the caches before it needs them.
      prefetch: the block, this many after this one in the order of the rows, whose rows a block of the forward pass
        asks into the L2 cache; 0 for none.
      hold: whether the backward pass keeps a row in registers between its two passes, or reads the stage again.
    """

    vector: int
    vectors: int
    threads_per_row: int
    rows_per_block: int = 1
    stages: int = 0
    blocks_per_sm: int = 1
    turns: int = 0
    splits: int = 1
    join: Literal["cluster", "launches"] = "cluster"
    parameters: Literal["registers", "shared", "memory"] = "registers"
    ahead: int = 0
    prefetch: int = 0
    hold: bool = True

    def __post_init__(self) -> None:
        check_powers_of_two(self, "vector", "threads_per_row")
        check_least(self, 1, "vectors", "rows_per_block", "blocks_per_sm", "splits")
        check_least(self, 0, "stages", "turns", "prefetch")
        if not 0 <= self.ahead <= (self.vectors if self.parameters == "memory" else 0):
            raise ValueError(
                f"NormKnobs: ahead is {self.ahead}; expected up to `vectors` with parameters = 'memory', and else 0"
            )
        if self.threads % 32 or self.threads > 1024:
            raise ValueError(
                f"NormKnobs: threads_per_row x rows_per_block is {self.threads}; expected a multiple of 32 up to 1024"
            )
        if self.threads_per_row > 32 and self.rows_per_block > 15:
            raise ValueError("NormKnobs: expected at most 15 rows a block when a row has more than 32 threads")
        if self.splits > 1 and (self.rows_per_block > 1 or self.threads_per_row < 32):
            raise ValueError("NormKnobs: a row of several splits needs rows_per_block = 1 and whole warps")
        if self.cluster & (self.cluster - 1) or self.cluster > MAX_CLUSTER:
            raise ValueError(f"NormKnobs: a cluster has {self.cluster} splits; expected 1, 2, 4 or {MAX_CLUSTER}")

    @property
    def threads(self) -> int:
        return self.threads_per_row * self.rows_per_block

    @property
    def cluster(self) -> int:
        return self.splits if self.join == "cluster" else 1

    @property
    def split_columns(self) -> int:
        """Columns that the threads of a row can hold."""
        return self.vector * self.vectors * self.threads_per_row


def vector_columns(columns: int, vector: int) -> int:
    """Columns of the vectors that a row of so many lies in, wherever it begins in memory: at most `vector` - 1 more."""
    return columns + vector - math.gcd(columns, vector)


def read(problem: Rows) -> tuple[str, ...]:
    """The operands that the kernels need; the rest of them are not passed."""
    names = tuple(array.name for array in problem.operands)
    if not problem.backward:
        return names
    needed = {"d_y"}
    if {"x", "scale"} & {*problem.active}:
        needed |= {"x", "mean", "rstd"}
    if "x" in problem.active:
        needed |= {"scale", "d_sum", "d_mean", "d_rstd"}
    return tuple(name for name in names if name in needed)


def collapsed(problem: Rows) -> Rows:
    """The same rows; groups become more rows of a single one where nothing but the rows tells them apart."""
    parameters = {"scale", "bias"} & {*read(problem)} | {f"d_{name}" for name in problem.active if name != "x"}
    rows = {*read(problem)} - parameters
    stride = {name: array.group_stride for name, array in problem.arrays.items()}
    own = {name: problem.rows * (problem.columns if name in STREAMED else 1) for name in rows}
    apart = any(stride[name] for name in parameters)
    if apart or any(stride[name] != own[name] for name in rows):
        return problem
    return replace(problem, groups=1, rows=problem.groups * problem.rows)
