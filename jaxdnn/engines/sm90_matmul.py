"""Knobs of the Hopper matmul kernel (cpp/kernels/matmul_sm90.cuh), and the unit and launch that they make."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from jaxdnn.plan import Argument, Launch, Operand, Result, Scalar, Scratch, TensorMap

DEPTH_BYTES = 128  # of K in a stage
CHUNK = 64  # elements of a row that runs along M or N, in one box
WARP_ROWS = 16  # of a result's box
TILE_WIDTHS = (64, 96, 128, 160, 192, 224, 256)  # columns of a multiply that core/wgmma.cuh has
MULTIPLIES = {("bfloat16", "bfloat16"), ("float16", "float16"), ("float32", "float32")} | {
    (a, b) for a in ("float8_e4m3fn", "float8_e5m2") for b in ("float8_e4m3fn", "float8_e5m2")
}
OPERAND_DTYPES = ("bfloat16", "float16", "float32")  # of an epilogue's operands and results
IDENTITY = """struct Epilogue {
    static void apply(const float (&sum)[1], const float (&)[1], const jaxdnn::Place&, float (&result)[1]) {
        result[0] = sum[0];
    }
};
"""

# Values of CUtensorMapDataType, CUtensorMapSwizzle and CUtensorMapL2promotion.
_MAP_DTYPE = {"float16": 6, "bfloat16": 9, "float32": 7, "float8_e4m3fn": 0, "float8_e5m2": 0}
_TFLOAT32 = 11
_SWIZZLE = {64: 2, 128: 3}
_PROMOTE_256 = 3


@dataclass(frozen=True)
class Sm90Knobs:
    """How a product is cut into tiles, and who works on them; cpp/kernels/matmul_sm90.cuh draws it.

    Attributes:
      tile_m, tile_n: rows and columns of a result's tile.
      stages: parts of K in flight, 128 bytes of each row.
      cluster_m, cluster_n: neighbouring tiles whose thread blocks share what they load.
      consumers: warp groups that multiply.
      schedule: "cooperative": they share a tile. "pingpong": two take every other tile, and one's epilogue runs behind
        the other's multiplies.
      group: rows of clusters' tiles that are worked through together, for the L2 cache.
      store: "tma": results leave through shared memory and the copy engine. "direct": straight from registers.
      slots: pieces of results, each 16 rows of a warp, that wait for the copy engine.
    """

    tile_m: int = 128
    tile_n: int = 256
    stages: int = 4
    cluster_m: int = 2
    cluster_n: int = 1
    consumers: int = 2
    schedule: Literal["cooperative", "pingpong"] = "cooperative"
    group: int = 8
    store: Literal["tma", "direct"] = "tma"
    slots: int = 2

    def __post_init__(self) -> None:
        for name in ("tile_m", "tile_n", "stages", "cluster_m", "cluster_n", "consumers", "group", "slots"):
            if getattr(self, name) < 1:
                raise ValueError(f"sm90 matmul: {name} is {getattr(self, name)}; expected at least 1")
        if self.consumer_rows not in (64, 128):
            raise ValueError(
                f"sm90 matmul: a warp group would have {self.consumer_rows} rows of the tile; expected 64 or 128"
            )
        if self.schedule == "pingpong" and self.consumers != 2:
            raise ValueError(f"sm90 matmul: pingpong needs consumers = 2; got {self.consumers}")
        if self.consumers > 3:
            raise ValueError(f"sm90 matmul: consumers is {self.consumers}; expected at most 3")
        if self.cluster_m * self.cluster_n not in (1, 2, 4):
            raise ValueError(f"sm90 matmul: a cluster has {self.cluster_m * self.cluster_n} blocks; expected 1, 2 or 4")

    @property
    def consumer_rows(self) -> int:
        return self.tile_m if self.schedule == "pingpong" else self.tile_m // self.consumers

    @property
    def threads(self) -> int:
        return 128 * (self.consumers + 1)


@dataclass(frozen=True)
class Matrix:
    """An array of matrices in memory: rows of dense columns. Strides count elements; one of 0 repeats the matrix."""

    buffer: Operand | Result | Scratch
    dtype: str
    rows: int
    columns: int
    row_stride: int
    batch_stride: int = 0

    @property
    def itemsize(self) -> int:
        return np.dtype(self.dtype).itemsize

    def tma_reason(self, what: str) -> str | None:
        """Why the copy engine can't read or write it, or None."""
        strides = {"row": self.row_stride, "batch": self.batch_stride}
        if self.buffer.offset % 16:
            return f"{what} starts at byte {self.buffer.offset} of its buffer, and TMA needs a multiple of 16"
        for name, stride in strides.items():
            if stride * self.itemsize % 16:
                return f"the {name} stride of {what} is {stride * self.itemsize} bytes, and TMA needs a multiple of 16"
            if stride * self.itemsize >= 2**40:
                return f"the {name} stride of {what} is {stride * self.itemsize} bytes, and TMA has 40 bits for it"
        return None

    def tensor_map(self, batch: int, box: tuple[int, int], swizzle: int, dtype: int | None = None) -> TensorMap:
        batched = self.batch_stride != 0 and batch > 1
        row = self.row_stride * self.itemsize
        return TensorMap(
            buffer=self.buffer,
            dtype=_MAP_DTYPE[self.dtype] if dtype is None else dtype,
            dimensions=(self.columns, self.rows, batch if batched else 1),
            strides=(row, self.batch_stride * self.itemsize if batched else row * self.rows),
            box=(*box, 1),
            element_strides=(1, 1, 1),
            swizzle=swizzle,
            l2_promotion=_PROMOTE_256,
        )


@dataclass(frozen=True)
class EpilogueOperand:
    """An array that the epilogue reads, as one value ("scalar"), one a column ("row"), one a row ("column") or "full".

    Strides count elements; a batch stride of 0 means the same for the whole batch.
    """

    buffer: Operand
    dtype: str
    broadcast: Literal["scalar", "row", "column", "full"]
    row_stride: int = 0
    batch_stride: int = 0

    @property
    def pairs(self) -> bool:
        """Whether pairs of columns, starting at an even one, are aligned words."""
        return not (self.buffer.offset // np.dtype(self.dtype).itemsize | self.row_stride | self.batch_stride) & 1


@dataclass(frozen=True)
class Product:
    """results = epilogue(a @ b[0], a @ b[1], ..., operands...), for each matrix of a batch.

    Attributes:
      m, n, k, batch: sizes of one product, and how many.
      a: (m, k) in memory, or (k, m) if `a_transposed`.
      b: one or two, each (k, n) in memory, or (n, k) if `b_transposed`.
      results: each (m, n); their rows and batches are dense.
      epilogue: CUDA source of `struct Epilogue` (core/epilogue.cuh).
    """

    m: int
    n: int
    k: int
    batch: int
    a: Matrix
    b: tuple[Matrix, ...]
    results: tuple[Matrix, ...]
    a_transposed: bool = False
    b_transposed: bool = False
    operands: tuple[EpilogueOperand, ...] = ()
    epilogue: str = IDENTITY

    @property
    def depth(self) -> int:
        """Elements of K in a stage."""
        return DEPTH_BYTES // self.a.itemsize

    @property
    def paired(self) -> bool:
        """Whether a direct store may write pairs of columns."""
        return self.n % 2 == 0


def tma_reason(product: Product) -> str | None:
    """Why the kernel can't serve the product, or None."""
    pair = (product.a.dtype, product.b[0].dtype)
    if pair not in MULTIPLIES:
        return f"Hopper's tensor cores don't multiply {pair[0]} by {pair[1]}"
    if min(product.m, product.n, product.k, product.batch) == 0:
        return "the arrays have no elements"
    if max(product.m, product.n, product.k, product.batch) >= 2**31 - 1024:
        return "a dimension is longer than its 32-bit index"
    if product.a.itemsize != 2 and (product.a_transposed or not product.b_transposed):
        return f"Hopper's tensor cores want the rows of {product.a.dtype} operands to run along k"
    for name, matrices in (("a", (product.a,)), ("b", product.b)):
        for matrix in matrices:
            if reason := matrix.tma_reason(name):
                return reason
    for array in (*product.operands, *product.results):
        if array.dtype not in OPERAND_DTYPES:
            return f"its epilogue reads and writes {', '.join(OPERAND_DTYPES)}, and an array is {array.dtype}"
    return None


def knobs_reason(product: Product, knobs: Sm90Knobs, shared_memory_limit: int) -> str | None:
    """Why the knobs don't fit the product, or None."""
    width = knobs.tile_n * len(product.b)
    if width not in TILE_WIDTHS:
        return f"its tiles multiply {width} columns at once; expected one of {TILE_WIDTHS}"
    if not product.b_transposed and knobs.tile_n % CHUNK:
        return f"tile_n is {knobs.tile_n}; b of (k, n) needs a multiple of {CHUNK}"
    for name, along, extent, sharers in (
        ("cluster_n", product.a_transposed, knobs.tile_m, knobs.cluster_n),
        ("cluster_m", not product.b_transposed, knobs.tile_n, knobs.cluster_m),
    ):
        if (product.depth if along else extent) % (8 * sharers):
            return f"{name} is {sharers}; its blocks can't share a tile of {extent} in groups of 8 lines"
    if knobs.consumer_rows // 64 * width > 384:
        return f"a warp group would hold {knobs.consumer_rows} x {width} sums; expected at most 64 x 256 or 128 x 192"
    if knobs.store == "tma":
        for result in product.results:
            if reason := result.tma_reason("a result"):
                return f"{reason}; expected store = 'direct'"
    if (needed := shared_memory(product, knobs)) > shared_memory_limit:
        return f"it would use {needed} bytes of shared memory, and a block has {shared_memory_limit}"
    return None


def store_columns(product: Product, knobs: Sm90Knobs) -> int:
    """Columns of a piece of results."""
    return 64 if knobs.tile_n % 64 == 0 and all(result.itemsize == 2 for result in product.results) else 32


def shared_memory(product: Product, knobs: Sm90Knobs) -> int:
    """Bytes of shared memory; what the kernel's own `kSharedBytes` says, which the unit asserts."""
    stage = DEPTH_BYTES * (knobs.tile_m + knobs.tile_n * len(product.b))
    piece = WARP_ROWS * store_columns(product, knobs) * sum(result.itemsize for result in product.results)
    slots = 4 * knobs.consumers * knobs.slots * piece if knobs.store == "tma" else 0
    return knobs.stages * stage + slots + knobs.stages * 16


def config_text(product: Product, knobs: Sm90Knobs) -> str:
    """The text of the `Config` structure."""
    operands = ", ".join(
        f"jaxdnn::EpilogueOperand<jaxdnn::{operand.dtype}, jaxdnn::Broadcast::{operand.broadcast}, "
        f"{str(operand.pairs and (operand.broadcast != 'row' or product.n % 2 == 0)).lower()}>"
        for operand in product.operands
    )
    types = {
        "A": f"jaxdnn::{product.a.dtype}",
        "B": f"jaxdnn::{product.b[0].dtype}",
        "Epilogue": "::Epilogue",
        "Operands": f"jaxdnn::TypeList<{operands}>",
        "Results": "jaxdnn::TypeList<" + ", ".join(f"jaxdnn::{result.dtype}" for result in product.results) + ">",
    }
    flags = {
        "AlongM": product.a_transposed,
        "AlongN": not product.b_transposed,
        "Pingpong": knobs.schedule == "pingpong",
        "TensorStore": knobs.store == "tma",
        "PairedStore": product.paired,
    }
    numbers = {
        "TileM": knobs.tile_m,
        "TileN": knobs.tile_n * len(product.b),
        "Stages": knobs.stages,
        "ClusterM": knobs.cluster_m,
        "ClusterN": knobs.cluster_n,
        "Consumers": knobs.consumers,
        "Sums": len(product.b),
        "StoreColumns": store_columns(product, knobs),
        "Slots": knobs.slots,
    }
    lines = [f"    using {name} = {text};" for name, text in types.items()]
    lines += [f"    static constexpr bool k{name} = {str(value).lower()};" for name, value in flags.items()]
    lines += [f"    static constexpr int k{name} = {value};" for name, value in numbers.items()]
    return "struct Config {\n" + "\n".join(lines) + "\n};\n"


@dataclass(frozen=True)
class Parameter:
    """A parameter of the kernel's entry point: its declaration, what it sets in the kernel's call, its argument."""

    ctype: str
    name: str
    field: str
    argument: Argument

    @property
    def is_map(self) -> bool:
        return isinstance(self.argument, TensorMap)


def parameters(product: Product, knobs: Sm90Knobs) -> list[Parameter]:
    """The entry point's parameters, in order."""
    map_type = "const __grid_constant__ jaxdnn::TensorMap"
    dtype = _TFLOAT32 if product.a.dtype == "float32" else None

    def load_map(matrix: Matrix, along: bool, extent: int, sharers: int) -> TensorMap:
        box = (CHUNK, product.depth // sharers) if along else (product.depth, extent // sharers)
        return matrix.tensor_map(product.batch, box, _SWIZZLE[128], dtype)

    found = [Parameter(map_type, "a", "a", load_map(product.a, product.a_transposed, knobs.tile_m, knobs.cluster_n))]
    for i, b in enumerate(product.b):
        argument = load_map(b, not product.b_transposed, knobs.tile_n, knobs.cluster_m)
        found.append(Parameter(map_type, f"b{i}", f"b[{i}]", argument))
    columns = store_columns(product, knobs)
    for i, result in enumerate(product.results):
        if knobs.store == "tma":
            argument = result.tensor_map(product.batch, (columns, WARP_ROWS), _SWIZZLE[columns * result.itemsize])
            found.append(Parameter(map_type, f"result{i}", f"results[{i}].map", argument))
        else:
            ctype = f"jaxdnn::{result.dtype}*"
            found.append(Parameter(ctype, f"result{i}", f"results[{i}].data", result.buffer))
    for i, operand in enumerate(product.operands):
        ctype = f"const jaxdnn::{operand.dtype}*"
        found.append(Parameter(ctype, f"operand{i}", f"operands[{i}].data", operand.buffer))
        strides = {"row_stride": 1 if operand.broadcast == "column" else operand.row_stride}
        strides["batch_stride"] = operand.batch_stride
        for name, stride in strides.items():
            if stride:
                field = f"operands[{i}].{name}"
                found.append(Parameter("long long", f"operand{i}_{name}", field, Scalar("int64", stride)))
    sizes = {"m": product.m, "n": product.n, "k": product.k, "batches": product.batch, "group": knobs.group}
    sizes |= {"a_batched": int(product.a.batch_stride != 0), "b_batched": int(product.b[0].batch_stride != 0)}
    found += [Parameter("int", name, name, Scalar("int32", size)) for name, size in sizes.items()]
    return found


def unit_text(product: Product, knobs: Sm90Knobs, found: Sequence[Parameter]) -> str:
    """The translation unit: the functor, the configuration and the entry point."""
    call = "jaxdnn::MatmulSm90<Config>"
    return (
        '#include "matmul_sm90.cuh"\n\n'
        + product.epilogue
        + "\n"
        + config_text(product, knobs)
        + f"static_assert({call}::kSharedBytes == {shared_memory(product, knobs)}, "
        '"the plan and the kernel disagree about shared memory");\n\n'
        + f'extern "C" __global__ void __launch_bounds__({knobs.threads}, 1)\nmatmul('
        + ", ".join(f"{p.ctype} {p.name}" for p in found)
        + f") {{\n    {call} call;\n"
        + "".join(f"    call.{p.field} = {'&' if p.is_map else ''}{p.name};\n" for p in found)
        + "    jaxdnn::matmul_sm90(call);\n}\n"
    )


def build(product: Product, knobs: Sm90Knobs, sm_count: int) -> tuple[str, Launch]:
    """The unit and the launch of one product."""
    found = parameters(product, knobs)
    cluster = knobs.cluster_m * knobs.cluster_n
    rows = math.ceil(product.m / (knobs.tile_m * knobs.cluster_m))
    columns = math.ceil(product.n / (knobs.tile_n * knobs.cluster_n))
    tiles = rows * columns * product.batch
    # As few clusters as take no more rounds than all of them would: a tail's idle blocks would only warm the chip.
    rounds = math.ceil(tiles / max(1, sm_count // cluster))
    clusters = math.ceil(tiles / rounds)
    launch = Launch(
        kernel="matmul",
        arguments=tuple(p.argument for p in found),
        grid=(clusters * cluster, 1, 1),
        block=(knobs.threads, 1, 1),
        cluster=(cluster, 1, 1),
        shared_memory=shared_memory(product, knobs),
    )
    return unit_text(product, knobs, found), launch
