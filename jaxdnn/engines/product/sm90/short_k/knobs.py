"""Which products have a K that is one stage, of rows one behind the other; and which knobs fit them."""

from dataclasses import replace
from math import ceil
from typing import Literal

from jaxdnn.engines.product.problem import Product
from jaxdnn.engines.product.sm90.knobs import REGISTER_WIDTHS, Sm90Knobs, loaded_columns
from jaxdnn.engines.product.sm90.knobs import knobs_reason as product_knobs_reason
from jaxdnn.engines.product.tma import DEPTH_BYTES, tma_reason

_MOST_K = 256  # of which all steps are in registers at once
_PIECE = 8  # elements, 16 bytes
_STEP = 16  # elements of K
_MOST_HELD = {1: 192, 2: 192, 3: 128}  # registers of a thread, of accumulators and rows, by warp groups


def whole_rows_reason(product: Product) -> str | None:
    """Why a product isn't one of those, or None."""
    if product.a.itemsize != 2:
        return f"a is {product.a.dtype}; expected 16-bit floats"
    if product.a_transposed or product.b_transposed:
        return "its operands are (m, k) and (k, n), and one of these is transposed"
    if len(product.b) > 1:
        return "it multiplies by one matrix b, and there are two"
    if product.k > _MOST_K or product.k % _PIECE:
        return f"k is {product.k}; expected a multiple of {_PIECE} of at most {_MOST_K}"
    if product.a.row_stride != product.k:
        return f"rows of a are {product.a.row_stride} elements apart; expected k, {product.k}"
    for name, matrix in zip("ab", (product.a, *product.b), strict=True):
        if reason := tma_reason(matrix, name):
            return reason
    return None


def depth(product: Product) -> int:
    """K, in whole steps."""
    return ceil(product.k / _STEP) * _STEP


def stage(product: Product, knobs: Sm90Knobs) -> int:
    """Bytes of a stage."""
    return (loaded_columns(product, knobs) * depth(product) + knobs.tile_m * product.k) * product.a.itemsize


def staged(product: Product) -> Literal["tma", "rows"]:
    """How results leave: TMA stores rows of whole lines faster, and what has others slower, than their warps do."""
    return "rows" if any(product.n * result.itemsize % DEPTH_BYTES for result in product.stored) else "tma"


def knobs_reason(product: Product, knobs: Sm90Knobs, shared_memory_limit: int) -> str | None:
    """Why the knobs don't fit a product, or None."""
    if reason := whole_rows_reason(product):
        return f"whole_rows is True; {reason}"
    if knobs.cluster_m * knobs.cluster_n > 1 or knobs.split_k > 1 or knobs.stagger or knobs.swapped:
        return "its blocks load alone, and all of K at once; expected no cluster, one split, no stagger and not swapped"
    if knobs.tile_n not in REGISTER_WIDTHS:
        return f"tile_n is {knobs.tile_n}; expected one of {REGISTER_WIDTHS}"
    blocks = knobs.consumer_rows // 64
    held = blocks * (knobs.tile_n // 2 + depth(product) // _STEP * 4)
    if held > (most := _MOST_HELD[knobs.consumers]):
        return f"a thread would hold {held} registers of accumulators and rows; expected at most {most}"
    tiles = replace(knobs, whole_rows=False)
    return product_knobs_reason(product, tiles, shared_memory_limit, staged(product), stage(product, knobs))
