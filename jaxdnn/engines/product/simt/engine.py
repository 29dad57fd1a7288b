"""Products on any GPU, for operands of any layout and alignment.

float32 and int32 accumulators are exact, by ordinary arithmetic; so are float64 ones, on tensor cores. 16-bit floats
are multiplied on the tensor cores that compute capability 8.0 brought. The kernel is cpp/kernels/product/simt.cuh.
"""

from collections.abc import Iterable

from jaxdnn.device import Target
from jaxdnn.engines.base import ProblemEngine
from jaxdnn.engines.product.atom import LARGEST_SIZE, dtypes_reason
from jaxdnn.engines.product.element_epilogue import element_epilogue
from jaxdnn.engines.product.element_reason import element_reason
from jaxdnn.engines.product.problem import Product
from jaxdnn.engines.product.simt.heuristic import MANY, candidates
from jaxdnn.engines.product.simt.knobs import SimtKnobs
from jaxdnn.engines.product.simt.unit import multiply
from jaxdnn.engines.product.small import small_reason
from jaxdnn.engines.product.split_k import identity_epilogue, split_stage
from jaxdnn.engines.product.unaligned import unaligned_reason
from jaxdnn.engines.unit import joined
from jaxdnn.plan import Plan


class Simt(ProblemEngine[Product, SimtKnobs]):
    """Products on any GPU, of any layout: all but 16-bit floats with ordinary arithmetic, or what rounds like it."""

    name = "simt"
    platform = "cuda"
    problem = Product
    notes = ("deterministic", "exact float32, int32 and float64 arithmetic")

    def outdone(self, problem: Product, target: Target) -> str | None:
        if problem.accumulator != "float32" or (problem.exact and problem.a.dtype == problem.b[0].dtype == "float32"):
            return None
        if problem.m * problem.n * problem.k * problem.batch >= MANY:
            return "XLA's kernels for tensor cores are faster for products this large, of what may be rounded"
        if target.compute_capability != 90:
            return None
        return small_reason(problem, target, "simt") or unaligned_reason(problem, target, "simt")

    def reason(self, problem: Product, target: Target) -> str | None:
        if reason := dtypes_reason(problem.accumulator, problem.a.dtype, problem.b[0].dtype, target):
            return reason
        if max(problem.m, problem.n, problem.k) >= LARGEST_SIZE:
            return "m, n or k is longer than its 32-bit index"
        return element_reason(problem, self.configurations(problem, target))

    def configurations(self, problem: Product, target: Target) -> Iterable[SimtKnobs]:
        return candidates(problem, target)

    def build(self, config: SimtKnobs, problem: Product, target: Target) -> Plan:
        splits = config.split_k
        if splits == 1:
            epilogue, after = element_epilogue(problem, 0)
            stages = [multiply(problem, config, epilogue), after]
        else:
            epilogue, after = element_epilogue(problem, len(problem.b))
            stages = [
                multiply(problem, config, identity_epilogue(problem)),
                split_stage(problem, epilogue, splits),
                after,
            ]
        return joined(stages).plan("sm_90a" if target.compute_capability == 90 else target.arch)
