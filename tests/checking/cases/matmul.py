"""Cases of `matmul`, `dot_general` and `gated_linear_unit`: rows of the table."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxdnn
from checking import reference
from checking.cases.base import Case
from checking.cases.dtypes import BF16, E4M3, E5M2, F32, F64, SHORT
from checking.cases.epilogues import EPILOGUES


@dataclass(frozen=True, repr=False)
class MatmulCase(Case):
    """One product of arrays.

    Attributes:
      kind: the public function.
      a, b: shapes. Of a gated linear unit, b is the shape of gate and up.
      dtypes_of: of a and b.
      numbers: dimension numbers, for dot_general.
      epilogue: a name in EPILOGUES, or of a gated linear unit, in `jax.nn`.
      extras: shape and dtype of each operand of the epilogue.
      out_dtype, precision: as the public function takes them.
      data: what a holds: "normal"; "nan" and "inf", normal but for one such element.
    """

    kind: str
    a: tuple[int, ...]
    b: tuple[int, ...]
    dtypes_of: tuple[str, str] = (F32, F32)
    numbers: Any = None
    epilogue: str | None = None
    extras: tuple[tuple[tuple[int, ...], str], ...] = ()
    out_dtype: str | None = None
    precision: str | None = None

    op = "matmul"

    @property
    def types(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """The shape and dtype of each operand."""
        of_a, of_b = zip((self.a, self.b), self.dtypes_of, strict=True)
        names = ("x", "gate", "up") if self.kind == "gated_linear_unit" else ("a", "b")
        matrices = dict(zip(names, (of_a, of_b, of_b), strict=False))
        return matrices | {f"operand{i}": extra for i, extra in enumerate(self.extras)}

    @property
    def dtypes(self) -> dict[str, str]:
        return {name: dtype for name, (_, dtype) in self.types.items()}

    @property
    def differentiable(self) -> bool:
        return super().differentiable and "int" not in (self.out_dtype or "")

    @property
    def results(self) -> Any:
        """The types of what the call returns, a pytree."""
        return _results(self.replace(seed=0, data="normal"))

    @property
    def outputs(self) -> dict[str, str]:
        return {f"y{i}": result.dtype.name for i, result in enumerate(jax.tree.leaves(self.results))}

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape of an operand or output."""
        if name in self.types:
            return self.types[name][0]
        return jax.tree.leaves(self.results)[int(name[1:])].shape

    @property
    def length(self) -> int:
        """The longest sum of products in the call or in a derivative."""
        return max(*self.a, *self.b, 1)

    @property
    def multiplied(self) -> float:
        """The unit roundoff of what derivatives are multiplied in."""
        widest = max((float(jnp.finfo(dtype).eps) for dtype in self._floating), default=0.0)
        return min(widest, float(jnp.finfo(BF16).eps)) / 2

    @property
    def _floating(self) -> list[str]:
        return [dtype for dtype in self.dtypes_of if jnp.issubdtype(dtype, jnp.floating)]

    @property
    def input_unit(self) -> float:
        """The unit roundoff of products, where tensor cores take less than what they are given.

        float32 is rounded to tf32 unless that is forbidden; products of float8 are aligned to the largest one in 14
        bits before they are added (DeepSeek-AI, "DeepSeek-V3 Technical Report", arXiv:2412.19437, section 3.3.2).
        """
        if jax.default_backend() != "gpu" or self.precision == "highest" or self.compute_dtype == F64:
            return 0.0
        if F32 in self.dtypes_of:
            return 2.0**-11
        return 2.0**-13 if {E4M3, E5M2} & set(self.dtypes_of) else 0.0

    def cotangents(self) -> Any:
        arrays = jax.tree.unflatten(jax.tree.structure(self.results), super().cotangents())
        return arrays if isinstance(arrays, tuple) else (arrays,)

    def operand_values(self, name: str, values: np.ndarray) -> np.ndarray:
        if name not in ("a", "x"):
            return values
        # The sums have a standard deviation of one, whatever their length.
        values = np.array(values / np.sqrt(max(1, self._contracted)))
        if self.data != "normal":
            values.flat[values.size // 2] = {"nan": np.nan, "inf": np.inf}[self.data]
        return values

    @property
    def _contracted(self) -> int:
        if self.numbers is None:
            return self.a[-1]
        return int(np.prod([self.a[axis] for axis in self.numbers[0][0]]))

    @property
    def function(self) -> Any:
        """The epilogue, of a matmul or dot_general."""
        return EPILOGUES[self.epilogue] if self.epilogue else None

    def call(self, *arrays: Any, **changes: Any) -> Any:
        keywords: dict[str, Any] = {"out_dtype": self.out_dtype, "precision": self.precision, **changes}
        if self.kind == "gated_linear_unit":
            return jaxdnn.gated_linear_unit(*arrays, activation=getattr(jax.nn, self.epilogue or "silu"), **keywords)
        keywords["epilogue"] = self.function
        if self.kind == "matmul":
            return jaxdnn.matmul(*arrays, **keywords)
        a, b, *operands = arrays
        return jaxdnn.dot_general(a, b, self.numbers, operands=operands, **keywords)

    def reference(self, rounding: Any, *arrays: Any) -> Any:
        outputs = reference.matmul(self, rounding, *arrays)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    def __str__(self) -> str:
        """The id of a test: "matmul-4x8-8x16-bf16-bf16-bias gelu"."""
        parts = [self.kind, *("x".join(map(str, shape)) or "scalar" for shape in (self.a, self.b))]
        parts += dict.fromkeys(SHORT[dtype] for dtype in self.dtypes_of)
        if self.numbers:
            parts.append("".join(str(self.numbers).split()).replace(",)", ")"))
        parts += [str(value) for value in (self.epilogue, self.precision) if value]
        parts += [f"out:{SHORT[self.out_dtype]}"] if self.out_dtype else []
        parts += [SHORT[dtype] for _, dtype in self.extras if dtype != F32]
        return "-".join([*parts, *([] if self.data == "normal" else [self.data])])


@functools.cache
def _results(case: MatmulCase) -> Any:
    arrays = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in case.types.values()]
    return jax.eval_shape(case.call, *arrays)


def product(a: Any, b: Any, *dtypes: str, **fields: Any) -> MatmulCase:
    """A matmul of two shapes; of one dtype, or of two."""
    both = (dtypes * 2)[:2] if dtypes else (F32, F32)
    return MatmulCase("matmul", a, b, both, **fields)
