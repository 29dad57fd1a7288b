"""Cases of `layer_norm` and `rms_norm`: rows of the table."""

from dataclasses import dataclass
from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import jaxdnn
from checking import reference
from checking.cases.base import Case, Rows, Split, subsets
from checking.cases.dtypes import BF16, F16, F32, F64, SHORT


@dataclass(frozen=True, repr=False)
class NormCase(Case):
    """One call of `layer_norm` or `rms_norm`.

    Attributes:
      kind: the public function.
      shape: x's.
      axis: as the public function takes it.
      x, residual, scale, bias: dtypes; None for an absent operand.
      epsilon, scale_offset, statistics: as the public function takes them.
      data: what x holds: "normal"; "large_mean", 100 standard deviations from 0; "huge" and "tiny", 1e10 and 1e-10
        times normal; "nan", "inf" and "zero", normal but for one such row.
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

    op = "norm"

    @property
    def dtypes(self) -> dict[str, str]:
        given = {"x": self.x, "residual": self.residual, "scale": self.scale, "bias": self.bias}
        return {name: dtype for name, dtype in given.items() if dtype}

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

    def operand_values(self, name: str, values: np.ndarray) -> np.ndarray:
        if name == "scale":
            return values + 1 - self.scale_offset
        return self._rows(name, values) if name in ("x", "residual") else values

    def _rows(self, name: str, values: np.ndarray) -> np.ndarray:
        """Values of x or the residual, as `data` says."""
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


PARAMETERS = {"scale": F32, "bias": F32}
EVERYTHING = {**PARAMETERS, "residual": F32, "statistics": True}
IN_F64 = dict.fromkeys(("x", "scale", "bias", "residual"), F64) | {"statistics": True}
SMALL = [
    NormCase("layer_norm", (4, 5), **EVERYTHING),
    NormCase("layer_norm", (4, 5), **IN_F64),
    NormCase("rms_norm", (4, 5), scale=F32, scale_offset=1.0),
    NormCase("rms_norm", (4, 5), x=F64, residual=F64, statistics=True),
    NormCase("layer_norm", (2, 4, 3), axis=(0, 2), **PARAMETERS),
]
AXIS = NormCase("layer_norm", (3, 2, 4), axis=(0, 2), scale=F32)
BY_ROWS, WHOLE = P("rows"), P()


def _split(case: NormCase, x: P, **fields: Any) -> Split:
    """x and all that has its shape split in one way; the statistics have no columns, the parameters are whole."""
    specs = {name: P() if name in ("scale", "bias") else x for name in case.operands}
    return Split(
        case, tuple(specs.values()), tuple(P(*x[: len(case.shape_of(name))]) for name in case.outputs), **fields
    )


SPLIT = NormCase("layer_norm", (8, 12, 16), **EVERYTHING)
ROWS = Rows(
    every=_norms(),
    empty=[
        NormCase("layer_norm", (0, 8), **PARAMETERS, statistics=True),
        NormCase("rms_norm", (4, 0), scale=F32, residual=F32),
        NormCase("layer_norm", (0, 0), scale=F32),
        NormCase("rms_norm", (2, 0, 3), axis=(0, 1), scale=F32),
    ],
    not_finite=[
        NormCase("layer_norm", (7, 64), **PARAMETERS, data="nan", statistics=True),
        NormCase("rms_norm", (7, 65), x=BF16, scale=BF16, data="nan"),
        NormCase("rms_norm", (40, 16), scale=F32, data="inf", statistics=True),
        NormCase("layer_norm", (40, 16), x=BF16, **PARAMETERS, data="inf"),
        NormCase("layer_norm", (3, 4099), scale=F32, data="nan"),
    ],
    plain=[NormCase("layer_norm", (6, 40), x=BF16, **PARAMETERS, statistics=True)],
    small=SMALL,
    deep=SMALL[:2],
    tiny=[NormCase("rms_norm", (2, 3), scale=F32)],
    repeated=[
        NormCase("layer_norm", (64, 256), **PARAMETERS),
        NormCase("rms_norm", (1025, 96), x=BF16, scale=BF16, residual=BF16),
    ],
    mapped=[
        *subsets(NormCase("layer_norm", (2, 5), **EVERYTHING)),
        *subsets(NormCase("rms_norm", (2, 5), scale=F32)),
        *((AXIS, axes) for axes in [(1, None), (3, 0), (-1, 1)]),
    ],
    narrow=[(NormCase("rms_norm", (2, 5), x=BF16, scale=F32), (0, None))],
    nested=[
        (NormCase("layer_norm", (2, 5), **PARAMETERS, residual=F32), (0, None, 0, None), (0, None, None, 0)),
        # The outer axis is rows of what has no inner one.
        (NormCase("layer_norm", (2, 5), **{**IN_F64, "statistics": False}), (None, None, 0, None), (0, 0, None, None)),
    ],
    looped=[NormCase("layer_norm", (4, 16), **PARAMETERS, residual=F32)],
    donated=[
        (NormCase("layer_norm", (33, 768), **PARAMETERS), (0,)),
        (NormCase("rms_norm", (5, 4099), x=BF16, scale=BF16, residual=BF16), (0, 1)),
        (NormCase("layer_norm", (3, 65_536), **EVERYTHING), (0, 1)),
    ],
    unsized=[
        ([NormCase(kind, shape, scale=F32) for shape in ((3, 8), (17, 5))], ("rows, columns", "columns"))
        for kind in ("layer_norm", "rms_norm")
    ],
    split=[
        # Rows alone: the gradients of scale and bias are summed over the devices, and nothing else is sent.
        *(
            _split(SPLIT, spec, sends=set(), gradient_sends={"all-reduce"})
            for spec in (P("a"), P(("a", "b")), P("a", "b"), P(None, "b"), P(None, ("a", "b")))
        ),
        # A row that lies on several devices is gathered: slower, but right.
        *(_split(SPLIT, spec) for spec in (P(None, None, "a"), P("a", None, "b"))),
        # The axis that is normalized comes first, and the one that is sharded last.
        _split(NormCase("rms_norm", (6, 8), axis=0, x=BF16, scale=F32), P(None, "a")),
        # A residual that asks for the same axis of the mesh as x.
        *(
            Split(NormCase("rms_norm", (8, 12, 16), residual=F32), (P("a"), spec), explicit=False)
            for spec in (P(None, "a"), P(("b", "a")), P("b", "a"))
        ),
    ],
    manual=[
        (NormCase("layer_norm", (8, 12), **EVERYTHING), (BY_ROWS, BY_ROWS, WHOLE, WHOLE), BY_ROWS),
        (NormCase("rms_norm", (8, 12), scale=F32), (BY_ROWS, WHOLE), BY_ROWS),
    ],
)
