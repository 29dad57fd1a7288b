"""Which knobs to try for the gradient of an image that windows tile, best first."""

from collections.abc import Iterator
from math import ceil

from jaxdnn.device import Target
from jaxdnn.engines.convolution.sm90.tiled_image.knobs import knobs_reason
from jaxdnn.engines.convolution.tiled_image import TiledImage
from jaxdnn.engines.product.sm90.heuristic import candidates as product_candidates
from jaxdnn.engines.product.sm90.knobs import Sm90Knobs
from jaxdnn.engines.product.sm90_shapes import SHAPES

# Of few columns, large tiles: of 48, 256 rows took 43 us and two turns of 128 took 48. Of those that are expected to
# take as long, blocks alone come first, which took 3 to 5 % less; notes on tiled images in
# benchmarks/results/convolution_kernels.md.
_NARROW = tuple(Sm90Knobs(tile_m=256, tile_n=width, stages=5, cluster_m=1) for width in (32, 48))
_SHAPES = sorted((*SHAPES, *_NARROW), key=lambda knobs: knobs.cluster_m)


def candidates(tiled: TiledImage, target: Target) -> Iterator[Sm90Knobs]:
    """Knobs that work for the gradient: those of fewest columns past the last one first, and of these by the time that
    is expected of the product.
    """
    columns = tiled.product.n
    found = product_candidates(tiled.product, target, staged="rows", shapes=_SHAPES, splits=lambda *_: [1])
    fitting = (knobs for knobs in found if knobs_reason(tiled, knobs, target.shared_memory) is None)
    return iter(sorted(fitting, key=lambda knobs: ceil(columns / knobs.tile_n) * knobs.tile_n))
