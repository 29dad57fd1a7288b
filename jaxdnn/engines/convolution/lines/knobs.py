"""Which depthwise convolutions the kernel of whole lines can have, and with which knobs.

The kernel is cpp/kernels/convolution/lines/.
"""

from dataclasses import dataclass
from math import ceil

from jaxdnn.device import Target
from jaxdnn.engines.base import check_least
from jaxdnn.engines.convolution.problem import Convolution, Tensor
from jaxdnn.engines.convolution.sliding import Sliding, sliding_reason

# What convolution/lines/lines.cuh has too.
LAG = 2  # stages that are not filled, since a step's readers may still have them
_PAIR = 2  # channels of a thread
_LINE = 128  # bytes that stages are whole multiples of
_BARRIER_BYTES = 16  # of a stage

_ITEM = 2  # bytes of an element
_WARP = 32
_MOST_THREADS = 1024
_REGISTERS = 65_536
_MOST_OF_THREAD = 255
_OTHER_REGISTERS = 34  # besides taps and sums
_STEP = 8  # that registers are given out in


@dataclass(frozen=True)
class LinesKnobs:
    """How lines are cut.

    Attributes:
      width: places of a thread, side by side in a line.
      stages: lines in flight, and in use.
      parts: into how many the rows of all images are cut, each of which is a block's.
    """

    width: int = 7
    stages: int = 8
    parts: int = 1

    def __post_init__(self) -> None:
        check_least(self, 1, "width", "parts")
        check_least(self, LAG + 1, "stages")


@dataclass(frozen=True)
class Lines(Sliding):
    """By whole lines of the source."""

    @property
    def arrays(self) -> list[Tensor]:
        """Those whose lines are copied."""
        return [self.source, *([self.other] if self.to_filter else [])]

    @property
    def channels(self) -> int:
        return self.problem.groups

    @property
    def taps(self) -> int:
        return self.windows[0].filter * self.windows[1].filter

    @property
    def count(self) -> int:
        """Rows of the result, of all images."""
        return self.problem.n * self.windows[0].output

    @property
    def zeros(self) -> int:
        """Places in front of a line."""
        return max(0, self.windows[1].low)

    @property
    def first(self) -> int:
        """The first place of the source that windows reach."""
        return max(0, -self.windows[1].low)

    @property
    def copied(self) -> int:
        """Places of the source, of a line."""
        x = self.windows[1]
        return min(x.image - self.first, x.output + x.filter - 1 - self.zeros)

    def threads(self, knobs: LinesKnobs) -> int:
        pairs = self.channels // _PAIR * (self.windows[1].output // knobs.width)
        return ceil(pairs / _WARP) * _WARP

    def registers(self, knobs: LinesKnobs) -> int:
        """Of a thread, about: taps, and sums or rows of the output."""
        needed = _PAIR * (self.taps + self.windows[0].filter * knobs.width) + _OTHER_REGISTERS
        return ceil(needed / _STEP) * _STEP

    def line_bytes(self, places: int) -> int:
        return ceil(places * self.channels * _ITEM / _LINE) * _LINE

    def shared_memory(self, knobs: LinesKnobs) -> int:
        """Bytes, as the kernel's own `kSharedBytes` says."""
        x = self.windows[1]
        stage = self.line_bytes(x.output + x.filter - 1)
        if not self.to_filter:
            return knobs.stages * (stage + _BARRIER_BYTES)
        ring = knobs.stages * (stage + self.line_bytes(x.output) + _BARRIER_BYTES)
        return max(ring, x.output // knobs.width * self.taps * self.channels * 4)


def lines_reason(problem: Convolution) -> str | None:
    """Why the kernel can't have the convolution, or None."""
    if reason := sliding_reason(problem):
        return reason
    form = Lines(problem)
    if form.linear:
        return "it has 2 spatial dimensions, and the convolution 1"
    if any((window.stride, window.dilation) != (1, 1) for window in form.windows):
        return "it is for windows without strides and dilation"
    if any(array.spatial_strides[-1] != form.channels for array in form.arrays):
        return "the places of a line don't lie one after the other"
    if form.copied < 1:
        return "windows reach no place of a line"
    return None


def knobs_reason(form: Lines, knobs: LinesKnobs, target: Target) -> str | None:
    """Why the knobs don't fit the convolution, or None."""
    places = form.windows[1].output
    if places % knobs.width:
        return f"width is {knobs.width}, which does not divide the {places} places of a line"
    if (threads := form.threads(knobs)) > _MOST_THREADS:
        return f"a block would have {threads} threads; expected at most {_MOST_THREADS}"
    if (knobs.parts - 1) * ceil(form.count / knobs.parts) >= form.count:
        return f"parts is {knobs.parts}, and the last of them would have none of the {form.count} rows"
    most = min(_MOST_OF_THREAD, _REGISTERS // threads // _STEP * _STEP)
    if (needed := form.registers(knobs)) > most:
        return f"a thread needs about {needed} registers for {knobs.width} places, and has {most}"
    if (needed := form.shared_memory(knobs)) > target.shared_memory:
        return f"it would use {needed} bytes of shared memory, and a block has {target.shared_memory}"
    return None
