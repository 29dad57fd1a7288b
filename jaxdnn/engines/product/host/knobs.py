"""Knobs of products on the CPU, and what a product lets them be."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jaxdnn.engines.base import check_least
from jaxdnn.engines.product.problem import EpilogueOperand, Matrix, Product, Reduced
from jaxdnn.pointwise.bytecode import MAX_INDICES
from jaxdnn.pointwise.operations import DTYPES

MAX_ARRAYS = 32  # kMaxArrays in cpp/host/product/call.h and cpp/host/convolution/depthwise.cc
_STREAMED = ("float64", "float32", "bfloat16", "float16", "int8")  # what is multiplied where it lies
# What a block's rows, columns and elements along k are padded to at most, on any processor.
ROW_STEP, COLUMN_STEP, DEPTH_STEP = 16, 32, 64


@dataclass(frozen=True)
class HostKnobs:
    """Knobs of a product on the CPU.

    Attributes:
      rows, columns: of the result's tile that is summed and finished in cache.
      depth: elements along k that are packed and multiplied together; a multiple of 64.
      splits: parts of k that are summed apart, by different tasks.
      tiles_per_task: consecutive tiles that one task works on.
      pack_a, pack_b: whether a launch before packs the whole matrix, or each tile its own part.
      streams: whether b is not packed at all but multiplied where it lies, which pays for a few rows.
    """

    rows: int
    columns: int
    depth: int
    splits: int = 1
    tiles_per_task: int = 1
    pack_a: bool = False
    pack_b: bool = False
    streams: bool = False

    def __post_init__(self) -> None:
        check_least(self, 1, "rows", "columns", "depth", "splits", "tiles_per_task")
        if self.depth % DEPTH_STEP:
            raise ValueError(f"HostKnobs: depth must be a multiple of {DEPTH_STEP}; got {self.depth}")


def streams(product: Product) -> bool:
    """Whether b can be multiplied where it lies: of other dtypes it is converted, which packing does."""
    return {product.a.dtype, product.b[0].dtype} <= set(_STREAMED)


def packed(product: Product) -> bool:
    """Whether panels of b are copies of its rows: multiplications make them on the way, for next to nothing.

    These are the formats with `multiply_packing` in cpp/host/product/format.h.
    """
    return not product.b_transposed and product.b[0].dtype in ("float32", "float64")


def arrays_reason(operands: Sequence[EpilogueOperand], results: Sequence[Matrix | Reduced]) -> str | None:
    """Why kernels on the CPU can't have an epilogue's arrays, or None."""
    arrays = (*operands, *results)
    if len(arrays) > MAX_ARRAYS:
        return f"the epilogue has more than {MAX_ARRAYS} operands and results"
    if any(len(operand.gathered) > MAX_INDICES for operand in operands):
        return f"its epilogue looks an operand up by more than {MAX_INDICES} integers at once"
    if unknown := {array.dtype for array in arrays} - set(DTYPES):
        return f"its epilogues don't have arrays of {' and '.join(sorted(unknown))}"
    return None


def up(value: int, multiple: int) -> int:
    """The next multiple."""
    return math.ceil(value / multiple) * multiple
