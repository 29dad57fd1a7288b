"""Which knobs of the direct convolution to try, best first: a model of time, of instructions and of bytes.

The number in brackets is that of the notes on direct in benchmarks/results/convolution_kernels.md.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product as combinations
from math import ceil, prod

from jaxdnn.device import Target
from jaxdnn.engines.convolution.direct.knobs import (
    ConvolutionDirectKnobs,
    Tiling,
    axes,
    channels,
    itemsize,
    knobs_reason,
    lanes,
    reach,
    shared_memory,
    slots,
    source,
    stage_bytes,
    tap_tile,
    threads,
    vector,
)
from jaxdnn.engines.convolution.matrices import product_of_groups
from jaxdnn.engines.convolution.problem import Convolution

WIDTHS = (16, 14, 12, 8, 7, 4, 2, 1)
BLOCKS = (128, 256)  # threads, about
CHANNELS = (16, 32, 48)  # of a block at least, if there are as many
TALL = (1, 2, 4)  # tiles along the rows of an image
STAGES = (4, 2)  # the first ones that fit
WAVES = (1, 2)  # of thread blocks, one after the other
MOST_CANDIDATES = 12

LANES = 32
SCHEDULERS, MOST_WARPS = 4, 64  # of a multiprocessor
REGISTERS = 16_384  # of a scheduler's warps
MOST_OF_THREAD = 168  # registers: blocks of fewer than three warps a scheduler wait too long
ALL_OF_THREAD = 248  # registers that one can have
OTHER_REGISTERS = 50  # besides accumulators and a row's values

CLOCK = 1.75e9
FEW_WARPS = 1.5  # that a scheduler lacks, of what hides latencies [1]
SEGMENT = 64  # bytes that memory delivers at once
WAIT = 900.0  # cycles from the start of a copy to its end
REDUCE = 5e-6  # seconds that the kernels take at least that add the parts of a filter's gradient
LAUNCH = 2000.0  # cycles from the start of a block to its first step, but for the filter
COPIED = 4  # bytes, of which less are loaded into registers
BATCH, TAPS = 8, 4  # such loads of a thread that are in flight; and those of the filter


def candidates(problem: Convolution, target: Target) -> Iterator[ConvolutionDirectKnobs]:
    """Knobs that work for the problem, by the time that is expected of them."""
    found: dict[ConvolutionDirectKnobs, float] = {}
    for knobs in _shapes(problem, target):
        if knobs_reason(problem, knobs, target) is None:
            found[knobs] = seconds(problem, knobs, target)
    return iter(sorted(found, key=found.__getitem__)[:MOST_CANDIDATES])


def _shapes(problem: Convolution, target: Target) -> Iterator[ConvolutionDirectKnobs]:
    _, row, column = axes(problem)
    lines = ceil(row.places / row.spread)
    each = lanes(problem, ConvolutionDirectKnobs(groups=1))  # threads of a group
    for width, block, least in combinations(WIDTHS, BLOCKS, CHANNELS):
        if width > 1 and width >= 2 * column.places:
            continue
        # Threads along channels first, whole sectors of memory, then along a row, then along channels again.
        strips = ceil(column.places / width)
        groups = min(problem.groups, ceil(least / each))
        along = min(strips, max(1, block // (each * groups)))
        along = ceil(strips / ceil(strips / along))
        groups = min(problem.groups, groups * max(1, block // (each * along * groups)))
        knobs = ConvolutionDirectKnobs(width, along, groups)
        needed = registers(problem, knobs, target)
        if needed > (MOST_OF_THREAD if width > 1 else ALL_OF_THREAD):
            continue
        resident = min(SCHEDULERS * (REGISTERS // (needed * LANES)), MOST_WARPS)
        resident //= ceil(threads(problem, knobs) / LANES)
        for tall, waves in combinations(TALL, WAVES):
            for stages in STAGES:
                knobs = replace(knobs, height=ceil(lines / tall), parts=1, stages=stages)
                fit = min(resident, target.shared_memory // (shared_memory(problem, knobs) + 1024))
                if fit > 0:
                    tiling = Tiling(problem, knobs)
                    parts = waves * target.sm_count * fit // tiling.blocks
                    yield replace(knobs, parts=max(1, min(parts, tiling.count)), resident=fit)
                    break


def registers(problem: Convolution, knobs: ConvolutionDirectKnobs, target: Target) -> int:
    """Of a thread, about; in the eights that they are given out in."""
    wide = itemsize(problem.accumulator) // 4
    depth, _, column = axes(problem)
    taps = prod(tap_tile(problem, knobs)) if problem.result == "filter" else 0
    values = min(reach(problem, knobs), knobs.width * column.taps)
    spare = 8 * len(problem.operands) + 8 * (not product_of_groups(problem).is_plain) + 32 * (wide - 1)
    spare += 4 * (1 + column.step) if itemsize(source(problem).dtype) >= 4 or column.step > 1 else 0
    spare += 8 * (target.compute_capability < 90) + 8 * (depth.taps * channels(problem)[1] > 1)
    spare += 8 * (lanes(problem, knobs) & (lanes(problem, knobs) - 1) > 0)  # what divides by it
    return ceil((wide * (taps + slots(problem, knobs) * knobs.width + values) + OTHER_REGISTERS + spare) / 8) * 8


def seconds(problem: Convolution, knobs: ConvolutionDirectKnobs, target: Target) -> float:
    """An estimate of the time, for comparing knobs with each other."""
    depth, row, column = axes(problem)
    own, other = channels(problem)
    tiling, gradient = Tiling(problem, knobs), problem.result == "filter"
    count = ceil(threads(problem, knobs) / LANES)  # warps
    # Instructions of a warp: multiply-adds of a row of the tile; and of a step, values that are loaded and widened,
    # taps, results (of a filter's gradient, the rows that move on) and copies.
    rows, columns = tap_tile(problem, knobs) if gradient else (row.taps, column.taps)
    planes = 1 if gradient else other * depth.taps
    double = 2 if problem.accumulator == "float64" else 1
    multiply = planes * rows * columns * knobs.width * double
    copied = stage_bytes(problem, knobs)
    loaded = planes * 2 * row.step * min(reach(problem, knobs), knobs.width * columns)
    step = loaded + 80 + 20 * copied / 16 / (LANES * count)
    step += knobs.width * (slots(problem, knobs) + 1) if gradient else planes * rows * columns / 4 + 6 * knobs.width
    steps = min(knobs.height, ceil(row.places / row.spread)) + slots(problem, knobs) - 1
    of_tile = (steps - slots(problem, knobs) + 1) * multiply + steps * step
    # What runs on a multiprocessor: the instructions of all its blocks, or a block's own waits.
    together = min(knobs.resident, ceil(tiling.blocks / target.sm_count))
    waves = ceil(tiling.blocks / (target.sm_count * knobs.resident))
    busy = max(together * count / SCHEDULERS, 1)
    block = max(count / SCHEDULERS, 1)
    piece = itemsize(source(problem).dtype) * vector(source(problem), other * knobs.groups)
    if piece < COPIED:  # by the threads, which wait for what they load
        waits = (block + FEW_WARPS) * of_tile + steps * WAIT * ceil(copied / piece / threads(problem, knobs) / BATCH)
    else:
        waits = steps * WAIT / (knobs.stages - 1)
    of_tile = max((busy + FEW_WARPS) * of_tile, waits)
    launch = LAUNCH
    if not gradient:
        launch += WAIT * ceil(planes * rows * columns * knobs.groups * own / threads(problem, knobs) / TAPS)
    cycles = waves * (tiling.part_tiles * of_tile + launch)
    # Bytes, as many at once as are on their way.
    moved = tiling.blocks * tiling.part_tiles * steps * copied
    moved += 0 if gradient else problem.batch * problem.rows * problem.columns * itemsize(source(problem).dtype)
    if knobs.groups < problem.groups:
        moved *= max(1, SEGMENT / (knobs.groups * min(own, other) * itemsize(source(problem).dtype)))
    flying = target.sm_count * together * (knobs.stages - 1) * copied
    parts = 0.0
    if gradient:
        parts = REDUCE + 2 * 4 * knobs.parts * problem.batch * problem.rows * problem.columns / target.bandwidth
    return max(cycles / CLOCK, moved / min(target.bandwidth, flying * CLOCK / WAIT)) + parts
