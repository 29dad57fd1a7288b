"""One dimension of a convolution's places: which places of the image, and taps of the filter, each of them meets.

Where the image is dilated, as it is where a convolution with strides is transposed, places that are the same modulo a
period meet the same taps. They are a phase, a convolution of its own, with fewer taps and no dilation.
"""

from dataclasses import dataclass
from functools import cached_property
from math import ceil, gcd

from jaxdnn.engines.convolution.problem import Window


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
    o * period + i of the result, the one that is number i. The places of a phase are filled up to whole segments of so
    many; and where a place stands for a block of the result's, it has the place of the block's first one.
    """

    image: int
    filter: int
    result: int
    stride: int
    step: int
    filter_step: int
    phases: tuple[Phase, ...]
    segment: int = 1
    block: int = 1

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
        """Of a phase; of some the last ones are not there."""
        return ceil(self.result / self.period / self.segment) * self.segment

    @property
    def period(self) -> int:
        """From one place of a phase to the next one, in the result."""
        return len(self.phases) * self.block

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
