"""What keeps kernels with ordinary arithmetic from a convolution."""

from jaxdnn.device import Target
from jaxdnn.engines.convolution.problem import Convolution

AXES = 3  # spatial ones that the kernels have: depth, row and column
LARGEST_SIZE = 2**31 - 2**16  # of rows and columns, which the kernels index with 32 bits
NARROW = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


def array_reason(problem: Convolution, target: Target) -> str | None:
    """Why such a kernel can't have the problem's arrays, or None."""
    if target.compute_capability < 80:
        return f"it needs compute capability 8.0 or later, and {target.name} is {target.arch}"
    pair, accumulator = (problem.a.dtype, problem.b.dtype), problem.accumulator
    served = {
        "float64": pair == ("float64", "float64"),
        "int32": pair == ("int8", "int8"),
        "float32": pair == ("float32", "float32") or (pair[0] in NARROW and pair[1] in NARROW),
    }
    if not served.get(accumulator, False):
        return f"it does not multiply {pair[0]} by {pair[1]} into {accumulator}"
    if reason := shape_reason(problem):
        return reason
    if max(problem.rows, problem.columns, *_lengths(problem)) >= LARGEST_SIZE:
        return "an axis is longer than its 32-bit index"
    return None


def shape_reason(problem: Convolution) -> str | None:
    """Why kernels of three dimensions, or any, can't have the problem's axes, or None."""
    if len(problem.windows) > AXES:
        return f"it has at most {AXES} spatial dimensions, and the convolution {len(problem.windows)}"
    if not min(problem.batch, problem.n, problem.groups, problem.c, problem.k, *_lengths(problem)):
        return "an axis has no elements"
    return None


def _lengths(problem: Convolution) -> list[int]:
    return [length for window in problem.windows for length in (window.image, window.filter, window.output)]
