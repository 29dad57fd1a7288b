"""matmul on any GPU, for operands of any layout and alignment.

float32 and int32 sums are exact, by ordinary arithmetic; so are float64 ones, on tensor cores. 16-bit floats are
multiplied on the tensor cores that compute capability 8.0 brought. The kernel is cpp/kernels/matmul_simt.cuh.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from jaxdnn.device import Target
from jaxdnn.engines.element_epilogue import (
    ElementEpilogue,
    Stage,
    ctype,
    element_epilogue,
    identity_sums,
    joined,
    reductions_reason,
    sums_stage,
)
from jaxdnn.engines.entry import Parameter, arguments, entry_text, numbers, struct_text
from jaxdnn.engines.product import Matrix, Product, ProductEngine, arguments_reason
from jaxdnn.engines.simt_knobs import (
    DOUBLE,
    HALF,
    TENSOR,
    SimtKnobs,
    blocks,
    knobs_reason,
    shared_memory,
    unit_of,
    vector,
)
from jaxdnn.plan import Launch, Plan
from jaxdnn.pointwise.cuda import register_type

LARGEST_SIZE = 2**31 - 2**16  # of m, n and k, which the kernel indexes with 32 bits
NARROW = (*HALF, "float8_e4m3fn", "float8_e5m2")

# Multiplications from which on cuBLAS makes up for an epilogue of its own: at 4096^3 in bfloat16 this kernel has 0.45
# of its speed on an H200.
_MANY = 2**30


class Simt(ProductEngine):
    """Products on any GPU, of any layout: all but 16-bit floats with ordinary arithmetic, or what rounds like it."""

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
        rounds = sums == "float32" and (pair != ("float32", "float32") or product.precision != "highest")
        if rounds and product.m * product.n * product.k * product.batch >= _MANY:
            return "XLA's kernels for tensor cores are faster for products this large, of what may be rounded"
        if max(product.m, product.n, product.k) >= LARGEST_SIZE:
            return "m, n or k is longer than its 32-bit index"
        if reason := arguments_reason(product.operands, product.results) or reductions_reason(product):
            return reason
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
    unit, sums = unit_of(product), len(product.b)
    along = (product.a_transposed, not product.b_transposed)
    matrices = (product.a, product.b[0])
    far = any(
        (knobs.depth if runs else tile) * matrix.row_stride * matrix.itemsize >= 2**32
        for matrix, runs, tile in zip(matrices, along, (knobs.tile_m, knobs.tile_n), strict=True)
    )
    types = {
        **epilogue.types(),
        "A": ctype(product.a.dtype),
        "B": ctype(product.b[0].dtype),
        "Sum": ctype(register_type(product.accumulator)),
    }
    constants = {
        "AlongM": along[0],
        "AlongN": along[1],
        "Far": far,
        "Half": unit is TENSOR,
        "Sums": sums,
        "TileM": knobs.tile_m,
        "TileN": knobs.tile_n,
        "ThreadM": knobs.thread_m,
        "ThreadN": knobs.thread_n,
        "Depth": knobs.depth,
        "Stages": knobs.stages,
        "VectorA": vector(unit, product.a, along[0]),
        "VectorB": min(vector(unit, b, along[1]) for b in product.b),
    }
    call = "jaxdnn::MatmulSimt<Config>"
    needed, threads = shared_memory(product, knobs), knobs.threads(unit)
    found = _matrix("a", "a", product.a)
    for i, b in enumerate(product.b):
        found += _matrix(f"b{i}", "b", b, f"[{i}]")
    found += epilogue.parameters()
    found += numbers(m=product.m, n=product.n, k=product.k, group=knobs.group)
    if knobs.split_k > 1:
        depth = math.ceil(product.k / (knobs.split_k * knobs.depth)) * knobs.depth
        found += numbers(splits=knobs.split_k, split_depth=depth)
    text = (
        f"\n{epilogue.text()}\n{struct_text('Config', types, constants)}\n"
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
    found = [replace(p, field=f"{field}_{p.name.rsplit('_')[-1]}{index}") for p in numbers("long long", **strides)]
    return [pointer, *found]


# ---- Heuristic -------------------------------------------------------------------------------------------------------

# All numbers were measured on an H200 with random data. A rate is of the first tile, 4096 x 4096 x 4096.
RATE = {"float32": 50e12, "int32": 29e12, "float64": 51e12}  # operations a second
TENSOR_RATE = 306e12
WARPS = 8  # of a multiprocessor that keep it busy
FEW_WARPS = 0.65  # with fewer, speed falls as this power: 4 are 0.64 as fast, at 512 x 512 x 8192
SUMS_LAUNCH = 5e-6  # seconds that the second kernel of a split takes at least
SUMS_RATE = 2.5e12  # bytes a second that sums of splits are written and read at


@dataclass(frozen=True)
class Shape:
    """A tile, and its speed relative to the first one when all multiprocessors are busy."""

    knobs: SimtKnobs
    speed: float


_LARGE, _WIDE = SimtKnobs(), SimtKnobs(tile_n=64, thread_n=8, resident=3)
_SMALL = (
    Shape(SimtKnobs(tile_m=64, tile_n=64, thread_n=8, resident=5), 0.92),
    Shape(SimtKnobs(tile_m=32, thread_m=4, thread_n=8, resident=4), 0.75),
    Shape(SimtKnobs(tile_m=32, tile_n=64, thread_m=4, thread_n=8, resident=8), 0.75),
)
# Microseconds at 4096 x 4096 x 4096 with stages of 16 and of 8: neither transposed 2777, 2861; A 3174, 2788; B 3107,
# 2938; both 2952, 2925. With the narrower tile and stages of 16: A 2768, B 2983, both 2814. Rows that are not aligned:
# 3470, with the narrower tile 3150.
_ALIGNED = (Shape(_LARGE, 1.0), Shape(_WIDE, 0.97), *_SMALL)
_A_TRANSPOSED = (Shape(_WIDE, 1.0), Shape(replace(_LARGE, depth=8, stages=4), 0.97), *_SMALL)
_B_TRANSPOSED = (Shape(replace(_LARGE, depth=8, stages=4), 0.94), Shape(_WIDE, 0.93), *_SMALL)
_UNALIGNED = (
    Shape(replace(_WIDE, depth=8, stages=4), 0.88),
    Shape(replace(_LARGE, depth=8, stages=4), 0.8),
    *(Shape(shape.knobs, 0.86 * shape.speed) for shape in _SMALL),
)
# What is converted on its way waits in registers.
_CONVERTED = tuple(
    Shape(replace(shape.knobs, depth=8, stages=2), shape.speed) for shape in (Shape(_LARGE, 1.0), *_SMALL)
)
_DOUBLE = (
    Shape(SimtKnobs(thread_m=32, thread_n=32, resident=1), 1.0),
    Shape(SimtKnobs(tile_m=64, thread_m=32, thread_n=64), 0.98),
    Shape(SimtKnobs(tile_m=64, tile_n=64, thread_m=32, thread_n=32, depth=8, stages=4, resident=3), 0.96),
    Shape(SimtKnobs(tile_m=32, tile_n=32, thread_m=16, thread_n=16, resident=4), 0.6),
)
_TENSOR = (
    Shape(SimtKnobs(thread_m=64, thread_n=64, depth=32), 1.0),
    Shape(SimtKnobs(tile_m=64, thread_m=32, thread_n=64, depth=32, resident=3), 0.72),
    Shape(SimtKnobs(tile_m=64, tile_n=64, thread_m=32, thread_n=32, depth=32, stages=4, resident=4), 0.58),
    Shape(SimtKnobs(tile_m=32, tile_n=64, thread_m=16, thread_n=32, depth=32, stages=4, resident=6), 0.42),
)
# 16-bit elements that have to be copied one by one wait in registers too.
_UNALIGNED_TENSOR = (
    Shape(SimtKnobs(tile_m=64, tile_n=64, thread_m=32, thread_n=32, depth=32, stages=2, resident=3), 0.33),
    Shape(SimtKnobs(tile_m=32, tile_n=64, thread_m=16, thread_n=32, depth=32, stages=2, resident=3), 0.2),
)


def shapes(product: Product) -> tuple[Shape, ...]:
    """Tiles for the product's dtypes, layout and alignment."""
    unit = unit_of(product)
    sides = ((product.a, product.a_transposed), *((b, not product.b_transposed) for b in product.b))
    together = min(vector(unit, matrix, along) for matrix, along in sides)
    if unit is DOUBLE:
        # 512 threads have 128 registers each, none of them for an epilogue, a transposed A or many addresses: 8 to 144
        # bytes spilled, with one version of NVRTC or another.
        spare = product.is_plain and len(product.b) == 1 and not product.a_transposed and together > 1
        return _DOUBLE if spare else _DOUBLE[1:]
    if unit is TENSOR:
        # Copies of few elements each have many addresses, for which the largest tile leaves no registers.
        return _UNALIGNED_TENSOR if together == 1 else _TENSOR if together > 2 else _TENSOR[1:]
    if product.a.itemsize < 4:
        return _CONVERTED
    if together == 1:
        return _UNALIGNED
    return _A_TRANSPOSED if product.a_transposed else _B_TRANSPOSED if product.b_transposed else _ALIGNED


def candidates(product: Product, target: Target) -> Iterator[SimtKnobs]:
    """Knobs that work for the product, by the time that is expected of them."""
    found: dict[SimtKnobs, float] = {}
    for shape in shapes(product):
        for split in splits(product, shape.knobs, target.sm_count * shape.knobs.resident):
            knobs = replace(shape.knobs, split_k=split)
            if knobs_reason(product, knobs, target) is None:
                found[knobs] = seconds(product, knobs, shape.speed, target.sm_count)
    return iter(sorted(found, key=found.__getitem__))


def splits(product: Product, knobs: SimtKnobs, slots: int) -> list[int]:
    """Into how many parts K may be cut to occupy more of the device: parts of at least 16 stages."""
    if knobs.threads(unit_of(product)) > 256:
        return [1]  # a part's place takes registers too: 40 bytes spilled with 512 threads
    most = min(slots // blocks(product, knobs), product.k // (16 * knobs.depth), 64)
    return [1, *(split for split in (2, 3, 4, 6, 8, 16, 32, 64) if split <= most)]


def seconds(product: Product, knobs: SimtKnobs, speed: float, sm_count: int) -> float:
    """An estimate of the time, for comparing knobs with each other."""
    unit = unit_of(product)
    each = math.ceil(blocks(product, knobs) / sm_count)  # blocks of a multiprocessor, one after the other or together
    warps = min(each, knobs.resident) * knobs.threads(unit) / 32
    rate = (TENSOR_RATE if unit is TENSOR else RATE[product.accumulator]) * speed * min(1.0, warps / WARPS) ** FEW_WARPS
    flops = 2 * knobs.tile_m * knobs.tile_n * math.ceil(product.k / knobs.split_k)
    time = each * sm_count * flops / rate
    if knobs.split_k > 1:
        sums = product.m * product.n * product.batch * len(product.b) * 4
        time += SUMS_LAUNCH + 2 * sums * knobs.split_k / SUMS_RATE
    return time
