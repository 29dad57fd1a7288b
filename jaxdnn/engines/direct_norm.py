"""layer_norm and rms_norm on CUDA: kernels that read every row once (cpp/kernels/norm_*.cuh)."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from jaxdnn.device import Target
from jaxdnn.engines.direct_norm_plan import MAX_CLUSTER, MAX_GRID, STREAMED, Call, NormKnobs, collapsed, read
from jaxdnn.engines.norm_geometry import geometry
from jaxdnn.plan import Plan
from jaxdnn.spec import Signature


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
        return iter(dict.fromkeys(Heuristic(spec, signature, target).candidates()))

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
    """Orders the configurations of one call: a layout of rows over threads first, then as many blocks as registers
    allow, then as many stages as shared memory allows."""

    def __init__(self, spec: Any, signature: Signature, target: Target) -> None:
        self.spec, self.target = spec, target
        self.problem = collapsed(spec, signature)
        self.forward = spec.direction == "forward"
        sizes = {name: np.dtype(signature.operands[name].dtype).itemsize for name in read(spec)}
        self.row_sizes = [size for name, size in sizes.items() if name in STREAMED]
        self.parameter_bytes = sum(size for name, size in sizes.items() if name in ("scale", "bias"))
        self.words = 2 if self.problem.compute_dtype == "float64" else 1  # registers of one number
        # Accesses of 16 bytes of the narrowest array, of at most 32 bytes of the widest, that divide a row.
        self.vector = math.gcd(self.problem.columns, min(16 // min(self.row_sizes), 32 // max(self.row_sizes)))

    def candidates(self) -> Iterator[NormKnobs]:
        for layout in self.layouts():
            variants = [replace(layout, hold=hold, parameters=kept) for hold, kept in self.places()]
            knobs = next((self.resident(knobs) for knobs in variants if self.fits(knobs)), None)
            if knobs is not None:
                yield knobs

    def places(self) -> list[tuple[bool, Literal["registers", "memory"]]]:
        """Where rows and parameters wait, fastest first."""
        if self.forward:
            return [(True, "registers"), (True, "memory")]
        return [(True, "registers"), (False, "registers"), (False, "memory")]

    def layouts(self) -> Iterator[NormKnobs]:
        """Rows in one block, then in clusters, then split over launches; 16 columns a thread, then fewer or more."""
        columns = self.problem.columns
        clusters = (1, 2, 4, MAX_CLUSTER) if self.target.compute_capability >= 90 else (1,)
        for parts in clusters:
            for elements in (16, 8, 32):
                yield from self.layout(parts, "cluster", elements)
        for elements in (16, 8, 4):
            parts = -(-columns // (256 * elements))
            yield from self.layout(parts, "launches", elements)

    def layout(self, parts: int, join: Literal["cluster", "launches"], elements: int) -> Iterator[NormKnobs]:
        accesses = self.problem.columns // self.vector
        each = -(-accesses // parts)
        if (parts - 1) * each >= accesses:
            return  # an empty last part
        team = power_of_two(-(-each * self.vector // max(elements, self.vector)))
        team = max(team, min(8, power_of_two(each)), 32 if parts > 1 else 1)
        if team > 1024:
            return
        yield NormKnobs(
            vector=self.vector,
            vectors=-(-each // team),
            threads_per_row=team,
            rows_per_block=256 // team if team <= 32 and parts == 1 else 1,
            parts=parts,
            join=join,
        )

    def registers(self, knobs: NormKnobs) -> int:
        """Registers of a thread; the constants were fitted to what ptxas 13.0 needs to spill nothing."""
        elements = knobs.vector * knobs.vectors
        needed = elements * self.parameter_bytes // 4 if knobs.parameters == "registers" else 0
        if self.forward:
            needed += elements * sum(self.row_sizes) // 4 + 2 * self.words * knobs.vector + 14
        else:
            gradients = len({"scale", "bias"} & {*self.spec.active})
            needed += gradients * elements * self.words + 3 * self.words * knobs.vector + 18
            if knobs.hold:
                needed += elements * sum(self.row_sizes) // 4
        return -(-needed // 8) * 8

    def fits(self, knobs: NormKnobs) -> bool:
        return self.registers(knobs) <= min(255, 65536 // knobs.threads)

    def resident(self, knobs: NormKnobs) -> NormKnobs:
        """With as many blocks a multiprocessor, and stages, as there is room for."""
        blocks = max(1, min(65536 // (knobs.threads * self.registers(knobs)), 1024 // knobs.threads))
        row = sum(self.row_sizes) * knobs.part_columns * knobs.rows_per_block
        room = (self.target.shared_memory + 1024) // blocks - 2048  # 1 KiB a block is the system's, 1 KiB for the sums
        stages = min(4, room // row)
        if knobs.vector * min(self.row_sizes) < 4 or (knobs.parts > 1 and knobs.join == "launches"):
            stages = 0
        if stages == 0:
            knobs = replace(knobs, hold=True)
            if not self.fits(knobs):
                knobs = replace(knobs, parameters="memory")
        return replace(knobs, stages=stages, blocks_per_sm=blocks)
