"""Products of matrices as an engine sees them, made directly: their plans, how to run one, and what is right."""

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jaxdnn import custom_call
from jaxdnn.engines.product.problem import Matrix, Product, Reduced, dense_operand, identity
from jaxdnn.plan import Operand, Plan, Result
from jaxdnn.pointwise import Program, collapse, trace


@dataclass(frozen=True)
class ProductCase:
    """epilogue(a @ b, ...) for a batch of matrices.

    Attributes:
      a_transposed, b_transposed: how they lie in memory.
      padding: columns after each row of a and b.
      sums: how many matrices b there are.
      epilogue: of (sums..., operands...), over (batch, row, column); None returns the sums.
      operands: dtype and shape of each.
      shared: which of "a" and "b" is one matrix for the whole batch.
    """

    m: int
    n: int
    k: int
    dtype: str = "float32"
    b_dtype: str = ""
    out: str = ""
    batch: int = 1
    a_transposed: bool = False
    b_transposed: bool = False
    padding: int = 0
    accumulators: int = 1
    epilogue: Callable[..., Any] | None = None
    operands: tuple[tuple[str, tuple[int, int, int]], ...] = ()
    shared: str = ""
    precision: Any = "highest"

    @property
    def accumulator(self) -> str:
        return {"float64": "float64", "int8": "int32"}.get(self.dtype, "float32")

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.batch, self.m, self.n

    def product(self) -> Product:
        out = self.out or ("int32" if self.dtype == "int8" else self.dtype)
        program = identity(self.accumulators, self.accumulator, out)
        if self.epilogue is not None:
            avals = [jax.ShapeDtypeStruct(shape, dtype) for dtype, shape in self.operands]
            traced = trace(self.epilogue, self.shape, (self.accumulator,) * self.accumulators, avals).with_output_dtype(
                out
            )
            collapsed = collapse(traced, self.shape, [shape for _, shape in self.operands], (1, 1, 1))
            assert isinstance(collapsed, Program), collapsed
            program = collapsed
        operands = []
        for load in program.affine_loads:
            dtype, _ = self.operands[load.operand]
            operands.append(dense_operand(load, Operand(1 + self.accumulators + load.operand), dtype))
        results: list[Matrix | Reduced] = []
        for i, output in enumerate(program.outputs):
            strides, step = [0, 0, 0], 1
            for axis in (2, 1, 0):
                if axis not in output.axes:
                    strides[axis] = step
                    step *= self.shape[axis]
            if output.reduction is None:
                results.append(Matrix(Result(i), output.dtype, self.m, self.n, self.n, self.m * self.n))
            else:
                results.append(Reduced(Result(i), output.dtype, output.reduction, *strides, output.axes))
        return Product(
            m=self.m,
            n=self.n,
            k=self.k,
            batch=self.batch,
            a=self._matrix(0),
            b=tuple(self._matrix(1 + i) for i in range(self.accumulators)),
            program=program,
            results=tuple(results),
            operands=tuple(operands),
            a_transposed=self.a_transposed,
            b_transposed=self.b_transposed,
            exact=self.precision == "highest",
        )

    def _matrix(self, index: int) -> Matrix:
        rows, columns = (self.m, self.k) if index == 0 else (self.k, self.n)
        if self.a_transposed if index == 0 else self.b_transposed:
            rows, columns = columns, rows
        stride = columns + self.padding
        batch = rows * stride if self.batch > 1 and ("a" if index == 0 else "b") not in self.shared else 0
        dtype = self.dtype if index == 0 else self.b_dtype or self.dtype
        return Matrix(Operand(index), dtype, rows, columns, stride, batch)

    def arrays(self) -> list[np.ndarray]:
        """Random operands, a function of the case alone."""
        random = np.random.default_rng(zlib.crc32(repr((*self.shape, self.k, self.dtype, self.padding)).encode()))
        matrices = [self._matrix(i) for i in range(1 + self.accumulators)]
        shapes = [(m.dtype, (self.batch if m.batch_stride else 1, m.rows, m.row_stride)) for m in matrices]
        return [_random(random, dtype, shape) for dtype, shape in (*shapes, *self.operands)]

    def matrices(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """a and every b in float64, without padding, not transposed."""
        found = []
        for i, array in enumerate(arrays[: 1 + self.accumulators]):
            wide = array[..., : self._matrix(i).columns].astype(np.float64)
            found.append(np.swapaxes(wide, 1, 2) if (self.b_transposed if i else self.a_transposed) else wide)
        return found


def _random(random: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    if dtype == "bool":
        return random.random(shape) < 0.5
    if "int" in dtype:
        return random.integers(-100, 100, shape).astype(dtype)
    return random.standard_normal(shape).astype(jnp.dtype(dtype))


def run(plan: Plan, product: Product, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The results of a plan, on the default device; a reduced one without the dimensions that are gone."""
    return run_plan(plan, result_types(product), arrays)


def run_plan(plan: Plan, types: Iterable[Any], arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The results of a plan, which have shapes and dtypes, on the default device."""
    results = jax.jit(lambda *operands: _plan_p.bind(*operands, plan=plan, types=tuple(types)))(*arrays)
    return [np.asarray(result) for result in results]


def result_types(product: Product) -> list[jax.ShapeDtypeStruct]:
    """Shape and dtype of each result."""
    shape = (product.batch, product.m, product.n)
    types = []
    for output in product.program.outputs:
        whole = len(output.dimensions) == len(shape) and output.reduction is None
        types.append(jax.ShapeDtypeStruct(shape if whole else output.shape(shape), output.dtype))
    return types


_plan_p = Primitive("product_plan")
_plan_p.multiple_results = True
_plan_p.def_abstract_eval(lambda *_, types, **__: [ShapedArray(t.shape, t.dtype) for t in types])
mlir.register_lowering(_plan_p, lambda ctx, *operands, plan, **_: custom_call.custom_call(ctx, plan, operands))
