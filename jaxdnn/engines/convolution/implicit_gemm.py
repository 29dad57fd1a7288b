"""A convolution as a product of matrices of which one is nowhere in memory: its rows are places of an image.

    result    rows (M)              columns (N)            summed over (K)
    output    places of the output  channels of the output taps of the window x channels of the image
    image     places of the image   channels of the image  taps of the window x channels of the output
    filter    taps x channels of    channels of the output places of the output
              the image

The input gradient of a convolution is an output: of an image that is the output's gradient, through the transposed
window. So there are two walks, to an output and to a filter. Both read the image at places that are linear in an
output's place and in a tap, as `Axis` says. Channels are padded to whole lines, of 128 bytes or fewer: a stage of K has
one or several, and so has a tile of a filter's rows.

Where the image is dilated, as it is where a convolution with strides is transposed, an output's places that are the
same modulo a period meet the same taps. They are a phase, a convolution of its own, with fewer taps and no dilation.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, gcd, prod

from jaxdnn.engines.convolution.problem import Convolution, Tensor, Window
from jaxdnn.engines.product.problem import Matrix, Product
from jaxdnn.engines.product.tma import CHUNK, DEPTH_BYTES, stage_depth

# Bytes of a line, and what it costs to load and multiply as many bytes in such lines: more copies, of fewer bytes each.
_LINES = {128: 1.0, 64: 1.1, 32: 1.35}


@dataclass(frozen=True)
class Phase:
    """Places of one dimension that meet the same taps.

    Attributes:
      taps: how many.
      start: where in the image the first place's window begins: its first tap.
      first: which of the filter's taps that is.
    """

    taps: int
    start: int
    first: int


@dataclass(frozen=True)
class Axis:
    """One dimension of places. Place o of a phase meets, at its tap number t, place

        o * stride + phase.start + t * step

    of the image, and tap `phase.first + t * filter_step` of the filter. Phases are as many as the period: of place
    o * period + i of the result, the one that is number i.
    """

    image: int
    filter: int
    result: int
    stride: int
    step: int
    filter_step: int
    phases: tuple[Phase, ...]

    @classmethod
    def of(cls, window: Window) -> "Axis":
        # o * stride + tap * dilation - low must be a multiple of the base dilation.
        base, low = window.base_dilation, window.low
        period, every = base // gcd(base, window.stride), base // gcd(base, window.dilation)
        sign, phases = -1 if window.flipped else 1, []
        for place in range(period):
            met = (tap for tap in range(min(every, window.filter))
                   if (place * window.stride + tap * window.dilation - low) % base == 0)  # fmt: skip
            first = next(met, None)
            if first is None:
                phases.append(Phase(0, 0, 0))
                continue
            start = (place * window.stride + first * window.dilation - low) // base
            of_filter = window.filter - 1 - first if window.flipped else first
            phases.append(Phase(ceil((window.filter - first) / every), start, of_filter))
        return cls(
            image=window.image,
            filter=window.filter,
            result=window.output,
            stride=period * window.stride // base,
            step=every * window.dilation // base,
            filter_step=sign * every,
            phases=tuple(phases),
        )

    @property
    def places(self) -> int:
        """Of a phase; of some the last one is not there."""
        return ceil(self.result / len(self.phases))

    @cached_property
    def start(self) -> int:
        """Where the first window of all begins."""
        return min((phase.start for phase in self.phases if phase.taps), default=0)

    @property
    def corners(self) -> tuple[int, int]:
        """Where the first place's window begins, and the last one's from the image's last place on."""
        return self.start, self.start + (self.places - 1) * self.stride - (self.image - 1)

    @property
    def reach(self) -> int:
        """The largest distance of a tap from `start`, of one place."""
        return max(
            (phase.start - self.start + (phase.taps - 1) * self.step for phase in self.phases if phase.taps), default=0
        )


@dataclass(frozen=True)
class ImplicitGemm:
    """A convolution as a product.

    Attributes:
      product: sizes, epilogue, and the matrices as they lie in memory: a is the places of all images of the batch, by
        their channels.
      axes: the innermost dimension first.
      images, image_batch: how many there are in memory, and of those from one convolution to the next.
      channels: of the image, in a group.
      group_columns: columns of a group.
      rows: that tiles are cut from, in a phase: padded channels of a filter, or places.
      line: bytes of channels that are loaded together.
    """

    product: Product
    axes: tuple[Axis, ...]
    images: int
    image_batch: int
    channels: int
    group_columns: int
    rows: int
    line: int

    @property
    def groups(self) -> int:
        return self.product.n // self.group_columns

    @property
    def taps(self) -> int:
        return prod(axis.filter for axis in self.axes)

    @property
    def phases(self) -> int:
        return prod(len(axis.phases) for axis in self.axes)

    @property
    def straight(self) -> bool:
        """Whether the rows of tiles are those of the result."""
        return self.phases == 1 and self.rows == self.product.m

    @property
    def tiled(self) -> Product:
        """The product that tiles are cut from: each phase is a matrix of it, with fewer taps in the mean."""
        matrices = self.product.batch * self.phases
        return replace(self.product, m=self.rows, k=ceil(self.product.k / self.skipped), batch=matrices)

    @property
    def skipped(self) -> float:
        """How many times the taps of the mean phase the longest one has."""
        taps = [[phase.taps for phase in axis.phases] for axis in self.axes]
        return prod(max(1, max(of_axis)) * len(of_axis) / max(1, sum(of_axis)) for of_axis in taps)


def implicit_gemm(problem: Convolution) -> ImplicitGemm | str:
    """The product that a convolution is, or why it is none."""
    if problem.result == "filter":
        return _to_filter(problem, problem.a, problem.b)
    if problem.result == "output":
        return _to_output(problem, problem.a, problem.b, problem.windows, (problem.c, problem.k))
    transposed = tuple(window.transposed for window in problem.windows)
    return _to_output(problem, problem.b, problem.a, transposed, (problem.k, problem.c))


def _to_output(
    problem: Convolution, image: Tensor, filter_: Tensor, windows: tuple[Window, ...], channels: tuple[int, int]
) -> ImplicitGemm | str:
    """`channels` are those of the image, which are summed over, and of the output."""
    summed, columns = channels
    images = _Images.of(problem, image, windows, summed)
    if isinstance(images, str):
        return images
    taps, of_filter = prod(window.filter for window in windows), problem.groups * problem.k
    matrix = Matrix(filter_.buffer, filter_.dtype, taps * problem.c, of_filter, of_filter, filter_.batch_stride)
    dense = _dense(filter_.spatial_strides, [window.filter for window in windows], problem.c * of_filter)
    if not dense or filter_.batch_stride not in (0, matrix.rows * of_filter):
        return "the filter is not dense in memory"
    met = prod(max(phase.taps for phase in axis.phases) for axis in images.axes)
    line, chunks = _lines(summed, images.matrix.itemsize, problem.groups)
    product = Product(
        m=problem.rows,
        n=problem.columns,
        k=ceil(max(1, met) * chunks * line / DEPTH_BYTES) * stage_depth(images.matrix),
        batch=problem.batch,
        a=images.matrix,
        b=(matrix,),
        program=problem.program,
        results=problem.results,
        operands=problem.operands,
        b_transposed=problem.result == "image",
        exact=problem.exact,
    )
    rows = problem.n * prod(axis.places for axis in images.axes)
    return ImplicitGemm(product, images.axes, images.count, images.batch, summed, columns, rows, line)


def _to_filter(problem: Convolution, image: Tensor, output: Tensor) -> ImplicitGemm | str:
    images = _Images.of(problem, image, problem.windows, problem.c)
    if isinstance(images, str):
        return images
    if any(window.base_dilation != 1 for window in problem.windows):
        return "the image of a filter's gradient is dilated"
    places, columns = [window.output for window in problem.windows], problem.groups * problem.k
    summed = problem.n * prod(places)
    dense = _dense((output.n_stride, *output.spatial_strides), [problem.n, *places], columns)
    if not dense or output.batch_stride not in (0, summed * columns):
        return "the output is not dense in memory"
    if images.batch and summed % CHUNK:
        return f"it sums over {summed} places of each of several convolutions, which are no multiple of {CHUNK}"
    product = Product(
        m=problem.rows,
        n=problem.columns,
        k=summed,
        batch=problem.batch,
        a=images.matrix,
        b=(Matrix(output.buffer, output.dtype, summed, columns, columns, output.batch_stride),),
        program=problem.program,
        results=problem.results,
        operands=problem.operands,
        a_transposed=True,
        exact=problem.exact,
    )
    line, chunks = _lines(problem.c, images.matrix.itemsize, problem.groups)
    rows = prod(axis.filter for axis in images.axes) * chunks * line // images.matrix.itemsize
    return ImplicitGemm(product, images.axes, images.count, images.batch, problem.c, problem.k, rows, line)


@dataclass(frozen=True)
class _Images:
    """What is read by places: how many images lie in memory, how many from one convolution to the next, and the places
    of all by their channels.
    """

    count: int
    batch: int
    matrix: Matrix
    axes: tuple[Axis, ...]

    @classmethod
    def of(cls, problem: Convolution, image: Tensor, windows: tuple[Window, ...], channels: int) -> "_Images | str":
        places, columns = [window.image for window in windows], problem.groups * channels
        if not _dense((image.n_stride, *image.spatial_strides), [problem.n, *places], columns):
            return "the image is not dense in memory"
        if image.batch_stride % image.n_stride:
            return "the convolutions of a batch are no whole number of images apart"
        batch = image.batch_stride // image.n_stride if problem.batch > 1 else 0
        count = (problem.batch - 1) * batch + problem.n
        matrix = Matrix(image.buffer, image.dtype, count * prod(places), columns, columns)
        return cls(count, batch, matrix, tuple(map(Axis.of, reversed(windows))))


def _lines(channels: int, itemsize: int, groups: int) -> tuple[int, int]:
    """The best length of lines for so many channels, and how many they take; none may go on in the next group, if that
    can be helped.
    """
    size = channels * itemsize
    whole = [line for line in _LINES if groups == 1 or size % line == 0]
    line = min(whole or _LINES, key=lambda line: ceil(size / line) * line * _LINES[line])
    return line, ceil(size / line)


def _dense(strides: tuple[int, ...], sizes: list[int], inner: int) -> bool:
    """Whether dimensions of these sizes lie one in the other, around `inner` elements."""
    return all(stride == inner * prod(sizes[i + 1 :]) for i, stride in enumerate(strides))
