"""Depthwise convolutions of short windows, by whole lines, on a Hopper GPU (cpp/kernels/convolution/lines/)."""

from collections.abc import Iterator

from jaxdnn.device import Target
from jaxdnn.engines.base import ProblemEngine
from jaxdnn.engines.convolution.lines.heuristic import candidates, is_bound_by_memory
from jaxdnn.engines.convolution.lines.knobs import Lines, LinesKnobs, knobs_reason, lines_reason
from jaxdnn.engines.convolution.lines.unit import fprop, wgrad
from jaxdnn.engines.convolution.matrices import product_of_groups
from jaxdnn.engines.convolution.problem import Convolution
from jaxdnn.engines.product.element_epilogue import element_epilogue
from jaxdnn.engines.product.element_reason import element_reason
from jaxdnn.engines.product.split_k import split_stage
from jaxdnn.engines.unit import joined
from jaxdnn.plan import Plan


class ConvolutionLines(ProblemEngine[Convolution, LinesKnobs]):
    """Depthwise convolutions of short windows by ordinary arithmetic, whose blocks have whole lines."""

    name = "lines"
    platform = "cuda"
    problem = Convolution
    notes = ("deterministic",)

    def reason(self, problem: Convolution, target: Target) -> str | None:
        if target.compute_capability != 90:
            return f"it needs compute capability 9.0, and {target.name} is {target.arch}"
        if reason := lines_reason(problem):
            return reason
        form, best = Lines(problem), next(self.configurations(problem, target), None)
        if best is None:
            return (
                f"no block has threads, registers and shared memory for a whole line of {form.windows[1].output} places"
            )
        if not is_bound_by_memory(form, best, target):
            return "multiply-adds, or its first lines, would take longer than memory for so many taps, or so few rows"
        return element_reason(product_of_groups(problem), [best])

    def configurations(self, problem: Convolution, target: Target) -> Iterator[LinesKnobs]:
        return candidates(Lines(problem), target)

    def build(self, config: LinesKnobs, problem: Convolution, target: Target) -> Plan:
        if reason := lines_reason(problem) or knobs_reason(Lines(problem), config, target):
            raise ValueError(f"{self.name}: {config} does not fit: {reason}")
        form, product = Lines(problem), product_of_groups(problem)
        if not form.to_filter:
            return fprop(form, config, element_epilogue(product, 0)[0]).plan("sm_90a")
        epilogue, after = element_epilogue(product, 1)
        return joined([wgrad(form, config), split_stage(product, epilogue, config.parts), after]).plan("sm_90a")
