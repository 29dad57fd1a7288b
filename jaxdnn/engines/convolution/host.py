"""Depthwise convolutions on the CPU: vectors of channels, and windows in registers (cpp/host/convolution/depthwise.cc).

All three directions sum over windows of an image, or of an output where that is what windows slide over; of a filter's
gradient, which array slides is chosen as the GPU's engine does: the one without zeros between its places.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, prod

from jaxdnn.device import Target
from jaxdnn.engines.base import ProblemEngine, check_least
from jaxdnn.engines.convolution.problem import Convolution, Tensor, Window
from jaxdnn.engines.convolution.reasons import AXES
from jaxdnn.engines.product.problem import Matrix
from jaxdnn.plan import Argument, Constant, Launch, Plan
from jaxdnn.pointwise import bytecode
from jaxdnn.pointwise.bytecode import MAX_INDICES
from jaxdnn.pointwise.operations import DTYPES

MAX_ARRAYS = 32  # kMaxArrays in cpp/host/convolution/depthwise.cc
_DTYPES = ("float32", "float64", "bfloat16", "float16")
_SPAN = 256  # channels of a tile, at most
_ELEMENTS = 16 * 1024  # of a tile: few enough for the L2 cache, enough to drown the start of a task


@dataclass(frozen=True)
class HostConvolutionKnobs:
    """Knobs of the depthwise convolution on the CPU.

    Attributes:
      width: places of a tile.
      span: channels of a tile.
    """

    width: int
    span: int

    def __post_init__(self) -> None:
        check_least(self, 1, "width", "span")


class HostConvolution(ProblemEngine[Convolution, HostConvolutionKnobs]):
    """Windows over vectors as wide as the processor's, XLA's own threads."""

    name = "host"
    platform = "cpu"
    problem = Convolution
    notes = ("deterministic",)

    def reason(self, problem: Convolution, target: Target) -> str | None:
        del target
        if (problem.c, problem.k) != (1, 1):
            return f"its groups have {problem.c} x {problem.k} channels, and its kernels are for one"
        if problem.a.dtype != problem.b.dtype or problem.a.dtype not in _DTYPES:
            return f"its kernels don't multiply {problem.a.dtype} by {problem.b.dtype}"
        if problem.accumulator != (wide := "float64" if problem.a.dtype == "float64" else "float32"):
            return f"its kernels sum {problem.a.dtype} in {wide}; {problem.accumulator} is asked for"
        if len(problem.windows) > AXES:
            return f"it has at most {AXES} spatial dimensions, and the convolution {len(problem.windows)}"
        lengths = [length for window in problem.windows for length in (window.image, window.filter, window.output)]
        if not min(problem.batch, problem.n, problem.groups, *lengths):
            return "an axis has no elements"
        if not all(isinstance(result, Matrix) for result in problem.results):
            return "its epilogue reduces"
        arrays = (*problem.operands, *problem.results)
        if len(arrays) > MAX_ARRAYS:
            return f"the epilogue has more than {MAX_ARRAYS} operands and results"
        if any(len(operand.gathered) > MAX_INDICES for operand in problem.operands):
            return f"its epilogue looks an operand up by more than {MAX_INDICES} integers at once"
        if unknown := {array.dtype for array in arrays} - set(DTYPES):
            return f"its epilogues don't have arrays of {' and '.join(sorted(unknown))}"
        return None

    def configurations(self, problem: Convolution, target: Target) -> Iterable[HostConvolutionKnobs]:
        del target
        span = min(problem.groups, _SPAN)
        return [HostConvolutionKnobs(max(8, _ELEMENTS // span), span)]

    def build(self, config: HostConvolutionKnobs, problem: Convolution, target: Target) -> Plan:
        del target
        spans = ceil(problem.groups / config.span)
        _, windows, _ = _sliding(problem)
        if problem.result == "filter":
            kernel, tiles = "taps", prod(window.filter for window in windows[:-1])
        else:
            kernel = "window"
            tiles = problem.n * prod(window.output for window in windows[:-1]) * ceil(windows[-1].output / config.width)
        grid = (problem.batch * tiles * spans, 1, 1)
        launch = Launch(f"convolution_{kernel}_{problem.a.dtype}", _arguments(problem, config), grid)
        return Plan(unit="", arch="", launches=(launch,))


def _sliding(problem: Convolution) -> tuple[Tensor, list[Window], Tensor]:
    """The array that windows slide over, the windows of depth, row and column, and the other array."""
    output = problem.result == "image"
    if problem.result == "filter":
        output = any(window.base_dilation > 1 for window in problem.windows)
    own = [window.transposed if output else window for window in problem.windows]
    windows = [*(AXES - len(own)) * [Window(1, 1, 1)], *own]
    slid, other = (problem.b, problem.a) if output else (problem.a, problem.b)
    return slid, windows, other


def _arguments(problem: Convolution, config: HostConvolutionKnobs) -> tuple[Argument, ...]:
    """The order of the words is that of `CallWords` in cpp/host/convolution/depthwise.cc."""
    slid, windows, other = _sliding(problem)
    words = [problem.batch, problem.n, problem.groups, config.width, config.span]
    words += [len(problem.operands), len(problem.results)]
    for window in windows:
        words += [window.image, window.filter, window.output, window.stride, window.dilation]
        words += [window.base_dilation, window.low, int(window.flipped)]
    for tensor in (slid, other):
        spatial = [*(AXES - len(tensor.spatial_strides)) * [0], *tensor.spatial_strides]
        words += [tensor.batch_stride, tensor.n_stride, *spatial]
    for operand in problem.operands:
        words += [operand.batch_stride, operand.row_stride, operand.column_stride]
    for result in problem.results:
        assert isinstance(result, Matrix)
        words += [result.batch_stride, result.row_stride, 1]
    arrays = [array.buffer for array in (*problem.operands, *problem.results)]
    return (Constant(tuple(words)), Constant(bytecode(problem.program)), slid.buffer, other.buffer, *arrays)
