"""Which operands of an epilogue TMA loads, in tiles, to the shared memory that results leave from.

What it brings there early, the threads at the end of a tile don't wait for (cpp/kernels/core/epilogue.cuh).
"""

from jaxdnn.engines.product.problem import EpilogueOperand, Matrix, Product
from jaxdnn.engines.product.tma import tma_reason

_SIZES = (2, 4)  # bytes of an element


def operand_matrix(operand: EpilogueOperand, product: Product) -> Matrix:
    """An operand of the result's own shape, as it lies."""
    batch_stride = operand.batch_stride if product.batch > 1 else 0
    rows, columns, stride = product.m, product.n, operand.row_stride
    if product.by_columns:
        rows, columns, stride = product.n, product.m, operand.column_stride
    return Matrix(operand.buffer, operand.dtype, rows, columns, stride, batch_stride)


def tile_reason(operand: EpilogueOperand, product: Product) -> str | None:
    """Why TMA can't load an operand, or None."""
    if operand.broadcast != "full" or operand.gathered:
        return "it is no value for each element of the result"
    if (operand.row_stride if product.by_columns else operand.column_stride) != 1 or any(operand.terms):
        return "its columns are not dense, or its dimensions no rows of a batch"
    matrix = operand_matrix(operand, product)
    if matrix.itemsize not in _SIZES:
        return f"its elements have {matrix.itemsize} bytes; expected one of {_SIZES}"
    return tma_reason(matrix, "it")


def tile_operands(product: Product) -> tuple[int, ...]:
    """Numbers of the operands that are tiles: the first one lies where the first stored result leaves from, and so on,
    and has elements of that one's size.
    """
    found: list[int] = []
    sizes = [result.itemsize for result in product.stored]
    for number, operand in enumerate(product.operands):
        fits = len(found) < len(sizes) and operand_matrix(operand, product).itemsize == sizes[len(found)]
        if fits and tile_reason(operand, product) is None:
            found.append(number)
    return tuple(found)
