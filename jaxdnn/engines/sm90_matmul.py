"""Knobs of the Hopper matmul kernel (cpp/kernels/matmul_sm90.cuh), and the unit and launches that they make."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from jaxdnn.engines.sm90_product import DEPTH_BYTES, SWIZZLE, TFLOAT32, Matrix, Product, identity
from jaxdnn.plan import Argument, Launch, Scalar, Scratch, TensorMap

CHUNK = 64  # elements of a row that runs along M or N, in one box
WARP_ROWS = 16  # of a result's box
TILE_WIDTHS = (64, 96, 128, 160, 192, 224, 256)  # columns of a multiply that core/wgmma.cuh has
SPLIT_THREADS = 256  # of matmul_split.cuh
MAX_GRID_YZ = 65535


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
      stagger: stages that the other consumers of a shared tile start behind the first, which hides a part of each one's
        epilogue.
      group: rows of clusters' tiles that are worked through together, for the L2 cache.
      split_k: parts of K that are summed apart, into scratch memory, and added by a second kernel.
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
    stagger: int = 0
    group: int = 8
    split_k: int = 1
    store: Literal["tma", "direct"] = "tma"
    slots: int = 2

    def __post_init__(self) -> None:
        for name in ("tile_m", "tile_n", "stages", "cluster_m", "cluster_n", "consumers", "group", "split_k", "slots"):
            if getattr(self, name) < 1:
                raise ValueError(f"sm90 matmul: {name} is {getattr(self, name)}; expected at least 1")
        if self.consumer_rows not in (64, 128):
            raise ValueError(
                f"sm90 matmul: a warp group would have {self.consumer_rows} rows of the tile; expected 64 or 128"
            )
        if self.schedule == "pingpong" and self.consumers != 2:
            raise ValueError(f"sm90 matmul: pingpong needs consumers = 2; got {self.consumers}")
        if not 0 <= self.stagger < self.stages or (self.stagger and self.schedule == "pingpong"):
            raise ValueError(
                f"sm90 matmul: stagger is {self.stagger}; expected less than the stages, and 0 with pingpong"
            )
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
    if knobs.split_k > math.ceil(product.k / product.depth):
        return f"split_k is {knobs.split_k}; k has {math.ceil(product.k / product.depth)} parts"
    if product.batch * knobs.split_k > MAX_GRID_YZ and knobs.split_k > 1:
        return f"split_k x batch is {product.batch * knobs.split_k}; expected at most {MAX_GRID_YZ}"
    if knobs.consumers == 3 and knobs.consumer_rows // 64 * width > 192:
        return f"three warp groups would hold {knobs.consumer_rows} x {width} sums each; expected at most 64 x 192"
    if knobs.consumer_rows // 64 * width > 384:
        return f"a warp group would hold {knobs.consumer_rows} x {width} sums; expected at most 128 x 192"
    if knobs.store == "tma":
        if knobs.split_k > 1 and product.n % 4:
            return f"n is {product.n}, and TMA needs rows of sums of a multiple of 16 bytes; expected store = 'direct'"
        for result in product.results:
            if knobs.split_k == 1 and (reason := result.tma_reason("a result")):
                return f"{reason}; expected store = 'direct'"
    multiplied = sums_of(product) if knobs.split_k > 1 else product
    if (needed := shared_memory(multiplied, knobs)) > shared_memory_limit:
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
    """The text of the `Config` structure of a product's kernel."""
    flags = {
        "AlongM": product.a_transposed,
        "AlongN": not product.b_transposed,
        "Pingpong": knobs.schedule == "pingpong",
        "TensorStore": knobs.store == "tma",
        "PairedStore": product.n % 2 == 0,
    }
    numbers = {
        "TileM": knobs.tile_m,
        "TileN": knobs.tile_n * len(product.b),
        "Stages": knobs.stages,
        "ClusterM": knobs.cluster_m,
        "ClusterN": knobs.cluster_n,
        "Consumers": knobs.consumers,
        "Stagger": knobs.stagger,
        "StoreColumns": store_columns(product, knobs),
        "Slots": knobs.slots,
    }
    lines = [f"    using A = jaxdnn::{product.a.dtype};", f"    using B = jaxdnn::{product.b[0].dtype};"]
    lines += [f"    static constexpr bool k{name} = {str(value).lower()};" for name, value in flags.items()]
    lines += [f"    static constexpr int k{name} = {value};" for name, value in numbers.items()]
    return "struct Config : Traits {\n" + "\n".join(lines) + "\n};\n"


def traits_text(product: Product, functor: str) -> str:
    """The structure that says what the epilogue reads and writes."""
    operands = ", ".join(
        f"jaxdnn::EpilogueOperand<jaxdnn::{operand.dtype}, jaxdnn::Broadcast::{operand.broadcast}, "
        f"{str(operand.pairs and (operand.broadcast != 'row' or product.n % 2 == 0)).lower()}>"
        for operand in product.operands
    )
    results = ", ".join(f"jaxdnn::{result.dtype}" for result in product.results)
    return (
        f"struct Traits {{\n    using Epilogue = ::{functor};\n    using Operands = jaxdnn::TypeList<{operands}>;\n"
        f"    using Results = jaxdnn::TypeList<{results}>;\n    static constexpr int kSums = {len(product.b)};\n}};\n"
    )


@dataclass(frozen=True)
class Parameter:
    """A parameter of a kernel's entry point: its declaration, what it sets in the kernel's call, its argument."""

    ctype: str
    name: str
    field: str
    argument: Argument

    @property
    def is_map(self) -> bool:
        return isinstance(self.argument, TensorMap)


_MAP = "const __grid_constant__ jaxdnn::TensorMap"


def load_parameters(product: Product, knobs: Sm90Knobs) -> list[Parameter]:
    """The tensor maps of a and b."""
    dtype = TFLOAT32 if product.a.dtype == "float32" else None

    def load_map(matrix: Matrix, along: bool, extent: int, sharers: int) -> TensorMap:
        box = (CHUNK, product.depth // sharers) if along else (product.depth, extent // sharers)
        return matrix.tensor_map(product.batch, box, SWIZZLE[128], dtype)

    a = Parameter(_MAP, "a", "a", load_map(product.a, product.a_transposed, knobs.tile_m, knobs.cluster_n))
    return [a] + [
        Parameter(_MAP, f"b{i}", f"b[{i}]", load_map(b, not product.b_transposed, knobs.tile_n, knobs.cluster_m))
        for i, b in enumerate(product.b)
    ]


def operand_parameters(product: Product) -> list[Parameter]:
    """The epilogue's operands, with those strides that are not zero."""
    found = []
    for i, operand in enumerate(product.operands):
        ctype = f"const jaxdnn::{operand.dtype}*"
        found.append(Parameter(ctype, f"operand{i}", f"operands[{i}].data", operand.buffer))
        strides = {"row_stride": 1 if operand.broadcast == "column" else operand.row_stride}
        strides["batch_stride"] = operand.batch_stride
        for name, stride in strides.items():
            if stride:
                argument = Scalar("int64", stride)
                found.append(Parameter("long long", f"operand{i}_{name}", f"operands[{i}].{name}", argument))
    return found


def result_parameters(product: Product, knobs: Sm90Knobs, batch: int) -> list[Parameter]:
    """The results' tensor maps, or their addresses."""
    columns = store_columns(product, knobs)
    found = []
    for i, result in enumerate(product.results):
        if knobs.store == "tma":
            argument = result.tensor_map(batch, (columns, WARP_ROWS), SWIZZLE[columns * result.itemsize])
            found.append(Parameter(_MAP, f"result{i}", f"results[{i}].map", argument))
        else:
            found.append(pointer(result, f"result{i}", f"results[{i}].data"))
    return found


def pointer(matrix: Matrix, name: str, field: str, const: bool = False) -> Parameter:
    """The address of a matrix."""
    return Parameter(f"{'const ' if const else ''}jaxdnn::{matrix.dtype}*", name, field, matrix.buffer)


def numbers(**values: int) -> list[Parameter]:
    """Integers of the kernel's call."""
    return [Parameter("int", name, name, Scalar("int32", value)) for name, value in values.items()]


def entry_text(kernel: str, call: str, threads: int, blocks: str, found: Sequence[Parameter]) -> str:
    """An entry point that fills in the kernel's call."""
    return (
        f'extern "C" __global__ void __launch_bounds__({threads}{blocks})\n{kernel}('
        + ", ".join(f"{p.ctype} {p.name}" for p in found)
        + f") {{\n    {call} call;\n"
        + "".join(f"    call.{p.field} = {'&' if p.is_map else ''}{p.name};\n" for p in found)
        + f"    jaxdnn::{kernel}(call);\n}}\n"
    )


def sums_of(product: Product) -> Product:
    """The product whose results are the sums of a split of K, one after the other in scratch memory."""
    m, n = product.m, product.n
    sums = tuple(Matrix(Scratch(i), "float32", m, n, n, m * n) for i in range(len(product.b)))
    return replace(product, results=sums, operands=(), epilogue=identity(len(sums)))


def build(product: Product, knobs: Sm90Knobs, sm_count: int) -> tuple[str, tuple[Launch, ...], tuple[int, ...]]:
    """The unit, the launches and the sizes of the scratch buffers of one product."""
    if knobs.split_k == 1:
        text, launch = product_launch(product, knobs, sm_count)
        head = '#include "matmul_sm90.cuh"\n\n'
        return head + product.epilogue + "\n" + traits_text(product, "Epilogue") + "\n" + text, (launch,), ()
    m, n, parts = product.m, product.n, product.batch * knobs.split_k
    first = sums_of(product)
    sums = first.results
    text, launch = product_launch(first, knobs, sm_count)
    found = [pointer(matrix, f"sums{i}", f"sums[{i}]", const=True) for i, matrix in enumerate(sums)]
    found += operand_parameters(product) + result_parameters(product, replace(knobs, store="direct"), product.batch)
    found += numbers(m=m, n=n, splits=knobs.split_k)
    second = Launch(
        kernel="matmul_split",
        arguments=tuple(p.argument for p in found),
        grid=(math.ceil(n / SPLIT_THREADS), min(m, MAX_GRID_YZ), product.batch),
        block=(SPLIT_THREADS, 1, 1),
    )
    unit = (
        '#include "matmul_sm90.cuh"\n#include "matmul_split.cuh"\n\n'
        + first.epilogue.replace("struct Epilogue", "struct Sums")
        + "\n"
        + traits_text(first, "Sums")
        + "\n"
        + text
        + "\n"
        + product.epilogue
        + "\n"
        + traits_text(product, "Epilogue").replace("struct Traits", "struct SplitConfig")
        + "\n"
        + entry_text("matmul_split", "jaxdnn::MatmulSplit<SplitConfig>", SPLIT_THREADS, "", found)
    )
    return unit, (launch, second), (parts * m * n * 4,) * len(sums)


def product_launch(product: Product, knobs: Sm90Knobs, sm_count: int) -> tuple[str, Launch]:
    """The configuration and entry point of the kernel that multiplies, and its launch."""
    batch = product.batch * knobs.split_k
    found = load_parameters(product, knobs) + result_parameters(product, knobs, batch) + operand_parameters(product)
    found += numbers(m=product.m, n=product.n, k=product.k, batches=product.batch, group=knobs.group)
    if knobs.split_k > 1:
        found += numbers(splits=knobs.split_k)
    if product.batch > 1:
        a_batched, b_batched = (int(matrix.batch_stride != 0) for matrix in (product.a, product.b[0]))
        found += numbers(a_batched=a_batched, b_batched=b_batched)
    cluster = knobs.cluster_m * knobs.cluster_n
    rows = math.ceil(product.m / (knobs.tile_m * knobs.cluster_m))
    columns = math.ceil(product.n / (knobs.tile_n * knobs.cluster_n))
    tiles = rows * columns * batch
    # As few clusters as take no more rounds than all of them would: idle ones in the last round would only draw power.
    rounds = math.ceil(tiles / max(1, sm_count // cluster))
    clusters = math.ceil(tiles / rounds)
    call = "jaxdnn::MatmulSm90<Config>"
    text = (
        config_text(product, knobs)
        + f"static_assert({call}::kSharedBytes == {shared_memory(product, knobs)}, "
        + '"the plan and the kernel disagree about shared memory");\n\n'
        + entry_text("matmul_sm90", call, knobs.threads, ", 1", found)
    )
    launch = Launch(
        kernel="matmul_sm90",
        arguments=tuple(p.argument for p in found),
        grid=(clusters * cluster, 1, 1),
        block=(knobs.threads, 1, 1),
        cluster=(cluster, 1, 1),
        shared_memory=shared_memory(product, knobs),
    )
    return text, launch
