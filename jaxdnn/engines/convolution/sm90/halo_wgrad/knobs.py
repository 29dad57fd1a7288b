"""Which filter gradients the kernel of patches can have, and with which knobs.

The kernel is cpp/kernels/convolution/sm90_halo_wgrad.cuh.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, prod

from jaxdnn.engines.base import check_least
from jaxdnn.engines.convolution.axis import Axis, Phase
from jaxdnn.engines.convolution.implicit_gemm import ImplicitGemm
from jaxdnn.engines.product.sm90.knobs import TILE_WIDTHS
from jaxdnn.engines.product.split_k import Diagonal
from jaxdnn.engines.product.tma import CHUNK, DEPTH_BYTES, stage_bytes, tma_reason

LINES: tuple[int, ...] = (128, 64, 32)  # bytes of channels that a block has
OUTPUT_LINES: tuple[int, ...] = (1, 2, 4)  # of a tile, in the 64 rows of a multiply
_GROUP = 8  # places of a line of a tile
STEP = 2 * _GROUP  # places of a multiply
_DIMENSIONS = 3
_MOST_CONSUMERS = 3
_MOST_ACCUMULATORS = {1: 128, 2: 128, 3: 96}  # registers of a thread, with so many warp groups that multiply
_MOST_BOX = 256  # places of TMA's boxes, along each dimension
_MOST_BLOCKS = 2**31 - 1
_TMA_ALIGNMENT = 16  # of what TMA loads, bytes
_BARRIERS = 16  # bytes of a stage's
_FLAT = Axis(image=1, filter=1, result=1, stride=1, step=1, filter_step=1, phases=(Phase(1, 0, 0),))


@dataclass(frozen=True)
class WgradKnobs:
    """How a filter's gradient by patches is cut; cpp/kernels/convolution/sm90_halo_wgrad.cuh draws it.

    Attributes:
      patch: bytes of the image's channels that a block has.
      lines: of the output, of 64 channels or so much fewer, that are the rows of one multiply.
      run: taps of one multiply: neighbours of a line of the window, or with several `lines` all of a column.
      runs: of a block, each of which is a warp group's.
      column_blocks: of 64 / lines channels of the output that a block has, each of which has warp groups of its own.
      width, height, images: places of a tile, along a line and across, and of how many images.
      stages: tiles in flight.
      split_k: parts of the places that are summed apart, into scratch memory, and added by a second kernel.
    """

    patch: int = 128
    lines: int = 1
    run: int = 3
    runs: int = 3
    column_blocks: int = 1
    width: int = 8
    height: int = 8
    images: int = 1
    stages: int = 4
    split_k: int = 1

    def __post_init__(self) -> None:
        check_least(self, 1, "run", "runs", "column_blocks", "width", "height", "images", "stages", "split_k")
        if self.patch not in LINES:
            raise ValueError(f"WgradKnobs: patch is {self.patch}; expected one of {LINES}")
        if self.lines not in OUTPUT_LINES:
            raise ValueError(f"WgradKnobs: lines is {self.lines}; expected one of {OUTPUT_LINES}")
        if self.width % _GROUP or self.places % (STEP * self.lines):
            raise ValueError(
                f"WgradKnobs: a tile is {self.width} x {self.height} places of {self.images} images; expected lines of "
                f"a multiple of {_GROUP}, and an even number of {_GROUP}s by {self.lines} lines"
            )
        if self.consumers > _MOST_CONSUMERS:
            raise ValueError(f"WgradKnobs: {self.consumers} warp groups multiply; expected at most {_MOST_CONSUMERS}")

    @property
    def consumers(self) -> int:
        """Warp groups that multiply."""
        return self.runs * self.column_blocks

    @property
    def threads(self) -> int:
        return 128 * (self.consumers + 1)

    @property
    def columns(self) -> int:
        """Channels of the output that a block has."""
        return self.block_columns * self.column_blocks

    @property
    def block_columns(self) -> int:
        """Of a column block."""
        return CHUNK // self.lines

    @property
    def places(self) -> int:
        """Of a tile."""
        return self.width * self.height * self.images


@dataclass(frozen=True)
class WgradPatches:
    """A filter's gradient by tiles of places, in three dimensions."""

    gemm: ImplicitGemm

    @classmethod
    def of(cls, gemm: ImplicitGemm, lines: int) -> "WgradPatches":
        """With so many lines of the output in a multiply: of as few merged groups as have all columns of a block."""
        channels, columns = gemm.channels // gemm.merged, gemm.group_columns // gemm.merged

        def fits(merged: int) -> bool:
            whole = merged * channels * gemm.product.a.itemsize % _TMA_ALIGNMENT == 0
            return whole and merged * columns % (CHUNK // lines) == 0

        merged = next(filter(fits, range(1, gemm.merged)), gemm.merged)
        return cls(replace(gemm, merged=merged, channels=merged * channels, group_columns=merged * columns))

    @cached_property
    def dimensions(self) -> tuple[Axis, Axis, Axis]:
        """The innermost first."""
        x, y, z = (*self.gemm.axes, _FLAT, _FLAT)[:_DIMENSIONS]
        return x, y, z

    def axes(self, knobs: WgradKnobs) -> tuple[Axis, Axis, Axis]:
        """By tiles."""
        x, y, z = self.dimensions
        return replace(x, block=knobs.width), replace(y, block=knobs.height), z

    @cached_property
    def images(self) -> int:
        """Of a convolution."""
        return self.gemm.product.k // prod(axis.result for axis in self.dimensions)

    @property
    def diagonal(self) -> Diagonal:
        """Of what is summed, where groups are multiplied by each other."""
        gemm = self.gemm
        if not gemm.crossed:
            return Diagonal()
        return Diagonal(gemm.merged, gemm.channels // gemm.merged, gemm.group_columns // gemm.merged)

    def tiles(self, knobs: WgradKnobs) -> int:
        """Of places."""
        x, y, z = self.dimensions
        return (
            ceil(x.result / knobs.width) * ceil(y.result / knobs.height) * z.result * ceil(self.images / knobs.images)
        )

    def plane_runs(self, knobs: WgradKnobs) -> int:
        """Runs of taps in a plane of the window."""
        x, y, _ = self.dimensions
        return x.filter if knobs.lines > 1 else ceil(x.filter / knobs.run) * y.filter

    def blocks(self, knobs: WgradKnobs) -> int:
        """That a filter is cut into, of one split."""
        product, z = self.gemm.product, self.dimensions[2]
        chunks = ceil(self.gemm.channels * product.a.itemsize / knobs.patch)
        planes = ceil(self.plane_runs(knobs) / knobs.runs) * z.filter
        return planes * chunks * ceil(product.n / knobs.columns) * product.batch

    def multiplied(self, knobs: WgradKnobs) -> int:
        """Columns of a multiply: taps, and lines beyond the first, by channels."""
        return (knobs.run + knobs.lines - 1) * self.channels(knobs)

    def channels(self, knobs: WgradKnobs) -> int:
        """Of the image that a block has."""
        return knobs.patch // self.gemm.product.a.itemsize

    def sides(self, knobs: WgradKnobs) -> tuple[int, int]:
        """Places of a patch, along its lines and across."""
        x, y, _ = self.dimensions
        taps = x.filter if knobs.lines > 1 else ceil(x.filter / knobs.run) * knobs.run
        return knobs.width + (taps - 1) * x.step, knobs.height + (y.filter - 1) * y.step

    def stage(self, knobs: WgradKnobs) -> int:
        """Bytes of a stage: the output's places of a tile, and their patch."""
        patch = prod(self.sides(knobs)) * knobs.images * knobs.patch
        return knobs.column_blocks * knobs.places * (DEPTH_BYTES // knobs.lines) + patch

    def shared_memory(self, knobs: WgradKnobs) -> int:
        """Bytes, as the kernel's own `kSharedBytes` says."""
        stages = knobs.stages * (self.stage_room(knobs) - _BARRIERS) + self.spare(knobs)
        left = 4 * knobs.consumers * (knobs.lines - 1) * knobs.run * self.channels(knobs) * knobs.block_columns
        return max(stages, left) + knobs.stages * _BARRIERS

    def spare(self, knobs: WgradKnobs) -> int:
        """Bytes behind the stages."""
        return STEP * (knobs.run + knobs.lines - 2) * knobs.patch

    def stage_room(self, knobs: WgradKnobs) -> int:
        """Bytes of a stage up to the next one, and of its barriers."""
        return stage_bytes(self.stage(knobs)) + _BARRIERS


def wgrad_patches_reason(gemm: ImplicitGemm) -> str | None:
    """Why the kernel can't have the convolution, or None."""
    product = gemm.product
    if not product.a_transposed:
        return "it computes gradients of filters alone"
    if product.a.itemsize != 2:
        return f"its patches are of 16-bit floats, and the image is {product.a.dtype}"
    if len(gemm.axes) > _DIMENSIONS:
        return f"its patches have at most {_DIMENSIONS} dimensions, and the convolution {len(gemm.axes)}"
    if any(axis.stride > 1 for axis in gemm.axes):
        return "with a stride the windows of a tile's line do not begin at neighbouring places"
    if gemm.axes[0].result < _GROUP:
        return f"its tiles have {_GROUP} places of a line, and the output {gemm.axes[0].result}"
    if gemm.taps == 1:
        return "a window of one tap has no other that a patch could be loaded for"
    if product.reduced:
        return "a result is reduced, and its sum over places is split"
    for matrix, what in ((product.a, "the image"), (product.b[0], "the output")):
        if gemm.groups > 1 and (reason := tma_reason(matrix, what)):
            return reason
    return None


def knobs_reason(patches: WgradPatches, knobs: WgradKnobs, shared_memory_limit: int) -> str | None:
    """Why the knobs don't fit the convolution, or None."""
    gemm = patches.gemm
    x, y, _ = patches.dimensions
    if gemm.groups > 1 and gemm.group_columns % knobs.columns:
        return f"a block has {knobs.columns} columns; the {gemm.group_columns} of a group must be a multiple of them"
    if (multiplied := patches.multiplied(knobs)) not in TILE_WIDTHS:
        return f"a run has {multiplied} taps and channels; expected one of {TILE_WIDTHS}"
    if multiplied // 2 > (most := _MOST_ACCUMULATORS[knobs.consumers]):
        return f"a thread of {knobs.consumers} warp groups would hold {multiplied // 2} accumulators; most are {most}"
    if knobs.lines > 1 and (knobs.run != y.filter or knobs.height % (knobs.lines * y.step)):
        return (
            f"a tile has {knobs.height} lines, and a run {knobs.run} taps; with {knobs.lines} lines in a multiply "
            f"expected a multiple of {knobs.lines * y.step}, and the {y.filter} of the window"
        )
    if knobs.runs > patches.plane_runs(knobs) or (knobs.lines == 1 and knobs.run > x.filter):
        return f"{knobs.runs} runs of {knobs.run} taps are more than a plane of the window has"
    if knobs.width > x.result or knobs.height > y.result:
        return f"a tile is {knobs.width} x {knobs.height} places, of which an image has {x.result} x {y.result}"
    if max(*patches.sides(knobs), knobs.images) > _MOST_BOX:
        return f"a patch has more than the {_MOST_BOX} places, along a dimension, of TMA's boxes"
    if gemm.product.batch > 1 and patches.images % knobs.images:
        return f"images is {knobs.images}; the {patches.images} of each of several convolutions are no multiple of it"
    tiles = patches.tiles(knobs)
    if (knobs.split_k - 1) * ceil(tiles / knobs.split_k) >= tiles:
        return f"split_k is {knobs.split_k}; the last one would have none of {tiles} tiles of places"
    if (blocks := patches.blocks(knobs) * knobs.split_k) > _MOST_BLOCKS:
        return f"it would launch {blocks} thread blocks, and a grid has at most {_MOST_BLOCKS}"
    if (needed := patches.shared_memory(knobs)) > shared_memory_limit:
        return f"it would use {needed} bytes of shared memory, and a block has {shared_memory_limit}"
    return None
