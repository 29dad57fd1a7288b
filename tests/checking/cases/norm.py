"""Cases of `layer_norm` and `rms_norm`: rows of the table."""

import zlib
from dataclasses import dataclass, fields, replace
from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np

import jaxdnn
from checking import reference
from checking.cases.dtypes import BF16, F16, F32, F64, SHORT


@dataclass(frozen=True, repr=False)
class NormCase:
    """One call of `layer_norm` or `rms_norm`.

    Attributes:
      kind: the public function.
      shape: x's.
      axis: as the public function takes it.
      x, residual, scale, bias: dtypes; None for an absent operand.
      epsilon, scale_offset, statistics: as the public function takes them.
      data: what x holds: "normal"; "large_mean", 100 standard deviations from 0; "huge" and "tiny", 1e10 and 1e-10
        times normal; "nan", "inf" and "zero", normal but for one such row.
      seed: of the random arrays.
    """

    kind: str
    shape: tuple[int, ...]
    axis: int | tuple[int, ...] = -1
    x: str = F32
    residual: str | None = None
    scale: str | None = None
    bias: str | None = None
    epsilon: float = 1e-6
    scale_offset: float = 0.0
    statistics: bool = False
    data: str = "normal"
    seed: int = 0

    op = "norm"
    differentiable = True

    @property
    def dtypes(self) -> dict[str, str]:
        given = {"x": self.x, "residual": self.residual, "scale": self.scale, "bias": self.bias}
        return {name: dtype for name, dtype in given.items() if dtype}

    @property
    def operands(self) -> tuple[str, ...]:
        return tuple(self.dtypes)

    active = operands

    @property
    def axes(self) -> tuple[int, ...]:
        given = (self.axis,) if isinstance(self.axis, int) else self.axis
        return tuple(sorted(axis % len(self.shape) for axis in given))

    @property
    def columns(self) -> int:
        return prod(self.shape[axis] for axis in self.axes)

    @property
    def rows(self) -> int:
        return prod(size for axis, size in enumerate(self.shape) if axis not in self.axes)

    @property
    def sum_dtype(self) -> str:
        """The dtype of x + residual."""
        return jnp.promote_types(self.x, self.residual or self.x).name

    @property
    def compute_dtype(self) -> str:
        return F64 if F64 in self.dtypes.values() else F32

    @property
    def unit(self) -> float:
        return float(np.finfo(self.compute_dtype).eps) / 2

    @property
    def outputs(self) -> dict[str, str]:
        outputs = {"y": self.x}
        if self.residual:
            outputs["sum"] = self.sum_dtype
        if self.statistics:
            names = ("mean", "rstd") if self.kind == "layer_norm" else ("rstd",)
            outputs |= dict.fromkeys(names, self.compute_dtype)
        return outputs

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape of an operand or output."""
        if name in ("scale", "bias"):
            return tuple(self.shape[axis] for axis in self.axes)
        if name in ("mean", "rstd"):
            return tuple(size for axis, size in enumerate(self.shape) if axis not in self.axes)
        return self.shape

    def primals(self) -> tuple[np.ndarray, ...]:
        return tuple(self._array("primal", name, dtype) for name, dtype in self.dtypes.items())

    def tangents(self) -> tuple[np.ndarray, ...]:
        return tuple(self._array("tangent", name, dtype) for name, dtype in self.dtypes.items())

    def cotangents(self) -> tuple[np.ndarray, ...]:
        return tuple(self._array("cotangent", name, dtype) for name, dtype in self.outputs.items())

    def _array(self, role: str, name: str, dtype: str) -> np.ndarray:
        random = np.random.default_rng([self.seed, zlib.crc32(f"{role} {name}".encode())])
        values = random.standard_normal(self.shape_of(name))
        if role == "primal" and name in ("x", "residual"):
            values = self._placed(values, name)
        if role == "primal" and name == "scale":
            values = values + 1 - self.scale_offset
        return values.astype(jnp.dtype(dtype))

    def _placed(self, values: np.ndarray, name: str) -> np.ndarray:
        match self.data:
            case "normal":
                return values
            case "large_mean":
                return values + 100 if name == "x" else values
            case "huge":
                return values * 1e10
            case "tiny":
                return values * 1e-10
        values = values.copy()
        rows = np.moveaxis(values, self.axes, range(-len(self.axes), 0)).reshape(self.rows, self.columns)
        bad = {"nan": np.nan, "inf": np.inf, "zero": 0.0}[self.data]
        rows[self.rows // 2, slice(None) if self.data == "zero" else self.columns // 3] = bad
        moved = [self.shape[axis] for axis in range(len(self.shape)) if axis not in self.axes]
        normalized = [self.shape[axis] for axis in self.axes]
        return np.moveaxis(rows.reshape(moved + normalized), range(-len(self.axes), 0), self.axes)

    def call(self, *arrays: Any, **changes: Any) -> Any:
        named = dict(zip(self.operands, arrays, strict=True))
        keywords = {
            "axis": self.axis,
            "epsilon": self.epsilon,
            "scale_offset": self.scale_offset,
            "return_statistics": self.statistics,
        }
        return getattr(jaxdnn, self.kind)(**named, **(keywords | changes))

    def reference(self, rounding: Any, *arrays: Any) -> Any:
        return reference.norm(self, rounding, **dict(zip(self.operands, arrays, strict=True)))

    def replace(self, **changes: Any) -> "NormCase":
        return replace(self, **changes)

    def __repr__(self) -> str:
        shown = [f for f in fields(self) if getattr(self, f.name) != f.default]
        return f"NormCase({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in shown)})"

    def __str__(self) -> str:
        """The id of a test: "rms_norm-4x7-bf16-scale:f32"."""
        parts = [self.kind, "x".join(map(str, self.shape)) or "scalar"]
        if self.axis != -1:
            parts.append("axis:" + ",".join(map(str, (self.axis,) if isinstance(self.axis, int) else self.axis)))
        parts.append(SHORT[self.x])
        parts += [f"{name}:{SHORT[dtype]}" for name, dtype in self.dtypes.items() if name != "x"]
        parts += [
            f"{name}:{getattr(self, name)}" for name in ("epsilon", "scale_offset", "data") if self._unusual(name)
        ]
        parts += ["statistics"] * self.statistics
        return "-".join(parts)

    def _unusual(self, name: str) -> bool:
        return getattr(self, name) != type(self).__dataclass_fields__[name].default

    def reproduction(self, check: str, engine: str | None = None) -> str:
        """The command that runs one check of this case: "forward", "jvp" or "vjp"."""
        named = f" --engine {engine}" if engine else ""
        return f'PYTHONPATH=tests python -P -m checking.fuzz.calls --check {check}{named} --case "{self!r}"'


def _norms() -> list[NormCase]:
    def layer(*shape: int, **fields: Any) -> NormCase:
        return NormCase("layer_norm", shape, **fields)

    def rms(*shape: int, **fields: Any) -> NormCase:
        return NormCase("rms_norm", shape, **fields)

    def of(dtype: str) -> dict[str, str]:
        return {"x": dtype, "scale": dtype, "bias": dtype}

    return [
        # shapes: one column, one row, odd, prime, no multiple of a vector, a tile or a warp, and a few large ones
        layer(3, 1, scale=F32, bias=F32),
        rms(3, 1, scale=F32),
        layer(1, 1),
        rms(1, 8, scale=F32),
        layer(1, 4099, scale=F32, bias=F32, statistics=True),
        layer(5, 3, scale=F32, bias=F32),
        rms(7, 13, scale=F32, statistics=True),
        layer(17, 31, x=BF16, scale=BF16, bias=BF16),
        rms(3, 1023, x=BF16, scale=F32),
        layer(3, 1025, x=F16, scale=F32, bias=F32),
        layer(33, 768, **of(F32)),
        layer(67, 4096, **of(BF16)),
        rms(257, 1024, x=BF16, scale=BF16),
        rms(9, 16_384, scale=F32),
        layer(3, 65_536, x=BF16, scale=F32, bias=F32),
        rms(2, 262_144, x=BF16, scale=BF16),
        layer(20_001, 4, **of(F32)),
        rms(3001, 128, x=F16, scale=F16),
        # ranks and axes
        layer(6, scale=F32),
        rms(2, 3, 4, 5, scale=F32, residual=F32),
        layer(2, 3, 4, 5, axis=1, **of(F32)),
        rms(2, 3, 8, axis=(-2, -1), scale=F32),
        layer(4, 3, 5, axis=(0, 2), scale=F32, bias=F32, residual=F32, statistics=True),
        layer(4, 6, axis=(0, 1), scale=F32),
        rms(5, 6, axis=0, x=BF16, scale=BF16, residual=BF16),
        # operands present and absent
        layer(4, 24),
        rms(4, 24, statistics=True),
        layer(4, 24, bias=F32),
        layer(4, 24, scale=F32, statistics=True),
        rms(4, 24, scale=F32, scale_offset=1.0),
        layer(4, 24, x=BF16, scale=BF16, bias=BF16, scale_offset=1.0, residual=BF16, statistics=True),
        rms(6, 40, x=F16, scale=F16, residual=F16, statistics=True),
        layer(6, 40, residual=F32, **of(F32)),
        # dtypes and their mixtures
        layer(5, 36, **of(F64), residual=F64, statistics=True),
        rms(5, 36, x=F64, scale=F64),
        layer(5, 36, x=BF16, scale=F64, bias=F32),
        rms(5, 36, x=F64, scale=F32, residual=BF16),
        rms(5, 36, x=BF16, scale=F32, residual=F32, statistics=True),
        layer(5, 36, x=F32, scale=BF16, bias=F16, residual=BF16),
        layer(5, 36, x=F16, scale=BF16, bias=F32, residual=BF16, statistics=True),
        # values
        layer(5, 64, data="large_mean", scale=F32, bias=F32, statistics=True),
        rms(5, 64, data="large_mean", scale=F32, statistics=True),
        layer(5, 512, x=BF16, data="large_mean", scale=BF16, bias=BF16),
        layer(5, 64, data="huge", scale=F32, epsilon=0.0),
        rms(5, 64, data="huge", scale=F32, residual=F32),
        layer(5, 64, data="tiny", scale=F32, epsilon=0.0),
        rms(5, 64, data="tiny", scale=F32, epsilon=0.0, statistics=True),
        layer(5, 64, data="tiny", scale=F32, bias=F32),
        layer(5, 64, data="zero", scale=F32, bias=F32),
        rms(5, 64, x=BF16, data="zero", scale=F32),
        rms(5, 64, epsilon=0.5, scale=F32, residual=F32),
    ]


NORMS = _norms()

# Calls without elements: the answer is the reference's, and nothing may be launched.
EMPTY_NORMS = [
    NormCase("layer_norm", (0, 8), scale=F32, bias=F32, statistics=True),
    NormCase("rms_norm", (4, 0), scale=F32, residual=F32),
    NormCase("layer_norm", (0, 0), scale=F32),
    NormCase("rms_norm", (2, 0, 3), axis=(0, 1), scale=F32),
]

# One row is not finite, and the others must not notice.
NOT_FINITE_NORMS = [
    NormCase("layer_norm", (7, 64), scale=F32, bias=F32, data="nan", statistics=True),
    NormCase("rms_norm", (7, 65), x=BF16, scale=BF16, data="nan"),
    NormCase("rms_norm", (40, 16), scale=F32, data="inf", statistics=True),
    NormCase("layer_norm", (40, 16), x=BF16, scale=F32, bias=F32, data="inf"),
    NormCase("layer_norm", (3, 4099), scale=F32, data="nan"),
]

# Small enough for second derivatives, many mapped axes and several devices: what an op's rules have to tell apart.
SMALL_NORMS = [
    NormCase("layer_norm", (4, 5), scale=F32, bias=F32, residual=F32, statistics=True),
    NormCase("layer_norm", (4, 5), x=F64, scale=F64, bias=F64, residual=F64, statistics=True),
    NormCase("rms_norm", (4, 5), scale=F32, scale_offset=1.0),
    NormCase("rms_norm", (4, 5), x=F64, residual=F64, statistics=True),
    NormCase("layer_norm", (2, 4, 3), axis=(0, 2), scale=F32, bias=F32),
]
