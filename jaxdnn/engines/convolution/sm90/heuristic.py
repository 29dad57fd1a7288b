"""Which knobs to try for a convolution on Hopper's tensor cores, best first: those of its product.

Numbers in brackets are those of the notes on sm90 in benchmarks/results/convolution_kernels.md.
"""

from collections.abc import Iterator
from dataclasses import replace

from jaxdnn.device import Target
from jaxdnn.engines.convolution.implicit_gemm import ImplicitGemm
from jaxdnn.engines.convolution.sm90.halo.heuristic import candidates as patch_candidates
from jaxdnn.engines.convolution.sm90.halo.heuristic import seconds as patch_seconds
from jaxdnn.engines.convolution.sm90.halo.knobs import patches_reason
from jaxdnn.engines.convolution.sm90.halo_wgrad.heuristic import candidates as wgrad_candidates
from jaxdnn.engines.convolution.sm90.halo_wgrad.knobs import WgradKnobs, wgrad_patches_reason
from jaxdnn.engines.convolution.sm90.knobs import ConvolutionKnobs, knobs_reason, staged, swap_reason
from jaxdnn.engines.product.operands import swap_reason as product_swap_reason
from jaxdnn.engines.product.operands import swapped
from jaxdnn.engines.product.problem import Product
from jaxdnn.engines.product.sm90.heuristic import candidates as product_candidates
from jaxdnn.engines.product.sm90.heuristic import fitted, splits
from jaxdnn.engines.product.sm90.knobs import Sm90Knobs, depth
from jaxdnn.engines.product.sm90_grid import cluster_tiles
from jaxdnn.engines.product.sm90_model import seconds
from jaxdnn.engines.product.sm90_shapes import SHAPES
from jaxdnn.engines.product.tma import DEPTH_BYTES

# Of few columns, which are those of a group, or all.
_NARROW = (
    Sm90Knobs(tile_m=192, tile_n=48, stages=6, cluster_m=1, consumers=3),
    Sm90Knobs(tile_m=128, tile_n=48, stages=8, cluster_m=1, schedule="pingpong"),
    Sm90Knobs(tile_m=128, tile_n=32, stages=8, cluster_m=1, schedule="pingpong"),
    Sm90Knobs(tile_m=256, tile_n=32, stages=6, cluster_m=1),
    Sm90Knobs(tile_m=64, tile_n=32, stages=8, cluster_m=1, schedule="pingpong"),
    Sm90Knobs(tile_m=128, tile_n=16, stages=8, cluster_m=1, schedule="pingpong"),
    Sm90Knobs(tile_m=256, tile_n=16, stages=6, cluster_m=1),
)
# Of 512 columns a third: with 176 the filter's gradient of 7x7 took 93 us, and with 192, an eighth of which is past the
# last one, 103.
_THIRD = Sm90Knobs(tile_m=128, tile_n=176, stages=4, cluster_m=1, schedule="pingpong")
# Of two lines of places at once, whose filters are half of what a stage of fewer rows loads.
_LINES = Sm90Knobs(tile_m=256, tile_n=128, stages=4, cluster_m=1)
# Of merged groups, of which the loads of the image take longest, and each tile loads what it has of the others again:
# as many rows as there can be. To a filter three warp groups have 192, the taps of three, which most windows have a
# multiple of.
_MERGED = (
    Sm90Knobs(tile_m=256, tile_n=64, stages=6, cluster_m=1),
    Sm90Knobs(tile_m=256, tile_n=64, stages=6, cluster_m=2),
    Sm90Knobs(tile_m=256, tile_n=128, stages=4, cluster_m=1),
    Sm90Knobs(tile_m=192, tile_n=64, stages=6, cluster_m=1, consumers=3),
)
# What patches are expected to take is less sure than what im2col is, of which more was measured, and they have to be
# faster by more than that; but of merged groups im2col takes a fifth longer than is expected of it [Patches, 3].
_UNSURE = 1.08
# At so many columns multiplies, lines and shared memory take as long as each other, and together longer [Dense layers].
_TIED_COLUMNS, _TIED = 128, 1.15
_MERGED_IM2COL = 1.2
# Likewise it takes longer with few columns, whose lines of the image are many for their multiplies [Patches, 11].
FEW_COLUMNS, _NARROW_IM2COL = 64, 1.17
_FILTER_IM2COL = 0.8  # of what is expected of im2col is what it takes to a filter [Filters by patches, 3]
# Whose columns are places: each 64 rows of a tile read all of its columns from shared memory, so that 128 channels by
# 192 places are multiplied in fewer of its clocks than 128 places by 128 channels [Swapped].
_SWAPPED = tuple(
    Sm90Knobs(tile_m=128, tile_n=tile_n, stages=8, cluster_m=1, schedule="pingpong", swapped=True)
    for tile_n in (128, 192)
)
_SWAPPED_IM2COL = 0.98  # of what is expected of them is what they take
_SWAPPED_ACROSS = 1.3  # likewise with filters whose rows are not whole lines [Patches, 19]
# Times as long takes an image whose lines end with padding, and to load these for several windows [Patches, 15, 20].
_PADDED_IM2COL, _PADDED_LOADS = 1.15, 1.5
# Blocks of a cluster wait for each other: 128 x 128 in turns took 2 to 4 % longer in clusters of two, and 256 x 128 as
# long as those [Dense layers].
_CLUSTERED = 1.04
_MERGED_ROUNDS = 4  # that splits of a merged filter's gradient fill, at most

# Of those that are expected to take as long, blocks alone come first: what im2col loads is not there as steadily as a
# matrix, and blocks of a cluster wait for each other [1].
_SHAPES = sorted((*SHAPES, *_NARROW), key=lambda knobs: knobs.cluster_m)


def candidates(gemm: ImplicitGemm, target: Target) -> Iterator[ConvolutionKnobs | WgradKnobs]:
    """Knobs that work for the convolution, by the time that is expected of them."""
    found: list[tuple[float, ConvolutionKnobs | WgradKnobs]] = [
        (_im2col_seconds(gemm, knobs, target.sm_count), knobs) for knobs in _by_im2col(gemm, target)
    ]
    if patches_reason(gemm) is None:
        by_patches = patch_candidates(gemm, target)
        found += [(_unsure(knobs) * patch_seconds(gemm, knobs, target.sm_count), knobs) for knobs in by_patches]
    if wgrad_patches_reason(gemm) is None:
        found += wgrad_candidates(gemm, target)
    return (knobs for _, knobs in sorted(found, key=lambda pair: (pair[0], pair[1].threads)))


def _unsure(knobs: Sm90Knobs) -> float:
    return _TIED if knobs.tile_n == _TIED_COLUMNS else _UNSURE


def _im2col_seconds(gemm: ImplicitGemm, knobs: Sm90Knobs, sm_count: int) -> float:
    longer = _CLUSTERED if knobs.cluster_m * knobs.cluster_n > 1 else 1
    longer *= _MERGED_IM2COL if gemm.merged > 1 else 1
    if knobs.swapped:
        (filters,) = gemm.product.b
        whole = filters.row_stride * filters.itemsize % DEPTH_BYTES == 0
        longer *= _SWAPPED_IM2COL if whole else _SWAPPED_ACROSS
    longer *= _PADDED_IM2COL if gemm.multiplied < 1 else 1
    if gemm.product.a_transposed:
        longer *= _FILTER_IM2COL
    elif gemm.merged == 1 and gemm.taps > 1:
        longer *= 1 + _stored_of_loaded(gemm.tiled, knobs)
        longer *= _NARROW_IM2COL if gemm.group_columns <= FEW_COLUMNS else 1
    # A line takes as long to load as one of DEPTH_BYTES, however short it is [Filters by patches, 3].
    # Places are loaded for several windows.
    again = any(axis.result > 1 and axis.filter * axis.step > axis.stride for axis in gemm.axes)
    of_a = DEPTH_BYTES / gemm.line * (_PADDED_LOADS if gemm.multiplied < 1 and again else 1)
    copies = of_a, of_a if gemm.product.b_transposed else 1.0
    return longer * seconds(gemm.tiled, knobs, sm_count, multiplied=gemm.multiplied, copies=copies)


def _stored_of_loaded(product: Product, knobs: Sm90Knobs) -> float:
    """Bytes that a tile stores of those that it loads: both pass through the L2 cache, which bounds im2col's loads."""
    stored = knobs.tile_m * knobs.tile_n * sum(result.itemsize for result in product.stored)
    return stored / ((knobs.tile_m + knobs.tile_n) * max(1, product.k) * product.a.itemsize)


def _by_im2col(gemm: ImplicitGemm, target: Target) -> Iterator[ConvolutionKnobs]:
    shapes, cut = _SHAPES, splits
    if len(gemm.product.b) > 1:
        shapes = [_LINES, *_SHAPES]
    elif gemm.crossed:
        shapes, cut = [*_SHAPES, *_MERGED], _merged_splits
    elif gemm.merged > 1:
        shapes = [replace(knobs, groups=gemm.merged) for knobs in (*_SHAPES, *_MERGED)]
    elif gemm.product.a_transposed:
        shapes = [_THIRD, *_SHAPES]
    for knobs in product_candidates(gemm.tiled, target, staged=staged(gemm), shapes=shapes, splits=cut):
        if knobs_reason(gemm, knobs, target.shared_memory) is None:
            yield ConvolutionKnobs(**vars(knobs))
    # Lines with padding take a third longer so than as rows [Patches, 15].
    if gemm.multiplied == 1 and swap_reason(gemm) is None and product_swap_reason(gemm.product) is None:
        transposed = swapped(gemm.product)
        for shape in _SWAPPED:
            found = fitted(transposed, shape, target, "tma")
            if found is not None:
                yield ConvolutionKnobs(**vars(found))


def _merged_splits(product: Product, knobs: Sm90Knobs, sm_count: int) -> list[int]:
    """Parts of K that fill the device once or a few times: one has to be at least two."""
    tiles, stages = cluster_tiles(product, knobs) * product.batch, product.k // depth(product)
    filling = (rounds * sm_count // tiles for rounds in range(1, _MERGED_ROUNDS + 1))
    return sorted({max(2, min(split, stages // 8, 16)) for split in filling})
