"""Which knobs of a product on Hopper's tensor cores fit a convolution of an image with few channels."""

from math import ceil

from jaxdnn.engines.convolution.sm90.knobs import launch_reason
from jaxdnn.engines.convolution.window_lines import SEGMENT, WindowLines
from jaxdnn.engines.product.problem import Product
from jaxdnn.engines.product.sm90.knobs import REGISTER_WIDTHS, Sm90Knobs, loaded_columns
from jaxdnn.engines.product.sm90.knobs import knobs_reason as product_knobs_reason
from jaxdnn.engines.product.tma import stage_bytes

_MOST_BOX = 256  # elements of a box's dimension
_MOST_STEPS = 16  # of an output's K, of which all are in registers at once
_MOST_ROWS = 256  # of a filter's tile, whose accumulators leave room for what they are multiplied by
_MOST_PLACES = 2**31 - 1024


def lines_reason(lines: WindowLines) -> str | None:
    """Why the kernel can't have the convolution, or None."""
    if lines.pitch > _MOST_BOX:
        return (
            f"the windows of {SEGMENT} places cover {lines.pitch} elements of a line of the image, and TMA loads "
            f"{_MOST_BOX} at once"
        )
    if any(axis.filter > _MOST_BOX for axis in lines.axes):
        return f"a window has more than the {_MOST_BOX} lines that TMA loads at once"
    if lines.to_filter and lines.rows > _MOST_ROWS:
        return f"a window has {lines.rows} elements, with what fills up its lines; expected at most {_MOST_ROWS}"
    if not lines.to_filter and lines.depth > 16 * _MOST_STEPS:
        return f"a window has {lines.depth} elements, with what fills up its lines; expected at most {16 * _MOST_STEPS}"
    if lines.places >= _MOST_PLACES:
        return "there are more places than its 32-bit index counts"
    return launch_reason(lines.product, lines.axes)


def stage(lines: WindowLines, product: Product, knobs: Sm90Knobs) -> int:
    """Bytes of a stage, up to where the next one begins."""
    depth = lines.depth if lines.to_filter else lines.filter_lines * lines.padded
    segments = lines.depth // SEGMENT if lines.to_filter else knobs.tile_m // SEGMENT
    size = loaded_columns(product, knobs) * depth * product.a.itemsize + segments * lines.segment_bytes
    return stage_bytes(size)


def knobs_reason(lines: WindowLines, knobs: Sm90Knobs, shared_memory_limit: int) -> str | None:
    """Why the knobs don't fit the convolution, or None."""
    product = lines.product
    if knobs.schedule == "pingpong" or knobs.cluster_m * knobs.cluster_n > 1:
        return "its blocks load alone, and its warp groups share tiles; expected a cooperative schedule and no cluster"
    if knobs.tile_n not in REGISTER_WIDTHS:
        return f"tile_n is {knobs.tile_n}; expected one of {REGISTER_WIDTHS}"
    if lines.to_filter and knobs.tile_m < lines.rows:
        return f"tile_m is {knobs.tile_m}; expected all of a filter's {lines.rows} rows"
    if knobs.split_k > ceil(product.k / lines.depth):
        return f"split_k is {knobs.split_k}; k has {ceil(product.k / lines.depth)} parts"
    staged = "tma" if lines.straight else "rows"
    return product_knobs_reason(product, knobs, shared_memory_limit, staged, stage(lines, product, knobs))
