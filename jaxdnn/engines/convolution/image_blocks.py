"""The gradient of an image with few channels as a product whose columns are blocks of its places, by their channels.

A place alone has too few columns for the tensor cores, and would read the output's gradient once more for each. So rows
are blocks of neighbouring places of two lines: a line's places and their channels, as they lie in memory, are the
columns of a product, and each of the two lines has a filter and a result of its own. A block meets all places of the
output that one of its own meets. At one of them, its columns meet as many neighbouring rows (taps by channels) of a
line of the filter as they are; of those that are past the filter's ends, TMA makes zeros. So where the output's
gradient is infinite or no number, neither is a number what its neighbours in a block have, though they don't meet it.
"""

from dataclasses import replace
from math import ceil, prod

from jaxdnn.engines.convolution.axis import Axis, Phase
from jaxdnn.engines.convolution.implicit_gemm import Images, ImplicitGemm, filter_matrix, lines_of
from jaxdnn.engines.convolution.problem import Convolution, Window
from jaxdnn.engines.product.problem import Matrix, Product, Reduced, identity
from jaxdnn.engines.product.tma import DEPTH_BYTES, stage_depth

_LINES = 2  # of a block: as many as a product may have right operands
_MOST_STEP = 8  # places of the output from one block to the next, of TMA's im2col mode
_MOST_COLUMNS = 128


def image_blocks(problem: Convolution) -> ImplicitGemm | None:
    """The product by blocks that the gradient of an image of two dimensions is, or None."""
    if problem.result != "image" or problem.groups > 1 or len(problem.windows) != 2:
        return None
    if any((window.dilation, window.base_dilation, window.flipped) != (1, 1, False) for window in problem.windows):
        return None
    rows, columns = problem.windows
    block, (stored,) = _block(columns, problem.c), problem.results[:1]
    plain = not problem.operands and not problem.program.operations and len(problem.results) == 1
    if not plain or isinstance(stored, Reduced) or block is None or _LINES % rows.stride or rows.image % _LINES:
        return None
    images = Images.of(problem, problem.b, tuple(window.transposed for window in problem.windows), problem.k)
    matrix = filter_matrix(problem, problem.a)
    if isinstance(images, str) or isinstance(matrix, str) or matrix.batch_stride:
        return None
    axes = (_axis(columns, block), _axis(rows, _LINES))
    line, width = columns.image * problem.c, block * problem.c
    m = problem.n * rows.image * (columns.image // block)
    if stored.row_stride != problem.c or stored.batch_stride not in (0, m * width):
        return None
    buffers = [replace(stored.buffer, offset=stored.buffer.offset + i * line * stored.itemsize) for i in range(_LINES)]
    bytes_of_line, lines = lines_of(problem.k, images.matrix.itemsize, along_columns=False)
    taps = prod(axis.phases[0].taps for axis in axes)
    program = problem.program
    product = Product(
        m=m,
        n=width,
        k=ceil(taps * lines * bytes_of_line / DEPTH_BYTES) * stage_depth(images.matrix),
        batch=problem.batch,
        a=images.matrix,
        b=(matrix,) * _LINES,
        program=identity(_LINES, program.accumulators[0].dtype, stored.dtype),
        results=tuple(Matrix(one, stored.dtype, m, width, width, stored.batch_stride) for one in buffers),
        b_transposed=True,
        exact=problem.exact,
    )
    (phase,) = axes[0].phases
    # A line of the filter is one matrix, and a line's blocks are the rows of the result.
    along = replace(
        axes[0], filter=1, filter_step=0, result=columns.image // block, block=1, phases=(replace(phase, first=0),)
    )
    return ImplicitGemm(
        product=product,
        axes=(along, axes[1]),
        images=images.count,
        image_batch=images.batch,
        merged=1,
        channels=problem.k,
        group_columns=width,
        rows=m // _LINES,
        line=bytes_of_line,
        filter_rows=(phase.first * problem.c, -columns.stride * problem.c),
    )


def _block(window: Window, channels: int) -> int | None:
    """How many places of a line a block has: those that read the output least often."""
    fitting = [
        block
        for block in range(window.stride, window.stride * _MOST_STEP + 1, window.stride)
        if window.image % block == 0 and block * channels <= _MOST_COLUMNS
    ]
    return min(fitting, key=lambda block: _axis(window, block).phases[0].taps / block, default=None)


def _axis(window: Window, block: int) -> Axis:
    """Of blocks, each of which is a place: block q meets those places o of the output, of which

        q * block + i + low == o * stride + tap

    with one of its own places i and one of the filter's.
    """
    first = -((window.filter - 1 - window.low) // window.stride)
    last = (block - 1 + window.low) // window.stride
    start = window.low - window.stride * first
    return Axis(
        image=window.output,
        filter=window.filter,
        result=window.image,
        stride=block // window.stride,
        step=1,
        filter_step=-window.stride,
        phases=(Phase(last - first + 1, first, start),),
        block=block,
    )
