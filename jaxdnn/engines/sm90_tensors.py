"""What the copy engine (TMA) asks of the matrices of a product, and the copies that those get which it refuses."""

from dataclasses import replace
from math import ceil

from jaxdnn.engines.product import Matrix, Product
from jaxdnn.plan import Scratch, TensorMap

DEPTH_BYTES = 128  # of K in a stage

# Values of CUtensorMapDataType, CUtensorMapSwizzle and CUtensorMapL2promotion.
_BYTES = 0
_MAP_DTYPE = {"float16": 6, "bfloat16": 9, "float32": 7, "int32": 3, "uint32": 2, "int16": 1, "uint16": 1}
_TFLOAT32 = 11  # rounds float32 to the nearest tf32 while it copies
SWIZZLE = {32: 1, 64: 2, 128: 3}
_PROMOTE_256 = 3


def depth(product: Product) -> int:
    """Elements of K in a stage."""
    return DEPTH_BYTES // product.a.itemsize


def tma_reason(matrix: Matrix, what: str) -> str | None:
    """Why the copy engine can't read or write a matrix, or None."""
    if matrix.buffer.offset % 16:
        return f"{what} starts at byte {matrix.buffer.offset} of its buffer, and TMA needs a multiple of 16"
    for name, stride in {"row": matrix.row_stride, "batch": matrix.batch_stride}.items():
        if stride * matrix.itemsize % 16:
            return f"the {name} stride of {what} is {stride * matrix.itemsize} bytes, and TMA needs a multiple of 16"
        if stride * matrix.itemsize >= 2**40:
            return f"the {name} stride of {what} is {stride * matrix.itemsize} bytes, and TMA has 40 bits for it"
    return None


def tensor_map(
    matrix: Matrix, batch: int, box: tuple[int, int], swizzle: int, *, multiplied: bool = False
) -> TensorMap:
    """The map of boxes of `box` columns and rows; those of a float32 matrix that is `multiplied` arrive as tf32."""
    batched = matrix.batch_stride != 0 and batch > 1
    row = matrix.row_stride * matrix.itemsize
    return TensorMap(
        buffer=matrix.buffer,
        dtype=_TFLOAT32 if multiplied and matrix.dtype == "float32" else _MAP_DTYPE.get(matrix.dtype, _BYTES),
        dimensions=(matrix.columns, matrix.rows, batch if batched else 1),
        strides=(row, matrix.batch_stride * matrix.itemsize if batched else row * matrix.rows),
        box=(*box, 1),
        element_strides=(1, 1, 1),
        swizzle=swizzle,
        l2_promotion=_PROMOTE_256,
    )


def transposes(product: Product, which: str) -> bool:
    """Whether a or b must run along k, and does not: 16-bit elements may run either way."""
    along_k = not product.a_transposed if which == "a" else product.b_transposed
    return product.a.itemsize != 2 and not along_k


def copied(product: Product) -> tuple[Product, list[tuple[str, Matrix, Matrix]]]:
    """The product with copies, in scratch memory, of those operands that the kernel can't load as they lie.

    Returns:
      The product, and of each copy which operand it is of ("a" or "b"), that and itself.
    """
    copies: list[tuple[str, Matrix, Matrix]] = []

    def loaded(matrix: Matrix, which: str) -> Matrix:
        transposed = transposes(product, which)
        if not transposed and tma_reason(matrix, which) is None:
            return matrix
        rows, columns = (matrix.columns, matrix.rows) if transposed else (matrix.rows, matrix.columns)
        aligned = 16 // matrix.itemsize
        row_stride = ceil(columns / aligned) * aligned
        batched = product.batch > 1 and matrix.batch_stride != 0
        batch_stride = rows * row_stride if batched else 0
        copy = Matrix(Scratch(len(copies)), matrix.dtype, rows, columns, row_stride, batch_stride)
        copies.append((which, matrix, copy))
        return copy

    a = loaded(product.a, "a")
    b = tuple(loaded(matrix, "b") for matrix in product.b)
    along_m = product.a_transposed and not transposes(product, "a")
    along_k = product.b_transposed or transposes(product, "b")
    return replace(product, a=a, b=b, a_transposed=along_m, b_transposed=along_k), copies
