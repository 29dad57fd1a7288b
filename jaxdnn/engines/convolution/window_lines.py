"""A convolution of an image with few channels as a product whose K, or rows, are the lines of a window.

    result    rows (M)                columns (N)              summed over (K)
    output    places of the output    channels of the output   lines of the window, and their elements
    filter    lines of the window,    channels of the output   places of the output
              and their elements

Elements of a line are its taps by the image's channels, as they lie in memory, in groups of 8 of which the last one may
be filled up; places of a line of the output are walked through in segments of 16, likewise.
"""

from dataclasses import dataclass, replace
from math import ceil, prod

from jaxdnn.engines.convolution.axis import Axis, Phase
from jaxdnn.engines.convolution.implicit_gemm import Images, filter_matrix, output_matrix
from jaxdnn.engines.convolution.problem import Convolution
from jaxdnn.engines.product.problem import Matrix, Product

SEGMENT = 16  # places: the rows of a warp, or a step of K
GROUP = 8  # elements: half a step of K, or half the rows of a warp
STAGE_SEGMENTS = 8  # of a filter's K
_BOX_ELEMENTS = 64  # that are 128 bytes, to which boxes in shared memory are aligned
_SPATIAL = 3
_ALONE = Axis(image=1, filter=1, result=1, stride=1, step=1, filter_step=1, phases=(Phase(1, 0, 0),))


@dataclass(frozen=True)
class WindowLines:
    """A convolution as such a product.

    Attributes:
      product: sizes, epilogue, and the matrices as they lie in memory: a is the lines of all images of the batch, b the
        filter or the output.
      axes: the innermost of three dimensions first.
      images, image_batch: how many there are in memory, and of those from one convolution to the next.
      places: of all images of a convolution, segments of lines filled up.
      channels: of the image.
    """

    product: Product
    axes: tuple[Axis, ...]
    images: int
    image_batch: int
    places: int
    channels: int

    @property
    def to_filter(self) -> bool:
        return self.product.a_transposed

    @property
    def lines(self) -> int:
        """Of a window."""
        return prod(axis.filter for axis in self.axes[1:])

    @property
    def elements(self) -> int:
        """Of a window's line."""
        return self.axes[0].filter * self.channels

    @property
    def early(self) -> int:
        """Elements before a segment's first window that are loaded, since TMA starts at whole groups."""
        return _early(self.axes[0], self.channels)

    @property
    def lead(self) -> int:
        """Elements before each window that count as its own: one where its pairs would be no words else."""
        return 0 if self.to_filter else _lead(self.axes[0], self.channels)

    @property
    def padded(self) -> int:
        """Elements of a window's line with those that lead it and what fills up its last group."""
        return ceil((self.lead + self.elements) / GROUP) * GROUP

    @property
    def place_step(self) -> int:
        """Elements from one place's window to the next one's."""
        return self.axes[0].stride * self.channels

    @property
    def pitch(self) -> int:
        """Elements of a line of a segment in shared memory."""
        covered = self.early + (SEGMENT - 1) * self.place_step + self.elements
        return ceil(covered / _BOX_ELEMENTS) * _BOX_ELEMENTS

    @property
    def segment_bytes(self) -> int:
        """Of a segment in shared memory; see `Segment` in cpp/kernels/convolution/sm90_few_channels.cuh."""
        return self.lines * self.pitch * self.product.a.itemsize

    @property
    def filter_lines(self) -> int:
        """Lines of a filter's tile: one of zeros follows an odd number of groups."""
        return self.lines + self.lines * (self.padded // GROUP) % 2

    @property
    def rows(self) -> int:
        """That tiles are cut from."""
        return self.lines * self.padded if self.to_filter else self.places

    @property
    def depth(self) -> int:
        """K of a stage."""
        return STAGE_SEGMENTS * SEGMENT if self.to_filter else self.product.k

    @property
    def straight(self) -> bool:
        """Whether the rows of tiles are those of the result."""
        return self.rows == self.product.m

    @property
    def tiled(self) -> Product:
        """The product that tiles are cut from."""
        return replace(self.product, m=self.rows)


def _early(width: Axis, channels: int) -> int:
    return width.start * channels % GROUP


def _lead(width: Axis, channels: int) -> int:
    return _early(width, channels) % 2 if width.stride * channels % 2 == 0 else 0


def window_lines(problem: Convolution) -> WindowLines | str:
    """The product that an output or a filter with one group is, or why it is none."""
    if any((window.dilation, window.base_dilation, window.flipped) != (1, 1, False) for window in problem.windows):
        return "a window is dilated or flipped, and so its lines are not those of the filter"
    if len(problem.windows) > _SPATIAL:
        return f"it has {len(problem.windows)} spatial dimensions; expected at most {_SPATIAL}"
    images = Images.of(problem, problem.a, problem.windows, problem.c)
    if isinstance(images, str):
        return images
    width, *outer = (*images.axes, *(_SPATIAL - len(images.axes)) * [_ALONE])
    axes = (replace(width, segment=SEGMENT), *outer)
    line = width.image * problem.c
    to_filter = problem.result == "filter"
    matrix = output_matrix(problem, problem.b) if to_filter else filter_matrix(problem, problem.b)
    if isinstance(matrix, str):
        return matrix
    places = problem.n * prod(axis.places for axis in axes)
    groups = prod(axis.filter for axis in outer) * ceil((_lead(width, problem.c) + width.filter * problem.c) / GROUP)
    product = Product(
        m=problem.rows,
        n=problem.columns,
        k=places if to_filter else ceil(groups / 2) * 2 * GROUP,
        batch=problem.batch,
        a=Matrix(images.matrix.buffer, images.matrix.dtype, images.matrix.rows // width.image, line, line),
        b=(matrix,),
        program=problem.program,
        results=problem.results,
        operands=problem.operands,
        a_transposed=to_filter,
        exact=problem.exact,
    )
    return WindowLines(product, axes, images.count, images.batch, places, problem.c)
