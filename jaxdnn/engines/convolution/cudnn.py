"""Which convolutions XLA hands to cuDNN's kernels for tensor cores (`conv_rewriter.cc` in XLA)."""

from math import prod

from jaxdnn.engines.convolution.problem import Convolution

# Multiply-adds from which on it matters what their kernels take, and not what a call costs besides.
_MANY = 2**30


def in_cudnn(problem: Convolution) -> bool:
    """Whether cuDNN computes it, and it is large.

    XLA walks through zeros where an image is dilated, or a filter's gradient is; and where an input gradient has a
    stride and several groups.
    """
    windows = problem.windows
    if any(window.base_dilation > 1 for window in windows):
        return False
    if problem.result == "filter" and any(window.dilation > 1 for window in windows):
        return False
    if problem.result == "image" and problem.groups > 1 and any(window.stride > 1 for window in windows):
        return False
    places = prod(window.output * window.filter for window in windows)
    return problem.batch * problem.n * places * problem.groups * problem.c * problem.k >= _MANY
