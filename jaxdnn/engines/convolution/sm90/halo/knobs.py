"""Which convolutions the kernel of patches can have, and with which knobs (cpp/kernels/convolution/sm90_halo.cuh)."""

from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, prod

from jaxdnn.engines.convolution.axis import Axis, Phase
from jaxdnn.engines.convolution.implicit_gemm import ImplicitGemm
from jaxdnn.engines.convolution.sm90.knobs import ConvolutionKnobs, launch_reason
from jaxdnn.engines.product.operands import packed
from jaxdnn.engines.product.problem import Product
from jaxdnn.engines.product.sm90.knobs import knobs_reason as product_knobs_reason
from jaxdnn.engines.product.sm90.knobs import loaded_columns, shared_memory
from jaxdnn.engines.product.tiles import operand_matrix, tile_operands
from jaxdnn.engines.product.tma import DEPTH_BYTES, STEPS, stage_bytes

BLOCK = 8  # places of a block's side
BLOCK_ROWS = BLOCK * BLOCK
LINES: tuple[int, ...] = (128, 64, 32)  # bytes of channels in a stage
_DIMENSIONS = (2, 3)  # of places
_MOST_BOX = 256  # places of a patch's side, and taps of a plane
_MOST_ROWS = 2**31 - 1024
_BOX_ALIGNMENT = 128  # of a patch
_BARRIERS = 16  # bytes of a stage's
_FLAT = Axis(image=1, filter=1, result=1, stride=1, step=1, filter_step=1, phases=(Phase(1, 0, 0),))


@dataclass(frozen=True)
class Patches:
    """A convolution of stride 1 by blocks of its places, in three dimensions."""

    gemm: ImplicitGemm

    @cached_property
    def axes(self) -> tuple[Axis, ...]:
        """Of blocks, the innermost first."""
        width, height, *depth = self.gemm.axes
        return replace(width, block=BLOCK), replace(height, block=BLOCK), *(depth or [_FLAT])

    @property
    def images(self) -> int:
        """Of a convolution."""
        return self.gemm.product.m // prod(axis.result for axis in self.axes)

    @property
    def rows(self) -> int:
        """That tiles are cut from."""
        return self.images * prod(axis.places for axis in self.axes) * BLOCK_ROWS

    @property
    def plane_taps(self) -> int:
        return self.axes[0].filter * self.axes[1].filter

    def depth(self, line: int) -> int:
        """Elements of K in a stage."""
        return self.plane_taps * line // self.gemm.product.a.itemsize

    def stages(self, line: int) -> int:
        """Of K."""
        return ceil(self.gemm.channels * self.gemm.product.a.itemsize / line) * self.axes[2].filter

    def taps(self, line: int) -> int:
        """Of all stages, each of which has a tile of the filter."""
        return self.stages(line) * self.plane_taps

    def sides(self, line: int) -> tuple[int, int]:
        """Places of a patch, along its lines and across."""
        width, height = (BLOCK + (axis.filter - 1) * axis.step for axis in self.axes[:2])
        even = _BOX_ALIGNMENT // line
        return ceil(width / even) * even, height

    def tap_bytes(self, product: Product, knobs: ConvolutionKnobs) -> int:
        """Of a tile of the filter."""
        return loaded_columns(product, knobs) * knobs.patch // knobs.groups

    def tap_lines(self, product: Product, knobs: ConvolutionKnobs) -> int:
        """Lines of a tile of the filter."""
        return self.tap_bytes(product, knobs) // (knobs.patch if product.b_transposed else DEPTH_BYTES)

    def filter_stage(self, product: Product, knobs: ConvolutionKnobs) -> int:
        """Bytes of a tile of the filter in its ring, with its barriers."""
        return _aligned(self.tap_bytes(product, knobs)) + _BARRIERS

    def stage(self, knobs: ConvolutionKnobs) -> int:
        """Bytes of a stage, the patches of a tile's blocks."""
        return knobs.tile_m // BLOCK_ROWS * prod(self.sides(knobs.patch)) * knobs.patch

    def shared_memory(self, product: Product, knobs: ConvolutionKnobs) -> int:
        """Bytes, as the kernel's own `kSharedBytes` says."""
        size = shared_memory(product, knobs, _aligned(self.stage(knobs)))
        return _aligned(size) + knobs.filter_stages * self.filter_stage(product, knobs)


def columns_of_tiles(product: Product, knobs: ConvolutionKnobs) -> int:
    """How many tiles lie side by side."""
    return ceil(product.n / knobs.tile_n)


def _aligned(size: int) -> int:
    return stage_bytes(size)


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
    if len(gemm.axes) not in _DIMENSIONS:
        return f"its blocks have two dimensions of places, and the convolution {len(gemm.axes)}"
    if gemm.phases > 1 or any(axis.stride > 1 for axis in gemm.axes):
        return "with a stride the windows of a block's line do not begin at neighbouring places"
    if any(axis.phases[0].taps != axis.filter for axis in gemm.axes):
        return "windows meet some of the filter's taps, and not all, in a dilated image"
    patches = Patches(gemm)
    if patches.rows >= _MOST_ROWS:
        return "its blocks have more places than its 32-bit index counts"
    if max(*patches.sides(LINES[0]), patches.plane_taps) > _MOST_BOX:
        return f"a patch is larger than the {_MOST_BOX} places of TMA's boxes"
    return launch_reason(product, patches.axes)


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
    gemm, taps = patches.gemm, patches.taps(knobs.patch)
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
    return product_knobs_reason(product, knobs, shared_memory_limit, "tma", patches.stage(knobs), gemm.merged)
