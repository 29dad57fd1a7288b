"""Which convolutions the kernel of patches can have, and with which knobs (cpp/kernels/convolution/sm90_halo.cuh)."""

from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, gcd, prod

from jaxdnn.engines.convolution.axis import Axis, Phase
from jaxdnn.engines.convolution.implicit_gemm import ImplicitGemm
from jaxdnn.engines.convolution.sm90.knobs import ConvolutionKnobs, launch_reason
from jaxdnn.engines.product.operands import packed
from jaxdnn.engines.product.problem import Product
from jaxdnn.engines.product.sm90.knobs import WARP_ROWS, loaded_columns, shared_memory
from jaxdnn.engines.product.sm90.knobs import knobs_reason as product_knobs_reason
from jaxdnn.engines.product.tiles import operand_matrix, tile_operands
from jaxdnn.engines.product.tma import DEPTH_BYTES, STEPS, stage_bytes

_DIMENSIONS = 3  # of places, those of the kernel
BLOCK_ROWS = 64  # places of a block
_SIDE = 8  # of its sides, where it has two; and of what a line has a multiple of
LINES: tuple[int, ...] = (128, 64, 32)  # bytes of channels in a stage
_MOST_BOX = 256  # places of a patch's side, and taps of a plane
_MOST_LINES = 32  # of a patch: each is loaded by a lane
_MOST_ROWS = 2**31 - 1024
_BOX_ALIGNMENT = 128  # of a patch
_BARRIERS = 16  # bytes of a stage's
_FLAT = Axis(image=1, filter=1, result=1, stride=1, step=1, filter_step=1, phases=(Phase(1, 0, 0),))


@dataclass(frozen=True)
class Patches:
    """A convolution of stride 1, as one of three dimensions, by blocks of its places, or along its lines.

    Attributes:
      gemm: the convolution.
      line: bytes of channels in a stage.
      along_lines: whether places come line after line, with those between two that both read as zeros.
    """

    gemm: ImplicitGemm
    line: int = LINES[0]
    along_lines: bool = False

    @classmethod
    def of(cls, gemm: ImplicitGemm, knobs: ConvolutionKnobs) -> "Patches":
        return cls(gemm, knobs.patch, knobs.along_lines)

    @cached_property
    def axes(self) -> tuple[Axis, ...]:
        """Of blocks, or of places, the innermost first."""
        width, height, depth = self._window
        if self.along_lines:
            plane = (replace(axis, segment=pitch) for axis, pitch in zip((width, height), self._pitches, strict=True))
        else:
            plane = (replace(axis, block=side) for axis, side in zip((width, height), self.block, strict=True))
        return *plane, depth

    @property
    def _window(self) -> tuple[Axis, ...]:
        return (*self.gemm.axes, _FLAT, _FLAT)[:_DIMENSIONS]

    @property
    def block(self) -> tuple[int, int]:
        """Places of a block, along its lines and across: a square of them, or in one dimension a part of a line."""
        return (BLOCK_ROWS, 1) if len(self.gemm.axes) == 1 else (_SIDE, _SIDE)

    @property
    def pitch(self) -> int:
        """Places from one line to the next, of which the last ones are none of the result's: as many as whole boxes of
        results have.
        """
        return self._pitches[0]

    @property
    def box(self) -> tuple[int, int]:
        """Of a result's places, along its lines and across: a part of a line, or a warp's rows of a block."""
        if self.along_lines:
            return (_SIDE if self.pitch % WARP_ROWS else WARP_ROWS), 1
        width = min(WARP_ROWS, self.block[0])
        return width, WARP_ROWS // width

    @property
    def _pitches(self) -> tuple[int, int]:
        width, height, _ = map(_pitch, self._window)
        return _multiple(width, _SIDE), height

    @property
    def images(self) -> int:
        """Of a convolution."""
        return self.gemm.product.m // prod(axis.result for axis in self.axes)

    @property
    def rows(self) -> int:
        """That tiles are cut from."""
        return self.images * prod(axis.places for axis in self.axes) * (1 if self.along_lines else BLOCK_ROWS)

    @property
    def plane_taps(self) -> int:
        width, height, _ = self._window
        return width.filter * height.filter

    @property
    def depth(self) -> int:
        """Elements of K in a stage."""
        return self.plane_taps * self.line // self.gemm.product.a.itemsize

    @property
    def stages(self) -> int:
        """Of K."""
        return ceil(self.gemm.channels * self.gemm.product.a.itemsize / self.line) * self.axes[2].filter

    @property
    def taps(self) -> int:
        """Of all stages, each of which has a tile of the filter."""
        return self.stages * self.plane_taps

    @property
    def sides(self) -> tuple[int, int]:
        """Places of a box that is loaded at once, along its lines and across: a block's patch, or a line."""
        if self.along_lines:
            return self.pitch, 1
        width, height = (side + _reach(axis) for axis, side in zip(self._window, self.block, strict=False))
        return _multiple(width, _BOX_ALIGNMENT // self.line), height

    def ahead(self, tile_m: int) -> int:
        """Places of a line that are ahead of where a tile along lines begins, at most."""
        return self.pitch - gcd(self.pitch, tile_m)

    def lines(self, tile_m: int) -> int:
        """Of the patch of a tile along lines, wherever in a line it begins."""
        width, height, _ = map(_reach, self._window)
        return ceil((self.ahead(tile_m) + tile_m + width) / self.pitch) + height

    def tap_bytes(self, product: Product, knobs: ConvolutionKnobs) -> int:
        """Of a tile of the filter."""
        return loaded_columns(product, knobs) * self.line // knobs.groups

    def tap_lines(self, product: Product, knobs: ConvolutionKnobs) -> int:
        """Lines of a tile of the filter."""
        return self.tap_bytes(product, knobs) // (self.line if product.b_transposed else DEPTH_BYTES)

    def filter_stage(self, product: Product, knobs: ConvolutionKnobs) -> int:
        """Bytes of a tile of the filter in its ring, with its barriers."""
        return stage_bytes(self.tap_bytes(product, knobs)) + _BARRIERS

    def loaded(self, tile_m: int) -> int:
        """Bytes that a stage is filled with, the patches of a tile's blocks, or the tile's lines."""
        boxes = self.lines(tile_m) if self.along_lines else tile_m // BLOCK_ROWS
        return boxes * prod(self.sides) * self.line

    def stage(self, tile_m: int) -> int:
        """Bytes of a stage. A tile along lines always begins at the same one, wherever in a line that is."""
        return self.loaded(tile_m) + (self.ahead(tile_m) * self.line if self.along_lines else 0)

    def shared_memory(self, product: Product, knobs: ConvolutionKnobs) -> int:
        """Bytes, as the kernel's own `kSharedBytes` says."""
        size = shared_memory(product, knobs, stage_bytes(self.stage(knobs.tile_m)))
        return stage_bytes(size) + knobs.filter_stages * self.filter_stage(product, knobs)


def _reach(axis: Axis) -> int:
    """How far the last tap of a window is from the first one."""
    return (axis.filter - 1) * axis.step


def _pitch(axis: Axis) -> int:
    """Places from where a line begins, with what windows meet before its first place, to where the next one does. What
    both meet outside of the image, one past its end and the other before its beginning, is there once.
    """
    before = -axis.start
    after = axis.start + axis.result + _reach(axis) - axis.image
    return axis.result + _reach(axis) - max(0, min(before, after, _reach(axis)))


def _multiple(size: int, of: int) -> int:
    return ceil(size / of) * of


def columns_of_tiles(product: Product, knobs: ConvolutionKnobs) -> int:
    """How many tiles lie side by side."""
    return ceil(product.n / knobs.tile_n)


def patches_reason(gemm: ImplicitGemm) -> str | None:
    """Why the kernel can't have the convolution, or None."""
    product = gemm.product
    if product.a_transposed:
        return "a filter's gradient sums over the places that patches have"
    if product.a.itemsize != 2:
        return f"its patches are of 16-bit floats, and the image is {product.a.dtype}"
    if gemm.filter_rows is not None:
        return "each column of a block of an image's places has rows of the filter of its own"
    if gemm.merged > STEPS:
        return f"a group has {gemm.channels // gemm.merged} channels, which are less than a multiply's"
    if gemm.groups > 1 and gemm.channels * product.a.itemsize % LINES[-1]:
        return f"a group has {gemm.channels} channels, which are no multiple of {LINES[-1]} bytes"
    if not 1 <= len(gemm.axes) <= _DIMENSIONS:
        return f"its places have 1 to {_DIMENSIONS} dimensions, and the convolution's {len(gemm.axes)}"
    if gemm.phases > 1 or any(axis.stride > 1 for axis in gemm.axes):
        return "with a stride the windows of a block's line do not begin at neighbouring places"
    if any(axis.phases[0].taps != axis.filter for axis in gemm.axes):
        return "windows meet some of the filter's taps, and not all, in a dilated image"
    patches = Patches(gemm)
    if patches.rows >= _MOST_ROWS:
        return "its blocks have more places than its 32-bit index counts"
    if max(*patches.sides, patches.plane_taps) > _MOST_BOX:
        return f"a patch is larger than the {_MOST_BOX} places of TMA's boxes"
    return launch_reason(product, patches.axes)


def _lines_reason(patches: Patches, tile_m: int) -> str | None:
    """Why a tile can't go along lines, or None."""
    if patches.rows >= _MOST_ROWS or patches.pitch > _MOST_BOX:
        return f"along_lines is True; lines are {patches.pitch} places apart, and TMA's boxes have {_MOST_BOX}"
    if patches.lines(tile_m) > _MOST_LINES:
        return f"along_lines is True; a tile has {patches.lines(tile_m)} lines, of which a warp loads {_MOST_LINES}"
    return None


def fetch_reason(patches: Patches) -> str | None:
    """Why TMA can't load the epilogue's operands by blocks of places, or None."""
    product = patches.gemm.product
    matrices = (operand_matrix(product.operands[number], product) for number in tile_operands(product))
    if any(matrix.batch_stride not in (0, product.m * matrix.row_stride) for matrix in matrices):
        return "the operands of a batch are not one after the other; expected fetch = 'direct'"
    return None


def knobs_reason(patches: Patches, knobs: ConvolutionKnobs, shared_memory_limit: int) -> str | None:
    """Why the knobs don't fit the convolution, or None."""
    product = patches.gemm.product
    if knobs.patch not in LINES:
        return f"patch is {knobs.patch}; expected one of {LINES}"
    if knobs.cluster_m * knobs.cluster_n > 1 or knobs.split_k > 1:
        return "its blocks work alone, on all of K; expected no cluster, and one split"
    if knobs.schedule == "pingpong" and not knobs.resident:
        return "warp groups that take turns have tiles of their own, and a filter that passes by is for all"
    gemm, taps = patches.gemm, patches.taps
    if patches.along_lines and (reason := _lines_reason(patches, knobs.tile_m)):
        return reason
    if gemm.groups > 1 and gemm.group_columns % knobs.tile_n:
        return f"tile_n is {knobs.tile_n}; the {gemm.group_columns} columns of a group must be a multiple of it"
    if gemm.groups > 1 and gemm.channels * product.a.itemsize % knobs.patch:
        return f"patch is {knobs.patch}; the {gemm.channels} channels of a group are no multiple of it"
    if gemm.merged > 1 and (knobs.tile_n != gemm.group_columns or knobs.patch != gemm.line):
        return f"expected tiles of {gemm.group_columns} columns and patches of {gemm.line}, those of merged groups"
    if knobs.resident and knobs.filter_stages != taps:
        return f"filter_stages is {knobs.filter_stages}; expected {taps}, all that stay"
    if knobs.resident and product.b[0].batch_stride:
        return "there are more filters than stay in shared memory"
    if knobs.resident and knobs.swizzle > 1 and product.n > knobs.tile_n:
        return "a block's tiles have filters of their own; expected swizzle = 1, by which they are of one column"
    if knobs.store == "tma" and any(
        result.batch_stride not in (0, product.m * result.row_stride) for result in product.stored
    ):
        return "the results of a batch are not one after the other; expected store = 'direct'"
    if knobs.fetch == "tma" and (reason := fetch_reason(patches)):
        return reason
    loaded, _ = packed(product)
    if (needed := patches.shared_memory(loaded, knobs)) > shared_memory_limit:
        return f"it would use {needed} bytes of shared memory, and a block has {shared_memory_limit}"
    stage = patches.stage(knobs.tile_m)
    return product_knobs_reason(product, knobs, shared_memory_limit, "tma", stage, gemm.merged)
