"""Products with few rows (or few columns) on Hopper, at the speed at which memory delivers the larger operand.

The kernel is cpp/kernels/product/skinny.cuh.
"""

from collections.abc import Iterable

from jaxdnn.device import Target
from jaxdnn.engines.base import ProblemEngine
from jaxdnn.engines.product.element_epilogue import element_epilogue
from jaxdnn.engines.product.element_reason import element_reason
from jaxdnn.engines.product.few_rows import few_rows_reason
from jaxdnn.engines.product.problem import Product
from jaxdnn.engines.product.skinny.heuristic import candidates
from jaxdnn.engines.product.skinny.knobs import SkinnyKnobs, skinny
from jaxdnn.engines.product.skinny.unit import multiply
from jaxdnn.engines.product.small import small_reason
from jaxdnn.engines.product.tma import tma_reason
from jaxdnn.engines.unit import joined
from jaxdnn.plan import Plan

LARGEST_SIZE = 2**31 - 1024  # of a dimension, which the copy engine indexes with 32 bits
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
MULTIPLIES = {("bfloat16", "bfloat16"), ("float16", "float16"), ("float32", "float32"), ("int8", "int8")} | {
    (a, b) for a in FLOAT8 for b in FLOAT8
}


class Skinny(ProblemEngine[Product, SkinnyKnobs]):
    """Products with at most 64 rows (or columns): the larger operand streams through the tensor cores once."""

    name = "skinny"
    platform = "cuda"
    problem = Product
    notes = ("tensor cores", "deterministic")

    def outdone(self, problem: Product, target: Target) -> str | None:
        one = skinny(problem)
        assert not isinstance(one, str), "the product is served"
        return small_reason(problem, target, "skinny") or few_rows_reason(one, target)

    def reason(self, problem: Product, target: Target) -> str | None:
        if target.compute_capability != 90:
            return f"it needs Hopper's tensor cores (sm_90), and {target.name} is {target.arch}"
        pair = (problem.a.dtype, problem.b[0].dtype)
        if pair not in MULTIPLIES or problem.accumulator not in ("float32", "int32"):
            return f"Hopper's tensor cores don't multiply {pair[0]} by {pair[1]} into {problem.accumulator}"
        if problem.rounding_reason:
            return problem.rounding_reason
        one = skinny(problem)
        if isinstance(one, str):
            return one
        if problem.a.itemsize != 2 and (one.streamed_mn_major or one.stationary_mn_major):
            return f"Hopper's tensor cores want the rows of {problem.a.dtype} operands to run along k"
        if max(problem.m, problem.n, problem.k, problem.batch) >= LARGEST_SIZE:
            return "a dimension is longer than its 32-bit index"
        for name, matrices in (("a", (problem.a,)), ("b", problem.b)):
            for matrix in matrices:
                if reason := tma_reason(matrix, name):
                    return reason
        return element_reason(problem, self.configurations(problem, target))

    def configurations(self, problem: Product, target: Target) -> Iterable[SkinnyKnobs]:
        one = skinny(problem)
        assert not isinstance(one, str), "the product is served"
        return candidates(one, target)

    def build(self, config: SkinnyKnobs, problem: Product, target: Target) -> Plan:  # noqa: ARG002
        one = skinny(problem)
        assert not isinstance(one, str), "the product is served"
        epilogue, after = element_epilogue(problem, 0)
        return joined([multiply(one, config, epilogue), after]).plan("sm_90a")
