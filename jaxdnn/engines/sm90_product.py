"""A product of matrices as the Hopper matmul kernel sees it: arrays, and what the copy engine asks of them."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from jaxdnn.plan import Operand, Result, Scratch, TensorMap

DEPTH_BYTES = 128  # of K in a stage
MULTIPLIES = {("bfloat16", "bfloat16"), ("float16", "float16"), ("float32", "float32")} | {
    (a, b) for a in ("float8_e4m3fn", "float8_e5m2") for b in ("float8_e4m3fn", "float8_e5m2")
}
OPERAND_DTYPES = ("bfloat16", "float16", "float32")  # of an epilogue's operands and results

# Values of CUtensorMapDataType, CUtensorMapSwizzle and CUtensorMapL2promotion.
_MAP_DTYPE = {"float16": 6, "bfloat16": 9, "float32": 7, "float8_e4m3fn": 0, "float8_e5m2": 0}
TFLOAT32 = 11
SWIZZLE = {64: 2, 128: 3}
_PROMOTE_256 = 3


def identity(sums: int) -> str:
    """The functor that returns each sum as a result."""
    size = f"(&sum)[{sums}], const float (&)[1], const jaxdnn::Place&, float (&result)[{sums}]"
    body = "".join(f"        result[{i}] = sum[{i}];\n" for i in range(sums))
    return f"struct Epilogue {{\n    static void apply(const float {size}) {{\n{body}    }}\n}};\n"


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
    epilogue: str = identity(1)

    @property
    def depth(self) -> int:
        """Elements of K in a stage."""
        return DEPTH_BYTES // self.a.itemsize


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
