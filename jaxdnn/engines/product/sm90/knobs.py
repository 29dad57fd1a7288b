"""Knobs of the kernel for Hopper's tensor cores (cpp/kernels/product/sm90.cuh), and which of them fit a product."""

from dataclasses import dataclass, fields
from math import ceil, gcd
from typing import Literal

from jaxdnn.engines.base import MAX_TENSOR_MAPS, check_least
from jaxdnn.engines.product.edges import edges
from jaxdnn.engines.product.operands import packed, swap_reason, swapped, transposes
from jaxdnn.engines.product.problem import Product
from jaxdnn.engines.product.tiles import tile_operands
from jaxdnn.engines.product.tma import CHUNK, DEPTH_BYTES, STEPS, stage_depth, tma_reason
from jaxdnn.engines.product.views import OVERLAP, row_views

WARP_ROWS = 16  # of a result's box
SLOT_ALIGNMENT = 1024  # bytes
L2_BYTES = 50 * 2**20  # of an H100's cache
TILE_QUEUE = 264  # bytes of core/tile_queue.cuh's
# Columns of a multiply that ptx/wgmma.cuh has.
TILE_WIDTHS = (16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240, 256)
REGISTER_WIDTHS = (32, 64, 80, 96, 112, 128)  # likewise, of rows in registers, as far as these leave room

Store = Literal["tma", "rows", "lines", "direct"]


@dataclass(frozen=True)
class Sm90Knobs:
    """How a product is cut into tiles, and who works on them; cpp/kernels/product/sm90.cuh draws it.

    Attributes:
      tile_m, tile_n: rows and columns of a result's tile.
      stages: parts of K in flight, 128 bytes of each row.
      cluster_m, cluster_n: neighbouring tiles whose thread blocks share what they load.
      consumers: warp groups that multiply.
      schedule: "cooperative": they share a tile. "pingpong": two take every other tile, or three every third, and one's
        epilogue runs behind the others' multiplies.
      stagger: stages that the other consumers of a shared tile start behind the first, which hides a part of each one's
        epilogue.
      swizzle: of the rasterization: rows of clusters' tiles that are worked through together, for the L2 cache.
      split_k: parts of K that are summed apart, into scratch memory, and added by a second kernel.
      groups: of columns of a tile, each of which is multiplied by its own part of a stage, and by no other.
      promotion: stages of 8-bit floats that the tensor cores sum, with 14 bits, before float32 arithmetic adds that to
        the accumulators; 0 for all of K.
      store: "tma": results leave through shared memory and TMA. "rows": through shared memory, row by row, where these
        are not aligned or no neighbours in the result. "lines": likewise, but in whole lines of memory, by warps that
        compute a row's tiles one after the other. "direct": straight from registers.
      epilogue_stages: subtiles of results, each 16 rows of a warp, that wait for TMA; swapped, each 64 rows of a warp
        group, and of all columns if there is one, unless results are reduced too.
      fetch: of the epilogue's operands of the result's own shape. "tma": those that can be are tiles, loaded where
        results leave from. "direct": straight to registers.
      swapped: whether the transposed product is computed: tile_m are columns of the result, and tile_n rows.
      views: how many there are of each matrix b whose rows are as far apart as TMA refuses; 1: it is copied.
      whole_rows: whether a stage has all of a short K, and a's rows as they lie (cpp/kernels/product/short_k.cuh).
      stationary: tiles of b's columns that stay in a block's shared memory, by which its whole rows are multiplied in
        turn; 0: a stage has one, too.
    """

    tile_m: int = 128
    tile_n: int = 256
    stages: int = 4
    cluster_m: int = 2
    cluster_n: int = 1
    consumers: int = 2
    schedule: Literal["cooperative", "pingpong"] = "cooperative"
    stagger: int = 0
    swizzle: int = 8
    split_k: int = 1
    groups: int = 1
    promotion: int = 0
    store: Store = "tma"
    epilogue_stages: int = 2
    fetch: Literal["tma", "direct"] = "direct"
    swapped: bool = False
    views: int = 1
    whole_rows: bool = False
    stationary: int = 0

    def __post_init__(self) -> None:
        positive = (
            "tile_m",
            "tile_n",
            "stages",
            "cluster_m",
            "cluster_n",
            "consumers",
            "swizzle",
            "split_k",
            "groups",
            "epilogue_stages",
            "views",
        )
        check_least(self, 1, *positive)
        check_least(self, 0, "stationary")
        if self.consumer_rows not in (64, 128):
            raise ValueError(
                f"Sm90Knobs: a warp group would have {self.consumer_rows} rows of the tile; expected 64 or 128"
            )
        if self.schedule == "pingpong" and self.consumers < 2:
            raise ValueError(f"Sm90Knobs: consumers is {self.consumers}; expected 2 or 3 with pingpong")
        if not 0 <= self.stagger < self.stages or (self.stagger and self.schedule == "pingpong"):
            raise ValueError(
                f"Sm90Knobs: stagger is {self.stagger}; expected less than the stages, and 0 with pingpong"
            )
        if self.promotion < 0 or (self.promotion and self.consumer_rows != 64):
            raise ValueError(
                f"Sm90Knobs: promotion is {self.promotion} with {self.consumer_rows} rows a warp group; expected at "
                "least 0, and 64 rows, for which there are registers to sum them twice"
            )
        if self.consumers > 3:
            raise ValueError(f"Sm90Knobs: consumers is {self.consumers}; expected at most 3")
        if self.cluster_m * self.cluster_n not in (1, 2, 4, 8):
            raise ValueError(
                f"Sm90Knobs: a cluster has {self.cluster_m * self.cluster_n} blocks; expected 1, 2, 4 or 8"
            )

    @property
    def constants(self) -> dict[str, int]:
        """What the kernel is compiled with, by the names that its `Config` has."""
        # Flags, and what is known when it is launched.
        others = ("schedule", "store", "fetch", "swizzle", "split_k", "whole_rows")
        named = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in others}
        return {name.title().replace("_", ""): value for name, value in named.items()}

    @property
    def consumer_rows(self) -> int:
        return self.tile_m if self.schedule == "pingpong" else self.tile_m // self.consumers

    @property
    def columns(self) -> int:
        """From a tile of the result to the next, or what a block computes at once of those that stay."""
        return self.tile_n * max(1, self.stationary) - (OVERLAP if self.views > 1 else 0)

    @property
    def tile(self) -> tuple[int, int]:
        """Its rows and columns."""
        return self.tile_m, self.tile_n

    @property
    def cluster(self) -> tuple[int, int]:
        """Its tiles below each other, and side by side."""
        return self.cluster_m, self.cluster_n

    @property
    def threads(self) -> int:
        return 128 * (self.consumers + 1)


def depth(product: Product) -> int:
    """Elements of K in a stage."""
    return stage_depth(product.a)


def loaded_columns(product: Product, knobs: Sm90Knobs) -> int:
    """Columns of b that are copied for a tile: boxes of whole chunks, where rows run along N."""
    return knobs.tile_n if product.b_transposed else ceil(knobs.tile_n / CHUNK) * CHUNK


def multiplied_columns(product: Product, knobs: Sm90Knobs) -> int:
    """Columns of a multiply of a warp group, which are of one group; 0 if it would have several."""
    return knobs.tile_n * len(product.b) // knobs.groups if knobs.groups <= STEPS else 0


def box_lines(product: Product, knobs: Sm90Knobs) -> int:
    """Lines of a box of a matrix b: what each group meets."""
    along_k = product.b_transposed or transposes(product, "b")
    return (knobs.tile_n if along_k else depth(product)) // knobs.groups


def loaded_lines(product: Product, knobs: Sm90Knobs) -> int:
    """Lines of 128 bytes that a stage has of a matrix b."""
    along_k = product.b_transposed or transposes(product, "b")
    return box_lines(product, knobs) * (1 if along_k else loaded_columns(product, knobs) // CHUNK)


def accumulator_registers(product: Product, knobs: Sm90Knobs) -> int:
    """Registers of a consumer's thread that hold accumulators."""
    width = knobs.tile_n * len(product.b)
    return width // 2 * (knobs.consumer_rows // 64 + bool(knobs.promotion))


def knobs_reason(
    product: Product,
    knobs: Sm90Knobs,
    shared_memory_limit: int,
    staged: Literal["tma", "rows"] = "tma",
    stage: int | None = None,
    groups: int = 1,
) -> str | None:
    """Why the knobs don't fit the product, or None. `staged` is how results leave that pass through shared memory, and
    `stage` how many bytes a stage has that holds other than tiles; `groups` of columns have their own part of K.
    """
    if knobs.whole_rows or knobs.stationary:
        return f"whole_rows is {knobs.whole_rows} and stationary {knobs.stationary}; expected a product over a short K"
    if knobs.groups != groups:
        return f"groups is {knobs.groups}; expected {groups}"
    if knobs.swapped:
        others = [knobs.split_k > 1 and "K is split", knobs.store != "tma" and "TMA stores no results"]
        if reason := swap_reason(product) or next(filter(None, others), None):
            return f"swapped is True; {reason}"
        product = swapped(product)
        if knobs.fetch != "tma" and any(operand.broadcast == "full" for operand in product.operands):
            return "swapped is True; expected fetch = 'tma', of an operand that varies with rows and columns"
    if knobs.views > 1 and (reason := views_reason(product, knobs)):
        return f"views is {knobs.views}; {reason}"
    product, _ = packed(product, knobs.views)
    if knobs.store not in (expected := stores(product, knobs, staged)):
        found = store_reason(product, knobs) or f"store is {knobs.store!r}"
        return f"{found}; expected store = {' or '.join(map(repr, expected))}"
    widths = (8, *TILE_WIDTHS) if knobs.groups > 1 else TILE_WIDTHS
    if (width := multiplied_columns(product, knobs)) not in (0, *widths):
        return f"its tiles multiply {width} columns at once; expected one of {widths}"
    if knobs.tile_n % store_columns(product, knobs):
        return f"tile_n is {knobs.tile_n}; expected a multiple of {store_columns(product, knobs)}, a subtile of results"
    if len(product.b) > 1 and loaded_columns(product, knobs) != knobs.tile_n:
        return f"tile_n is {knobs.tile_n}; two b of (k, n) need a multiple of {CHUNK}"
    for name, lines, extent, sharers in (
        ("cluster_n", depth(product) if product.a_transposed else knobs.tile_m, knobs.tile_m, knobs.cluster_n),
        ("cluster_m", box_lines(product, knobs), knobs.tile_n, knobs.cluster_m),
    ):
        if lines % (8 * sharers):
            return f"{name} is {sharers}; its blocks can't share a tile of {extent} in groups of 8 lines"
    if knobs.promotion and "float8" not in product.a.dtype:
        return f"promotion is for 8-bit floats, and a is {product.a.dtype}"
    if knobs.split_k > ceil(product.k / depth(product)):
        return f"split_k is {knobs.split_k}; k has {ceil(product.k / depth(product))} parts"
    if knobs.split_k > 1 and product.reduced:
        return f"split_k is {knobs.split_k}; a product with a reduction can't be split"
    most = 128 if knobs.consumers == 3 else 192
    if accumulator_registers(product, knobs) > most:
        held = f"{accumulator_registers(product, knobs)} accumulators"
        return f"a thread of {knobs.consumers} warp groups would hold {held}; expected at most {most}"
    if knobs.fetch == "tma" and (reason := fetch_reason(product, knobs)):
        return reason
    if knobs.store != "direct":
        if (maps := tensor_maps(product, knobs)) > MAX_TENSOR_MAPS:
            return f"it would take {maps} tensor maps, and a launch has {MAX_TENSOR_MAPS}; expected store = 'direct'"
        if store_columns(product, knobs) * min(stored_sizes(product, knobs), default=4) < 32:
            return f"tile_n is {knobs.tile_n}, and a row of a subtile less than 32 bytes; expected store = 'direct'"
    stage = tile_stage(product, knobs) if stage is None else stage
    if (needed := shared_memory(product, knobs, stage)) > shared_memory_limit:
        return f"it would use {needed} bytes of shared memory, and a block has {shared_memory_limit}"
    return None


def views_reason(product: Product, knobs: Sm90Knobs) -> str | None:
    """Why b can't be loaded by so many views, or None."""
    if knobs.views != (expected := row_views(product)):
        return f"expected {expected}, of rows of b so far apart"
    if (maps := operand_maps(product, knobs)) > MAX_TENSOR_MAPS:
        return f"they would take {maps} tensor maps, and a launch has {MAX_TENSOR_MAPS}"
    if knobs.store != "rows" or knobs.split_k > 1 or product.reduced:
        return "expected store = 'rows', one split and no reduction: the last columns of a tile are the next one's"
    return None


def fetch_reason(product: Product, knobs: Sm90Knobs) -> str | None:
    """Why TMA can't load any of the epilogue's operands with these knobs, or None."""
    if knobs.store != "tma" or knobs.split_k > 1:
        return "fetch is 'tma'; expected store = 'tma' and one split, since operands lie where results leave from"
    if not tile_operands(product):
        return "fetch is 'tma', and no operand of the epilogue can be a tile; expected 'direct'"
    return None


def stored_sizes(product: Product, knobs: Sm90Knobs) -> list[int]:
    """Of each result that the multiplying kernel stores, the bytes of an element."""
    return [4] * len(product.b) if knobs.split_k > 1 else [result.itemsize for result in product.stored]


def store_reason(product: Product, knobs: Sm90Knobs) -> str | None:
    """Why TMA can't store what the multiplying kernel does, or None."""
    if knobs.split_k > 1:
        return f"n is {product.n}, and TMA needs rows of a multiple of 16 bytes" if product.n % 4 else None
    return next(filter(None, (tma_reason(result, "a result") for result in product.stored)), None)


def stores(product: Product, knobs: Sm90Knobs, staged: Literal["tma", "rows"]) -> tuple[Store, ...]:
    """How results can leave, the fastest way first."""
    if not store_reason(product, knobs):
        return staged, "direct"
    return ("rows", "direct") if piece_bytes(product, knobs) >= 2 else ("direct",)


def piece_bytes(product: Product, knobs: Sm90Knobs) -> int:
    """Bytes that are stored at once where results leave row by row: as all their rows are aligned, or elements."""
    if knobs.split_k > 1:
        return gcd(16, 4 * product.n)
    bytes_apart = (
        stride * result.itemsize
        for result in product.stored
        for stride in (result.row_stride, result.batch_stride, result.columns)
    )
    return gcd(16, *bytes_apart, *(result.buffer.offset for result in product.stored))


def evicts_first(product: Product, knobs: Sm90Knobs) -> bool:
    """Whether the results, by TMA, leave the L2 cache before what else is there: if it can't hold them until they are
    read ([28] in benchmarks/results/product_kernels.md).
    """
    size = product.m * product.n * product.batch * sum(stored_sizes(product, knobs))
    return knobs.store == "tma" and knobs.split_k == 1 and size > L2_BYTES


def tensor_maps(product: Product, knobs: Sm90Knobs) -> int:
    """Tensor maps of the multiplying kernel."""
    tiles = len(tile_operands(product)) if knobs.fetch == "tma" else 0
    stored = len(stored_sizes(product, knobs)) if knobs.store == "tma" else 0
    return operand_maps(product, knobs) + stored + tiles


def operand_maps(product: Product, knobs: Sm90Knobs) -> int:
    """Tensor maps of a and b."""
    found = edges(product, knobs.tile, knobs.cluster, knobs.views)
    return 1 + len(product.b) * knobs.views + sum(len(edge.matrices) for edge in found)


def store_columns(product: Product, knobs: Sm90Knobs) -> int:
    """Columns of a subtile of results."""
    # Two epilogue_stages of 32 columns take as much room as one of 64, and one can be filled while the other is copied.
    # A warp group waits for its warps as seldom as can be [78]; what is reduced takes registers as well.
    if knobs.swapped and knobs.epilogue_stages == 1 and not product.reduced:
        return knobs.tile_n
    if knobs.tile_n % 32:
        return 16
    return 64 if knobs.tile_n % 64 == 0 and sum(stored_sizes(product, knobs)) <= 2 else 32


def tile_stage(product: Product, knobs: Sm90Knobs) -> int:
    """Bytes of a stage that holds the tiles of both operands."""
    return DEPTH_BYTES * (knobs.tile_m + loaded_lines(product, knobs) * len(product.b))


def shared_memory(product: Product, knobs: Sm90Knobs, stage: int) -> int:
    """Bytes of shared memory, of which a stage takes so many; what the kernel's own `kSharedBytes` says, which the unit
    asserts.
    """
    epilogue_stages = 4 * knobs.consumers * epilogue_bytes(product, knobs)
    full = 4 * knobs.consumers * knobs.epilogue_stages * 8 if knobs.fetch == "tma" else 0
    return knobs.stages * stage + epilogue_stages + knobs.stages * 16 + full + TILE_QUEUE


def epilogue_bytes(product: Product, knobs: Sm90Knobs) -> int:
    """Bytes of shared memory that a warp stores results from."""
    if knobs.store == "direct":
        return 0
    subtile = WARP_ROWS * store_columns(product, knobs)
    least = SLOT_ALIGNMENT // (4 if knobs.swapped else 1)  # the warps of a group share it
    return knobs.epilogue_stages * sum(max(subtile * size, least) for size in stored_sizes(product, knobs))
