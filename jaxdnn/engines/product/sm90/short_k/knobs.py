"""Which products have a K that is one stage, of rows one behind the other; and which knobs fit them."""

from dataclasses import replace
from math import ceil
from typing import Literal

from jaxdnn.engines.product.problem import Product
from jaxdnn.engines.product.sm90.knobs import REGISTER_WIDTHS, Sm90Knobs, loaded_columns, store_columns, stored_sizes
from jaxdnn.engines.product.sm90.knobs import knobs_reason as product_knobs_reason
from jaxdnn.engines.product.sm90.knobs import shared_memory as tiles_shared_memory
from jaxdnn.engines.product.tma import DEPTH_BYTES, stage_bytes

_MOST_K = 256  # of which all steps are in registers at once
STEP = 16  # elements of K
_MOST_HELD = {1: 192, 2: 192, 3: 128}  # registers of a thread, of accumulators and rows, by warp groups


def whole_rows_reason(product: Product) -> str | None:
    """Why a product isn't one of those, or None."""
    if product.a.itemsize != 2:
        return f"a is {product.a.dtype}; expected 16-bit floats"
    if product.a_transposed or product.b_transposed:
        return "its operands are (m, k) and (k, n), and one of these is transposed"
    if product.k > _MOST_K:
        return f"k is {product.k}; expected at most {_MOST_K}"
    if product.a.row_stride != product.k:
        return f"rows of a are {product.a.row_stride} elements apart; expected k, {product.k}"
    begins = {"a": product.a.buffer.offset, "a matrix of a": product.a.batch_stride * product.a.itemsize}
    for name, first in begins.items():
        if first % 16:
            return f"{name} begins at byte {first}; expected a multiple of 16"
    return None


def depth(product: Product) -> int:
    """K, in whole steps."""
    return ceil(product.k / STEP) * STEP


def stage(product: Product, knobs: Sm90Knobs) -> int:
    """Bytes of a stage."""
    rows = knobs.tile_m * product.k * product.a.itemsize
    return stage_bytes(rows + (0 if knobs.stationary else column_bytes(product, knobs)))


def column_bytes(product: Product, knobs: Sm90Knobs) -> int:
    """Bytes of a tile's columns of b, or of both matrices."""
    return loaded_columns(product, knobs) * len(product.b) * depth(product) * product.a.itemsize


def shared_memory(product: Product, knobs: Sm90Knobs) -> int:
    """Bytes of shared memory: of tiles, and of the columns of b that stay, with a barrier each."""
    of_tiles = tiles_shared_memory(product, knobs, stage(product, knobs))
    if knobs.stationary == 0:
        return of_tiles
    return stage_bytes(of_tiles) + knobs.stationary * (column_bytes(product, knobs) + 16)


def staged(product: Product) -> Literal["tma", "rows"]:
    """How results leave: TMA stores rows of whole lines faster, and what has others slower, than their warps do."""
    return "rows" if any(product.n * result.itemsize % DEPTH_BYTES for result in product.stored) else "tma"


def whole_lines_reason(product: Product, knobs: Sm90Knobs) -> str | None:
    """Why results can't leave in whole lines of memory, which their warps gather from tile to tile, or None."""
    if not knobs.stationary:
        return "its tiles of a row are computed by several blocks; expected columns that stay"
    if [size * store_columns(product, knobs) for size in stored_sizes(product, knobs)] != [DEPTH_BYTES]:
        return "expected one result of 16 bits, and whole 64 columns of tiles"
    if knobs.epilogue_stages != 2:
        return f"epilogue_stages is {knobs.epilogue_stages}; expected 2, of the line that is stored and the next one"
    return None


def knobs_reason(product: Product, knobs: Sm90Knobs, shared_memory_limit: int) -> str | None:
    """Why the knobs don't fit a product, or None."""
    if reason := whole_rows_reason(product):
        return f"whole_rows is True; {reason}"
    if knobs.cluster_m * knobs.cluster_n > 1 or knobs.split_k > 1 or knobs.stagger or knobs.swapped:
        return "its blocks load alone, and all of K at once; expected no cluster, one split, no stagger and not swapped"
    width = knobs.tile_n * len(product.b)
    if width not in REGISTER_WIDTHS:
        widths = tuple(width // len(product.b) for width in REGISTER_WIDTHS)
        return f"tile_n is {knobs.tile_n}; expected one of {widths}"
    blocks = knobs.consumer_rows // 64
    held = blocks * (width // 2 + depth(product) // STEP * 4)
    if held > (most := _MOST_HELD[knobs.consumers]):
        return f"a thread would hold {held} registers of accumulators and rows; expected at most {most}"
    if knobs.stationary and (reason := _stationary_reason(product, knobs)):
        return f"stationary is {knobs.stationary}; {reason}"
    tiles = replace(knobs, whole_rows=False, stationary=0)
    if knobs.store == "lines":
        if reason := whole_lines_reason(product, knobs):
            return f"store is 'lines'; {reason}"
        tiles = replace(tiles, store="rows")
    if reason := product_knobs_reason(product, tiles, shared_memory_limit, staged(product), stage(product, knobs)):
        return reason
    if (needed := shared_memory(product, knobs)) > shared_memory_limit:
        return f"it would use {needed} bytes of shared memory, and a block has {shared_memory_limit}"
    return None


def _stationary_reason(product: Product, knobs: Sm90Knobs) -> str | None:
    """Why columns of b can't stay in shared memory, or None."""
    if knobs.consumer_rows != 64:
        return f"a warp group has {knobs.consumer_rows} rows; expected 64, which it takes into registers"
    if product.reduced:
        return "what is reduced is so of a tile's columns; expected no reduction"
    if product.batch > 1 and product.b[0].batch_stride:
        return "each matrix of the batch has its own b; expected one for all"
    if knobs.schedule == "pingpong" and knobs.stages % knobs.consumers:
        # One that is ahead of another must not take the phase before for its own.
        return f"there are {knobs.stages} stages; expected as many of each of {knobs.consumers} warp groups"
    if knobs.swizzle > 1 and product.n > knobs.columns:
        return f"swizzle is {knobs.swizzle}; expected 1, by which a block's tiles are of the same columns"
    return None
