"""Which convolutions the kernel can have, as strips of places, and with which knobs.

The kernel is cpp/kernels/convolution/depthwise/.
"""

from dataclasses import dataclass
from math import ceil

from jaxdnn.device import Target
from jaxdnn.engines.base import check_least
from jaxdnn.engines.convolution.sliding import Sliding

# What convolution/depthwise/strips.cuh has too.
GROUP = 32  # channels of a warp's copy, and of a block's least
STRIPS = 16  # of a step
STRIP = 8  # places of a strip
LINE_BYTES = 16  # of a plane of shared memory
_MULTIPLY = 16  # places of the source that one reads
_WARPS = (4, 8, 16)  # of a block
_SLABS = (32, 64, 128)  # channels of a block
_REGISTERS = 65_536
_MOST_OF_THREAD = 255
_MOVED_REGISTERS = 6  # of an address, and what a thread knows of it
_READ_REGISTERS = 8  # of 16 places of a strip that are multiplied
_OTHER_REGISTERS = 44  # besides these, and sums, and bands or rows of the output
_STEP = 8  # that registers are given out in


@dataclass(frozen=True)
class DepthwiseKnobs:
    """How a depthwise convolution is cut; cpp/kernels/convolution/depthwise/strips.cuh draws it.

    Attributes:
      across, images: strips of a line that a step has, and images of which it has them.
      slab: channels of a block.
      warps: of a block; each has as many channels.
      stages: steps whose rows are in flight.
      parts: into how many the rows of all strips are cut, each of which is a block's.
    """

    across: int = 7
    images: int = 2
    slab: int = 32
    warps: int = 8
    stages: int = 8
    parts: int = 1

    def __post_init__(self) -> None:
        check_least(self, 1, "across", "images", "parts")
        check_least(self, 2, "stages")
        for name, known in (("warps", _WARPS), ("slab", _SLABS)):
            if getattr(self, name) not in known:
                raise ValueError(f"DepthwiseKnobs: {name} is {getattr(self, name)}; expected one of {known}")
        if self.warps % self.groups or self.slab % (2 * self.warps):
            raise ValueError(f"DepthwiseKnobs: {self.warps} warps can't share {self.slab} channels in pairs")
        if self.across * self.images > STRIPS:
            raise ValueError(
                f"DepthwiseKnobs: {self.across} strips of {self.images} images are more than the {STRIPS} of a step"
            )

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def groups(self) -> int:
        """Of channels."""
        return self.slab // GROUP

    @property
    def team(self) -> int:
        """Warps of a group."""
        return self.warps // self.groups

    @property
    def channels(self) -> int:
        """Of a warp."""
        return self.slab // self.warps


@dataclass(frozen=True)
class Strips(Sliding):
    """Cut in strips of places."""

    def slabs(self, knobs: DepthwiseKnobs) -> int:
        return ceil(self.problem.groups / knobs.slab)

    @property
    def depth(self) -> int:
        """Multiplies along the places of the source that a strip meets."""
        x = self.windows[1]
        return ceil(((STRIP - 1) * x.stride + (x.filter - 1) * x.dilation + 1) / _MULTIPLY)

    @property
    def slots(self) -> int:
        """Rows of the result that a row of the source belongs to."""
        y = self.windows[0]
        return ceil(y.filter / y.stride)

    @property
    def lead(self) -> int:
        """Steps of an image, of whichever class, whose rows are all in front of it."""
        y = self.windows[0]
        if self.to_filter or self.linear:
            return 0
        # The last row of step m of the last class is ((m + 1) * stride - 1) * classes + (classes - 1) * stride - low.
        before = y.low - (self.classes - 1) * y.stride + self.classes - 1
        return max(0, min(self.slots - 1, before // (self.classes * y.stride)))

    def rows(self, knobs: DepthwiseKnobs) -> int:
        """Of a class; or in one dimension ranges of strips."""
        return self._across(knobs) if self.linear else ceil(self.windows[0].output / self.classes)

    def ranges(self, knobs: DepthwiseKnobs) -> int:
        """Of strips, of a line."""
        return 1 if self.linear else self._across(knobs)

    def _across(self, knobs: DepthwiseKnobs) -> int:
        return ceil(self.windows[1].output / (STRIP * knobs.across))

    def count(self, knobs: DepthwiseKnobs) -> int:
        """Rows of all strips."""
        return ceil(self.problem.n / knobs.images) * self.classes * self.ranges(knobs) * self.rows(knobs)

    def blocks(self, knobs: DepthwiseKnobs) -> int:
        """Lines of 8 places of an image that a step copies, of one row."""
        return (knobs.across - 1) * self.windows[1].stride + 2 * self.depth

    def units(self, knobs: DepthwiseKnobs) -> int:
        """Of a step, for each group of channels, each of which is a warp's copy."""
        return self.windows[0].stride * knobs.images * self.blocks(knobs)

    def output_units(self, knobs: DepthwiseKnobs) -> int:
        """Likewise of the output, to a filter's gradient."""
        return knobs.images * knobs.across if self.to_filter else 0

    def registers(self, knobs: DepthwiseKnobs) -> int:
        """Of a thread, about: the sums, and bands or rows of the output; and addresses."""
        wide, narrow = self.slots, self.depth * self.windows[0].filter
        if self.to_filter:
            wide, narrow = narrow, wide
        moved = sum(ceil(units / knobs.team) for units in (self.units(knobs), knobs.across * knobs.images))
        read = self.depth * self.windows[0].stride
        own = knobs.channels * (4 * wide + 2 * narrow) + _MOVED_REGISTERS * moved + _READ_REGISTERS * read
        return ceil((own + _OTHER_REGISTERS) / _STEP) * _STEP

    def shared_memory(self, knobs: DepthwiseKnobs) -> int:
        """Bytes, as the kernel's own `kSharedBytes` says."""
        units, outputs = self.units(knobs), self.output_units(knobs)
        ring = knobs.stages * (ceil(units / knobs.team) + ceil(outputs / knobs.team)) * knobs.threads
        others = outputs | 1 if self.to_filter else len(self.problem.results) * (STRIPS | 1)
        lines = ring + 2 * knobs.slab * ((units | 1) + others)
        if not self.to_filter:
            return lines * LINE_BYTES
        taps = self.windows[0].filter * self.windows[1].filter
        diagonals = knobs.warps * _MULTIPLY * self.depth * STRIP + taps * knobs.slab
        return max(lines * LINE_BYTES, diagonals * 4)


def knobs_reason(form: Strips, knobs: DepthwiseKnobs, target: Target) -> str | None:
    """Why the knobs don't fit the convolution, or None."""
    if knobs.parts > (count := form.count(knobs)):
        return f"parts is {knobs.parts}, and there are {count} rows of strips"
    most = min(_MOST_OF_THREAD, _REGISTERS // knobs.threads)
    if (needed := form.registers(knobs)) > most:
        return f"a thread needs about {needed} registers for {knobs.channels} channels, and has {most}"
    if (needed := form.shared_memory(knobs)) > target.shared_memory:
        return f"it would use {needed} bytes of shared memory, and a block has {target.shared_memory}"
    return None
