"""The gradient of an image that windows tile, side by side, as one product.

    rows      windows: places of the output
    columns   a window's places by the image's channels, as the filter lies in memory
    summed    channels of the output

So is a transposed convolution whose stride is its window. As phases of the stride each place of a window would be a
product of its own, and read the whole output again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd, prod

from jaxdnn.engines.convolution.implicit_gemm import filter_matrix, output_matrix
from jaxdnn.engines.convolution.problem import Convolution
from jaxdnn.engines.product.problem import EpilogueOperand, Matrix, Product
from jaxdnn.pointwise import Term

_PIECES = (16, 8, 4)  # bytes that a thread stores at once
_LARGEST_STEP = 2**31  # elements


@dataclass(frozen=True)
class TiledDimension:
    """One dimension of an image: place `first` + window * window_step + tap * tap_step, in elements.

    Attributes:
      windows, taps: how many.
    """

    windows: int
    taps: int
    window_step: int
    tap_step: int
    first: int = 0


@dataclass(frozen=True)
class TiledImage:
    """The gradient as such a product.

    Attributes:
      product: what is multiplied; its result has the image's elements, in the order of its own.
      dimensions: of the image, the innermost first.
      run: elements that lie together both in a window of the image and in the filter.
      image_step: elements from one image to the next.
    """

    product: Product
    dimensions: tuple[TiledDimension, ...]
    run: int
    image_step: int

    @property
    def first(self) -> int:
        """Where the first window's first tap is."""
        return sum(dimension.first for dimension in self.dimensions)

    @property
    def piece(self) -> int:
        """Bytes of a run that are stored at once, of each result."""
        return _piece(self.run, self.product.stored)


def tiled_image(problem: Convolution) -> TiledImage | None:
    """The product that the gradient of an image of one group is, or None."""
    windows, taps = problem.windows, prod(window.filter for window in problem.windows)
    if problem.result != "image" or problem.groups > 1 or taps == 1:
        return None
    if not all(window.tiles for window in windows):
        return None
    output, filter_ = output_matrix(problem, problem.b), filter_matrix(problem, problem.a)
    stored = [result for result in problem.results if isinstance(result, Matrix)]
    if isinstance(output, str) or isinstance(filter_, str) or len(stored) < len(problem.results):
        return None
    if problem.program.indexed or not all(map(_is_of_channels, problem.operands)):
        return None
    columns = taps * problem.c
    dimensions, run, image_step = _dimensions(problem)
    # As TMA would have it of a matrix: so are results staged, though threads store them.
    aligned = all(columns * result.itemsize % 16 == 0 for result in stored)
    if not aligned or not _piece(run, stored) or image_step >= _LARGEST_STEP:
        return None
    product = Product(
        m=output.rows,
        n=columns,
        k=problem.k,
        batch=problem.batch,
        a=output,
        b=(filter_,),
        program=problem.program,
        results=tuple(replace(one, rows=output.rows, columns=columns, row_stride=columns) for one in stored),
        operands=tuple(_of_channels(operand, problem.c) for operand in problem.operands),
        b_transposed=True,
        exact=problem.exact,
    )
    return TiledImage(product, dimensions, run, image_step)


def _dimensions(problem: Convolution) -> tuple[tuple[TiledDimension, ...], int, int]:
    """The image's dimensions, the elements of a run, and those of an image."""
    found, run, step = [], problem.c, problem.c
    for i, window in enumerate(reversed(problem.windows)):
        size, taps = step * window.filter, window.filter
        if i == 0 and not window.flipped:
            run, taps = size, 1
        first = step * (taps - 1) if window.flipped else 0
        found.append(TiledDimension(window.output, taps, size, -step if window.flipped else step, first))
        step *= window.image
    return tuple(found), run, step


def _is_of_channels(operand: EpilogueOperand) -> bool:
    return operand.broadcast in ("scalar", "row") and not operand.terms[2] and not operand.gathered


def _of_channels(operand: EpilogueOperand, channels: int) -> EpilogueOperand:
    """What is read by channels, by a window's places and their channels."""
    batch, row, _ = operand.terms
    column = (Term(operand.column_stride, modulus=channels),) if operand.column_stride else ()
    return replace(operand, column_stride=0, terms=(batch, row, column))


def _piece(run: int, results: Sequence[Matrix]) -> int:
    places = gcd(*(place for result in results for place in (run * result.itemsize, result.buffer.offset)))
    return next((piece for piece in _PIECES if places % piece == 0), 0)
