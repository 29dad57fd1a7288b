"""Cases of `matmul`, `dot_general` and `gated_linear_unit`: rows of the table."""

import functools
import zlib
from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxdnn
from checking import reference
from checking.cases.dtypes import BF16, E4M3, E5M2, F16, F32, F64, I8, I32, SHORT
from checking.cases.epilogues import EPILOGUES


@dataclass(frozen=True, repr=False)
class MatmulCase:
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
      seed: of the random arrays.
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
    data: str = "normal"
    seed: int = 0

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
    def operands(self) -> tuple[str, ...]:
        return tuple(self.types)

    @property
    def differentiable(self) -> bool:
        """Whether every operand and result is floating point."""
        return not any("int" in dtype for dtype in (*self.dtypes.values(), self.out_dtype or ""))

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
    def compute_dtype(self) -> str:
        return F64 if F64 in self.dtypes.values() else F32

    @property
    def unit(self) -> float:
        return float(np.finfo(self.compute_dtype).eps) / 2

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

    def primals(self) -> tuple[np.ndarray, ...]:
        return tuple(self._array("primal", name) for name in self.types)

    def tangents(self) -> tuple[np.ndarray, ...]:
        return tuple(self._array("tangent", name) for name in self.types)

    def cotangents(self) -> Any:
        arrays = [self._array("cotangent", name) for name in self.outputs]
        arrays = jax.tree.unflatten(jax.tree.structure(self.results), arrays)
        return arrays if isinstance(arrays, tuple) else (arrays,)

    def _array(self, role: str, name: str) -> np.ndarray:
        random = np.random.default_rng([self.seed, zlib.crc32(f"{role} {name}".encode())])
        dtype = jnp.dtype(self.dtypes.get(name) or self.outputs[name])
        shape = self.shape_of(name)
        if jnp.issubdtype(dtype, jnp.integer):
            return random.integers(-127, 128, shape).astype(dtype)
        values = random.standard_normal(shape)
        if role == "primal" and name in ("a", "x"):
            # The sums have a standard deviation of one, whatever their length.
            values = np.array(values / np.sqrt(max(1, self._contracted)))
            if self.data != "normal":
                values.flat[values.size // 2] = {"nan": np.nan, "inf": np.inf}[self.data]
        return values.astype(dtype)

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

    def replace(self, **changes: Any) -> "MatmulCase":
        return replace(self, **changes)

    def __repr__(self) -> str:
        shown = [f for f in fields(self) if getattr(self, f.name) != f.default]
        return f"MatmulCase({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in shown)})"

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

    def reproduction(self, check: str, engine: str | None = None) -> str:
        """The command that runs one check of this case: "forward", "jvp" or "vjp"."""
        named = f" --engine {engine}" if engine else ""
        return f'PYTHONPATH=tests python -P -m checking.fuzz.calls --check {check}{named} --case "{self!r}"'


@functools.cache
def _results(case: MatmulCase) -> Any:
    arrays = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in case.types.values()]
    return jax.eval_shape(case.call, *arrays)


def product(a: Any, b: Any, *dtypes: str, **fields: Any) -> MatmulCase:
    """A matmul of two shapes; of one dtype, or of two."""
    both = (dtypes * 2)[:2] if dtypes else (F32, F32)
    return MatmulCase("matmul", a, b, both, **fields)


def _matmuls() -> list[MatmulCase]:
    def dot(a: Any, b: Any, numbers: Any, *dtypes: str, **fields: Any) -> MatmulCase:
        return product(a, b, *dtypes, **fields).replace(kind="dot_general", numbers=numbers)

    def gated(a: Any, b: Any, *dtypes: str, **fields: Any) -> MatmulCase:
        return product(a, b, *dtypes, **fields).replace(kind="gated_linear_unit")

    def row(n: int, dtype: str = F32) -> Any:
        return ((n,), dtype)

    scalar = ((), F32)
    nn = ((1,), (0,))
    none = ((), ())
    return [
        # shapes: vectors, one of everything, no tile multiple, skinny both ways, several tiles
        product((8,), (8,)),
        product((7,), (7, 5)),
        product((5, 7), (7,)),
        product((1, 1), (1, 1)),
        product((3, 5), (5, 2)),
        product((33, 65), (65, 17)),
        product((128, 64), (64, 256), BF16),
        product((130, 70), (70, 140), BF16),
        product((257, 96), (96, 136), F16),
        product((1, 520), (520, 300), BF16),
        product((16, 1024), (1024, 264), BF16),
        product((40, 513), (513, 72), F16),
        product((300, 24), (24, 1), F32),
        product((2, 4099), (4099, 3), F32),
        product((260, 520), (520, 390), F32, precision="highest"),
        # batches and broadcasts
        product((3, 4, 8), (3, 8, 5)),
        product((3, 4, 8), (8, 5), BF16),
        product((4, 8), (3, 8, 5)),
        product((2, 1, 4, 8), (3, 8, 5)),
        product((2, 3, 4, 8), (2, 1, 8, 5), BF16),
        product((2, 3, 70, 40), (2, 3, 40, 33), F16),
        product((6,), (2, 6, 5)),
        # dimension numbers
        dot((9, 20), (20, 11), (nn, none), F32),
        dot((40, 72), (56, 72), (((1,), (1,)), none), BF16),
        dot((72, 40), (72, 56), (((0,), (0,)), none), BF16),
        dot((72, 40), (56, 72), (((0,), (1,)), none), F16),
        dot((3, 4, 5), (4, 5, 6), (((1, 2), (0, 1)), none)),
        dot((3, 4, 5), (5, 4, 6), (((1, 2), (1, 0)), none)),
        dot((5, 3, 4), (4, 5, 6), (((2,), (0,)), ((0,), (1,)))),
        dot((2, 3, 4, 5), (5, 2, 3, 6), (((3,), (0,)), ((0, 1), (1, 2))), BF16),
        dot((4, 3, 2, 8), (4, 7, 2, 8), (((3,), (3,)), ((0, 2), (0, 2))), BF16),
        dot((3, 4), (5, 6), (((), ()), none)),
        dot((3, 4), (3, 4), (((0, 1), (0, 1)), none)),
        dot((3, 4), (3, 4), (((), ()), ((0, 1), (0, 1)))),
        # dtypes and their mixtures, and what is stored
        product((33, 40), (40, 24), F64),
        product((33, 40), (40, 24), E4M3, out_dtype=BF16),
        product((33, 48), (48, 24), E4M3, E5M2, out_dtype=F32),
        product((33, 48), (48, 32), E5M2, out_dtype=F16),
        product((33, 40), (40, 24), I8, out_dtype=I32),
        product((33, 40), (40, 24), BF16, F32),
        product((33, 40), (40, 24), BF16, out_dtype=F32),
        product((33, 40), (40, 24), F32, out_dtype=BF16),
        product((33, 40), (40, 24), F16, out_dtype=F64),
        # epilogues
        product((33, 40), (40, 24), epilogue="relu"),
        product((130, 64), (64, 72), BF16, epilogue="bias gelu", extras=(row(72, BF16),)),
        product((130, 64), (64, 72), F32, epilogue="bias erf gelu", extras=(row(72),)),
        product((40, 64), (64, 33), F16, epilogue="bias", extras=(row(33),)),
        product((2, 3, 20, 16), (16, 24), BF16, epilogue="bias gelu", extras=(row(24),), out_dtype=F32),
        product((33, 40), (40, 24), epilogue="accumulate", extras=(((33, 24), F32), scalar, scalar)),
        product((33, 40), (40, 24), BF16, epilogue="residual", extras=(row(24), ((33, 24), BF16))),
        product((3, 33, 40), (3, 40, 24), BF16, epilogue="residual", extras=(((3, 1, 24), BF16), ((3, 33, 24), BF16))),
        product((33, 40), (40, 24), epilogue="of rows", extras=(row(33),)),
        product((33, 48), (48, 32), E4M3, epilogue="scaled", extras=(scalar, scalar), out_dtype=BF16),
        product((33, 40), (40, 24), I8, epilogue="dequantized", extras=(row(24),), out_dtype=I32),
        product((33, 40), (40, 24), BF16, epilogue="two results", extras=(row(24),)),
        product((33, 40), (40, 24), epilogue="below the diagonal"),
        product((33, 40), (40, 24), epilogue="softmax"),
        product((5, 40), (40,), epilogue="silu"),
        # reductions
        product((133, 40), (40, 72), BF16, epilogue="largest"),
        product((133, 40), (40, 72), epilogue="summed over rows", extras=(((133, 72), F32),)),
        product((2, 33, 40), (2, 40, 24), BF16, epilogue="summed over rows", extras=(((2, 33, 24), BF16),)),
        product((33, 40), (40, 300), epilogue="least of each row"),
        product((33, 40), (40, 1), epilogue="least of each row"),
        product((33, 106), (106, 256), epilogue="extrema", precision="highest"),
        product((33, 40), (40, 24), epilogue="sum alone"),
        # two products at once
        gated((33, 40), (40, 24)),
        gated((2, 65, 64), (64, 136), BF16),
        gated((33, 40), (40, 24), F16, epilogue="gelu", extras=(row(24), row(24, F16))),
        gated((8,), (8, 6), epilogue="relu"),
    ]


MATMULS = _matmuls()

EMPTY_MATMULS = [
    product((0, 8), (8, 5), epilogue="relu"),
    product((4, 0), (0, 5), epilogue="bias gelu", extras=(((5,), F32),)),
    product((3, 4, 8), (3, 8, 0), BF16),
    product((0, 4, 8), (0, 8, 5)),
]

NOT_FINITE_MATMULS = [
    product((33, 40), (40, 24), data="nan"),
    product((33, 40), (40, 24), BF16, data="inf"),
    product((33, 40), (40, 24), BF16, data="nan", epilogue="bias gelu", extras=(((24,), BF16),)),
    product((33, 40), (40, 24), data="nan", epilogue="largest"),
]

SMALL_MATMULS = [
    product((3, 4), (4, 2), epilogue="bias gelu", extras=(((2,), F32),)),
    product((3, 4), (4, 2), F64, epilogue="residual", extras=(((2,), F64), ((3, 2), F64))),
    product((2, 3, 4), (2, 4, 2)),
    product((3, 4), (4, 2), epilogue="summed over rows", extras=(((3, 2), F32),)),
    product((3, 4), (4, 2)).replace(kind="gated_linear_unit"),
    product((3, 4), (4, 2), epilogue="softmax"),
]
