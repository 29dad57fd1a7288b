"""Convolutions on Hopper's tensor cores (cpp/kernels/convolution/sm90.cuh)."""

from collections.abc import Iterator

from jaxdnn.device import Target
from jaxdnn.engines.base import ProblemEngine
from jaxdnn.engines.convolution.cudnn import in_cudnn
from jaxdnn.engines.convolution.implicit_gemm import implicit_gemm
from jaxdnn.engines.convolution.problem import Convolution
from jaxdnn.engines.convolution.sm90.heuristic import candidates
from jaxdnn.engines.convolution.sm90.knobs import image_reason, knobs_reason, operands_reason
from jaxdnn.engines.convolution.sm90.unit import ConvolutionUnit
from jaxdnn.engines.product.sm90.engine import Sm90
from jaxdnn.engines.product.sm90.knobs import Sm90Knobs
from jaxdnn.plan import Plan

_LINE = 64  # channels, which are 128 bytes of 16-bit floats


class ConvolutionSm90(ProblemEngine[Convolution, Sm90Knobs]):
    """Implicit GEMM: a product's tiles, of which one operand is read by places of an image."""

    name = "sm90"
    platform = "cuda"
    problem = Convolution
    notes = Sm90.notes

    def reason(self, problem: Convolution, target: Target) -> str | None:
        gemm = implicit_gemm(problem)
        if isinstance(gemm, str):
            return gemm
        if reason := Sm90().reason(gemm.product, target):
            return reason
        if reason := image_reason(gemm) or operands_reason(gemm):
            return reason
        if next(candidates(gemm, target), None) is None:
            return f"no tile fits the {gemm.group_columns} columns of a group"
        return _cudnn_reason(problem) if in_cudnn(problem) else None

    def configurations(self, problem: Convolution, target: Target) -> Iterator[Sm90Knobs]:
        gemm = implicit_gemm(problem)
        return iter(()) if isinstance(gemm, str) else candidates(gemm, target)

    def build(self, config: Sm90Knobs, problem: Convolution, target: Target) -> Plan:
        gemm = implicit_gemm(problem)
        reason = gemm if isinstance(gemm, str) else knobs_reason(gemm, config, target.shared_memory)
        if isinstance(gemm, str) or reason:
            raise ValueError(f"{self.name}: {config} does not fit: {reason}")
        unit = ConvolutionUnit(gemm, config, target.sm_count)
        return Plan(unit.text, "sm_90a", tuple(unit.launches), tuple(unit.scratch))


def _cudnn_reason(problem: Convolution) -> str | None:
    """Why cuDNN, which has it too, is faster; measured in benchmarks/results/convolution_kernels.md."""
    if problem.result == "filter":
        few = problem.c % _LINE != 0
    else:
        few = problem.groups > 1 and (problem.c if problem.result == "output" else problem.k) < _LINE
    if few:
        return "XLA's convolutions by cuDNN are faster for so few channels in a group"
    if problem.result == "image" and any(window.filter < window.stride for window in problem.windows):
        return "XLA's convolutions by cuDNN are faster where most places of the image meet no window"
    return None
