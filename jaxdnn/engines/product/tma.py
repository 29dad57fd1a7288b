"""What the Tensor Memory Accelerator (TMA) asks of matrices, and the maps that it reads and writes them by."""

from math import ceil

from jaxdnn.engines.product.problem import Matrix
from jaxdnn.plan import TensorMap

# What core/tile.cuh has too: bytes of K in a stage, and elements of a row that runs along M or N, in one box.
DEPTH_BYTES = 128
STEPS = 4  # multiplies along K of a stage
CHUNK = 64
_STAGE_ALIGNMENT = 1024  # bytes, of tiles that TMA swizzles

# Values of CUtensorMapDataType, CUtensorMapSwizzle and CUtensorMapL2promotion.
_BYTES = 0
MAP_DTYPE = {"float16": 6, "bfloat16": 9, "float32": 7, "int32": 3, "uint32": 2, "int16": 1, "uint16": 1}
TFLOAT32 = 11  # rounds float32 to the nearest tf32 while it copies
SWIZZLE = {32: 1, 64: 2, 128: 3}
PROMOTE_128, PROMOTE_256 = 2, 3


def tma_reason(matrix: Matrix, what: str) -> str | None:
    """Why TMA can't read or write a matrix, or None."""
    if matrix.buffer.offset % 16:
        return f"{what} starts at byte {matrix.buffer.offset} of its buffer, and TMA needs a multiple of 16"
    for name, stride in {"row": matrix.row_stride, "batch": matrix.batch_stride}.items():
        if stride * matrix.itemsize % 16:
            return f"the {name} stride of {what} is {stride * matrix.itemsize} bytes, and TMA needs a multiple of 16"
        if stride * matrix.itemsize >= 2**40:
            return f"the {name} stride of {what} is {stride * matrix.itemsize} bytes, and TMA has 40 bits for it"
    return None


def stage_bytes(size: int) -> int:
    """Of a stage that holds so many bytes, up to where the next one begins."""
    return ceil(size / _STAGE_ALIGNMENT) * _STAGE_ALIGNMENT


def stage_depth(matrix: Matrix) -> int:
    """Elements of K in a stage, of an operand."""
    return DEPTH_BYTES // matrix.itemsize


def element_type(dtype: str, *, multiplied: bool = False) -> int:
    """The CUtensorMapDataType of an array; float32 that is `multiplied` arrives as tf32."""
    return TFLOAT32 if multiplied and dtype == "float32" else MAP_DTYPE.get(dtype, _BYTES)


def promotion(row: int) -> int:
    """How much the L2 cache loads at once of rows that are so many bytes apart. The second half of 256 bytes is another
    row's, unless rows are whole lines ([48] in benchmarks/results/product_kernels.md, and [19] of Patches in
    convolution_kernels.md).
    """
    return PROMOTE_128 if row % DEPTH_BYTES else PROMOTE_256


def operand_map(
    matrix: Matrix, batch: int, along: bool, extent: int, *, sharers: int = 1, l2_promotion: int | None = None
) -> TensorMap:
    """The map of an operand's tiles of `extent` rows along M or N, of which each of `sharers` blocks loads a part.

    Memory runs `along` these, or along K.
    """
    depth = stage_depth(matrix)
    box = (CHUNK, depth // sharers) if along else (depth, extent // sharers)
    return tensor_map(matrix, batch, box, SWIZZLE[DEPTH_BYTES], multiplied=True, l2_promotion=l2_promotion)


def tensor_map(
    matrix: Matrix,
    batch: int,
    box: tuple[int, int],
    swizzle: int,
    *,
    multiplied: bool = False,
    l2_promotion: int | None = None,
) -> TensorMap:
    """The map of boxes of `box` columns and rows, of what is `multiplied`."""
    batched = matrix.batch_stride != 0 and batch > 1
    row = matrix.row_stride * matrix.itemsize
    if l2_promotion is None:
        # Of a batch, what the L2 cache loads besides is often nobody's [48].
        l2_promotion = PROMOTE_128 if batched else promotion(row)
    return TensorMap(
        buffer=matrix.buffer,
        dtype=element_type(matrix.dtype, multiplied=multiplied),
        dimensions=(matrix.columns, matrix.rows, batch if batched else 1),
        strides=(row, matrix.batch_stride * matrix.itemsize if batched else row * matrix.rows),
        box=(*box, 1),
        element_strides=(1, 1, 1),
        swizzle=swizzle,
        l2_promotion=l2_promotion,
    )
