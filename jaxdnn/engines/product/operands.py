"""A product as the kernel for Hopper's tensor cores loads it: with copies of operands, and transposed."""

from dataclasses import replace
from math import ceil
from typing import NamedTuple

from jaxdnn.engines.product.problem import Matrix, Product, Reduced
from jaxdnn.engines.product.tiles import tile_operands
from jaxdnn.engines.product.tma import DEPTH_BYTES, tma_reason
from jaxdnn.engines.product.views import view_k, view_step
from jaxdnn.plan import Scratch

# Bytes, from which on a copy's rows are whole lines of 128 bytes, which take less time to load: an eighth more at most.
# [25] in benchmarks/results/product_kernels.md.
_LONG_ROW = 1024


def transposes(product: Product, which: str) -> bool:
    """Whether a or b must run along k, and does not: 16-bit elements may run either way."""
    along_k = not product.a_transposed if which == "a" else product.b_transposed
    return product.a.itemsize != 2 and not along_k


class Copy(NamedTuple):
    """A copy of an operand, in scratch memory.

    Attributes:
      source, matrix: what it is of, and itself.
      transposed: whether its rows are the source's columns.
      views, view_step: of the other operand, in whose order its columns are (cpp/kernels/core/views.cuh).
    """

    source: Matrix
    matrix: Matrix
    transposed: bool
    views: int = 1
    view_step: int = 0


def packed(product: Product, views: int = 1, *, whole_rows: bool = False) -> tuple[Product, list[Copy]]:
    """The product with copies, in scratch memory, of those operands that the kernel can't load as they lie; or of a
    alone, if it loads so many views of b: k is what these have in whole stages; and of b alone, if it loads whole rows
    of a. And the copies.
    """
    copies: list[Copy] = []
    k = view_k(product, views)

    def loaded(matrix: Matrix, which: str) -> Matrix:
        transposed = transposes(product, which)
        as_it_lies = which == "b" if views > 1 else not transposed and tma_reason(matrix, which) is None
        if as_it_lies or (whole_rows and which == "a"):
            return matrix
        rows, columns = (matrix.columns, matrix.rows) if transposed else (matrix.rows, matrix.columns)
        columns = columns if views == 1 else k
        aligned = (DEPTH_BYTES if columns * matrix.itemsize >= _LONG_ROW else 16) // matrix.itemsize
        row_stride = ceil(columns / aligned) * aligned
        batched = product.batch > 1 and matrix.batch_stride != 0
        batch_stride = rows * row_stride if batched else 0
        copy = Matrix(Scratch(len(copies)), matrix.dtype, rows, columns, row_stride, batch_stride)
        copies.append(Copy(matrix, copy, transposed, views, view_step(product.b[0], views)))
        return copy

    a = loaded(product.a, "a")
    b = tuple(loaded(matrix, "b") for matrix in product.b)
    along_m = product.a_transposed and not transposes(product, "a")
    along_k = product.b_transposed or transposes(product, "b")
    return replace(product, k=k, a=a, b=b, a_transposed=along_m, b_transposed=along_k), copies


def swapped(product: Product) -> Product:
    """The transposed product, whose results lie by columns: their matrices are those of the product itself."""
    (b,) = product.b
    return replace(
        product,
        m=product.n,
        n=product.m,
        a=b,
        b=(product.a,),
        operands=tuple(operand.transposed for operand in product.operands),
        results=tuple(one.transposed if isinstance(one, Reduced) else one for one in product.results),
        a_transposed=not product.b_transposed,
        b_transposed=not product.a_transposed,
        by_columns=not product.by_columns,
    )


def swap_reason(product: Product) -> str | None:
    """Why a product can't be computed as the transposed one, or None."""
    if len(product.b) > 1 or packed(product)[1]:
        return "there are two matrices b, or copies"
    sizes = [result.itemsize for result in product.stored]
    if sizes != [2] or tma_reason(product.stored[0], "a result"):
        return "its results are not one matrix of 16-bit elements that TMA can store"
    if any({1, 2}.intersection(result.axes) != {1} for result in product.reduced):
        return "a result is reduced over other than rows"
    tiles = tile_operands(product)
    for number, operand in enumerate(product.operands):
        if (operand.broadcast == "full" and number not in tiles) or operand.gathered or any(operand.terms):
            return "an operand of its epilogue varies with rows and columns, and is no tile that TMA can load"
    if product.program.indexed:
        return "its epilogue depends on where an element is"
    return None
