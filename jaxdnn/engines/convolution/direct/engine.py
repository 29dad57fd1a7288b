"""Convolutions of few channels a group on any GPU, above all depthwise ones (cpp/kernels/convolution/direct/)."""

from collections.abc import Iterable
from itertools import islice

from jaxdnn.device import Target
from jaxdnn.engines.base import ProblemEngine
from jaxdnn.engines.convolution.direct.heuristic import candidates
from jaxdnn.engines.convolution.direct.knobs import ConvolutionDirectKnobs, axes
from jaxdnn.engines.convolution.direct.unit import fprop, wgrad
from jaxdnn.engines.convolution.matrices import product_of_groups
from jaxdnn.engines.convolution.problem import Convolution
from jaxdnn.engines.convolution.reasons import array_reason
from jaxdnn.engines.product.element_epilogue import element_epilogue
from jaxdnn.engines.product.element_reason import element_reason
from jaxdnn.engines.product.split_k import split_stage
from jaxdnn.engines.unit import joined
from jaxdnn.plan import Plan

MOST_CHANNELS = 16  # of c * k in a group, from which on a product of matrices is worth its tiles


class ConvolutionDirect(ProblemEngine[Convolution, ConvolutionDirectKnobs]):
    """Depthwise convolutions and others of few channels a group, by ordinary arithmetic, bound by memory."""

    name = "direct"
    platform = "cuda"
    problem = Convolution
    notes = ("deterministic", "exact float32, int32 and float64 arithmetic")

    def reason(self, problem: Convolution, target: Target) -> str | None:
        if problem.c * problem.k > MOST_CHANNELS:
            return f"its groups have {problem.c} x {problem.k} channels, and it is for {MOST_CHANNELS} products at most"
        if reason := array_reason(problem, target):
            return reason
        if problem.result == "filter" and any(axis.window.base_dilation > 1 for axis in axes(problem)):
            return "its window both has strides and dilates the image, and no array of a weight gradient is dense then"
        if not (first := list(islice(self.configurations(problem, target), 1))):
            return "its windows are too large for a thread's registers, or for shared memory"
        return element_reason(product_of_groups(problem), first)

    def configurations(self, problem: Convolution, target: Target) -> Iterable[ConvolutionDirectKnobs]:
        return candidates(problem, target)

    def build(self, config: ConvolutionDirectKnobs, problem: Convolution, target: Target) -> Plan:
        product = product_of_groups(problem)
        if problem.result == "filter":
            epilogue, after = element_epilogue(product, 2)
            sums = wgrad(problem, config, len(after.launches))
            stages = [sums, split_stage(product, epilogue, 1, 1), after]
        else:
            epilogue, after = element_epilogue(product, 0)
            stages = [fprop(problem, config, epilogue), after]
        return joined(stages).plan("sm_90a" if target.compute_capability == 90 else target.arch)
