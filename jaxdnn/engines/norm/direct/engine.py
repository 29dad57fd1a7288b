"""layer_norm and rms_norm on CUDA: kernels that read every row once (cpp/kernels/norm/direct/*.cuh)."""

from collections.abc import Iterator
from typing import Any

from jaxdnn.device import Target
from jaxdnn.engines.norm.direct.heuristic import Heuristic
from jaxdnn.engines.norm.direct.knobs import NormKnobs
from jaxdnn.engines.norm.direct.unit import MAX_GRID, Call
from jaxdnn.engines.norm.problem import geometry
from jaxdnn.plan import Plan
from jaxdnn.spec import Signature


class DirectNorm:
    """Memory-bound normalization: rows stream through shared memory while earlier ones are reduced and written."""

    name = "direct"
    platform = "cuda"
    op = "norm"
    notes = ("deterministic", "accumulates in float32 (in float64 if an array is)")

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
