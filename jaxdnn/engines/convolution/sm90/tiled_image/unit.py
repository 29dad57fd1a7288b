"""The unit and the launches of the gradient of an image that windows tile, on Hopper: a product's, but for where its
results lie.

The kernel is cpp/kernels/convolution/sm90_tiled_image.cuh.
"""

from collections.abc import Mapping

from jaxdnn.engines.convolution.tiled_image import TiledImage
from jaxdnn.engines.product.affine import divisor_magic
from jaxdnn.engines.product.problem import Product
from jaxdnn.engines.product.sm90.knobs import Sm90Knobs
from jaxdnn.engines.product.sm90.unit import Unit
from jaxdnn.engines.unit import Constant, Parameter, numbers
from jaxdnn.plan import Scalar


class TiledImageUnit(Unit):
    """The text, the launches and the scratch buffers of one gradient."""

    kernel = "convolution_sm90_tiled_image"
    call = "ConvolutionSm90TiledImage"
    brief_batches = False  # of groups, of which they were not timed

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
