"""Knobs of attention's kernels for any GPU (cpp/kernels/attention/simt.cuh), and which of them fit a call."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, gcd

import numpy as np

from jaxdnn.engines.attention.problem import Attention, Heads
from jaxdnn.engines.base import check_least

COPY_BYTES = 16  # that one instruction may copy
REGISTERS = 65_536  # of a multiprocessor
MOST_REGISTERS = 255  # of a thread
OTHER_REGISTERS = 130  # of a thread, for addresses, factors and rows' numbers
MOST_SCORES = 32  # of a thread: bits of a word


@dataclass(frozen=True)
class AttentionSimtKnobs:
    """How attention is cut into tiles; cpp/kernels/attention/simt.cuh draws it.

    Attributes:
      tile_m: vectors that stay with a thread block: queries, or for the gradients of keys and values, keys.
      tile_n: vectors of the other side that pass by at a time.
      warps_m, warps_n: warps that share the vectors that stay, and the columns of scores and sums.
      resident: thread blocks that a multiprocessor has registers for.
      tensor: whether tensor cores multiply, factors that are rounded to tf32, which loses nothing of 16-bit floats.
    """

    tile_m: int = 128
    tile_n: int = 64
    warps_m: int = 4
    warps_n: int = 2
    resident: int = 1
    tensor: bool = False

    def __post_init__(self) -> None:
        check_least(self, 1, "tile_m", "tile_n", "warps_m", "warps_n", "resident")
        rows, columns = (16, 8) if self.tensor else (8, 4)
        for name, step in (("tile_m", rows * self.warps_m), ("tile_n", columns * self.warps_n)):
            if getattr(self, name) % step:
                raise ValueError(f"AttentionSimtKnobs: {name} is {getattr(self, name)}; expected a multiple of {step}")

    @property
    def threads(self) -> int:
        return 32 * self.warps_m * self.warps_n

    @property
    def registers(self) -> int:
        """Of a thread."""
        return min(MOST_REGISTERS, REGISTERS // (self.threads * self.resident))


@dataclass(frozen=True)
class Kernel:
    """What of a call one launch computes, as far as memory and registers go.

    Attributes:
      head_size, value_size: elements of a vector's row in shared memory.
      shared_memory: bytes.
      sums: accumulators of a thread.
    """

    head_size: int
    value_size: int
    shared_memory: int
    sums: int


def vectors(problem: Attention) -> dict[str, Heads]:
    """The arrays of vectors, by the fields of the kernels' call; those that are there."""
    found: dict[str, Heads | None] = {name: getattr(problem, name) for name in ("query", "key", "value", "out")}
    if problem.backward is not None:
        gradients = ("d_out", "d_query", "d_key", "d_value")
        found |= {name: getattr(problem.backward, name) for name in gradients}
    return {name: heads for name, heads in found.items() if heads is not None}


def itemsize(problem: Attention) -> int:
    """Bytes of a sum."""
    return np.dtype(problem.accumulator).itemsize


def forward(problem: Attention, knobs: AttentionSimtKnobs) -> Kernel:
    """The results."""
    head_size, value_size = _up(problem.head_size, 8), _up(problem.value_head_size, 16 * knobs.warps_n)
    size = itemsize(problem)
    elements = (knobs.tile_m + knobs.tile_n) * pitch(head_size, size) + knobs.tile_n * pitch(value_size, size)
    elements += _strip(problem, knobs) + knobs.tile_m * knobs.warps_n
    return Kernel(head_size, value_size, elements * size, _sums(knobs, 1, value_size))


def backward(problem: Attention, knobs: AttentionSimtKnobs, *, keys: bool) -> Kernel:
    """The gradients of keys and values, or that of queries."""
    values = keys and problem.backward is not None and problem.backward.d_value is not None
    vectors = _vectors(problem, knobs)
    size = itemsize(problem)
    elements = vectors.shared_memory // size + (1 + values) * _strip(problem, knobs)
    summed = vectors.head_size + (vectors.value_size if values else 0)
    return Kernel(vectors.head_size, vectors.value_size, elements * size, _sums(knobs, 2, summed))


def d_loaded(problem: Attention, knobs: AttentionSimtKnobs) -> Kernel:
    """The gradient of an array that scores load."""
    vectors = _vectors(problem, knobs)
    strip = _strip(problem, knobs) * itemsize(problem)
    return Kernel(vectors.head_size, vectors.value_size, max(vectors.shared_memory, strip), _sums(knobs, 3, 0))


def kernels(problem: Attention, knobs: AttentionSimtKnobs) -> Iterator[Kernel]:
    """Those of a call that are cut into tiles."""
    if problem.backward is None:
        yield forward(problem, knobs)
        return
    yield backward(problem, knobs, keys=False)
    yield backward(problem, knobs, keys=True)
    if problem.backward.load_gradients:
        yield d_loaded(problem, knobs)


def knobs_reason(problem: Attention, knobs: AttentionSimtKnobs, shared_memory_limit: int) -> str | None:
    """Why the knobs don't fit the call, or None."""
    if knobs.tensor and (reason := tensor_reason(problem)):
        return reason
    scores = knobs.tile_m * knobs.tile_n // knobs.threads
    if scores > MOST_SCORES:
        return f"a thread would have {scores} scores; expected at most {MOST_SCORES}"
    for kernel in kernels(problem, knobs):
        held = kernel.sums * itemsize(problem) // 4
        if held > (most := knobs.registers - OTHER_REGISTERS):
            return f"a thread would hold {held} words of sums; expected at most {most}"
        if kernel.shared_memory > shared_memory_limit:
            return f"it would use {kernel.shared_memory} bytes of shared memory, and a block has {shared_memory_limit}"
    return None


def tensor_reason(problem: Attention) -> str | None:
    """Why tensor cores can't multiply what the call has, or None."""
    if problem.accumulator != "float32":
        return f"tensor cores sum tf32 in float32, and {problem.accumulator} is wanted"
    if problem.exact and "float32" in {heads.dtype for heads in vectors(problem).values()}:
        return "it rounds float32 operands to tf32, and precision HIGHEST forbids that"
    return None


def pitch(size: int, itemsize: int, skew: int = 1) -> int:
    """Elements from one row to the next in shared memory (`SimtRows`)."""
    line = 16 // itemsize
    return _up(size - skew * line, 8 * line) + skew * line


def copy(heads: Heads, size: int) -> int:
    """Neighbouring elements of a vector that one copy takes, where all vectors are so aligned."""
    if heads.feature_stride != 1:
        return 1
    strides = [heads.length_stride, heads.head_stride, *(term.stride for term in heads.batch)]
    return gcd(COPY_BYTES // heads.itemsize, size, heads.buffer.offset // heads.itemsize, *strides)


def _vectors(problem: Attention, knobs: AttentionSimtKnobs) -> Kernel:
    """What a tile of scores and their cotangents is computed of."""
    head_size, value_size = (_up(size, 16 * knobs.warps_n) for size in (problem.head_size, problem.value_head_size))
    size = itemsize(problem)
    elements = (knobs.tile_m + knobs.tile_n) * (pitch(head_size, size) + pitch(value_size, size))
    return Kernel(head_size, value_size, elements * size, 0)


def _strip(problem: Attention, knobs: AttentionSimtKnobs) -> int:
    """Elements of a tile of factors that are made of scores."""
    return knobs.tile_m * pitch(knobs.tile_n, itemsize(problem), 2 if knobs.tensor else 1)


def _sums(knobs: AttentionSimtKnobs, scores: int, columns: int) -> int:
    """Accumulators of a thread: of so many tiles of scores, and of so many columns."""
    rows = knobs.tile_m // (8 * knobs.warps_m)
    return rows * (scores * knobs.tile_n + columns) // (4 * knobs.warps_n)


def _up(size: int, step: int) -> int:
    return ceil(size / step) * step
