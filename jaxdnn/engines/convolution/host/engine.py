"""Convolutions on the CPU: windows in registers where a group has one channel (cpp/host/convolution/depthwise.cc), and
products of gathered panels where it has more (cpp/host/convolution/implicit_gemm.cc).
"""

from collections.abc import Iterable

from jaxdnn.device import Target
from jaxdnn.engines.base import ProblemEngine
from jaxdnn.engines.convolution.host.heuristic import candidates
from jaxdnn.engines.convolution.host.knobs import HostConvolutionKnobs, HostDepthwiseKnobs
from jaxdnn.engines.convolution.host.unit import depthwise, depthwise_reason, gemm, gemm_reason, is_depthwise
from jaxdnn.engines.convolution.problem import Convolution
from jaxdnn.engines.convolution.reasons import shape_reason
from jaxdnn.engines.product.host.knobs import arrays_reason
from jaxdnn.plan import Plan

_DTYPES = ("float32", "float64", "bfloat16", "float16")


class HostConvolution(ProblemEngine[Convolution, HostConvolutionKnobs]):
    """Vectors as wide as the processor's, tiles in cache, XLA's own threads."""

    name = "host"
    platform = "cpu"
    problem = Convolution
    notes = ("deterministic",)

    def reason(self, problem: Convolution, target: Target) -> str | None:
        del target
        if problem.a.dtype != problem.b.dtype or problem.a.dtype not in _DTYPES:
            return f"its kernels don't multiply {problem.a.dtype} by {problem.b.dtype}"
        if problem.accumulator != (wide := "float64" if problem.a.dtype == "float64" else "float32"):
            return f"its kernels sum {problem.a.dtype} in {wide}; {problem.accumulator} is asked for"
        if reason := shape_reason(problem) or arrays_reason(problem.operands, problem.results):
            return reason
        return depthwise_reason(problem) if is_depthwise(problem) else gemm_reason(problem)

    def configurations(self, problem: Convolution, target: Target) -> Iterable[HostConvolutionKnobs]:
        return candidates(problem, target)

    def build(self, config: HostConvolutionKnobs, problem: Convolution, target: Target) -> Plan:
        del target
        if isinstance(config, HostDepthwiseKnobs):
            return Plan(unit="", arch="", launches=(depthwise(config, problem),))
        call = gemm(config, problem)
        return Plan(unit="", arch="", launches=tuple(call.launches()), scratch=call.scratch)
