"""Knobs of the direct norm engine, and what it makes of a call before it knows them."""

import math
from dataclasses import dataclass, replace
from typing import Literal

from jaxdnn.device import Target
from jaxdnn.engines.base import check_least, check_powers_of_two
from jaxdnn.engines.norm.problem import Rows

NARROW_BYTES = 8  # of an access, of which fewer are narrow
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


class Room:
    """What knobs a multiprocessor has room for, in a call."""

    def __init__(self, problem: Rows, target: Target) -> None:
        self.target = target
        self.problem = collapsed(problem)
        self.forward = not problem.backward
        self.read = read(problem)
        sizes = {name: problem.arrays[name].itemsize for name in self.read}
        self.row_sizes = [size for name, size in sizes.items() if name in STREAMED]
        self.parameter_sizes = [size for name, size in sizes.items() if name in ("scale", "bias")]
        self.gradients = len({"scale", "bias"} & {*problem.active})
        self.words = 2 if self.problem.compute_dtype == "float64" else 1  # registers of one number
        # Accesses of 16 bytes of the narrowest array, of at most 32 bytes of the widest. Where they do not divide a
        # row, narrower ones that do, if they have 8 bytes; else the row is skewed, if whole warps have enough of it.
        widest = min(16 // min(self.row_sizes), 32 // max(self.row_sizes))
        columns = self.problem.columns
        dividing = math.gcd(columns, widest)
        together = self.problem.groups == 1 or self.problem.rows * columns % widest == 0
        self.skewed = dividing * min(self.row_sizes) < NARROW_BYTES and together and columns >= 32 * widest
        self.vector = widest if self.skewed else dividing

    def shareable(self, knobs: NormKnobs) -> bool:
        """Whether parameters can wait in shared memory: cp.async copies at least 4 bytes, as they are aligned."""
        aligned = self.problem.columns % knobs.vector == 0 and all(
            knobs.vector * size >= 4 for size in self.parameter_sizes
        )
        return bool(self.parameter_sizes) and aligned

    def within_shared(self, knobs: NormKnobs) -> NormKnobs:
        """As many of the stages, and then of the blocks, as shared memory holds."""
        columns = knobs.split_columns * knobs.rows_per_block
        parameters = sum(self.parameter_sizes) * columns if knobs.parameters == "shared" else 0
        for blocks in range(knobs.blocks_per_sm, 0, -1):
            # The system takes 1 KiB a block, and the sums less than 1 KiB more.
            room = (self.target.shared_memory + 1024) // blocks - 2048 - parameters
            stages = min(knobs.stages, room // (sum(self.row_sizes) * columns))
            if stages >= 1:
                return replace(knobs, stages=stages, blocks_per_sm=blocks)
        return replace(knobs, stages=0, hold=True)

    def within_registers(self, variants: list[NormKnobs], fewest_blocks: int) -> NormKnobs | None:
        """The first variant that spills nothing, with as many of its blocks as then fit."""
        for fewest in dict.fromkeys((fewest_blocks, 1)):
            for knobs in variants:
                for blocks in range(knobs.blocks_per_sm, fewest - 1, -1):
                    if self.registers(knobs) <= min(255, 65536 // (knobs.threads * blocks) // 8 * 8):
                        return replace(knobs, blocks_per_sm=blocks)
        return None

    def registers(self, knobs: NormKnobs) -> int:
        """Registers of a thread: what must be held, and constants fitted to what ptxas 13.0 needs to spill nothing."""
        elements, vectors = knobs.vector * knobs.vectors, knobs.vectors
        row = vectors * sum(max(1, knobs.vector * size // 4) for size in self.row_sizes)
        kept = sum(max(1, knobs.vector * size // 4) for size in self.parameter_sizes)
        kept *= vectors if knobs.parameters == "registers" else knobs.ahead
        temporary = self.words * knobs.vector
        exact = knobs.splits * knobs.split_columns == self.problem.columns
        steps = 8 if knobs.join == "launches" else 0
        if self.forward:
            if knobs.splits > 1 and steps:
                row = max(row - kept, row // len(self.row_sizes))  # one step has no parameters, the other reads the sum
            ring = (32 if self.problem.groups > 1 or self.problem.columns % knobs.vector else 24) if knobs.stages else 0
            masks = 0 if exact else 4 * vectors
            if self.skewed and knobs.vector <= 4:
                masks -= 2 * (vectors - 1)  # of which nothing is asked
            masks += 3 * vectors if self.problem.columns % knobs.vector and len(self.row_sizes) > 1 else 0
            near = knobs.parameters == "memory" and not knobs.ahead
            if knobs.cluster > 1 and near and not self.skewed and self.problem.groups == 1:
                # Nothing else is kept from row to row; of float32 nothing is widened either, nor has it a mean.
                least = 4 if self.row_sizes == [4] and not self.problem.centered else 10
                ring, masks = min(ring, least), min(masks, vectors)
            early = 2 * bool(knobs.prefetch) + vectors * bool(knobs.ahead)
            early += 8 if early and self.problem.groups > 1 else 0
            steps -= min(steps, ring)
            return row + kept + (2 if kept else 4) * temporary + 8 * self.words + ring + masks + steps + early
        sums = self.gradients * elements * self.words
        alone = exact and knobs.threads == knobs.threads_per_row and knobs.splits == 1
        masks = 0 if alone else max(0, elements * self.words - 16)
        masks += max(0, vectors - 4) if exact else 3 * vectors
        masks += 0 if alone or knobs.hold else 16
        masks += (7 if knobs.stages else 3) * vectors if self.problem.columns % knobs.vector else 0
        seeds = 4 * self.words * len({"d_sum", "d_mean", "d_rstd"} & {*self.read})
        # Numbers in flight: most of a row's in float32, more in float64, whose conversions take registers too.
        flight = 3 * elements if self.words == 2 else elements * 3 // 4
        return sums + kept + row * knobs.hold + 3 * temporary + 4 + flight + masks + seeds + steps
