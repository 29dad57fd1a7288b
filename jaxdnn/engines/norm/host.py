"""layer_norm and rms_norm on the CPU: a task normalizes whole rows, read once from memory (cpp/host/norm/*.cc)."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax

from jaxdnn.device import Target
from jaxdnn.engines.norm.problem import Geometry, geometry
from jaxdnn.plan import Argument, Launch, Operand, Plan, Result, Scalar, Scratch
from jaxdnn.spec import Signature

# Elements of one task: few enough to share out among many threads, enough to drown the start of a task. On two Zen 3
# cores 4096 x 1024 in bfloat16 takes 1.80 ms with 2 rows a task, 1.40 with 8, 1.33 with 16, and no less with more.
_TASK_ELEMENTS = 32 * 1024
# With a parameter's gradient a task also writes, and `norm_reduce` reads, its own row of sums. Backward, layer_norm,
# bfloat16: 4096 x 1024 takes 4.5 ms with 16 rows a task, 2.6 with 32, 2.5 with 64, 3.0 with 256; 512 x 16384 takes 13.9
# with 8, 11.9 with 16, 8.0 with 32, 12.2 with 64.
_GRADIENT_TASK_ELEMENTS = 64 * 1024
_LEAST_GRADIENT_ROWS = 32
# More rows than this in one float32 sum would let its rounding grow.
_MOST_GRADIENT_ROWS = 1024
# Elements of a parameter's gradient that a task of `norm_reduce` owns; kSpan in norm/backward.cc.
_REDUCE_SPAN = 256

_ABSENT: tuple[Argument, ...] = (Scalar("int64", 0), Scalar("int64", -1))


@dataclass(frozen=True)
class HostNormConfig:
    """Knobs of the CPU norm.

    Attributes:
      rows_per_task: rows of one group that a task owns. Where a group has fewer, a task owns several groups.
    """

    rows_per_task: int

    def __post_init__(self) -> None:
        if not isinstance(self.rows_per_task, int) or self.rows_per_task < 1:
            raise ValueError(f"HostNormConfig: rows_per_task must be an int of at least 1; got {self.rows_per_task!r}")


class HostNorm:
    """Rows in cache, vectors as wide as the processor's, XLA's own threads."""

    name = "host"
    platform = "cpu"
    op = "norm"
    notes = ("deterministic",)

    def supports(self, spec: Any, signature: Signature, target: Target) -> str | None:
        del target
        if spec.direction == "tangent":
            return "it has no kernel for the tangent"
        shape = geometry(spec, signature)
        if isinstance(shape, str):
            return shape
        if spec.direction == "forward" and spec.residual == "added":
            return "x already is the sum with the residual, which its kernel would only copy"
        if spec.direction == "backward" and "y" not in spec.seeded:
            return "its backward kernel starts from the cotangent of y, which is zero here"
        return _dtype_reason(spec, signature)

    def candidates(self, spec: Any, signature: Signature, target: Target) -> Iterable[HostNormConfig]:
        del target
        shape = _geometry(spec, signature)
        if {"d_scale", "d_bias"}.isdisjoint(signature.results):
            rows = math.ceil(_TASK_ELEMENTS / shape.columns)
        else:
            rows = math.ceil(_GRADIENT_TASK_ELEMENTS / shape.columns)
            rows = min(max(rows, _LEAST_GRADIENT_ROWS), _MOST_GRADIENT_ROWS)
        return dict.fromkeys(HostNormConfig(max(1, int(rows * factor))) for factor in (1, 2, 4, 0.5))

    def plan(self, config: HostNormConfig, spec: Any, signature: Signature, target: Target) -> Plan:
        del target
        call = _Call(config, spec, signature, _geometry(spec, signature))
        forward = spec.direction == "forward"
        return Plan(
            op=spec.title,
            unit="",
            arch="",
            launches=(call.forward(),) if forward else tuple(call.backward()),
            scratch=call.scratch,
        )


def _geometry(spec: Any, signature: Signature) -> Geometry:
    shape = geometry(spec, signature)
    assert not isinstance(shape, str), "the call is supported"
    return shape


def _sum_dtype(spec: Any, signature: Signature) -> str:
    """The dtype of x + residual, which is y's where there is no residual."""
    name = "x" if spec.direction == "backward" else "sum"
    arrays = {**signature.operands, **signature.results}
    return arrays[name].dtype.name if name in arrays else spec.dtype


def _dtype_reason(spec: Any, signature: Signature) -> str | None:
    """None if every array has y's dtype, parameters that or float32, and statistics the arithmetic's.

    A residual, and then the sum with all that is of its dtype, may be float32 where y has 16 bits.
    """
    y = spec.dtype
    compute = "float64" if y == "float64" else "float32"
    total = _sum_dtype(spec, signature)
    sums = {y, compute} & {total}
    for name, array in {**signature.operands, **signature.results}.items():
        match name.removeprefix("d_"):
            case "scale" | "bias":
                allowed = {y, compute}
            case "mean" | "rstd":
                allowed = {compute}
            case "residual" | "sum":
                allowed = sums
            case "x" if spec.direction == "backward":
                allowed = sums
            case _:
                allowed = {y}
        if array.dtype.name not in allowed:
            return f"{name} is {array.dtype.name} where y is {y}, and the host kernels have no such mixture"
    return None


@dataclass(frozen=True)
class _Call:
    """One call's launches. The order of the arguments is that of `Forward` and `Backward` in cpp/host."""

    config: HostNormConfig
    spec: Any
    signature: Signature
    shape: Geometry

    @property
    def chunk_rows(self) -> int:
        return min(self.config.rows_per_task, self.shape.rows)

    @property
    def task_chunks(self) -> int:
        return max(1, self.config.rows_per_task // self.shape.rows)

    @property
    def chunks(self) -> int:
        return self.shape.groups * math.ceil(self.shape.rows / self.chunk_rows)

    @property
    def gradients(self) -> tuple[str, ...]:
        """The gradients of parameters among the results, each of which has one scratch buffer, in order."""
        return tuple(name for name in ("d_scale", "d_bias") if name in self.signature.results)

    @property
    def scratch(self) -> tuple[int, ...]:
        size = 8 if self.shape.compute_dtype == "float64" else 4
        return (self.chunks * self.shape.columns * size,) * len(self.gradients)

    def forward(self) -> Launch:
        return self._over_rows(
            "norm_forward",
            Scalar("float64", self.spec.epsilon),
            Scalar("float64", self.spec.scale_offset),
            *self._arrays("x", "residual"),
            *self._parameters("scale", "bias"),
            *self._arrays("y", "sum", "mean", "rstd"),
        )

    def backward(self) -> Iterator[Launch]:
        yield self._over_rows(
            "norm_backward",
            Scalar("float64", self.spec.scale_offset),
            *self._arrays("x"),
            *self._parameters("scale"),
            *self._arrays("mean", "rstd", "d_y", "d_sum", "d_mean", "d_rstd", "d_x"),
            *self._sums("d_scale"),
            *self._sums("d_bias"),
        )
        if self.gradients:
            spans = math.ceil(self.shape.groups * self.shape.columns / _REDUCE_SPAN)
            yield self._launch(
                f"norm_reduce_{self.spec.dtype}",
                spans,
                *(argument for name in ("d_scale", "d_bias") for argument in self._sums(name) + self._parameters(name)),
            )

    def _over_rows(self, kernel: str, *arguments: Argument) -> Launch:
        centered = Scalar("int64", int(self.spec.kind == "layer_norm"))
        dtypes = dict.fromkeys((self.spec.dtype, _sum_dtype(self.spec, self.signature)))
        kernel = "_".join((kernel, *dtypes))
        return self._launch(kernel, math.ceil(self.chunks / self.task_chunks), centered, *arguments)

    def _launch(self, kernel: str, tasks: int, *arguments: Argument) -> Launch:
        shape = self.shape
        sizes = (shape.groups, shape.rows, shape.columns, self.chunk_rows, self.task_chunks)
        return Launch(kernel, (*(Scalar("int64", size) for size in sizes), *arguments), (tasks, 1, 1))

    def _array(self, name: str) -> jax.ShapeDtypeStruct | None:
        return {**self.signature.operands, **self.signature.results}.get(name)

    def _arrays(self, *names: str) -> tuple[Argument, ...]:
        """For each array its buffer and its group stride."""
        arguments: list[Argument] = []
        for name in names:
            if self._array(name) is None:
                arguments += _ABSENT
                continue
            is_operand = name in self.signature.operands
            index = (self.signature.operand_index if is_operand else self.signature.result_index)(name)
            buffer = Operand(index) if is_operand else Result(index)
            arguments += (buffer, Scalar("int64", self.shape.group_stride[name]))
        return tuple(arguments)

    def _parameters(self, *names: str) -> tuple[Argument, ...]:
        """For each parameter its buffer, its group stride, and whether it is float32."""
        arguments: list[Argument] = []
        for name in names:
            array = self._array(name)
            is_float = array is not None and array.dtype.name == "float32"
            arguments += (*self._arrays(name), Scalar("int64", int(is_float)))
        return tuple(arguments)

    def _sums(self, name: str) -> tuple[Argument, ...]:
        """The scratch buffer of one parameter's gradient, a row for each chunk."""
        if name not in self.gradients:
            return _ABSENT
        return Scratch(self.gradients.index(name)), Scalar("int64", self.shape.columns)
