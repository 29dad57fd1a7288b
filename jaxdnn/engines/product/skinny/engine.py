"""Products with few rows (or few columns) on Hopper, at the speed at which memory delivers the larger operand.

The kernel is cpp/kernels/product/skinny.cuh.
"""

from collections.abc import Iterable

from jaxdnn.device import Target
from jaxdnn.engines.product.affine import affine_reason
from jaxdnn.engines.product.element_epilogue import element_epilogue, joined, reductions_reason
from jaxdnn.engines.product.problem import Product, ProductEngine, arguments_reason
from jaxdnn.engines.product.skinny.heuristic import candidates
from jaxdnn.engines.product.skinny.knobs import NARROW_WIDTHS, SkinnyKnobs, skinny
from jaxdnn.engines.product.skinny.unit import multiply
from jaxdnn.engines.product.tma import tma_reason
from jaxdnn.plan import Plan

LARGEST_SIZE = 2**31 - 1024  # of a dimension, which the copy engine indexes with 32 bits
# Of matrices that are left to sm90, if there are many: 4096 of 128 x 64 x 128 took 77 us, and 67 there.
SMALL_ROWS = 128
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
MULTIPLIES = {("bfloat16", "bfloat16"), ("float16", "float16"), ("float32", "float32"), ("int8", "int8")} | {
    (a, b) for a in FLOAT8 for b in FLOAT8
}


class Skinny(ProductEngine):
    """Products with at most 64 rows (or columns): the larger operand streams through the tensor cores once."""

    name = "skinny"
    platform = "cuda"
    notes = ("tensor cores", "deterministic")

    def reason(self, product: Product, target: Target) -> str | None:
        if target.compute_capability != 90:
            return f"it needs Hopper's tensor cores (sm_90), and {target.name} is {target.arch}"
        pair = (product.a.dtype, product.b[0].dtype)
        if pair not in MULTIPLIES or product.accumulator not in ("float32", "int32"):
            return f"Hopper's tensor cores don't multiply {pair[0]} by {pair[1]} into {product.accumulator}"
        if pair[0] == "float32" and product.precision != "default":
            return "Hopper's tensor cores round float32 operands to tf32, and the precision is above the default"
        one = skinny(product)
        if isinstance(one, str):
            return one
        small = one.rows <= SMALL_ROWS and one.columns > NARROW_WIDTHS[-2]
        if small and product.batch >= target.sm_count:
            return f"{product.batch} matrices of one tile each take less time in blocks that work through many"
        if product.a.itemsize != 2 and (one.along_wide or one.along_narrow):
            return f"Hopper's tensor cores want the rows of {product.a.dtype} operands to run along k"
        if max(product.m, product.n, product.k, product.batch) >= LARGEST_SIZE:
            return "a dimension is longer than its 32-bit index"
        for name, matrices in (("a", (product.a,)), ("b", product.b)):
            for matrix in matrices:
                if reason := tma_reason(matrix, name):
                    return reason
        if reason := arguments_reason(product.operands, product.results) or reductions_reason(product):
            return reason
        if reason := affine_reason(product.operands, (product.batch, product.m, product.n)):
            return reason
        if not any(True for _ in self.configurations(product, target)):
            return "it has no configuration of as few thread blocks as a grid may have"
        return None

    def configurations(self, product: Product, target: Target) -> Iterable[SkinnyKnobs]:
        one = skinny(product)
        assert not isinstance(one, str), "the product is served"
        return candidates(one, target)

    def build(self, config: SkinnyKnobs, product: Product, target: Target, title: str) -> Plan:  # noqa: ARG002
        one = skinny(product)
        assert not isinstance(one, str), "the product is served"
        epilogue, after = element_epilogue(product, 0)
        plan = joined([multiply(one, config, epilogue), after])
        unit = "".join(f'#include "{header}"\n' for header in plan.headers) + plan.text
        return Plan(title, unit, "sm_90a", plan.launches, plan.scratch)
