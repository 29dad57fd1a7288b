"""Knobs of the convolution on any GPU (cpp/kernels/convolution/simt.cuh), and what a problem lets them be."""

from dataclasses import dataclass
from math import ceil, gcd

import numpy as np

from jaxdnn.device import Target
from jaxdnn.engines.base import check_least, check_powers_of_two
from jaxdnn.engines.convolution.matrices import product_of_group
from jaxdnn.engines.convolution.problem import Convolution, Tensor
from jaxdnn.engines.product.atom import Atom, Loads, atom_of, shared_memory, tiles_reason, transposes
from jaxdnn.engines.product.element_epilogue import MAX_GRID

LOAD_BYTES = 16  # that one instruction may load
TRANSPOSED = 4  # neighbours along K that ordinary arithmetic takes apart


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


def convolution_atom(problem: Convolution) -> Atom:
    """What multiplies the problem's elements."""
    return atom_of(problem.accumulator, problem.a.dtype, problem.b.dtype)


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


def vector(atom: Atom, side: Side) -> int:
    """Neighbours that one load takes, where all are so aligned."""
    tensor, size = side.tensor, np.dtype(side.tensor.dtype).itemsize
    most = LOAD_BYTES // size
    if transposes(atom, side.runs):
        most = min(most, TRANSPOSED)
    inner = [stride for stride in (tensor.c_stride, tensor.k_stride) if stride != 1]
    outer = (tensor.batch_stride, tensor.n_stride, *tensor.spatial_strides, tensor.group_stride)
    return gcd(most, side.channels, *inner, *outer, tensor.buffer.offset // size)


def knobs_reason(problem: Convolution, knobs: ConvolutionSimtKnobs, target: Target) -> str | None:
    """Why the knobs don't fit the problem, or None."""
    atom, extents = convolution_atom(problem), (knobs.tile_m, knobs.tile_n)
    both = zip(sides(problem), extents, strict=True)
    loads = [Loads(extent, side.runs, vector(atom, side)) for side, extent in both]
    if reason := tiles_reason(atom, knobs, loads):
        return reason
    if knobs.depth % atom.step:
        return f"depth is {knobs.depth}; expected a multiple of {atom.step}"
    if knobs.split_k > (parts := ceil(product_of_group(problem).k / knobs.depth)):
        return f"split_k is {knobs.split_k}; k has {parts} parts of {knobs.depth}"
    if (count := blocks(problem, knobs)) > MAX_GRID:
        return f"it would take {count} thread blocks, and a grid has at most {MAX_GRID}"
    if (needed := shared_bytes(problem, knobs)) > target.shared_memory:
        return f"it would use {needed} bytes of shared memory, and a block has {target.shared_memory}"
    return None


def blocks(problem: Convolution, knobs: ConvolutionSimtKnobs) -> int:
    """Thread blocks of the grid."""
    product = product_of_group(problem)
    tiles = ceil(product.m / knobs.tile_m) * ceil(product.n / knobs.tile_n)
    return tiles * knobs.split_k * problem.groups * problem.batch


def shared_bytes(problem: Convolution, knobs: ConvolutionSimtKnobs) -> int:
    """Bytes of shared memory of a thread block: of two stages."""
    a, b = sides(problem)
    return shared_memory(convolution_atom(problem), knobs, (a.runs, b.runs), stages=2)
