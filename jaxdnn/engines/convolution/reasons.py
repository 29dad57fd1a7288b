"""What keeps kernels with ordinary arithmetic from a convolution."""

from jaxdnn.device import Target
from jaxdnn.engines.convolution.problem import Convolution
from jaxdnn.engines.product.atom import LARGEST_SIZE, dtypes_reason

AXES = 3  # spatial ones that the kernels have: depth, row and column


def array_reason(problem: Convolution, target: Target) -> str | None:
    """Why such a kernel can't have the problem's arrays, or None."""
    if reason := dtypes_reason(problem.accumulator, problem.a.dtype, problem.b.dtype, target):
        return reason
    if reason := shape_reason(problem):
        return reason
    if max(problem.rows, problem.columns, *_lengths(problem)) >= LARGEST_SIZE:
        return "an axis is longer than its 32-bit index"
    return None


def shape_reason(problem: Convolution) -> str | None:
    """Why kernels of three dimensions, or any, can't have the problem's axes, or None."""
    if len(problem.windows) > AXES:
        return f"it has at most {AXES} spatial dimensions, and the convolution {len(problem.windows)}"
    return None


def _lengths(problem: Convolution) -> list[int]:
    return [length for window in problem.windows for length in (window.image, window.filter, window.output)]
