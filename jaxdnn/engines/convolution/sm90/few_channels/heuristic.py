"""Which knobs to try for a convolution of an image with few channels, best first.

The order is that of what was measured; see the notes on few channels in benchmarks/results/convolution_kernels.md.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import ceil

from jaxdnn.device import Target
from jaxdnn.engines.convolution.sm90.few_channels.knobs import knobs_reason
from jaxdnn.engines.convolution.window_lines import WindowLines
from jaxdnn.engines.product.accumulators import accumulator_limit
from jaxdnn.engines.product.sm90.knobs import REGISTER_WIDTHS, Sm90Knobs, accumulator_registers, stores

# Three warp groups: while one loads its registers and another stores, the third multiplies.
_OUTPUT = (
    Sm90Knobs(tile_m=192, stages=4, cluster_m=1, consumers=3),
    Sm90Knobs(tile_m=128, stages=4, cluster_m=1, consumers=2),
    Sm90Knobs(tile_m=64, stages=4, cluster_m=1, consumers=1),
)
_FILTER = (
    Sm90Knobs(tile_m=64, stages=6, cluster_m=1, consumers=1),
    Sm90Knobs(tile_m=128, stages=6, cluster_m=1, consumers=2),
    Sm90Knobs(tile_m=192, stages=6, cluster_m=1, consumers=3),
    Sm90Knobs(tile_m=256, stages=6, cluster_m=1, consumers=2),
)
_FEW_STAGES = 4  # of a split


def candidates(lines: WindowLines, target: Target) -> Iterator[Sm90Knobs]:
    """Knobs that work for the convolution: those of fewest columns past the last one first, and of these the widest."""
    columns = lines.product.n
    for width in sorted(REGISTER_WIDTHS, key=lambda width: (ceil(columns / width) * width, -width)):
        for shape in _FILTER if lines.to_filter else _OUTPUT:
            knobs = _fitted(lines, replace(shape, tile_n=width, split_k=_split(lines, width, target)), target)
            if knobs is not None:
                yield knobs


def _split(lines: WindowLines, width: int, target: Target) -> int:
    """Into how many parts the sum over places is cut: one for each multiprocessor."""
    if not lines.to_filter or lines.product.reduced:
        return 1
    tiles = ceil(lines.product.n / width) * lines.product.batch
    stages = ceil(lines.product.k / lines.depth)
    return max(1, min(target.sm_count // tiles, stages // _FEW_STAGES))


def _fitted(lines: WindowLines, knobs: Sm90Knobs, target: Target) -> Sm90Knobs | None:
    """The knobs with as many stages as there is room for."""
    for store in stores(lines.product, knobs, "tma" if lines.straight else "rows"):
        stored = replace(knobs, store=store)
        if accumulator_registers(lines.product, stored) > accumulator_limit(lines.product, stored):
            continue
        for stages in range(knobs.stages, 1, -1):
            choice = replace(stored, stages=stages)
            if knobs_reason(lines, choice, target.shared_memory) is None:
                return choice
    return None
