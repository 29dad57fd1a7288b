"""What multiplies in the kernels for any GPU (cpp/kernels/product/simt/multiply.cuh, tensor.cuh), and tiles of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from jaxdnn.device import Target
from jaxdnn.pointwise.operations import NARROW_FLOATS

HALF = ("bfloat16", "float16")
LARGEST_SIZE = 2**31 - 2**16  # of rows and columns, which the kernels index with 32 bits


@dataclass(frozen=True)
class Atom:
    """The accumulators that are multiplied at once.

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


FMA = Atom(lanes=1, block=(4, 4), warp=(8, 4), step=1, itemsize=4, padding=4)
DOUBLE = Atom(lanes=32, block=(16, 8), warp=(1, 1), step=4, itemsize=8, padding=4)
TENSOR = Atom(lanes=32, block=(16, 16), warp=(1, 1), step=16, itemsize=2, padding=8)


class Tiles(Protocol):
    """Knobs of which tiles are made; the engines' own dataclasses say what each is."""

    @property
    def tile_m(self) -> int: ...
    @property
    def tile_n(self) -> int: ...
    @property
    def thread_m(self) -> int: ...
    @property
    def thread_n(self) -> int: ...
    @property
    def depth(self) -> int: ...


@dataclass(frozen=True)
class Loads:
    """How a stage's tile of a matrix is loaded.

    Attributes:
      extent: its rows, or columns.
      runs: whether memory runs along these, not along K.
      together: neighbours that a thread loads at once.
    """

    extent: int
    runs: bool
    together: int


def dtypes_reason(accumulator: str, a: str, b: str, target: Target) -> str | None:
    """Why a GPU's atoms don't multiply elements of two dtypes, or None."""
    if target.compute_capability < 80:
        return f"it needs compute capability 8.0 or later, and {target.name} is {target.arch}"
    served = {
        "float64": a == b == "float64",
        "int32": a == b == "int8",
        "float32": a == b == "float32" or (a in NARROW_FLOATS and b in NARROW_FLOATS),
    }
    if not served.get(accumulator, False):
        return f"it does not multiply {a} by {b} into {accumulator}"
    return None


def atom_of(accumulator: str, a: str, b: str) -> Atom:
    """What multiplies elements of two dtypes."""
    if accumulator == "float64":
        return DOUBLE
    return TENSOR if a in HALF and a == b else FMA


def threads(atom: Atom, knobs: Tiles, slices: int = 1) -> int:
    """Of a thread block, as many for each of the slices of a stage."""
    return slices * atom.lanes * knobs.tile_m * knobs.tile_n // (knobs.thread_m * knobs.thread_n)


def tiles_reason(atom: Atom, knobs: Tiles, loads: Sequence[Loads], slices: int = 1) -> str | None:
    """Why threads can't share the tiles of a and b, or None."""
    count = threads(atom, knobs, slices)
    for axis, tile, part, block, across in zip(
        "mn", (knobs.tile_m, knobs.tile_n), (knobs.thread_m, knobs.thread_n), atom.block, atom.warp, strict=True
    ):
        if part % block or tile % (part * across):
            return f"tile_{axis} is {tile} and thread_{axis} {part}; expected multiples of {part * across} and {block}"
    if not 32 <= count <= 1024:
        return f"a block would have {count} threads; expected 32 to 1024"
    for name, load in zip("ab", loads, strict=True):
        run = (load.extent if load.runs else knobs.depth) // load.together
        if run == 0 or count % run or (load.extent * knobs.depth) % (count * load.together):
            return f"{count} threads can't share tiles of {load.extent} x {knobs.depth} of {name} evenly"
    return None


def transposes(atom: Atom, runs: bool) -> bool:
    """Whether elements are transposed on their way to shared memory (product/simt/tile.cuh)."""
    return atom is FMA and not runs


def shared_memory(atom: Atom, knobs: Tiles, runs: Sequence[bool], stages: int) -> int:
    """Bytes of shared memory; what the kernel's own `kSharedBytes` says, which the unit asserts."""
    stage = 0
    for along, extent in zip(runs, (knobs.tile_m, knobs.tile_n), strict=True):
        rows_of_k = along or transposes(atom, along)
        rows, columns = (knobs.depth, extent) if rows_of_k else (extent, knobs.depth)
        stage += rows * (columns + atom.padding)
    pieces = knobs.thread_m if atom is FMA else knobs.thread_m // 8
    piece = knobs.tile_m // pieces * (knobs.tile_n + 4) * (8 if atom is DOUBLE else 4)
    return max(atom.itemsize * stages * stage, piece)
