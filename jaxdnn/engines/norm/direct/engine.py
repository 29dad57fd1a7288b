"""layer_norm and rms_norm on CUDA: kernels that read every row once (cpp/kernels/norm/direct/*.cuh)."""

from collections.abc import Iterator

from jaxdnn.device import Target
from jaxdnn.engines.base import ProblemEngine
from jaxdnn.engines.norm.direct.heuristic import Heuristic
from jaxdnn.engines.norm.direct.knobs import NormKnobs
from jaxdnn.engines.norm.direct.unit import MAX_GRID, Call
from jaxdnn.engines.norm.problem import Rows
from jaxdnn.plan import Plan


class DirectNorm(ProblemEngine[Rows, NormKnobs]):
    """Memory-bound normalization: rows stream through shared memory while earlier ones are reduced and written."""

    name = "direct"
    platform = "cuda"
    problem = Rows
    notes = ("deterministic", "accumulates in float32 (in float64 if an array is)")

    def reason(self, problem: Rows, target: Target) -> str | None:
        if target.compute_capability < 80:
            return f"it needs compute capability 8.0 or later, and {target.name} is {target.arch}"
        if problem.columns >= MAX_GRID // 2:
            return f"a row of {problem.columns} columns is longer than its 32-bit column index"
        if problem.groups * max(1, problem.columns // 1024) > MAX_GRID:
            return f"{problem.groups} groups of {problem.columns} columns are more thread blocks than a grid has"
        return None

    def configurations(self, problem: Rows, target: Target) -> Iterator[NormKnobs]:
        return Heuristic(problem, target).candidates()

    def build(self, config: NormKnobs, problem: Rows, target: Target) -> Plan:
        unit, launches, scratch = Call(config, problem, target).build()
        arch = "sm_90a" if target.compute_capability == 90 else target.arch
        return Plan(unit, arch, launches, scratch)
