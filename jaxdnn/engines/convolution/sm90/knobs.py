"""Which knobs of a product on Hopper's tensor cores fit a convolution, and what TMA's im2col mode asks of its image."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from jaxdnn.engines.base import check_least
from jaxdnn.engines.convolution.axis import Axis
from jaxdnn.engines.convolution.implicit_gemm import STEP_BYTES, ImplicitGemm
from jaxdnn.engines.product.operands import transposes
from jaxdnn.engines.product.problem import Product, arguments_reason
from jaxdnn.engines.product.sm90.knobs import Sm90Knobs, depth
from jaxdnn.engines.product.sm90.knobs import knobs_reason as product_knobs_reason
from jaxdnn.engines.product.tma import DEPTH_BYTES

# Of the driver, by how many dimensions of places there are: corners lie in [-limit, limit), and a tap's distance from
# where its window begins is less than its own.
_CORNER_LIMITS = {1: 2**15, 2: 2**7, 3: 2**4}
_REACH_LIMITS = {1: 2**16, 2: 2**8, 3: 2**5}
_MOST_STRIDE = 8
_OTHER_ARGUMENTS = 17  # of a launch, at most, besides those of an epilogue's arrays and of axes
_AXIS_ARGUMENTS = 9  # besides three a phase


@dataclass(frozen=True)
class ConvolutionKnobs(Sm90Knobs):
    """A product's knobs, and how the image is loaded.

    Attributes:
      patch: bytes of channels that patches of the image have, which are loaded once for all taps of a window; 0: places
        are loaded by im2col, once for each tap.
      filter_stages: with patches, tiles of the filter, of a tap each, that are in flight; or all that there are.
      resident: whether these stay in shared memory.
      along_lines: with patches, whether a tile's rows are places line after line, and not blocks of 8 x 8.
    """

    patch: int = 0
    filter_stages: int = 1
    resident: bool = False
    along_lines: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, 0, "patch")
        check_least(self, 1, "filter_stages")

    @property
    def constants(self) -> dict[str, int]:
        own = ("Patch", "FilterStages", "Resident", "AlongLines")  # of a kernel of its own
        return {name: value for name, value in super().constants.items() if name not in own}


def image_reason(gemm: ImplicitGemm) -> str | None:
    """Why TMA can't read the image place by place, or None."""
    spatial = len(gemm.axes)
    if spatial not in _CORNER_LIMITS:
        return f"it has {spatial} spatial dimensions, and TMA's im2col mode 1, 2 or 3"
    corner, reach = _CORNER_LIMITS[spatial], _REACH_LIMITS[spatial]
    for axis in gemm.axes:
        if axis.stride > _MOST_STRIDE:
            return f"a stride is {axis.stride}, and TMA's im2col mode has at most {_MOST_STRIDE}"
        if not all(-corner <= one < corner for one in axis.corners):
            low, high = axis.corners
            return (
                f"windows begin {low} from the image's first place and {high} from its last one, and TMA's im2col mode "
                f"has -{corner} to {corner - 1} with {spatial} spatial dimensions"
            )
        if axis.reach >= reach:
            return (
                f"a window reaches {axis.reach} places far, and TMA's im2col mode {reach - 1} with {spatial} spatial "
                "dimensions"
            )
    return None


def operands_reason(gemm: ImplicitGemm) -> str | None:
    """Why the operands can't be loaded, nor copied first, or None."""
    product = gemm.product
    if product.a_transposed and transposes(product, "a"):
        return f"tensor cores want {product.a.dtype} to lie along the places that are summed over, not along channels"
    if gemm.channels * product.a.itemsize < 16:
        return f"the image has {gemm.channels} channels in a group, which are less than 16 bytes"
    if gemm.crossed and product.k <= depth(product):
        return f"it sums over {product.k} places, which are too few to be split"
    # What the last of several lines has of the next group is not multiplied.
    whole = STEP_BYTES if gemm.line == DEPTH_BYTES else gemm.line
    if gemm.groups > 1 and not product.a_transposed and gemm.channels * product.a.itemsize % whole:
        return f"a group has {gemm.channels} channels, which are no multiple of {whole} bytes"
    if not product.a_transposed and transposes(product, "b"):
        if gemm.groups > 1 or gemm.merged > 1:
            return f"a filter of {product.a.dtype} would have to be transposed in each group"
        if product.batch > 1 and product.b[0].batch_stride:
            return f"several filters of {product.a.dtype} would have to be transposed"
        if gemm.channels * product.a.itemsize % 16:
            return f"the image has {gemm.channels} channels, and TMA needs a multiple of 16 bytes"
    return launch_reason(product, gemm.axes)


def launch_reason(product: Product, axes: Sequence[Axis]) -> str | None:
    """Why a launch has no room for all arguments, or None."""
    others = _OTHER_ARGUMENTS + sum(_AXIS_ARGUMENTS + 3 * len(axis.phases) for axis in axes)
    return arguments_reason(product.operands, product.results, others)


def knobs_reason(gemm: ImplicitGemm, knobs: Sm90Knobs, shared_memory_limit: int) -> str | None:
    """Why the knobs don't fit the convolution, or None."""
    if knobs.swapped and (reason := swap_reason(gemm)):
        return f"swapped is True; {reason}"
    if knobs.swapped and knobs.cluster_m * knobs.cluster_n > 1:
        return "swapped is True; expected blocks alone, since what they would share are the places of rows"
    columns = knobs.tile_n * knobs.cluster_n  # that read the same channels of the image
    if gemm.groups > 1 and gemm.group_columns % columns:
        return f"a cluster has {columns} columns; the {gemm.group_columns} of a group must be a multiple of them"
    groups = 1 if gemm.crossed else gemm.merged
    if groups > 1 and knobs.tile_n != gemm.group_columns:
        return f"tile_n is {knobs.tile_n}; expected {gemm.group_columns}, the columns of merged groups"
    if gemm.crossed and knobs.split_k == 1:
        return "split_k is 1; what groups have of each other is left out where splits are added"
    lines = gemm.line // gemm.product.a.itemsize
    if not gemm.product.a_transposed and not gemm.product.b_transposed and lines % (8 * knobs.cluster_m):
        return f"cluster_m is {knobs.cluster_m}; its blocks can't share {lines} channels in groups of 8"
    stages = gemm.product.k // depth(gemm.product)
    if gemm.product.a_transposed and gemm.image_batch and stages % knobs.split_k:
        return f"split_k is {knobs.split_k}; the last of {stages} stages would be followed by other images' places"
    if gemm.filter_rows is not None and knobs.split_k > 1:
        return f"split_k is {knobs.split_k}; each line of a block is another result, which has not all rows"
    if gemm.phases > 1 and (knobs.schedule == "pingpong" or knobs.split_k > 1):
        return "phases of the stride have K of several lengths; expected a cooperative schedule, and one split"
    return product_knobs_reason(gemm.product, knobs, shared_memory_limit, staged(gemm), groups=groups)


def swap_reason(gemm: ImplicitGemm) -> str | None:
    """Why places can't be columns of tiles, besides what keeps a product from it, or None."""
    if gemm.product.a_transposed:
        return "those of a filter's gradient are summed over"
    if gemm.groups > 1 or gemm.merged > 1 or gemm.line < DEPTH_BYTES:
        return "its channels are those of groups, or less than a line"
    if not gemm.straight:
        return "they are not those of the result, one after the other"
    return None


def staged(gemm: ImplicitGemm) -> Literal["tma", "rows"]:
    """How results leave that pass through shared memory."""
    return "tma" if gemm.straight else "rows"
