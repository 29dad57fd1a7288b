"""Which knobs to try for a convolution by patches on Hopper's tensor cores, and the time that is expected of them.

Numbers in brackets are those of the notes on patches in benchmarks/results/convolution_kernels.md.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product as pairs
from math import ceil

from jaxdnn.device import Target, fewest_clusters
from jaxdnn.engines.convolution.implicit_gemm import ImplicitGemm
from jaxdnn.engines.convolution.sm90.halo.knobs import (
    BLOCK_ROWS,
    LINES,
    Patches,
    columns_of_tiles,
    fetch_reason,
    knobs_reason,
)
from jaxdnn.engines.convolution.sm90.knobs import ConvolutionKnobs
from jaxdnn.engines.product.accumulators import accumulator_limit, sums_rows
from jaxdnn.engines.product.operands import packed
from jaxdnn.engines.product.problem import Product
from jaxdnn.engines.product.sm90.heuristic import fetched, storing
from jaxdnn.engines.product.sm90.knobs import accumulator_registers
from jaxdnn.engines.product.sm90_model import (
    L2_RATE,
    MEMORY_RATE,
    SHARED_RATE,
    TILE,
    TOGETHER,
    across_rows,
    at_once,
    moved,
)
from jaxdnn.engines.product.tma import DEPTH_BYTES

_SHAPES = (
    ConvolutionKnobs(cluster_m=1, tile_m=192, consumers=3),
    ConvolutionKnobs(cluster_m=1, tile_m=256),
    ConvolutionKnobs(cluster_m=1, tile_m=128),
    ConvolutionKnobs(cluster_m=1, tile_m=128, schedule="pingpong"),
    ConvolutionKnobs(cluster_m=1, tile_m=128, schedule="pingpong", consumers=3),
)
_WIDTHS = (256, 192, 160, 128, 96, 80, 64, 48, 32, 16)
_BETWEEN = (224, 112)  # of 97 to 112 columns, or twice as many, of which the others leave more, or are narrow [18]
_WIDE = 64
_ENOUGH_STAGES = 4
_MOST_STAGES = {128: 4, 64: 6, 32: 8}  # by bytes of channels, where the filter stays: so much is on its way [15]
_ACCUMULATORS_OF_THREE = 64  # of a thread that is compiled for 128 registers [11]
_LEAST_FILTER_STAGES, _MOST_FILTER_STAGES = 4, 12
_SPARE = 1.1  # columns that are multiplied, of those that there are
_LINE_RATE = 0.48e9  # lines of boxes a second, however long, that TMA brings to a multiprocessor [2]
_START = 3e-6  # seconds until the first blocks multiply, and from the last ones' end on [3]
# Patches leave more of the power limit to the tensor cores than im2col, whose lines are loaded again for each tap; and
# three warp groups are no faster than two [3].
_RATE = 780e12  # flops a second
_TOGETHER = {**TOGETHER, 3: 1.03}
_EPILOGUE = 2.8e-9  # seconds a column of 64 rows
_SUMS = 2  # times as long as to store 2 bytes takes what is computed of a sum [12]
_TURN = {2: 0.15e-6, 3: 0.145e-6}  # seconds from one warp group's multiplies to the next one's, of so many [11]
# Of stages so few that multiplies wait for them: two of patches, or less than six of the filter [4].
_FEW_STAGES, _FEW_FILTER_STAGES, _WAITING = 2, 6, 1.1
_WAITING_FOR_LITTLE = 1.5  # likewise for two of shorter lines, which are little that is on its way [19]
_SHORT_LINES = {128: 1.0, 64: 1.03, 32: 1.2}  # times as long, by bytes of channels in a stage [14, 15]
_SHORT_TAPS = 1.15  # likewise of the shortest, where the filter passes by: its tiles are of one multiply [15]
_STAGE = 0.1e-6  # seconds of a stage that nothing is multiplied [15]
_WRITE_RATE = 3.5e12  # bytes a second of results [15]
_LINES_OF_TWO = 2  # times as long they take whose lines of 128 bytes two tiles have a part of [15]


def candidates(gemm: ImplicitGemm, target: Target) -> Iterator[ConvolutionKnobs]:
    """Knobs that work for the convolution."""
    fewer = Patches(gemm, along_lines=True).rows < Patches(gemm).rows
    for shape, width, line, along_lines in pairs(_SHAPES, _widths(gemm), _lines(gemm), (False, True)[: 1 + fewer]):
        chosen = replace(shape, tile_n=width, patch=line, groups=gemm.merged, along_lines=along_lines)
        patches = Patches.of(gemm, chosen)
        knobs = _fitted(patches, _resident(gemm, chosen), target) or _fitted(patches, chosen, target)
        if knobs is not None:
            yield knobs


def _resident(gemm: ImplicitGemm, knobs: ConvolutionKnobs) -> ConvolutionKnobs:
    """With a filter that stays: the whole, or the tiles' own."""
    several = gemm.product.n > knobs.tile_n
    return replace(knobs, resident=True, swizzle=1 if several else knobs.swizzle)


def _widths(gemm: ImplicitGemm) -> list[int]:
    """Columns of tiles, the widest first: of those with few past the last column, none much narrower than others."""
    columns = gemm.group_columns if gemm.groups > 1 else gemm.product.n

    def fitting(widths: tuple[int, ...]) -> list[int]:
        padded = {width: ceil(columns / width) * width for width in widths}
        return [width for width in widths if padded[width] <= _SPARE * min(padded.values())]

    found = fitting(_WIDTHS)
    if found[0] < _WIDE:
        found = fitting((*_BETWEEN, *_WIDTHS))
    return [width for width in found if 4 * width >= min(columns, found[0])]


def _lines(gemm: ImplicitGemm) -> list[int]:
    """Bytes of channels of which a stage has least past the last one; the longer ones first."""
    size = gemm.channels * gemm.product.a.itemsize
    return sorted(LINES, key=lambda line: ceil(size / line) * line)[:2]


def _fitted(patches: Patches, knobs: ConvolutionKnobs, target: Target) -> ConvolutionKnobs | None:
    """The knobs with as many stages as there is room for, of patches first."""
    loaded, _ = packed(patches.gemm.product)
    stored = replace(knobs, store=storing(loaded, knobs))
    stored = replace(stored, fetch="direct" if fetch_reason(patches) else fetched(loaded, stored))
    most = accumulator_limit(loaded, stored)
    if knobs.consumers == 3:
        most = min(most, _ACCUMULATORS_OF_THREE)
    if accumulator_registers(loaded, stored) > most:
        return None
    most_stages = _MOST_STAGES[knobs.patch] if knobs.resident else _ENOUGH_STAGES
    more = pairs(range(most_stages, _ENOUGH_STAGES, -1), (2,))
    for stages, epilogue_stages in (*more, *pairs(range(_ENOUGH_STAGES, 1, -1), (2, 1))):
        choice = replace(stored, stages=stages, epilogue_stages=epilogue_stages)
        room = target.shared_memory - patches.shared_memory(loaded, choice)
        fitting = choice.filter_stages + room // patches.filter_stage(loaded, choice)
        needed = patches.taps if knobs.resident else _LEAST_FILTER_STAGES
        if fitting < needed:
            continue
        choice = replace(choice, filter_stages=needed if knobs.resident else min(fitting, _MOST_FILTER_STAGES))
        if knobs_reason(patches, choice, target.shared_memory) is None:
            return choice
    return None


def seconds(gemm: ImplicitGemm, knobs: ConvolutionKnobs, sm_count: int) -> float:
    """An estimate of the time, for comparing knobs with each other."""
    patches, (product, _) = Patches.of(gemm, knobs), packed(gemm.product)
    stages, size = patches.stages, product.a.itemsize
    length = stages * patches.depth  # of K
    blocks = knobs.tile_m // BLOCK_ROWS
    taps = 0 if knobs.resident else patches.plane_taps
    image, filters = patches.loaded(knobs.tile_m), taps * patches.tap_bytes(product, knobs)
    filter_lines = taps * patches.tap_lines(product, knobs)
    # What lies across lines of the L2 cache is asked for in more of them [19].
    of_image = across_rows(product.a)
    of_filter = 1.0 if product.b_transposed else across_rows(product.b[0])
    loaded, asked = stages * (image + filters), stages * (image * of_image + filters * of_filter)
    lines = stages * (image // knobs.patch * of_image + filter_lines * of_filter)
    own = knobs.tile_n // knobs.groups  # columns that a line of channels meets
    read = blocks * (BLOCK_ROWS + own) * length * size
    multiplies = 2 * knobs.tile_m * own * length / (_RATE / sm_count)
    multiplying = max(multiplies, (loaded + read) / SHARED_RATE) + stages * _STAGE
    loading = max(asked / L2_RATE, lines / _LINE_RATE)
    work = sum(result.itemsize for result in product.stored) / 2 + (0 if product.is_plain or sums_rows(product) else 1)
    work += _SUMS * len(product.reduced)
    storing = TILE + _EPILOGUE * knobs.tile_n * (knobs.consumer_rows // 64) * work
    if knobs.schedule == "pingpong":
        computing = max(multiplying + _TURN[knobs.consumers], (multiplying + storing) / knobs.consumers)
    else:
        computing = multiplying * _TOGETHER[knobs.consumers] + storing
    tile = max(computing, loading)
    tile *= _SHORT_LINES[knobs.patch]
    if knobs.patch == LINES[-1] and not knobs.resident:
        tile *= _SHORT_TAPS
    if knobs.stages <= _FEW_STAGES:
        tile *= _WAITING if knobs.patch == LINES[0] else _WAITING_FOR_LITTLE
    if knobs.filter_stages < _FEW_FILTER_STAGES and not knobs.resident:
        tile *= _WAITING
    columns = columns_of_tiles(product, knobs)
    tiles = ceil(patches.rows / knobs.tile_m) * columns * product.batch
    blocks = fewest_clusters(tiles, 1, sm_count, columns) if knobs.resident else sm_count
    written = sum(result.itemsize for result in product.stored) * product.m * product.n * product.batch
    moving = (moved(product) - written) / MEMORY_RATE + written / _WRITE_RATE * _of_two(product, knobs)
    return _START + at_once(ceil(tiles / blocks) * tile, moving)


def _of_two(product: Product, knobs: ConvolutionKnobs) -> float:
    """How much longer it takes to write results, whose columns of tiles may end within lines of 128 bytes."""
    whole = all(knobs.tile_n * result.itemsize % DEPTH_BYTES == 0 for result in product.stored)
    return 1 if whole or columns_of_tiles(product, knobs) == 1 else _LINES_OF_TWO
