"""matmul on any GPU, exactly: ordinary arithmetic in float32 and int32, float64's tensor cores, operands of any layout.

The kernel is cpp/kernels/matmul_simt.cuh.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from jaxdnn.device import Target
from jaxdnn.engines.element_epilogue import (
    MAX_GRID,
    ElementEpilogue,
    Parameter,
    Stage,
    arguments,
    config_text,
    ctype,
    element_epilogue,
    entry_text,
    identity_sums,
    joined,
    numbers,
    sums_stage,
)
from jaxdnn.engines.product import Matrix, Product, ProductEngine
from jaxdnn.plan import Launch, Plan
from jaxdnn.pointwise.cuda import register_type

PADDING = 4  # elements after each row of a tile in shared memory
COPY_BYTES = 16  # that one instruction may copy
TRANSPOSED = 4  # elements that one thread transposes together: stages of 8 rows are then free of bank conflicts
LARGEST_SIZE = 2**31 - 1024  # of m, n and k, which the kernel indexes with 32 bits
NARROW = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


@dataclass(frozen=True)
class SimtKnobs:
    """How a product is cut into tiles; cpp/kernels/matmul_simt.cuh draws it.

    Attributes:
      tile_m, tile_n: rows and columns of sums of a thread block.
      thread_m, thread_n: rows and columns of sums of a thread; of a warp where float64 is multiplied.
      depth: of K in a stage.
      stages: in flight.
      group: rows of tiles that are worked through together, for the L2 cache.
      split_k: parts of K that are summed apart, into scratch memory, and added by a second kernel.
      resident: thread blocks that a multiprocessor has registers for.
    """

    tile_m: int = 128
    tile_n: int = 128
    thread_m: int = 8
    thread_n: int = 16
    depth: int = 16
    stages: int = 3
    group: int = 8
    split_k: int = 1
    resident: int = 2

    def __post_init__(self) -> None:
        for name in ("tile_m", "tile_n", "thread_m", "thread_n", "depth", "stages", "group", "split_k", "resident"):
            if getattr(self, name) < 1:
                raise ValueError(f"simt matmul: {name} is {getattr(self, name)}; expected at least 1")
        if self.stages < 2:
            raise ValueError("simt matmul: stages is 1; expected at least 2")
        for name in ("tile_m", "tile_n", "depth"):
            if (value := getattr(self, name)) & (value - 1):
                raise ValueError(f"simt matmul: {name} is {value}; expected a power of two")

    def threads(self, double: bool) -> int:
        return (32 if double else 1) * self.tile_m * self.tile_n // (self.thread_m * self.thread_n)


def transposes(matrix: Matrix, along: bool) -> bool:
    """Whether elements are transposed on their way to shared memory (core/simt_tile.cuh)."""
    return not along and matrix.dtype != "float64"


def vector(matrix: Matrix, along: bool) -> int:
    """Neighbours that one copy takes, where all rows are so aligned."""
    most = COPY_BYTES // matrix.itemsize
    if transposes(matrix, along):
        most = min(most, TRANSPOSED)
    elif matrix.itemsize < 4:
        return 1  # converted one by one
    offset = matrix.buffer.offset // matrix.itemsize
    return math.gcd(most, matrix.columns, matrix.row_stride, matrix.batch_stride, offset)


def knobs_reason(product: Product, knobs: SimtKnobs, target: Target) -> str | None:
    """Why the knobs don't fit the product, or None."""
    double, sums = product.accumulator == "float64", len(product.b)
    multiply = "its float64 tensor cores take" if double else "a warp's lanes take"
    of_thread = (16, 8) if double else (4, 4)
    of_warp = (1, 1) if double else (8, 4)
    for axis, tile, part, unit, lanes in zip(
        "mn", (knobs.tile_m, knobs.tile_n), (knobs.thread_m, knobs.thread_n), of_thread, of_warp, strict=True
    ):
        if part % unit or tile % (part * lanes):
            return f"tile_{axis} is {tile} and thread_{axis} {part}; {multiply} multiples of {unit} x {lanes}"
    threads = knobs.threads(double)
    if not 32 <= threads <= 1024:
        return f"a block would have {threads} threads; expected 32 to 1024"
    sides = (
        (product.a, product.a_transposed, knobs.tile_m),
        (product.b[0], not product.b_transposed, knobs.tile_n // sums),
    )
    for name, (matrix, along, extent) in zip("ab", sides, strict=True):
        run = (extent if along else knobs.depth) // vector(matrix, along)
        if threads % max(1, run) or (extent * knobs.depth) % (threads * vector(matrix, along)):
            return f"{threads} threads can't share tiles of {extent} x {knobs.depth} of {name} evenly"
    if knobs.depth % (8 if double else 2):
        return f"depth is {knobs.depth}; expected a multiple of {8 if double else 2}"
    if knobs.split_k > math.ceil(product.k / knobs.depth):
        return f"split_k is {knobs.split_k}; k has {math.ceil(product.k / knobs.depth)} parts of {knobs.depth}"
    if blocks(product, knobs) > MAX_GRID:
        return f"it would take {blocks(product, knobs)} thread blocks, and a grid has at most {MAX_GRID}"
    if (needed := shared_memory(product, knobs)) > target.shared_memory:
        return f"it would use {needed} bytes of shared memory, and a block has {target.shared_memory}"
    return None


def blocks(product: Product, knobs: SimtKnobs) -> int:
    """Thread blocks of the grid."""
    rows = math.ceil(product.m / knobs.tile_m)
    columns = math.ceil(product.n * len(product.b) / knobs.tile_n)
    return rows * columns * product.batch * knobs.split_k


def shared_memory(product: Product, knobs: SimtKnobs) -> int:
    """Bytes of shared memory; what the kernel's own `kSharedBytes` says, which the unit asserts."""
    double, stage = product.accumulator == "float64", 0
    for matrix, along, extent in (
        (product.a, product.a_transposed, knobs.tile_m),
        (product.b[0], not product.b_transposed, knobs.tile_n),
    ):
        rows_of_k = along or transposes(matrix, along)
        rows, columns = (knobs.depth, extent) if rows_of_k else (extent, knobs.depth)
        stage += rows * (columns + PADDING)
    pieces = knobs.thread_m // 8 if double else knobs.thread_m
    piece = knobs.tile_m // pieces * (knobs.tile_n + PADDING)
    return (8 if double else 4) * max(knobs.stages * stage, piece)


class Simt(ProductEngine):
    """Exact products on any GPU: float32 and int32 with ordinary arithmetic, float64 on its tensor cores."""

    name = "simt"
    platform = "cuda"
    notes = ("deterministic", "exact float32, int32 and float64 arithmetic")

    def reason(self, product: Product, target: Target) -> str | None:
        if target.compute_capability < 80:
            return f"it needs compute capability 8.0 or later, and {target.name} is {target.arch}"
        pair, sums = (product.a.dtype, product.b[0].dtype), product.accumulator
        served = {
            "float64": pair == ("float64", "float64"),
            "int32": pair == ("int8", "int8"),
            "float32": pair == ("float32", "float32") or (pair[0] in NARROW and pair[1] in NARROW),
        }
        if not served.get(sums, False):
            return f"it does not multiply {pair[0]} by {pair[1]} into {sums}"
        if max(product.m, product.n, product.k) >= LARGEST_SIZE:
            return "m, n or k is longer than its 32-bit index"
        if not any(True for _ in self.configurations(product, target)):
            return "it has no configuration of as few thread blocks as a grid may have"
        return None

    def configurations(self, product: Product, target: Target) -> Iterable[SimtKnobs]:
        return candidates(product, target)

    def build(self, config: SimtKnobs, product: Product, target: Target, title: str) -> Plan:
        splits = config.split_k
        if splits == 1:
            epilogue, after = element_epilogue(product, 0)
            stages = [_multiply(product, config, epilogue), after]
        else:
            epilogue, after = element_epilogue(product, len(product.b))
            stages = [_multiply(product, config, identity_sums(product)), sums_stage(product, epilogue, splits), after]
        plan = joined(stages)
        return Plan(
            op=title,
            unit="".join(f'#include "{header}"\n' for header in plan.headers) + plan.text,
            arch="sm_90a" if target.compute_capability == 90 else target.arch,
            launches=plan.launches,
            scratch=plan.scratch,
        )


def _multiply(product: Product, knobs: SimtKnobs, epilogue: ElementEpilogue) -> Stage:
    """The kernel that multiplies, and what follows each sum (or each split's sum)."""
    double, sums = product.accumulator == "float64", len(product.b)
    along = (product.a_transposed, not product.b_transposed)
    matrices = (product.a, product.b[0])
    far = any(
        (knobs.depth if runs else tile) * matrix.row_stride * matrix.itemsize >= 2**32
        for matrix, runs, tile in zip(matrices, along, (knobs.tile_m, knobs.tile_n), strict=True)
    )
    lines = [
        *epilogue.config(),
        f"using A = {ctype(product.a.dtype)};",
        f"using B = {ctype(product.b[0].dtype)};",
        f"using Sum = {ctype(register_type(product.accumulator))};",
    ]
    flags = {"AlongM": along[0], "AlongN": along[1], "Far": far}
    lines += [f"static constexpr bool k{name} = {str(value).lower()};" for name, value in flags.items()]
    sizes = {
        "Sums": sums,
        "TileM": knobs.tile_m,
        "TileN": knobs.tile_n,
        "ThreadM": knobs.thread_m,
        "ThreadN": knobs.thread_n,
        "Depth": knobs.depth,
        "Stages": knobs.stages,
        "VectorA": vector(product.a, along[0]),
        "VectorB": min(vector(b, along[1]) for b in product.b),
    }
    lines += [f"static constexpr int k{name} = {value};" for name, value in sizes.items()]
    call = "jaxdnn::MatmulSimt<Config>"
    needed, threads = shared_memory(product, knobs), knobs.threads(double)
    found = _matrix("a", "a", product.a)
    for i, b in enumerate(product.b):
        found += _matrix(f"b{i}", "b", b, f"[{i}]")
    found += epilogue.parameters()
    found += numbers(m=product.m, n=product.n, k=product.k, group=knobs.group)
    if knobs.split_k > 1:
        depth = math.ceil(product.k / (knobs.split_k * knobs.depth)) * knobs.depth
        found += numbers(splits=knobs.split_k, split_depth=depth)
    text = (
        f"\n{epilogue.text()}\n{config_text('Config', lines)}\n"
        f"static_assert({call}::kSharedBytes == {needed}, "
        '"the plan and the kernel disagree about shared memory");\n\n'
        + entry_text("matmul_simt", call, f"{threads}, {knobs.resident}", found)
    )
    launch = Launch(
        "matmul_simt",
        arguments(found),
        (blocks(product, knobs), 1, 1),
        (threads, 1, 1),
        shared_memory=needed,
    )
    return Stage(("matmul_simt.cuh",), text, (launch,))


def _matrix(name: str, field: str, matrix: Matrix, index: str = "") -> list[Parameter]:
    """The address and strides of an operand."""
    pointer = Parameter(f"const {ctype(matrix.dtype)}*", name, f"{field}{index}", matrix.buffer)
    strides = {f"{name}_stride": matrix.row_stride, f"{name}_batch": matrix.batch_stride}
    found = [replace(p, field=f"{field}_{p.name.rsplit('_')[-1]}{index}") for p in numbers("int64", **strides)]
    return [pointer, *found]


# ---- Heuristic -------------------------------------------------------------------------------------------------------

RATE = {"float32": 50e12, "int32": 25e12, "float64": 55e12}  # operations a second of the largest tile
SUMS_LAUNCH = 4e-6  # seconds that the second kernel of a split takes at least
SUMS_RATE = 2.5e12  # bytes a second that sums of splits are written and read at


@dataclass(frozen=True)
class Shape:
    """A tile, and its speed relative to the first one."""

    knobs: SimtKnobs
    speed: float


_SINGLE = (
    Shape(SimtKnobs(), 1.0),
    Shape(SimtKnobs(tile_n=64, thread_n=8, resident=3), 0.85),
    Shape(SimtKnobs(tile_m=64, tile_n=64, thread_n=8, resident=6), 0.8),
    Shape(SimtKnobs(tile_m=32, thread_m=4, thread_n=8, resident=4), 0.6),
    Shape(SimtKnobs(tile_m=32, tile_n=64, thread_m=4, thread_n=8, resident=8), 0.55),
)
_DOUBLE = (
    Shape(SimtKnobs(thread_m=32, thread_n=64, resident=1), 1.0),
    Shape(SimtKnobs(tile_m=64, tile_n=64, thread_m=32, thread_n=32, resident=3), 0.9),
    Shape(SimtKnobs(tile_m=32, tile_n=32, thread_m=16, thread_n=16, resident=4), 0.6),
)


def candidates(product: Product, target: Target) -> Iterator[SimtKnobs]:
    """Knobs that work for the product, by the time that is expected of them."""
    found: dict[SimtKnobs, float] = {}
    for shape in _DOUBLE if product.accumulator == "float64" else _SINGLE:
        knobs = shape.knobs
        if product.a.itemsize < 4:  # what is converted on its way waits in registers
            knobs = replace(knobs, depth=8, stages=2)
        slots = target.sm_count * knobs.resident
        for split in splits(product, knobs, slots):
            choice = replace(knobs, split_k=split)
            if knobs_reason(product, choice, target) is None:
                found[choice] = seconds(product, choice, shape, slots)
    return iter(sorted(found, key=found.__getitem__))


def splits(product: Product, knobs: SimtKnobs, slots: int) -> list[int]:
    """Into how many parts K may be cut to occupy more of the device: parts of at least 16 stages."""
    most = min(slots // blocks(product, knobs), product.k // (16 * knobs.depth), 64)
    return [1, *(split for split in (2, 3, 4, 6, 8, 16, 32, 64) if split <= most)]


def seconds(product: Product, knobs: SimtKnobs, shape: Shape, slots: int) -> float:
    """An estimate of the time, for comparing knobs with each other."""
    rounds = math.ceil(blocks(product, knobs) / slots)
    flops = 2 * knobs.tile_m * knobs.tile_n * math.ceil(product.k / knobs.split_k) * slots * rounds
    time = flops / (RATE[product.accumulator] * shape.speed)
    if knobs.split_k > 1:
        sums = product.m * product.n * product.batch * len(product.b) * 4
        time += SUMS_LAUNCH + 2 * sums * knobs.split_k / SUMS_RATE
    return time
