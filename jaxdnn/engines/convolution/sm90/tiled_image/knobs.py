"""Which knobs of a product on Hopper's tensor cores fit the gradient of an image that windows tile."""

from jaxdnn.engines.convolution.tiled_image import TiledImage
from jaxdnn.engines.product.affine import affine_reason
from jaxdnn.engines.product.problem import arguments_reason
from jaxdnn.engines.product.sm90.knobs import Sm90Knobs
from jaxdnn.engines.product.sm90.knobs import knobs_reason as product_knobs_reason

_OTHER_ARGUMENTS = 19  # of a launch, at most, besides those of an epilogue's arrays and of dimensions
_DIMENSION_ARGUMENTS = 6


def tiled_image_reason(tiled: TiledImage) -> str | None:
    """Why the kernel can't have the gradient, or None."""
    product = tiled.product
    others = _OTHER_ARGUMENTS + _DIMENSION_ARGUMENTS * len(tiled.dimensions)
    extents = (product.batch, product.m, product.n)
    return arguments_reason(product.operands, product.results, others) or affine_reason(product.operands, extents)


def knobs_reason(tiled: TiledImage, knobs: Sm90Knobs, shared_memory_limit: int) -> str | None:
    """Why the knobs don't fit the gradient, or None."""
    if knobs.store != "rows" or knobs.split_k > 1:
        return "results lie apart; expected store = 'rows' and one split"
    return product_knobs_reason(tiled.product, knobs, shared_memory_limit, "rows")
