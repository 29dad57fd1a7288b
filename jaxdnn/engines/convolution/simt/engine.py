"""Convolutions on any GPU, of any window, direction, dtype and alignment (cpp/kernels/convolution/simt.cuh)."""

from collections.abc import Iterable

from jaxdnn.device import Target
from jaxdnn.engines.base import ProblemEngine
from jaxdnn.engines.convolution.cudnn import in_cudnn
from jaxdnn.engines.convolution.matrices import product_of_group, product_of_groups
from jaxdnn.engines.convolution.problem import Convolution
from jaxdnn.engines.convolution.reasons import array_reason
from jaxdnn.engines.convolution.simt.heuristic import candidates
from jaxdnn.engines.convolution.simt.knobs import ConvolutionSimtKnobs
from jaxdnn.engines.convolution.simt.unit import multiply
from jaxdnn.engines.product.element_epilogue import element_epilogue
from jaxdnn.engines.product.element_reason import element_reason
from jaxdnn.engines.product.split_k import identity_epilogue, split_stage
from jaxdnn.engines.unit import joined
from jaxdnn.plan import Plan


class ConvolutionSimt(ProblemEngine[Convolution, ConvolutionSimtKnobs]):
    """A product of matrices for each group, whose elements are gathered, by arithmetic that is exact in float32."""

    name = "simt"
    platform = "cuda"
    problem = Convolution
    notes = ("deterministic", "exact float32, int32 and float64 arithmetic")

    def reason(self, problem: Convolution, target: Target) -> str | None:
        if reason := array_reason(problem, target):
            return reason
        product = product_of_group(problem)
        if max(product.m, product.k) >= 2**31:
            return "an axis is longer than its 31-bit index"
        if problem.accumulator == "float32" and in_cudnn(problem):
            return "XLA's convolutions by cuDNN are faster for windows like these, of as many products"
        return element_reason(product_of_groups(problem), self.configurations(problem, target))

    def configurations(self, problem: Convolution, target: Target) -> Iterable[ConvolutionSimtKnobs]:
        return candidates(problem, target)

    def build(self, config: ConvolutionSimtKnobs, problem: Convolution, target: Target) -> Plan:
        product, splits = product_of_groups(problem), config.split_k
        if splits == 1:
            epilogue, after = element_epilogue(product, 0)
            stages = [multiply(problem, config, epilogue), after]
        else:
            epilogue, after = element_epilogue(product, 1)
            stages = [
                multiply(problem, config, identity_epilogue(product)),
                split_stage(product, epilogue, splits),
                after,
            ]
        return joined(stages).plan("sm_90a" if target.compute_capability == 90 else target.arch)
