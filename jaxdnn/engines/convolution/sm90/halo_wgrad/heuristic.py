"""Which knobs to try for a filter's gradient by patches on Hopper's tensor cores, and the time that is expected of them.

Numbers in brackets are those of the notes on filters by patches in benchmarks/results/convolution_kernels.md.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product as pairs
from math import ceil

from jaxdnn.device import Target
from jaxdnn.engines.convolution.sm90.halo_wgrad.knobs import LINES, WgradKnobs, WgradPatches, knobs_reason
from jaxdnn.engines.product.sm90.heuristic import L2_RATE, MEMORY_RATE, SHARED_RATE, SPLIT_LAUNCH, TOGETHER, moved
from jaxdnn.engines.product.tma import CHUNK

_MOST_STAGES = 8
_WIDTHS, _MOST_HEIGHT, _MOST_IMAGES = (8, 16, 32), 32, 4  # of tiles
_MOST_TILES = 2  # that are tried, of one part of a filter
_MOST_ROUNDS = 2  # of all multiprocessors that blocks fill
_LINE_RATE = 0.48e9  # lines of boxes a second that TMA brings to a multiprocessor
_RATE = 780e12  # flops a second
_START = 4e-6  # seconds of a block until it multiplies, and from then on until its accumulators are stored
_SPLIT_RATE = 2e12  # bytes a second that accumulators of splits are written and read at


def candidates(patches: WgradPatches, target: Target) -> Iterator[WgradKnobs]:
    """Knobs that work for the convolution."""
    for shape in _shapes(patches):
        tiles = [knobs for knobs in _tiles(patches, shape) if _fitted(patches, knobs, target)]
        tiles.sort(key=lambda knobs: _stages_time(patches, knobs, target.sm_count) * patches.tiles(knobs))
        for knobs in tiles[:_MOST_TILES]:
            for split in _splits(patches, knobs, target.sm_count):
                if (choice := _fitted(patches, replace(knobs, split_k=split), target)) is not None:
                    yield choice


def _shapes(patches: WgradPatches) -> Iterator[WgradKnobs]:
    """Of a block's part of the filter: warp groups for a line of the window each, or for 64 columns."""
    x, y, _ = patches.dimensions
    size = patches.gemm.product.a.itemsize
    for line in LINES:
        if line > LINES[-1] and line // 2 >= patches.gemm.channels * size:
            continue
        for lines in range(1, x.filter + 1):
            run = ceil(x.filter / lines)
            if run * line // size <= 192:
                runs = patches.plane_runs(WgradKnobs(patch=line, run=run))
                for own in (3, 2, 1):
                    if own <= runs:
                        yield WgradKnobs(patch=line, run=run, runs=own, column_blocks=1 if own > 1 else 2)
                break


def _tiles(patches: WgradPatches, shape: WgradKnobs) -> Iterator[WgradKnobs]:
    """Of lines and images in equal parts."""
    x, y, _ = patches.dimensions
    heights = {ceil(y.result / parts) for parts in range(1, y.result + 1)}
    for width, height in pairs(_WIDTHS, sorted(height for height in heights if height <= _MOST_HEIGHT)):
        whole = width >= x.result and height >= y.result
        for images in range(1, min(patches.images, _MOST_IMAGES if whole else 1) + 1):
            if width * height * images % 16 == 0 and width < x.result + _WIDTHS[0]:
                yield replace(shape, width=width, height=height, images=images)


def _splits(patches: WgradPatches, knobs: WgradKnobs, sm_count: int) -> list[int]:
    """Parts of the places that fill the device once or a few times."""
    blocks, tiles = patches.blocks(knobs), patches.tiles(knobs)
    filling = {min(tiles, max(1, rounds * sm_count // blocks)) for rounds in range(1, _MOST_ROUNDS + 1)}
    return sorted({ceil(tiles / ceil(tiles / split)) for split in filling})


def _fitted(patches: WgradPatches, knobs: WgradKnobs, target: Target) -> WgradKnobs | None:
    """The knobs with as many stages as there is room for."""
    for stages in range(_MOST_STAGES, 1, -1):
        choice = replace(knobs, stages=stages)
        if knobs_reason(patches, choice, target.shared_memory) is None:
            return choice
    return None


def _stages_time(patches: WgradPatches, knobs: WgradKnobs, sm_count: int) -> float:
    """Of one tile of places."""
    product = patches.gemm.product
    multiplied, stage = patches.multiplied(knobs), patches.stage(knobs)
    multiplies = 2 * CHUNK * multiplied * knobs.places * knobs.consumers / (_RATE / sm_count)
    read = knobs.consumers * knobs.places * (CHUNK + multiplied) * product.a.itemsize
    lines = knobs.column_blocks * knobs.places + (stage - knobs.column_blocks * knobs.places * 128) // knobs.patch
    multiplying = max(multiplies, (stage + read) / SHARED_RATE) * TOGETHER[knobs.consumers]
    return max(multiplying, stage / L2_RATE, lines / _LINE_RATE)


def seconds(patches: WgradPatches, knobs: WgradKnobs, sm_count: int) -> float:
    """An estimate of the time, for comparing knobs with each other."""
    product = patches.gemm.product
    tiles, blocks = patches.tiles(knobs), patches.blocks(knobs) * knobs.split_k
    rounds = ceil(blocks / sm_count)
    block = ceil(tiles / knobs.split_k) * _stages_time(patches, knobs, sm_count) + _START
    multiplying = ((rounds * block) ** 4 + (moved(product) / MEMORY_RATE) ** 4) ** 0.25
    added = 2 * 4 * product.m * patches.diagonal.groups * product.n * product.batch * knobs.split_k / _SPLIT_RATE
    return multiplying + SPLIT_LAUNCH + added
