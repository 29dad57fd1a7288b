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

Where windows tile the image, lines of windows count as images, so that any stride will do.

Groups of few channels are merged, so many as have them in one line. To an output, each multiply along K is of one of
them, with that one's columns alone. To a filter, each group's channels are multiplied by each group's columns, and only
a group's by its own are kept.
"""

from dataclasses import dataclass, replace
from math import ceil, prod

from jaxdnn.engines.convolution.axis import Axis
from jaxdnn.engines.convolution.problem import Convolution, Tensor, Window
from jaxdnn.engines.product.problem import Matrix, Product
from jaxdnn.engines.product.tma import CHUNK, DEPTH_BYTES, STEPS, stage_depth

STEP_BYTES = DEPTH_BYTES // STEPS  # of K in a multiply
# Bytes of a line, and what it costs to load and multiply as many bytes in such lines: more copies, of fewer bytes each.
_LINES = {128: 1.0, 64: 1.1, 32: 1.35}
# Of a group that is merged with others, and of all that are.
_MERGED_COLUMNS, _MOST_COLUMNS = (8, 16, 32, 64, 96, 128), 256


@dataclass(frozen=True)
class ImplicitGemm:
    """A convolution as a product.

    Attributes:
      product: sizes, epilogue, and the matrices as they lie in memory: a is the places of all images of the batch, by
        their channels.
      axes: the innermost dimension first.
      images, image_batch: how many there are in memory, and of those from one convolution to the next.
      merged: groups that are loaded together, and count as one in what follows.
      channels: of the image, in a group.
      group_columns: columns of a group.
      rows: that tiles are cut from, in a phase: padded channels of a filter, or places.
      line: bytes of channels that are loaded together.
      filter_rows: of blocks of an image's places: which row of a line of the filter's is the first column's, at the
        innermost dimension's first tap, and from one tap to the next.
    """

    product: Product
    axes: tuple[Axis, ...]
    images: int
    image_batch: int
    merged: int
    channels: int
    group_columns: int
    rows: int
    line: int
    filter_rows: tuple[int, int] | None = None

    @property
    def groups(self) -> int:
        return ceil(self.product.n / self.group_columns)

    @property
    def taps(self) -> int:
        return prod(axis.filter for axis in self.axes)

    @property
    def phases(self) -> int:
        return prod(len(axis.phases) for axis in self.axes)

    @property
    def lines(self) -> int:
        """Of channels, at a tap."""
        return ceil(self.channels * self.product.a.itemsize / self.line)

    @property
    def last_steps(self) -> int:
        """Multiplies of the last line at a tap, if that is a stage: of those channels that are the group's."""
        if self.line < DEPTH_BYTES or self.product.a_transposed:
            return STEPS
        return ceil((self.channels * self.product.a.itemsize - (self.lines - 1) * self.line) / STEP_BYTES)

    @property
    def steps(self) -> int:
        """Multiplies of a stage, but for the last one at a tap."""
        return STEPS if self.lines > 1 else self.last_steps

    @property
    def multiplied(self) -> float:
        """The part of K that is multiplied."""
        return ((self.lines - 1) * STEPS + self.last_steps) / (self.lines * STEPS)

    @property
    def crossed(self) -> bool:
        """Whether merged groups are multiplied by each other, too."""
        return self.merged > 1 and self.product.a_transposed

    @property
    def straight(self) -> bool:
        """Whether the rows of tiles are those of what they are stored to."""
        return self.phases == 1 and self.rows == self.product.m * (self.merged if self.crossed else 1)

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
    problem = _by_lines_of_windows(problem)
    if problem.result == "filter":
        return _to_filter(problem, problem.a, problem.b)
    if problem.result == "output":
        return _to_output(problem, problem.a, problem.b, problem.windows, (problem.c, problem.k))
    transposed = tuple(window.transposed for window in problem.windows)
    return _to_output(problem, problem.b, problem.a, transposed, (problem.k, problem.c))


def _by_lines_of_windows(problem: Convolution) -> Convolution:
    """The same convolution, of as many more images as there are lines of windows, where these tile an image; or itself,
    where that has no strides, or is what is computed.
    """
    if problem.result == "image" or not problem.windows:
        return problem
    first, *others = problem.windows
    if first.stride == 1 or not first.tiles:
        return problem
    windows = (Window(first.filter, first.filter, 1, flipped=first.flipped), *others)

    def split(tensor: Tensor, places: int) -> Tensor:
        return replace(tensor, n_stride=places * tensor.spatial_strides[0]) if tensor.n_stride else tensor

    a = split(problem.a, first.filter)
    b = split(problem.b, 1) if problem.result == "filter" else problem.b
    return replace(problem, n=problem.n * first.output, windows=windows, a=a, b=b)


def _to_output(
    problem: Convolution, image: Tensor, filter_: Tensor, windows: tuple[Window, ...], channels: tuple[int, int]
) -> ImplicitGemm | str:
    """`channels` are those of the image, which are summed over, and of the output."""
    summed, columns = channels
    images = Images.of(problem, image, windows, summed)
    if isinstance(images, str):
        return images
    matrix = filter_matrix(problem, filter_)
    if isinstance(matrix, str):
        return matrix
    met = prod(max(phase.taps for phase in axis.phases) for axis in images.axes)
    along_columns = problem.result == "output"
    merged = _merged_to_output(problem.groups, summed, columns, images.matrix.itemsize, along_columns)
    line, chunks = lines_of(merged * summed, images.matrix.itemsize, problem.groups, along_columns=along_columns)
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
        b_transposed=not along_columns,
        exact=problem.exact,
    )
    rows = problem.n * prod(axis.places for axis in images.axes)
    return ImplicitGemm(
        product, images.axes, images.count, images.batch, merged, merged * summed, merged * columns, rows, line
    )


def _to_filter(problem: Convolution, image: Tensor, output: Tensor) -> ImplicitGemm | str:
    images = Images.of(problem, image, problem.windows, problem.c)
    if isinstance(images, str):
        return images
    if any(window.base_dilation != 1 for window in problem.windows):
        return "the image of a filter's gradient is dilated"
    matrix = output_matrix(problem, output)
    if isinstance(matrix, str):
        return matrix
    summed = matrix.rows
    if images.batch and summed % CHUNK:
        return f"it sums over {summed} places of each of several convolutions, which are no multiple of {CHUNK}"
    product = Product(
        m=problem.rows,
        n=problem.columns,
        k=summed,
        batch=problem.batch,
        a=images.matrix,
        b=(matrix,),
        program=problem.program,
        results=problem.results,
        operands=problem.operands,
        a_transposed=True,
        exact=problem.exact,
    )
    itemsize = images.matrix.itemsize
    merged = _merged_to_filter(problem.groups, problem.c, itemsize)
    channels = merged * problem.c
    line, chunks = lines_of(channels, itemsize, along_columns=True)
    rows = prod(axis.filter for axis in images.axes) * chunks * line // itemsize
    return ImplicitGemm(
        product, images.axes, images.count, images.batch, merged, channels, merged * problem.k, rows, line
    )


def filter_matrix(problem: Convolution, filter_: Tensor) -> Matrix | str:
    """A filter's taps and their channels by the output's channels, or why that is no matrix in memory."""
    windows, columns = [window.filter for window in problem.windows], problem.groups * problem.k
    matrix = Matrix(filter_.buffer, filter_.dtype, prod(windows) * problem.c, columns, columns, filter_.batch_stride)
    dense = _dense(filter_.spatial_strides, windows, problem.c * columns)
    return (
        matrix if dense and matrix.batch_stride in (0, matrix.rows * columns) else "the filter is not dense in memory"
    )


def output_matrix(problem: Convolution, output: Tensor) -> Matrix | str:
    """An output's places, of all images, by its channels, or why that is no matrix in memory."""
    places, columns = [problem.n, *(window.output for window in problem.windows)], problem.groups * problem.k
    matrix = Matrix(output.buffer, output.dtype, prod(places), columns, columns, output.batch_stride)
    dense = _dense((output.n_stride, *output.spatial_strides), places, columns)
    return (
        matrix if dense and matrix.batch_stride in (0, matrix.rows * columns) else "the output is not dense in memory"
    )


@dataclass(frozen=True)
class Images:
    """What is read by places: how many images lie in memory, how many from one convolution to the next, and the places
    of all by their channels.
    """

    count: int
    batch: int
    matrix: Matrix
    axes: tuple[Axis, ...]

    @classmethod
    def of(cls, problem: Convolution, image: Tensor, windows: tuple[Window, ...], channels: int) -> "Images | str":
        places, columns = [window.image for window in windows], problem.groups * channels
        if not _dense((image.n_stride, *image.spatial_strides), [problem.n, *places], columns):
            return "the image is not dense in memory"
        if image.batch_stride % image.n_stride:
            return "the convolutions of a batch are no whole number of images apart"
        batch = image.batch_stride // image.n_stride if problem.batch > 1 else 0
        count = (problem.batch - 1) * batch + problem.n
        matrix = Matrix(image.buffer, image.dtype, count * prod(places), columns, columns)
        return cls(count, batch, matrix, tuple(map(Axis.of, reversed(windows))))


def _merged_to_output(groups: int, channels: int, columns: int, itemsize: int, along_columns: bool) -> int:
    """As many groups as fill a line, if that is a few; or one, where that can't be. The filter's rows may run
    `along_columns`.
    """
    merged = {64: 2, 32: 4, 16: 8 if itemsize == 2 else 1}.get(channels * itemsize, 1)
    fits = groups > 1 and columns in _MERGED_COLUMNS and merged * columns <= _MOST_COLUMNS
    # A multiply begins anywhere in a chunk of columns, and ends there, or has whole ones.
    if along_columns and (merged * columns % CHUNK or (CHUNK % columns and columns % CHUNK)):
        fits = False
    return merged if fits else 1


def _merged_to_filter(groups: int, channels: int, itemsize: int) -> int:
    """As many groups as a line has room for, if it then begins at a multiple of 16 bytes."""
    most = min(groups, max(1, DEPTH_BYTES // (channels * itemsize)))
    return next((merged for merged in range(most, 1, -1) if merged * channels * itemsize % 16 == 0), 1)


def lines_of(channels: int, itemsize: int, groups: int = 1, *, along_columns: bool) -> tuple[int, int]:
    """Bytes of a line, and how many of them so many channels take at a tap.

    As few as there can be, since a short one takes as long to load as a long one, and of those the shortest. But where
    the other matrix's rows lie along columns, or padded channels are rows of tiles, these are as many as the padding
    has, and the least of that is best. Multiplies end where a group does, if its last line is a stage or full.
    """
    size = channels * itemsize
    if not along_columns:
        line = min(_LINES, key=lambda line: (ceil(size / line), line))
    else:
        fitting = (line for line in _LINES if groups == 1 or line == DEPTH_BYTES or size % line == 0)
        line = min(fitting, key=lambda line: ceil(size / line) * line * _LINES[line])
    return line, ceil(size / line)


def _dense(strides: tuple[int, ...], sizes: list[int], inner: int) -> bool:
    """Whether dimensions of these sizes lie one in the other, around `inner` elements."""
    return all(stride == inner * prod(sizes[i + 1 :]) for i, stride in enumerate(strides))
