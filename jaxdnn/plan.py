"""A plan: everything the runtime needs to execute one call, as frozen data.

Engines write plans, `custom_call` turns them into XLA's custom calls, and the two launchers of `cpp/runtime` (one for
CUDA, one for the host) execute them. Neither launcher knows an op: it finds a kernel by name, resolves its arguments to
addresses and launches it over a grid.
"""

import struct
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Operand:
    """The address of an operand of the custom call, plus `offset` bytes."""

    index: int
    offset: int = 0


@dataclass(frozen=True)
class Result:
    """The address of a result of the custom call, plus `offset` bytes."""

    index: int
    offset: int = 0


@dataclass(frozen=True)
class Scratch:
    """The address of one of the plan's scratch buffers, plus `offset` bytes."""

    index: int
    offset: int = 0


@dataclass(frozen=True)
class Scalar:
    """A number passed by value. `dtype` is the kernel parameter's type: "int32", "int64", "float32" or "float64"."""

    dtype: str
    value: int | float

    @property
    def size(self) -> int:
        return np.dtype(self.dtype).itemsize

    @property
    def bits(self) -> int:
        """The value's bytes, little endian and zero extended, read as a signed 64-bit integer."""
        raw = np.array(self.value, self.dtype).tobytes().ljust(8, b"\0")
        return struct.unpack("<q", raw)[0]


@dataclass(frozen=True)
class Constant:
    """The address of numbers that travel with the plan: 64-bit integers, aligned to 8 bytes. On the host only."""

    words: tuple[int, ...]


@dataclass(frozen=True)
class Counter:
    """An int32: the number of one of the unit's `count` counters in global memory, that no other call site has; or -1,
    if all are taken. Counters are zero at first, and each launch leaves its own at zero. On a GPU only.
    """

    count: int


@dataclass(frozen=True)
class TensorMap:
    """A CUtensorMap passed by value, as `cuTensorMapEncodeTiled` takes it; the first dimension is the innermost.

    `dtype`, `interleave`, `swizzle`, `l2_promotion` and `fill` are the values of the driver's enumerations.
    `strides` are in bytes and leave out the innermost dimension, which is dense.

    One with `corners` is as `cuTensorMapEncodeIm2col` takes it: dimensions are channels, places and images; loads walk
    through the places from the first lower corner to the last place plus the upper one, in steps of `element_strides`;
    and `box` is how many channels of how many places.
    """

    buffer: Operand | Result | Scratch
    dtype: int
    dimensions: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    interleave: int = 0
    swizzle: int = 0
    l2_promotion: int = 0
    fill: int = 0
    corners: tuple[tuple[int, int], ...] = ()  # lower and upper, of each dimension of places


Argument = Operand | Result | Scratch | Scalar | Constant | Counter | TensorMap


@dataclass(frozen=True)
class Launch:
    """One kernel over one grid. On the host `grid[0]` counts the tasks and the other sizes stay at their defaults."""

    kernel: str
    arguments: tuple[Argument, ...]
    grid: tuple[int, int, int]
    block: tuple[int, int, int] = (1, 1, 1)
    cluster: tuple[int, int, int] = (1, 1, 1)
    shared_memory: int = 0


@dataclass(frozen=True)
class Plan:
    """What one custom call does.

    Attributes:
      unit: the CUDA translation unit that defines the kernels; empty on the host.
      arch: what the unit is compiled for ("sm_90a"); on the host the instruction set, or empty for the best there is.
      launches: executed in order on one stream.
      scratch: sizes in bytes of uninitialised buffers: extra results of the custom call on a GPU, which XLA allocates;
        memory that the launcher keeps on the host.
      op: the call's name in error messages and logs, which planning gives it.
    """

    unit: str
    arch: str
    launches: tuple[Launch, ...]
    scratch: tuple[int, ...] = ()
    op: str = ""

    @property
    def workspace(self) -> int:
        """Bytes of scratch that this call takes."""
        return sum(self.scratch)
