"""What keeps kernels with an epilogue of one element at a time from a product: `element_reason`."""

from collections.abc import Iterable

from jaxdnn.engines.product.affine import affine_reason
from jaxdnn.engines.product.element_epilogue import reductions_reason
from jaxdnn.engines.product.problem import Product, arguments_reason


def element_reason(problem: Product, configurations: Iterable[object]) -> str | None:
    """Why such a kernel can't have the product's arrays, or a grid its tiles; else None."""
    if reason := affine_reason(problem.operands, (problem.batch, problem.m, problem.n)):
        return reason
    if reason := arguments_reason(problem.operands, problem.results) or reductions_reason(problem):
        return reason
    if not any(True for _ in configurations):
        return "it has no configuration of as few thread blocks as a grid may have"
    return None
