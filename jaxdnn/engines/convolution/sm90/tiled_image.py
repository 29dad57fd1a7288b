"""The gradient of an image that windows tile, on Hopper: a product's knobs and kernel, but for where results lie.

The kernel is cpp/kernels/convolution/sm90_tiled_image.cuh.
"""

from collections.abc import Iterator, Mapping

from jaxdnn.device import Target
from jaxdnn.engines.convolution.tiled_image import TiledImage
from jaxdnn.engines.product.affine import affine_reason, divisor_magic
from jaxdnn.engines.product.problem import Product, arguments_reason
from jaxdnn.engines.product.sm90.heuristic import SHAPES
from jaxdnn.engines.product.sm90.heuristic import candidates as product_candidates
from jaxdnn.engines.product.sm90.knobs import Sm90Knobs
from jaxdnn.engines.product.sm90.knobs import knobs_reason as product_knobs_reason
from jaxdnn.engines.product.sm90.unit import Unit
from jaxdnn.engines.unit import Constant, Parameter, numbers
from jaxdnn.plan import Scalar

_OTHER_ARGUMENTS = 19  # of a launch, at most, besides those of an epilogue's arrays and of dimensions
_DIMENSION_ARGUMENTS = 6
_NARROW = (
    Sm90Knobs(tile_m=128, tile_n=48, stages=8, cluster_m=1, schedule="pingpong"),
    Sm90Knobs(tile_m=256, tile_n=48, stages=5, cluster_m=1),
)


def tiled_image_reason(tiled: TiledImage) -> str | None:
    """Why the kernel can't have the gradient, or None."""
    product = tiled.product
    others = _OTHER_ARGUMENTS + _DIMENSION_ARGUMENTS * len(tiled.dimensions)
    extents = (product.batch, product.m, product.n)
    return arguments_reason(product.operands, product.results, others) or affine_reason(product.operands, extents)


def candidates(tiled: TiledImage, target: Target) -> Iterator[Sm90Knobs]:
    """Knobs that work for the gradient, by the time that is expected of the product."""
    shapes = (*SHAPES, *_NARROW)
    found = product_candidates(tiled.product, target, staged="rows", shapes=shapes, splits=lambda *_: [1])
    return (knobs for knobs in found if knobs_reason(tiled, knobs, target.shared_memory) is None)


def knobs_reason(tiled: TiledImage, knobs: Sm90Knobs, shared_memory_limit: int) -> str | None:
    """Why the knobs don't fit the gradient, or None."""
    if knobs.store != "rows" or knobs.split_k > 1:
        return "results lie apart; expected store = 'rows' and one split"
    return product_knobs_reason(tiled.product, knobs, shared_memory_limit, "rows")


class TiledImageUnit(Unit):
    """The text, the launches and the scratch buffers of one gradient."""

    kernel = "convolution_sm90_tiled_image"
    call = "ConvolutionSm90TiledImage"

    def __init__(self, tiled: TiledImage, knobs: Sm90Knobs, sm_count: int) -> None:
        self.tiled = tiled
        super().__init__(tiled.product, knobs, sm_count)

    def load_constants(self, product: Product) -> dict[str, Constant]:
        own = {"Dimensions": len(self.tiled.dimensions), "PieceBytes": self.tiled.piece}
        return {**super().load_constants(product), **own}

    def load_parameters(self, product: Product) -> list[Parameter]:
        tiled, found = self.tiled, super().load_parameters(product)
        for i, dimension in enumerate(tiled.dimensions):
            counts = {"window": dimension.windows, "tap": dimension.taps}
            steps = {"window": dimension.window_step, "tap": dimension.tap_step}
            found += _parameters(
                i, "{}s.magic", {name: divisor_magic(count) for name, count in counts.items()}, "long long"
            )
            found += _parameters(i, "{}_count", counts) + _parameters(i, "{}_step", steps)
        found += numbers(run=tiled.run)
        found += numbers("long long", first=tiled.first, image_step=tiled.image_step)
        magic = Scalar("int64", divisor_magic(tiled.run))
        return [*found, Parameter("long long", "run_divisor", "run_divisor.magic", magic)]


def _parameters(number: int, field: str, values: Mapping[str, int], ctype: str = "int") -> list[Parameter]:
    """Members of a `TiledDimension`."""
    dtype = "int64" if ctype == "long long" else "int32"
    return [
        Parameter(ctype, f"dimension{number}_{field.format(name).partition('.')[0]}",
                  f"dimensions[{number}].{field.format(name)}", Scalar(dtype, value))
        for name, value in values.items()
    ]  # fmt: skip
