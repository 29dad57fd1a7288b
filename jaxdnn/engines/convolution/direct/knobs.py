"""Knobs of the direct convolution (cpp/kernels/convolution/direct/), and what a problem lets them be."""

from dataclasses import dataclass
from math import ceil, gcd, prod
from typing import Literal

import numpy as np

from jaxdnn.device import Target
from jaxdnn.engines.base import check_least
from jaxdnn.engines.convolution.problem import Convolution, Tensor, Window
from jaxdnn.engines.convolution.reasons import AXES
from jaxdnn.engines.product.element_epilogue import MAX_GRID
from jaxdnn.pointwise.cuda import register_type

COPY_BYTES = 16  # that one instruction may copy


@dataclass(frozen=True)
class ConvolutionDirectKnobs:
    """How a convolution of few channels a group is cut; cpp/kernels/convolution/direct/ draws it.

    Attributes:
      width: neighbouring places of a row that a thread has; of a filter's gradient, of the output's row.
      strips: threads along a row.
      groups: whose channels a thread block has.
      height: rows of a tile.
      parts: of the tiles, each of which one thread block works through.
      stages: steps whose rows are in shared memory.
      resident: thread blocks that a multiprocessor has registers for.
      tap_rows, tap_columns: of a filter's gradient, the taps whose sums a thread block has.
    """

    width: int = 8
    strips: int = 8
    groups: int = 32
    height: int = 32
    parts: int = 1
    stages: int = 3
    resident: int = 2
    tap_rows: int = 7
    tap_columns: int = 7

    def __post_init__(self) -> None:
        check_least(self, 1, "width", "strips", "groups", "height", "parts", "resident", "tap_rows", "tap_columns")
        check_least(self, 2, "stages")


@dataclass(frozen=True)
class Axis:
    """What `WindowAxis` of cpp/kernels/convolution/axis.cuh has: the constants of a window's phases."""

    window: Window

    @property
    def period(self) -> int:
        return self.window.base_dilation // gcd(self.window.stride, self.window.base_dilation)

    @property
    def step(self) -> int:
        return self.period * self.window.stride // self.window.base_dilation

    @property
    def tap_period(self) -> int:
        return self.window.base_dilation // gcd(self.window.dilation, self.window.base_dilation)

    @property
    def spread(self) -> int:
        return self.tap_period * self.window.dilation // self.window.base_dilation

    @property
    def taps(self) -> int:
        return ceil(self.window.filter / self.tap_period)

    @property
    def places(self) -> int:
        """Of the result in the first phase."""
        return ceil(self.window.output / self.period)


def slides(problem: Convolution) -> Literal["image", "output"]:
    """The array that windows slide over. For a filter's gradient it is the one without zeros between its places."""
    if problem.result == "filter":
        return "output" if any(window.base_dilation > 1 for window in problem.windows) else "image"
    return "output" if problem.result == "image" else "image"


def axes(problem: Convolution) -> tuple[Axis, Axis, Axis]:
    """Depth, row and column of the windows that slide."""
    windows = [window.transposed if slides(problem) == "output" else window for window in problem.windows]
    depth, row, column = map(Axis, [*(AXES - len(windows)) * [Window(1, 1, 1)], *windows])
    return depth, row, column


def source(problem: Convolution) -> Tensor:
    """The array that windows slide over."""
    return problem.b if slides(problem) == "output" else problem.a


def still(problem: Convolution) -> Tensor:
    """Of a filter's gradient, the array that does not slide."""
    return problem.a if slides(problem) == "output" else problem.b


def channels(problem: Convolution) -> tuple[int, int]:
    """Of a group: those of the result (of a filter's gradient, of the array that does not slide) and of the source."""
    return (problem.c, problem.k) if slides(problem) == "output" else (problem.k, problem.c)


def tap_tile(problem: Convolution, knobs: ConvolutionDirectKnobs) -> tuple[int, int]:
    """Rows and columns of a filter's taps whose sums a thread block has."""
    _, row, column = axes(problem)
    return min(row.taps, knobs.tap_rows), min(column.taps, knobs.tap_columns)


def itemsize(dtype: str) -> int:
    """Bytes of an element."""
    return np.dtype(dtype).itemsize


def slots(problem: Convolution, knobs: ConvolutionDirectKnobs) -> int:
    """Rows that a row of the source belongs to."""
    row = axes(problem)[1]
    return ceil((tap_tile(problem, knobs)[0] if problem.result == "filter" else row.taps) / row.step)


def reach(problem: Convolution, knobs: ConvolutionDirectKnobs) -> int:
    """Neighbouring places of the source that a thread's windows take in a row."""
    column = axes(problem)[2]
    taps = tap_tile(problem, knobs)[1] if problem.result == "filter" else column.taps
    return (knobs.width - 1) * column.step + (taps - 1) * column.spread + 1


def vector(tensor: Tensor, block: int) -> int:
    """Neighbouring channels that are copied together, of the `block` that a thread block has."""
    size = itemsize(tensor.dtype)
    strides = (tensor.batch_stride, tensor.n_stride, *tensor.spatial_strides, tensor.buffer.offset // size)
    return gcd(COPY_BYTES // size, block, *strides)


@dataclass(frozen=True)
class Tiling:
    """Tiles and thread blocks of a result, under some knobs."""

    problem: Convolution
    knobs: ConvolutionDirectKnobs

    @property
    def columns(self) -> int:
        return ceil(axes(self.problem)[2].places / (self.knobs.strips * self.knobs.width))

    @property
    def rows(self) -> int:
        """Of a class of rows."""
        _, row, _ = axes(self.problem)
        return ceil(ceil(row.places / row.spread) / self.knobs.height)

    @property
    def count(self) -> int:
        depth, row, _ = axes(self.problem)
        return self.columns * self.rows * row.spread * depth.places * self.problem.n

    @property
    def blocks_of_groups(self) -> int:
        return ceil(self.problem.groups / self.knobs.groups)

    @property
    def part_tiles(self) -> int:
        return ceil(self.count / self.knobs.parts)

    @property
    def blocks(self) -> int:
        each = prod(axis.period for axis in axes(self.problem))
        if self.problem.result == "filter":
            depth, row, column = axes(self.problem)
            rows, columns = tap_tile(self.problem, self.knobs)
            each = depth.taps * ceil(row.taps / rows) * ceil(column.taps / columns)
        return self.blocks_of_groups * self.knobs.parts * each * self.problem.batch


def lanes(problem: Convolution, knobs: ConvolutionDirectKnobs) -> int:
    """Threads of a block for each strip: one a channel of the result, or of a filter's gradient a pair of channels."""
    own, other = channels(problem)
    return own * knobs.groups * (other if problem.result == "filter" else 1)


def threads(problem: Convolution, knobs: ConvolutionDirectKnobs) -> int:
    """Of a thread block."""
    return lanes(problem, knobs) * knobs.strips


def stage_bytes(problem: Convolution, knobs: ConvolutionDirectKnobs) -> int:
    """What a step copies."""
    depth, row, column = axes(problem)
    own, other = channels(problem)
    places = (knobs.strips - 1) * knobs.width * column.step + reach(problem, knobs)
    slid = row.step * places * other * knobs.groups * itemsize(source(problem).dtype)
    if problem.result == "filter":
        unmoved = knobs.strips * knobs.width * own * knobs.groups * itemsize(still(problem).dtype)
        return ceil(slid / 16) * 16 + ceil(unmoved / 16) * 16
    return ceil(depth.taps * slid / 16) * 16


def shared_memory(problem: Convolution, knobs: ConvolutionDirectKnobs) -> int:
    """Bytes of shared memory; what the kernel's own `kSharedBytes` says, which the unit asserts."""
    depth, row, column = axes(problem)
    own, other = channels(problem)
    ring, size = knobs.stages * stage_bytes(problem, knobs), itemsize(_register(problem))
    if problem.result == "filter":
        return max(ring, threads(problem, knobs) * tap_tile(problem, knobs)[1] * size)
    lane = 16 // size
    plane = ceil(row.taps * column.taps / lane)
    pitch = (other * depth.taps * plane | 1) * lane
    return ring + own * knobs.groups * pitch * size


def _register(problem: Convolution) -> str:
    return {"double": "float64", "float": "float32"}.get(register := register_type(problem.accumulator), register)


def knobs_reason(problem: Convolution, knobs: ConvolutionDirectKnobs, target: Target) -> str | None:
    """Why the knobs don't fit the problem, or None."""
    if not 1 <= (count := threads(problem, knobs)) <= 1024:
        return f"a block would have {count} threads; expected at most 1024"
    if knobs.parts > (tiles := Tiling(problem, knobs).count):
        return f"parts is {knobs.parts}, and there are {tiles} tiles"
    if (blocks := Tiling(problem, knobs).blocks) > MAX_GRID:
        return f"it would take {blocks} thread blocks, and a grid has at most {MAX_GRID}"
    if (needed := shared_memory(problem, knobs)) > target.shared_memory:
        return f"it would use {needed} bytes of shared memory, and a block has {target.shared_memory}"
    return None
