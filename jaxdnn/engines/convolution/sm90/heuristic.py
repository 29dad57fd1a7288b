"""Which knobs to try for a convolution on Hopper's tensor cores, best first: those of its product.

Numbers in brackets are those of the notes on sm90 in benchmarks/results/convolution_kernels.md.
"""

from collections.abc import Iterator

from jaxdnn.device import Target
from jaxdnn.engines.convolution.implicit_gemm import ImplicitGemm
from jaxdnn.engines.convolution.sm90.knobs import knobs_reason, staged
from jaxdnn.engines.product.sm90.heuristic import SHAPES
from jaxdnn.engines.product.sm90.heuristic import candidates as product_candidates
from jaxdnn.engines.product.sm90.knobs import Sm90Knobs

# Of few columns, which are those of a group, or all.
_NARROW = (
    Sm90Knobs(tile_m=128, tile_n=32, stages=8, cluster_m=1, schedule="pingpong"),
    Sm90Knobs(tile_m=256, tile_n=32, stages=6, cluster_m=1),
    Sm90Knobs(tile_m=64, tile_n=32, stages=8, cluster_m=1, schedule="pingpong"),
    Sm90Knobs(tile_m=128, tile_n=16, stages=8, cluster_m=1, schedule="pingpong"),
    Sm90Knobs(tile_m=256, tile_n=16, stages=6, cluster_m=1),
)


# Of those that are expected to take as long, blocks alone come first: what im2col loads is not there as steadily as a
# matrix, and blocks of a cluster wait for each other [1].
_SHAPES = sorted((*SHAPES, *_NARROW), key=lambda knobs: knobs.cluster_m)


def candidates(gemm: ImplicitGemm, target: Target) -> Iterator[Sm90Knobs]:
    """Knobs that work for the convolution, by the time that is expected of them."""
    for knobs in product_candidates(gemm.tiled, target, staged=staged(gemm), shapes=_SHAPES):
        if knobs_reason(gemm, knobs, target.shared_memory) is None:
            yield knobs
