"""Depthwise convolutions on the tensor cores of a Hopper GPU (cpp/kernels/convolution/depthwise/)."""

from collections.abc import Iterator

from jaxdnn.device import Target
from jaxdnn.engines.base import ProblemEngine
from jaxdnn.engines.convolution.depthwise.heuristic import candidates, ordinary_seconds, seconds
from jaxdnn.engines.convolution.depthwise.knobs import DepthwiseKnobs, Strips, knobs_reason
from jaxdnn.engines.convolution.depthwise.unit import fprop, wgrad
from jaxdnn.engines.convolution.matrices import product_of_groups
from jaxdnn.engines.convolution.problem import Convolution
from jaxdnn.engines.convolution.sliding import sliding_reason
from jaxdnn.engines.product.element_epilogue import element_epilogue
from jaxdnn.engines.product.element_reason import element_reason
from jaxdnn.engines.product.split_k import split_stage
from jaxdnn.engines.unit import joined
from jaxdnn.plan import Plan


class ConvolutionDepthwise(ProblemEngine[Convolution, DepthwiseKnobs]):
    """Depthwise convolutions by multiplies with the bands that a window's rows are."""

    name = "depthwise"
    platform = "cuda"
    problem = Convolution
    notes = ("tensor cores", "deterministic")

    def reason(self, problem: Convolution, target: Target) -> str | None:
        if target.compute_capability != 90:
            return f"it needs compute capability 9.0, and {target.name} is {target.arch}"
        if reason := sliding_reason(problem):
            return reason
        form, best = Strips(problem), next(self.configurations(problem, target), None)
        if best is None:
            return "its window has more taps than a thread's registers hold bands of"
        if seconds(form, best, target) > ordinary_seconds(form, target):
            return "ordinary arithmetic takes less time for so few taps, or places"
        return element_reason(product_of_groups(problem), [best])

    def configurations(self, problem: Convolution, target: Target) -> Iterator[DepthwiseKnobs]:
        return candidates(Strips(problem), target)

    def build(self, config: DepthwiseKnobs, problem: Convolution, target: Target) -> Plan:
        form = Strips(problem)
        if reason := sliding_reason(problem) or knobs_reason(form, config, target):
            raise ValueError(f"{self.name}: {config} does not fit: {reason}")
        product = product_of_groups(problem)
        if not form.to_filter:
            return fprop(form, config, element_epilogue(product, 0)[0]).plan("sm_90a")
        epilogue, after = element_epilogue(product, 1)
        return joined([wgrad(form, config), split_stage(product, epilogue, config.parts), after]).plan("sm_90a")
