"""The launches of convolutions on the CPU."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil, prod

from jaxdnn.engines.convolution.axis import Axis, Phase
from jaxdnn.engines.convolution.host.knobs import HostDepthwiseKnobs, HostWindowKnobs
from jaxdnn.engines.convolution.matrices import product_of_groups
from jaxdnn.engines.convolution.problem import Convolution, Tensor, Window
from jaxdnn.engines.convolution.reasons import AXES
from jaxdnn.engines.product.host.unit import Call
from jaxdnn.engines.product.problem import Matrix
from jaxdnn.plan import Argument, Constant, Launch
from jaxdnn.pointwise import bytecode

_NONE = Window(1, 1, 1)  # in the place of a dimension that the convolution has not


def is_depthwise(problem: Convolution) -> bool:
    """Whether each group has one channel, so that nothing is summed over but windows."""
    return problem.c == problem.k == 1


# ---- Depthwise: all three directions sum over windows of an image, or of an output where that is what windows slide
# over; of a filter's gradient, which array slides is chosen as the GPU's engine does: the one without zeros between its
# places.


def depthwise_reason(problem: Convolution) -> str | None:
    """Why the kernels of depthwise convolutions don't serve one, or None."""
    if not all(isinstance(result, Matrix) for result in problem.results):
        return "its epilogue reduces"
    return None


def depthwise(config: HostDepthwiseKnobs, problem: Convolution) -> Launch:
    """Its only launch."""
    spans = ceil(problem.groups / config.span)
    _, windows, _ = _sliding(problem)
    if problem.result == "filter":
        kernel, tiles = "taps", prod(window.filter for window in windows[:-1])
    else:
        kernel = "window"
        tiles = problem.n * prod(window.output for window in windows[:-1]) * ceil(windows[-1].output / config.width)
    grid = (problem.batch * tiles * spans, 1, 1)
    return Launch(f"convolution_{kernel}_{problem.a.dtype}", _arguments(problem, config), grid)


def _sliding(problem: Convolution) -> tuple[Tensor, list[Window], Tensor]:
    """The array that windows slide over, the windows of depth, row and column, and the other array."""
    output = problem.result == "image"
    if problem.result == "filter":
        output = any(window.base_dilation > 1 for window in problem.windows)
    own = [window.transposed if output else window for window in problem.windows]
    windows = [*(AXES - len(own)) * [_NONE], *own]
    slid, other = (problem.b, problem.a) if output else (problem.a, problem.b)
    return slid, windows, other


def _arguments(problem: Convolution, config: HostDepthwiseKnobs) -> tuple[Argument, ...]:
    """The order of the words is that of `CallWords` in cpp/host/convolution/depthwise.cc."""
    slid, windows, other = _sliding(problem)
    words = [problem.batch, problem.n, problem.groups, config.width, config.span]
    words += [len(problem.operands), len(problem.results)]
    for window in windows:
        words += [window.image, window.filter, window.output, window.stride, window.dilation]
        words += [window.base_dilation, window.low, int(window.flipped)]
    for tensor in (slid, other):
        words += [tensor.batch_stride, tensor.n_stride, *_padded(tensor.spatial_strides)]
    for operand in problem.operands:
        words += [operand.batch_stride, operand.row_stride, operand.column_stride]
    for result in problem.results:
        assert isinstance(result, Matrix)
        words += [result.batch_stride, result.row_stride, 1]
    arrays = [array.buffer for array in (*problem.operands, *problem.results)]
    return (Constant(tuple(words)), Constant(bytecode(problem.program)), slid.buffer, other.buffer, *arrays)


def _padded(strides: tuple[int, ...]) -> list[int]:
    return [*(AXES - len(strides)) * [0], *strides]


# ---- Products, as implicit_gemm.py states them: of windows, and of the filter or of what its gradient multiplies by.


# What XLA's convolutions, which have fast kernels for one group, are left: benchmarks/results/convolution_kernels.md.
_LEAST_WINDOW = 64  # elements
_LEAST_COLUMNS = 16


def gemm_reason(problem: Convolution) -> str | None:
    """Why a convolution is not computed as a product, or None."""
    channels = problem.k if problem.result == "image" else problem.c
    window = channels * prod(own.filter for own in problem.windows)
    if window < _LEAST_WINDOW and (problem.groups == 1 or (channels == 1 and problem.result == "output")):
        return f"XLA's convolutions are faster for windows of {window} elements"
    if problem.groups == 1 and problem.columns < _LEAST_COLUMNS:
        return f"XLA's convolutions are faster for {problem.columns} channels of the result"
    if problem.result != "filter":
        return None
    if any(window.base_dilation != 1 for window in problem.windows):
        return "the image of a filter's gradient is dilated"
    output, inner = problem.b, problem.groups * problem.k
    places = [problem.n, *(window.output for window in problem.windows)]
    for i, stride in enumerate((output.n_stride, *output.spatial_strides)):
        if stride != inner * prod(places[i + 1 :]):
            return "the output is not dense in memory"
    return None


def gemm(config: HostWindowKnobs, problem: Convolution) -> "GemmCall":
    """The product that a convolution is; of its matrix a only the array is used, by windows."""
    toward_image = problem.result == "image"
    image, other = (problem.b, problem.a) if toward_image else (problem.a, problem.b)
    own = [window.transposed if toward_image else window for window in problem.windows]
    axes = tuple(map(Axis.of, [*(AXES - len(own)) * [_NONE], *own]))
    product, channels = product_of_groups(problem), problem.k if toward_image else problem.c
    if problem.result == "filter":
        axes, k, step = tuple(map(_by_taps, axes)), product.k, other.spatial_strides[-1] if own else other.n_stride
    else:
        longest = prod(max(phase.taps for phase in axis.phases) for axis in axes)
        k, step = max(1, longest) * channels, other.c_stride
    b = Matrix(other.buffer, other.dtype, k, product.n, step, other.batch_stride)
    product = replace(product, k=k, b=(b,), b_transposed=toward_image)
    product = replace(product, a=Matrix(image.buffer, image.dtype, product.m, k, k, image.batch_stride))
    return GemmCall(
        config.of_product(),
        product,
        problem.groups,
        to_filter=problem.result == "filter",
        axes=axes,
        image=image,
        other=other,
        channels=channels,
    )


def _by_taps(axis: Axis) -> Axis:
    """The same meetings, of taps in the order of the filter."""
    if axis.filter_step == 1:
        return axis
    (phase,) = axis.phases
    start = phase.start + (phase.taps - 1) * axis.step
    return replace(axis, step=-axis.step, filter_step=1, phases=(Phase(phase.taps, start, 0),))


@dataclass(frozen=True, kw_only=True)
class GemmCall(Call):
    """A product's launches, of panels that are gathered.

    Attributes:
      to_filter: whether the result is a filter, so that places are summed over.
      axes: the outermost first.
      image, other: what windows are of; the filter, or the output of its gradient.
      channels: of the image, in a group.
    """

    to_filter: bool
    axes: tuple[Axis, ...]
    image: Tensor
    other: Tensor
    channels: int

    def packing(self, index: int) -> str:
        return "ahead" if index and not self.to_filter else "by_tile"

    def pack_blocks(self, index: int) -> int:
        return super().pack_blocks(index) * prod(len(axis.phases) for axis in self.axes)

    def launches(self) -> Iterator[Launch]:
        own = {"product_pack": "convolution_pack", "product_multiply": "convolution_multiply"}
        for launch in super().launches():
            yield replace(launch, kernel=own.get(launch.kernel, launch.kernel))

    def arguments(self) -> tuple[Argument, ...]:
        words, *others = super().arguments()
        assert isinstance(words, Constant)
        return (Constant((*words.words, *self._words())), *others)

    def _words(self) -> Iterator[int]:
        """In the order of `WindowWords` and `PhaseWords` in cpp/host/convolution/implicit_gemm.cc."""
        yield from (int(self.to_filter), self.image.n_stride, self.channels)
        yield from (self.image.group_stride, self.other.group_stride)
        strides = [_padded(tensor.spatial_strides) for tensor in (self.image, self.other)]
        axes = list(zip(self.axes, *strides, strict=True))
        for axis, image, other in axes:
            yield from (axis.image, axis.result, axis.stride, axis.step, image, axis.filter_step * other)
            yield from (len(axis.phases), max(phase.taps for phase in axis.phases))
        for axis, _, other in axes:
            for phase in axis.phases:
                yield from (phase.taps, phase.start, phase.first * other)
