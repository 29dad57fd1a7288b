"""layer_norm and rms_norm on CUDA: kernels that read every row once (cpp/kernels/norm_*.cuh)."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from jaxdnn.device import Target
from jaxdnn.engines.direct_norm_knobs import MAX_CLUSTER, STREAMED, NormKnobs, collapsed, read
from jaxdnn.engines.direct_norm_plan import MAX_GRID, Call
from jaxdnn.engines.norm_geometry import geometry
from jaxdnn.plan import Plan
from jaxdnn.spec import Signature

MOST_CANDIDATES = 8
Part = tuple[int, Literal["cluster", "launches"]]  # parts of a row, and how they add their sums


class DirectNorm:
    """Memory-bound normalization: rows stream through shared memory while earlier ones are reduced and written."""

    name = "direct"
    platform = "cuda"
    op = "norm"
    notes = ("deterministic", "accumulates in float32 (in float64 if an array is)", "reads every input once")

    def supports(self, spec: Any, signature: Signature, target: Target) -> str | None:
        if spec.direction == "tangent":
            return "it has no kernel for the tangent"
        if target.compute_capability < 80:
            return f"it needs compute capability 8.0 or later, and {target.name} is {target.arch}"
        if spec.direction == "backward" and "y" not in spec.seeded:
            return "its backward kernel starts from the cotangent of y, which is zero here"
        problem = geometry(spec, signature)
        if isinstance(problem, str):
            return problem
        if problem.columns >= MAX_GRID // 2:
            return f"a row of {problem.columns} columns is longer than its 32-bit column index"
        if problem.groups * max(1, problem.columns // 1024) > MAX_GRID:
            return f"{problem.groups} groups of {problem.columns} columns are more thread blocks than a grid has"
        return None

    def candidates(self, spec: Any, signature: Signature, target: Target) -> Iterator[NormKnobs]:
        return Heuristic(spec, signature, target).candidates()

    def plan(self, config: NormKnobs, spec: Any, signature: Signature, target: Target) -> Plan:
        call = Call(config, spec, signature, target)
        unit, launches, scratch = call.build()
        return Plan(
            op=spec.title,
            unit=unit,
            arch="sm_90a" if target.compute_capability == 90 else target.arch,
            launches=launches,
            scratch=scratch,
        )


def power_of_two(least: int) -> int:
    """The smallest power of two that is not smaller than `least`."""
    return 1 << max(0, least - 1).bit_length()


class Heuristic:
    """Orders the configurations of one call.

    The thresholds come from sweeps on an H200, benchmarks/results/norm_kernels.md. What they show: the memory system is
    fastest with about 64 KiB of reads in flight on each multiprocessor (less does not cover the latency, more slows
    the copy alone by up to 7%), and when blocks are scheduled in the order of the rows, not when a fixed set of blocks
    strides over them and drifts apart (5 to 10%).
    """

    def __init__(self, spec: Any, signature: Signature, target: Target) -> None:
        self.spec, self.target = spec, target
        self.problem = collapsed(spec, signature)
        self.forward = spec.direction == "forward"
        sizes = {name: np.dtype(signature.operands[name].dtype).itemsize for name in read(spec)}
        self.row_sizes = [size for name, size in sizes.items() if name in STREAMED]
        self.parameter_sizes = [size for name, size in sizes.items() if name in ("scale", "bias")]
        self.gradients = len({"scale", "bias"} & {*spec.active})
        self.words = 2 if self.problem.compute_dtype == "float64" else 1  # registers of one number
        # Accesses of 16 bytes of the narrowest array, of at most 32 bytes of the widest, that divide a row.
        self.vector = math.gcd(self.problem.columns, min(16 // min(self.row_sizes), 32 // max(self.row_sizes)))

    def candidates(self) -> Iterator[NormKnobs]:
        found = self.forward_candidates() if self.forward else self.backward_candidates()
        return itertools.islice(dict.fromkeys(found), MOST_CANDIDATES)

    def layouts(self) -> list[Part]:
        """Parts of a row: one if a block can hold it, more if it can't or if the rows are too few to go round."""
        columns, rows = self.problem.columns, self.problem.rows * self.problem.groups
        parts = [1, 2, 4, MAX_CLUSTER] if self.target.compute_capability >= 90 else [1]
        parts = [count for count in parts if count == 1 or columns >= 4096 * count]
        spread = [count for count in parts if 2 * rows * count <= self.target.sm_count]
        clusters: list[Part] = [(count, "cluster") for count in dict.fromkeys([*reversed(spread), *parts])]
        return [*clusters, (-(-columns // 4096), "launches")] if columns > 4096 else clusters

    def layout(self, parts: int, join: Literal["cluster", "launches"], elements: int, threads: int) -> NormKnobs | None:
        """`elements` columns a thread, in blocks of at least `threads`; None if that is no layout."""
        vector = min(self.vector, elements)
        accesses = self.problem.columns // vector
        each = -(-accesses // parts)
        team = power_of_two(-(-each * vector // elements))
        # Four neighbouring lanes, and a warp of a row in parts, even if that leaves a thread fewer columns.
        team = max(team, 32 if parts > 1 else min(4, power_of_two(each)))
        if team > 1024 or (parts - 1) * each >= accesses:
            return None
        rows = max(1, threads // team) if parts == 1 else 1
        return NormKnobs(vector, -(-each // team), team, rows_per_block=rows, parts=parts, join=join)

    def forward_candidates(self) -> Iterator[NormKnobs]:
        for part in self.layouts():
            # 64 bytes of a row a thread, four accesses in flight; more in rows that 512 threads would not hold.
            row_bytes = max(self.row_sizes) * self.problem.columns // part[0]
            thread_bytes = next((size for size in (64, 128, 256) if row_bytes <= 512 * size), None)
            if thread_bytes is None:
                continue
            elements = thread_bytes // max(self.row_sizes)
            # Parameters that outweigh the rows are kept for several of them: layer_norm of 4096 x 16384 in bfloat16
            # with float32 parameters, 3,673 GB/s against 3,346.
            heavy = sum(self.parameter_sizes) > 2 * sum(self.row_sizes)
            # Two turns with a ring in rows of 2 to 16 KiB: 3,966 GB/s against 3,906 at 16384 x 4096 in bfloat16. One
            # turn in longer ones: 3,905 against 3,874 at 8192 x 8192.
            ringed = len(self.row_sizes) == 1 and row_bytes >= 2048 and (heavy or row_bytes < 16384)
            ring = self.ring(part, elements, 4 if heavy and row_bytes >= 16384 else 2)
            direct = self.direct(part, elements)
            yield from (knobs for knobs in ([ring, direct] if ringed else [direct, ring]) if knobs)

    def direct(self, part: Part, elements: int) -> NormKnobs | None:
        """One turn, straight into registers, 1,024 threads on a multiprocessor."""
        layout = self.layout(*part, elements, 256)
        if layout is None:
            return None
        layout = replace(layout, turns=1, blocks_per_sm=max(1, 1024 // layout.threads))
        return self.within_registers([layout, replace(layout, parameters="memory")], layout.blocks_per_sm)

    def ring(self, part: Part, elements: int, turns: int) -> NormKnobs | None:
        """Several turns, two stages, 512 threads on a multiprocessor."""
        layout = self.layout(*part, elements, 128)
        if layout is None or part[1] == "launches" or layout.vector * min(self.row_sizes) < 4:
            return None
        layout = replace(layout, turns=turns, stages=2, blocks_per_sm=max(1, 512 // layout.threads))
        return self.within_registers([self.within_shared(layout)], 1)

    def backward_candidates(self) -> Iterator[NormKnobs]:
        # 16 columns a thread; 32 in rows that 512 threads would not hold.
        for team_threads in (512, 1024):
            for part in self.layouts():
                for elements in (16, 8, 32):
                    knobs = self.backward(part, elements)
                    if knobs is not None and knobs.threads_per_row <= team_threads:
                        yield knobs

    def backward(self, part: Part, elements: int) -> NormKnobs | None:
        """The first variant that fits, fastest first: rows and parameters in registers, or either in shared memory."""
        layout = self.layout(*part, elements // self.words, 256)
        if layout is None:
            return None
        most = 1024 if elements == 8 else 512
        layout = replace(layout, blocks_per_sm=max(1, most // layout.threads))
        fewest = max(1, 512 // layout.threads)
        if part[1] == "launches" or layout.vector * min(self.row_sizes) < 4:
            return self.within_registers([layout, replace(layout, parameters="memory")], fewest)
        shapes = [layout]
        if layout.vector > 1 and layout.vector * min(self.row_sizes) >= 8:
            # Narrower accesses widen fewer numbers at a time.
            shapes.append(replace(layout, vector=layout.vector // 2, vectors=layout.vectors * 2))
        again = [replace(shape, hold=False) for shape in shapes]
        shared = [replace(shape, parameters="shared") for shape in again if self.shareable(shape)]
        memory = [replace(shape, parameters="memory") for shape in again]
        for variants in ([layout], again, shared, memory):
            knobs = self.within_registers(variants, fewest)
            knobs = knobs and self.within_registers([self.within_shared(self.staged(knobs))], 1)
            if knobs is not None and (knobs.stages or not variants[0].parameters == "shared"):
                return knobs
        return None

    def shareable(self, knobs: NormKnobs) -> bool:
        return all(knobs.vector * size >= 4 for size in self.parameter_sizes)

    def staged(self, knobs: NormKnobs) -> NormKnobs:
        """Stages for 64 KiB in flight; one more where a stage is only free after the second pass."""
        stage = sum(self.row_sizes) * knobs.part_columns * knobs.rows_per_block * knobs.blocks_per_sm
        return replace(knobs, stages=min(4, max(1, 65536 // stage) + (not knobs.hold)))

    def within_shared(self, knobs: NormKnobs) -> NormKnobs:
        """As many of the stages, and then of the blocks, as shared memory holds."""
        columns = knobs.part_columns * knobs.rows_per_block
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
        elements = knobs.vector * knobs.vectors
        row = knobs.vectors * sum(max(1, knobs.vector * size // 4) for size in self.row_sizes)
        kept = knobs.vectors * sum(max(1, knobs.vector * size // 4) for size in self.parameter_sizes)
        kept *= knobs.parameters == "registers"
        temporary = self.words * knobs.vector
        exact = knobs.parts * knobs.part_columns == self.problem.columns
        steps = 8 if knobs.join == "launches" else 0
        if self.forward:
            masks = 0 if exact else 2 * knobs.vectors
            return row + kept + (2 if kept else 4) * temporary + 8 * self.words + masks + steps
        sums = self.gradients * elements * self.words
        plain = exact and knobs.threads == knobs.threads_per_row and knobs.parts == 1
        masks = 0 if plain else max(0, elements * self.words - 16)
        return sums + kept + row * knobs.hold + 3 * temporary + 4 + elements * 3 // 4 * self.words + masks + steps
