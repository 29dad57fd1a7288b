"""layer_norm and rms_norm on the CPU: a task normalizes whole rows, read once from memory (cpp/host/norm/*.cc)."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from jaxdnn.device import Target
from jaxdnn.engines.base import ProblemEngine, check_least
from jaxdnn.engines.norm.problem import Rows
from jaxdnn.plan import Argument, Launch, Plan, Scalar, Scratch

# Elements of one task: few enough to share out among many threads, enough to drown the start of a task. This and the
# next two are of the notes on the host in benchmarks/results/norm_kernels.md.
_TASK_ELEMENTS = 32 * 1024
# With a parameter's gradient a task also writes, and `norm_reduce` reads, its own row of sums.
_GRADIENT_TASK_ELEMENTS = 64 * 1024
_LEAST_GRADIENT_ROWS = 32
# More rows than this in one float32 sum would let its rounding grow.
_MOST_GRADIENT_ROWS = 1024
# Elements of a parameter's gradient that a task of `norm_reduce` owns; kSpan in norm/backward.cc.
_REDUCE_CHUNK = 256

_ABSENT: tuple[Argument, ...] = (Scalar("int64", 0), Scalar("int64", -1))


@dataclass(frozen=True)
class HostNormKnobs:
    """Knobs of the CPU norm.

    Attributes:
      rows_per_task: rows of one group that a task owns. Where a group has fewer, a task owns several groups.
    """

    rows_per_task: int

    def __post_init__(self) -> None:
        check_least(self, 1, "rows_per_task")


class HostNorm(ProblemEngine[Rows, HostNormKnobs]):
    """Rows in cache, vectors as wide as the processor's, XLA's own threads."""

    name = "host"
    platform = "cpu"
    problem = Rows
    notes = ("deterministic",)

    def reason(self, problem: Rows, target: Target) -> str | None:
        del target
        if not problem.backward and "sum" in problem.arrays and "residual" not in problem.arrays:
            return "x already is the sum with the residual, which its kernel would only copy"
        return _dtype_reason(problem)

    def configurations(self, problem: Rows, target: Target) -> Iterable[HostNormKnobs]:
        del target
        if {"scale", "bias"}.isdisjoint(problem.active):
            rows = math.ceil(_TASK_ELEMENTS / problem.columns)
        else:
            rows = math.ceil(_GRADIENT_TASK_ELEMENTS / problem.columns)
            rows = min(max(rows, _LEAST_GRADIENT_ROWS), _MOST_GRADIENT_ROWS)
        return dict.fromkeys(HostNormKnobs(max(1, int(rows * factor))) for factor in (1, 2, 4, 0.5))

    def build(self, config: HostNormKnobs, problem: Rows, target: Target) -> Plan:
        del target
        call = _Call(config, problem)
        launches = tuple(call.backward()) if problem.backward else (call.forward(),)
        return Plan(unit="", arch="", launches=launches, scratch=call.scratch)


def _dtype(problem: Rows) -> str:
    """The dtype of y."""
    return problem.arrays["d_y" if problem.backward else "y"].dtype


def _sum_dtype(problem: Rows) -> str:
    """The dtype of x + residual, which is y's where there is no residual."""
    total = problem.arrays.get("x" if problem.backward else "sum")
    return total.dtype if total is not None else _dtype(problem)


def _dtype_reason(problem: Rows) -> str | None:
    """None if every array has y's dtype, parameters that or float32, and statistics the arithmetic's.

    A residual, and then the sum with all that is of its dtype, may be float32 where y has 16 bits.
    """
    y = _dtype(problem)
    compute = "float64" if y == "float64" else "float32"
    sums = {y, compute} & {_sum_dtype(problem)}
    for name, array in problem.arrays.items():
        match name.removeprefix("d_"):
            case "scale" | "bias":
                allowed = {y, compute}
            case "mean" | "rstd":
                allowed = {compute}
            case "residual" | "sum":
                allowed = sums
            case "x" if problem.backward:
                allowed = sums
            case _:
                allowed = {y}
        if array.dtype not in allowed:
            return f"{name} is {array.dtype} where y is {y}, and the host kernels have no such mixture"
    return None


@dataclass(frozen=True)
class _Call:
    """One call's launches. The order of the arguments is that of `Forward` and `Backward` in cpp/host."""

    config: HostNormKnobs
    problem: Rows

    @property
    def chunk_rows(self) -> int:
        return min(self.config.rows_per_task, self.problem.rows)

    @property
    def task_chunks(self) -> int:
        return max(1, self.config.rows_per_task // self.problem.rows)

    @property
    def chunks(self) -> int:
        return self.problem.groups * math.ceil(self.problem.rows / self.chunk_rows)

    @property
    def gradients(self) -> tuple[str, ...]:
        """The gradients of parameters among the results, each of which has one scratch buffer, in order."""
        return tuple(f"d_{name}" for name in ("scale", "bias") if name in self.problem.active)

    @property
    def scratch(self) -> tuple[int, ...]:
        size = 8 if self.problem.compute_dtype == "float64" else 4
        return (self.chunks * self.problem.columns * size,) * len(self.gradients)

    def forward(self) -> Launch:
        return self._over_rows(
            "norm_forward",
            *self._factors(),
            *self._arrays("x", "residual"),
            *self._parameters("scale", "bias"),
            *self._arrays("y", "sum", "mean", "rstd"),
        )

    def backward(self) -> Iterator[Launch]:
        yield self._over_rows(
            "norm_backward",
            *self._factors(),
            *self._arrays("x"),
            *self._parameters("scale"),
            *self._arrays("mean", "rstd", "d_y", "d_sum", "d_mean", "d_rstd", "d_x"),
            *self._sums("d_scale"),
            *self._sums("d_bias"),
        )
        if self.gradients:
            chunks = math.ceil(self.problem.groups * self.problem.columns / _REDUCE_CHUNK)
            yield self._launch(
                f"norm_reduce_{_dtype(self.problem)}",
                chunks,
                *(argument for name in ("d_scale", "d_bias") for argument in self._sums(name) + self._parameters(name)),
            )

    def _factors(self) -> Iterator[Argument]:
        return (Scalar("float64", value) for _, value in self.problem.factors)

    def _over_rows(self, kernel: str, *arguments: Argument) -> Launch:
        centered = Scalar("int64", int(self.problem.centered))
        dtypes = dict.fromkeys((_dtype(self.problem), _sum_dtype(self.problem)))
        kernel = "_".join((kernel, *dtypes))
        return self._launch(kernel, math.ceil(self.chunks / self.task_chunks), centered, *arguments)

    def _launch(self, kernel: str, tasks: int, *arguments: Argument) -> Launch:
        problem = self.problem
        sizes = (problem.groups, problem.rows, problem.columns, self.chunk_rows, self.task_chunks)
        return Launch(kernel, (*(Scalar("int64", size) for size in sizes), *arguments), (tasks, 1, 1))

    def _arrays(self, *names: str) -> tuple[Argument, ...]:
        """For each array its buffer and its group stride."""
        arguments: list[Argument] = []
        for name in names:
            array = self.problem.arrays.get(name)
            arguments += _ABSENT if array is None else (array.buffer, Scalar("int64", array.group_stride))
        return tuple(arguments)

    def _parameters(self, *names: str) -> tuple[Argument, ...]:
        """For each parameter its buffer, its group stride, and whether it is float32."""
        arguments: list[Argument] = []
        for name in names:
            array = self.problem.arrays.get(name)
            is_float = array is not None and array.dtype == "float32"
            arguments += (*self._arrays(name), Scalar("int64", int(is_float)))
        return tuple(arguments)

    def _sums(self, name: str) -> tuple[Argument, ...]:
        """The scratch buffer of one parameter's gradient, a row for each chunk."""
        if name not in self.gradients:
            return _ABSENT
        return Scratch(self.gradients.index(name)), Scalar("int64", self.problem.columns)
