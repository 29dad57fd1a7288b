"""Which knobs to try for a convolution by patches on Hopper's tensor cores, by the time that is expected of them."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product as pairs
from math import ceil

from jaxdnn.device import Target
from jaxdnn.engines.convolution.sm90.halo.knobs import BLOCK_ROWS, LINES, Patches, knobs_reason
from jaxdnn.engines.convolution.sm90.knobs import ConvolutionKnobs
from jaxdnn.engines.product.sm90.heuristic import (
    EPILOGUE,
    L2_RATE,
    MEMORY_RATE,
    RATE,
    SHARED_RATE,
    TILE,
    TOGETHER,
    accumulator_limit,
    moved,
)
from jaxdnn.engines.product.sm90.knobs import accumulator_registers, packed

_SHAPES = (
    ConvolutionKnobs(cluster_m=1, tile_m=192, consumers=3),
    ConvolutionKnobs(cluster_m=1, tile_m=256),
    ConvolutionKnobs(cluster_m=1, tile_m=128),
    ConvolutionKnobs(cluster_m=1, tile_m=64, consumers=1),
)
_WIDTHS = (16, 32, 48, 64, 96, 128, 160, 192, 256)
_MOST_STAGES = 4
_ACCUMULATORS_OF_THREE = 64  # registers, of a thread that is compiled for 128
_LEAST_FILTER_STAGES, _MOST_FILTER_STAGES = 4, 12


def candidates(patches: Patches, target: Target) -> Iterator[ConvolutionKnobs]:
    """Knobs that work for the convolution."""
    for shape, width, line, resident in pairs(_SHAPES, _WIDTHS, LINES, (True, False)):
        shape = replace(shape, tile_n=width, groups=patches.gemm.merged)
        knobs = _fitted(patches, replace(shape, patch=line, resident=resident), target)
        if knobs is not None:
            yield knobs


def _fitted(patches: Patches, knobs: ConvolutionKnobs, target: Target) -> ConvolutionKnobs | None:
    """The knobs with as many stages as there is room for, of patches first."""
    loaded, _ = packed(patches.gemm.product)
    for store in ("tma", "direct"):
        stored = replace(knobs, store=store, filter_stages=1)
        most = accumulator_limit(loaded, stored)
        if accumulator_registers(loaded, stored) > (min(most, _ACCUMULATORS_OF_THREE) if knobs.consumers == 3 else most):
            continue
        for stages, epilogue_stages in pairs(range(_MOST_STAGES, 1, -1), (2, 1)):
            choice = replace(stored, stages=stages, epilogue_stages=epilogue_stages)
            room = target.shared_memory - patches.shared_memory(loaded, choice)
            fitting = 1 + room // patches.filter_stage(loaded, choice)
            needed = patches.taps(knobs.patch) if knobs.resident else _LEAST_FILTER_STAGES
            if fitting < needed:
                continue
            choice = replace(choice, filter_stages=needed if knobs.resident else min(fitting, _MOST_FILTER_STAGES))
            if knobs_reason(patches, choice, target.shared_memory) is None:
                return choice
    return None


def seconds(patches: Patches, knobs: ConvolutionKnobs, sm_count: int) -> float:
    """An estimate of the time, for comparing knobs with each other."""
    product, _ = packed(patches.gemm.product)
    stages, size = patches.stages(knobs.patch), product.a.itemsize
    length = stages * patches.depth(knobs.patch)  # of K
    blocks = knobs.tile_m // BLOCK_ROWS
    filters = 0 if knobs.resident else patches.plane_taps * patches.tap_bytes(product, knobs)
    loaded = stages * (patches.stage(knobs) + filters)
    own = knobs.tile_n // knobs.groups  # columns that a line of channels meets
    read = blocks * (BLOCK_ROWS + own) * length * size
    multiplies = 2 * knobs.tile_m * own * length / (RATE / sm_count)
    multiplying = max(multiplies, (loaded + read) / SHARED_RATE) * TOGETHER[knobs.consumers]
    loading = loaded / L2_RATE
    work = sum(result.itemsize for result in product.stored) / 2 + (0 if product.is_plain else 1)
    storing = TILE + EPILOGUE * knobs.tile_n * (knobs.consumer_rows // 64) * work
    tile = max(multiplying + storing, loading)
    tiles = ceil(patches.rows / knobs.tile_m) * ceil(product.n / knobs.tile_n) * product.batch
    return ((ceil(tiles / sm_count) * tile) ** 4 + (moved(product) / MEMORY_RATE) ** 4) ** 0.25
