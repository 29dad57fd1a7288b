"""Which knobs to try for a filter's gradient by patches on Hopper, and the time that is expected of them.

Numbers in brackets are those of the notes on filters by patches in benchmarks/results/convolution_kernels.md.
"""

from collections.abc import Iterator
from dataclasses import replace
from heapq import nsmallest
from itertools import product as pairs
from math import ceil, prod

from jaxdnn.device import Target
from jaxdnn.engines.convolution.implicit_gemm import ImplicitGemm
from jaxdnn.engines.convolution.sm90.halo_wgrad.knobs import (
    LINES,
    OUTPUT_LINES,
    STEP,
    WgradKnobs,
    WgradPatches,
    knobs_reason,
)
from jaxdnn.engines.product.sm90_model import L2_RATE, SHARED_RATE, TOGETHER, overlapped
from jaxdnn.engines.product.tma import CHUNK

_LEAST_STAGES, _MOST_STAGES = 3, 8  # of two, multiplies wait for each [2]
_ENOUGH_STAGES, _ENOUGH_LOADED = 4, 152 * 1024  # more of both, stages and bytes in flight, are slower [9]
_WIDTHS, _MOST_HEIGHT, _MOST_IMAGES = (8, 16, 32), 32, 4  # of tiles
_LEAST_STEPS = 2  # multiplies of a tile; those of one each are waited for one by one [2]
_MOST = 8  # that are offered
_MOST_TILES = 2  # that are tried, of one part of a filter
_MOST_MULTIPLIED = 192  # taps and channels of a multiply, which are 96 registers of accumulators
_MOST_ROUNDS = 2  # of all multiprocessors that blocks fill
_LINE_RATE = 0.58e9  # lines of boxes a second that TMA brings to a multiprocessor [3]
_RATE = 780e12  # flops a second
_START = 2e-6  # seconds of a block until it multiplies, and from its last multiply on [3]
_ADD = 1.5e-6  # seconds that the kernel which adds splits takes at least [3]
_SPLIT_RATE = 3e12  # bytes a second that accumulators of splits are written and read at [4]


def candidates(gemm: ImplicitGemm, target: Target) -> list[tuple[float, WgradKnobs]]:
    """Knobs that work for the convolution, by the time that is expected of them, which comes with them."""
    # Of those that are expected to take as long, the most lines of the output come first [10].
    found = (
        (_seconds(patches, knobs, target.sm_count), knobs)
        for lines in reversed(OUTPUT_LINES)
        for patches in (WgradPatches.of(gemm, lines),)
        for knobs in _found(patches, lines, target)
    )
    return nsmallest(_MOST, found, key=lambda pair: pair[0])


def _found(patches: WgradPatches, lines: int, target: Target) -> Iterator[WgradKnobs]:
    for shape in _shapes(patches) if lines == 1 else _line_shapes(patches, lines):
        for _, tile in nsmallest(_MOST_TILES, _tiles(patches, shape, target), key=lambda pair: pair[0]):
            for split in _splits(patches, tile, target.sm_count):
                knobs = replace(tile, split_k=split)
                if knobs_reason(patches, knobs, target.shared_memory) is None:
                    yield knobs


def _shapes(patches: WgradPatches) -> Iterator[WgradKnobs]:
    """Of a block's part of the filter, by bytes of channels: as long runs as there are registers for, in the number of
    warp groups that leaves the fewest without one; or one, which shares the patch with that of another 64 columns.
    """
    x, _, _ = patches.dimensions
    size = patches.gemm.product.a.itemsize
    for line in LINES:
        if line > LINES[-1] and line // 2 >= patches.gemm.channels * size:
            continue
        most = _MOST_MULTIPLIED * size // line  # taps
        run = ceil(x.filter / ceil(x.filter / most))
        runs = patches.plane_runs(WgradKnobs(patch=line, run=run))
        own = min((3, 2, 1), key=lambda own: ceil(runs / own) * own)
        if own > 1:
            yield WgradKnobs(patch=line, run=run, runs=own)
        if own == 1 or patches.gemm.group_columns > CHUNK:
            yield WgradKnobs(patch=line, run=run, runs=1, column_blocks=2)


def _line_shapes(patches: WgradPatches, lines: int) -> Iterator[WgradKnobs]:
    """The same, of multiplies with several lines of the output, where that has few channels: a run is a column of the
    window.
    """
    gemm, (x, y, _) = patches.gemm, patches.dimensions
    columns = gemm.group_columns // gemm.merged if gemm.groups > 1 else gemm.product.n
    if y.filter == 1 or columns * lines > CHUNK:
        return
    for line in LINES:
        if line > LINES[-1] and line // 2 >= gemm.channels * gemm.product.a.itemsize:
            continue
        own = min((3, 2, 1), key=lambda own: ceil(x.filter / own) * own)
        yield WgradKnobs(patch=line, lines=lines, run=y.filter, runs=own)


def _tiles(patches: WgradPatches, shape: WgradKnobs, target: Target) -> Iterator[tuple[float, WgradKnobs]]:
    """Tiles of places, which cut images in parts of about as many lines, with as many stages as there is room for; and
    the time that all of them take.
    """
    x, y, _ = patches.dimensions
    equal = {ceil(y.result / parts) for parts in range(1, y.result + 1)}
    step = shape.lines * y.step if shape.lines > 1 else 2
    for width, height in pairs(_WIDTHS, sorted(equal | {ceil(height / step) * step for height in equal})):
        whole = height == y.result and (width == x.result or shape.lines > 1)
        for images in range(1, min(patches.images, _MOST_IMAGES if whole else 1) + 1):
            multiplies, left = divmod(width * height * images, STEP * shape.lines)
            if multiplies < _LEAST_STEPS or left or height > min(y.result, _MOST_HEIGHT) or width > x.result:
                continue
            knobs = replace(shape, width=width, height=height, images=images)
            room = (target.shared_memory - patches.spare(knobs)) // patches.stage_room(knobs)
            stages = min(_MOST_STAGES, room, max(_ENOUGH_STAGES, _ENOUGH_LOADED // patches.stage_room(knobs)))
            if stages >= _LEAST_STAGES:
                time = patches.tiles(knobs) * _tile_seconds(patches, knobs, target.sm_count)
                yield time, replace(knobs, stages=stages)


def _splits(patches: WgradPatches, knobs: WgradKnobs, sm_count: int) -> list[int]:
    """Parts of the places that fill the device once or a few times."""
    blocks, tiles = patches.blocks(knobs), patches.tiles(knobs)
    filling = {min(tiles, max(1, rounds * sm_count // blocks)) for rounds in range(1, _MOST_ROUNDS + 1)}
    return sorted({ceil(tiles / ceil(tiles / split)) for split in filling})


def _tile_seconds(patches: WgradPatches, knobs: WgradKnobs, sm_count: int) -> float:
    """Of one tile of places."""
    product = patches.gemm.product
    multiplied, stage = patches.multiplied(knobs), patches.stage(knobs)
    depth = knobs.places // knobs.lines
    multiplies = 2 * CHUNK * multiplied * depth * knobs.consumers / (_RATE / sm_count)
    read = knobs.consumers * depth * (CHUNK + multiplied) * product.a.itemsize
    lines = knobs.column_blocks * knobs.places + prod(patches.sides(knobs)) * knobs.images
    multiplying = max(multiplies, (stage + read) / SHARED_RATE) * TOGETHER[knobs.consumers]
    return max(multiplying, stage / L2_RATE, lines / _LINE_RATE)


def _seconds(patches: WgradPatches, knobs: WgradKnobs, sm_count: int) -> float:
    """An estimate of the time, for comparing knobs with each other."""
    product = patches.gemm.product
    tiles, blocks = patches.tiles(knobs), patches.blocks(knobs) * knobs.split_k
    rounds = ceil(blocks / sm_count)
    block = ceil(tiles / knobs.split_k) * _tile_seconds(patches, knobs, sm_count) + _START
    added = 2 * 4 * product.m * patches.diagonal.groups * product.n * product.batch * knobs.split_k / _SPLIT_RATE
    return overlapped(rounds * block, product) + _ADD + added
