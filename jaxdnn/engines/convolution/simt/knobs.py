"""Knobs of the convolution on any GPU (cpp/kernels/convolution/simt.cuh), and what a problem lets them be."""

from dataclasses import dataclass
from math import ceil, gcd

import numpy as np

from jaxdnn.device import Target
from jaxdnn.engines.base import check_least, check_powers_of_two
from jaxdnn.engines.convolution.matrices import product_of_group
from jaxdnn.engines.convolution.problem import Convolution, Tensor
from jaxdnn.engines.product.element_epilogue import MAX_GRID

LOAD_BYTES = 16  # that one instruction may load
TRANSPOSED = 4  # neighbours along K that ordinary arithmetic takes apart
HALF = ("bfloat16", "float16")


@dataclass(frozen=True)
class ConvolutionSimtKnobs:
    """How the product of a group is cut into tiles.

    Attributes:
      tile_m, tile_n: rows and columns of accumulators of a thread block.
      thread_m, thread_n: rows and columns of accumulators of a thread; of a warp, on tensor cores.
      depth: of K in a stage.
      split_k: parts of K that are summed apart, into scratch memory, and added by a second kernel.
      resident: thread blocks that a multiprocessor has registers for.
    """

    tile_m: int = 64
    tile_n: int = 64
    thread_m: int = 8
    thread_n: int = 8
    depth: int = 16
    split_k: int = 1
    resident: int = 4

    def __post_init__(self) -> None:
        check_powers_of_two(self, "tile_m", "tile_n", "depth")
        check_least(self, 1, "thread_m", "thread_n", "split_k", "resident")


@dataclass(frozen=True)
class Unit:
    """What multiplies (cpp/kernels/product/simt/multiply.cuh, tensor.cuh).

    Attributes:
      lanes: threads that hold `thread_m` x `thread_n` accumulators together.
      block: rows and columns that those are multiples of.
      warp: how many of them, along rows and columns, a warp holds.
      step: rows of K that are multiplied at once.
      itemsize: bytes of an element of a tile in shared memory.
      padding: elements after each row of a tile.
    """

    lanes: int
    block: tuple[int, int]
    warp: tuple[int, int]
    step: int
    itemsize: int
    padding: int


FMA = Unit(lanes=1, block=(4, 4), warp=(8, 4), step=1, itemsize=4, padding=4)
DOUBLE = Unit(lanes=32, block=(16, 8), warp=(1, 1), step=4, itemsize=8, padding=4)
TENSOR = Unit(lanes=32, block=(16, 16), warp=(1, 1), step=16, itemsize=2, padding=8)


def unit_of(problem: Convolution) -> Unit:
    """What multiplies the problem's elements."""
    if problem.accumulator == "float64":
        return DOUBLE
    return TENSOR if problem.a.dtype in HALF and problem.a.dtype == problem.b.dtype else FMA


@dataclass(frozen=True)
class Side:
    """One of the matrices: its array, whether memory runs along M or N, and how many channels are neighbours."""

    tensor: Tensor
    runs: bool
    channels: int


def sides(problem: Convolution) -> tuple[Side, Side]:
    """A, of the array that windows slide over, and B; cpp/kernels/convolution/simt/gather.cuh has a table of them."""
    match problem.result:
        case "output":
            return Side(problem.a, False, problem.c), Side(problem.b, True, problem.k)
        case "image":
            return Side(problem.b, False, problem.k), Side(problem.a, False, problem.k)
        case "filter":
            return Side(problem.a, True, problem.c), Side(problem.b, True, problem.k)


def vector(unit: Unit, side: Side) -> int:
    """Neighbours that one load takes, where all are so aligned."""
    tensor, size = side.tensor, np.dtype(side.tensor.dtype).itemsize
    most = LOAD_BYTES // size
    if unit is FMA and not side.runs:
        most = min(most, TRANSPOSED)
    inner = [stride for stride in (tensor.c_stride, tensor.k_stride) if stride != 1]
    outer = (tensor.batch_stride, tensor.n_stride, *tensor.spatial_strides, tensor.group_stride)
    return gcd(most, side.channels, *inner, *outer, tensor.buffer.offset // size)


def threads(problem: Convolution, knobs: ConvolutionSimtKnobs) -> int:
    """Of a thread block."""
    return unit_of(problem).lanes * knobs.tile_m * knobs.tile_n // (knobs.thread_m * knobs.thread_n)


def knobs_reason(problem: Convolution, knobs: ConvolutionSimtKnobs, target: Target) -> str | None:
    """Why the knobs don't fit the problem, or None."""
    unit, count = unit_of(problem), threads(problem, knobs)
    for axis, tile, part, block, across in zip(
        "mn", (knobs.tile_m, knobs.tile_n), (knobs.thread_m, knobs.thread_n), unit.block, unit.warp, strict=True
    ):
        if part % block or tile % (part * across):
            return f"tile_{axis} is {tile} and thread_{axis} {part}; expected multiples of {part * across} and {block}"
    if not 32 <= count <= 1024:
        return f"a block would have {count} threads; expected 32 to 1024"
    for name, side, extent in zip("ab", sides(problem), (knobs.tile_m, knobs.tile_n), strict=True):
        together = vector(unit, side)
        run = (extent if side.runs else knobs.depth) // together
        if run == 0 or count % run or (extent * knobs.depth) % (count * together):
            return f"{count} threads can't share tiles of {extent} x {knobs.depth} of {name} evenly"
    if knobs.depth % unit.step:
        return f"depth is {knobs.depth}; expected a multiple of {unit.step}"
    if knobs.split_k > (parts := ceil(product_of_group(problem).k / knobs.depth)):
        return f"split_k is {knobs.split_k}; k has {parts} parts of {knobs.depth}"
    if (count := blocks(problem, knobs)) > MAX_GRID:
        return f"it would take {count} thread blocks, and a grid has at most {MAX_GRID}"
    if (needed := shared_memory(problem, knobs)) > target.shared_memory:
        return f"it would use {needed} bytes of shared memory, and a block has {target.shared_memory}"
    return None


def blocks(problem: Convolution, knobs: ConvolutionSimtKnobs) -> int:
    """Thread blocks of the grid."""
    product = product_of_group(problem)
    tiles = ceil(product.m / knobs.tile_m) * ceil(product.n / knobs.tile_n)
    return tiles * knobs.split_k * problem.groups * problem.batch


def shared_memory(problem: Convolution, knobs: ConvolutionSimtKnobs) -> int:
    """Bytes of shared memory; what the kernel's own `kSharedBytes` says, which the unit asserts."""
    unit, stage = unit_of(problem), 0
    for side, extent in zip(sides(problem), (knobs.tile_m, knobs.tile_n), strict=True):
        rows_of_k = side.runs or unit is FMA
        rows, columns = (knobs.depth, extent) if rows_of_k else (extent, knobs.depth)
        stage += rows * (columns + unit.padding)
    pieces = knobs.thread_m if unit is FMA else knobs.thread_m // 8
    piece = knobs.tile_m // pieces * (knobs.tile_n + 4) * (8 if unit is DOUBLE else 4)
    return max(2 * unit.itemsize * stage, piece)
