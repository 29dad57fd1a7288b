"""Convolutions of stride 1 on Hopper's tensor cores by patches of the image (cpp/kernels/convolution/sm90_halo.cuh)."""

from collections.abc import Iterator

from jaxdnn.device import Target
from jaxdnn.engines.base import ProblemEngine
from jaxdnn.engines.convolution.implicit_gemm import implicit_gemm
from jaxdnn.engines.convolution.problem import Convolution
from jaxdnn.engines.convolution.sm90.halo.heuristic import candidates
from jaxdnn.engines.convolution.sm90.halo.knobs import HaloKnobs, Patches, knobs_reason, patches_reason
from jaxdnn.engines.convolution.sm90.halo.unit import HaloUnit
from jaxdnn.engines.product.sm90.engine import Sm90
from jaxdnn.plan import Plan


class ConvolutionSm90Halo(ProblemEngine[Convolution, HaloKnobs]):
    """Implicit GEMM, of which a tile's part of the image is loaded once for all taps of a window."""

    name = "sm90_halo"
    platform = "cuda"
    problem = Convolution
    notes = Sm90.notes

    def reason(self, problem: Convolution, target: Target) -> str | None:
        patches = _patches(problem)
        if isinstance(patches, str):
            return patches
        if reason := Sm90().reason(patches.gemm.product, target):
            return reason
        if next(candidates(patches, target), None) is None:
            return "the patches and the filter of a tile are more than shared memory"
        return None

    def configurations(self, problem: Convolution, target: Target) -> Iterator[HaloKnobs]:
        patches = _patches(problem)
        return iter(()) if isinstance(patches, str) else candidates(patches, target)

    def build(self, config: HaloKnobs, problem: Convolution, target: Target) -> Plan:
        patches = _patches(problem)
        reason = patches if isinstance(patches, str) else knobs_reason(patches, config, target.shared_memory)
        if isinstance(patches, str) or reason:
            raise ValueError(f"{self.name}: {config} does not fit: {reason}")
        unit = HaloUnit(patches, config, target.sm_count)
        return Plan(unit.text, "sm_90a", tuple(unit.launches), tuple(unit.scratch))


def _patches(problem: Convolution) -> Patches | str:
    """The convolution by patches, or why it has none."""
    gemm = implicit_gemm(problem)
    if isinstance(gemm, str):
        return gemm
    return patches_reason(gemm) or Patches(gemm)
