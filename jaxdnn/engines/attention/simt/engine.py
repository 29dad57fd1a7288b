"""Attention on any GPU: what tensor cores don't serve (cpp/kernels/attention/simt.cuh, attention/simt/)."""

from collections.abc import Iterator
from math import ceil

from jaxdnn.device import Target
from jaxdnn.engines.attention.problem import Attention
from jaxdnn.engines.attention.simt.heuristic import TILES, candidates
from jaxdnn.engines.attention.simt.knobs import AttentionSimtKnobs, knobs_reason, vectors
from jaxdnn.engines.attention.simt.unit import Unit, functions, places
from jaxdnn.engines.attention.summed import summed_reason
from jaxdnn.engines.base import MAX_ARGUMENTS, ProblemEngine
from jaxdnn.engines.product.affine import affine_reason
from jaxdnn.engines.product.element_epilogue import MAX_GRID
from jaxdnn.plan import Plan

_DTYPES = {"float32": ("float32", "bfloat16", "float16"), "float64": ("float64",)}
_MOST_LENGTH = 2**29  # sums of a position and a band's bounds have 31 bits


class AttentionSimt(ProblemEngine[Attention, AttentionSimtKnobs]):
    """Exact sums in float32 and float64, of vectors of any layout, forward and backward."""

    name = "simt"
    platform = "cuda"
    problem = Attention
    notes = ("deterministic", "exact float32 and float64 arithmetic")

    def reason(self, problem: Attention, target: Target) -> str | None:
        if target.compute_capability < 80:
            return f"it needs compute capability 8.0 or later, and {target.name} is {target.arch}"
        return (
            self._array_reason(problem)
            or self._size_reason(problem, target)
            or self._function_reason(problem)
            or self._place_reason(problem, target)
        )

    def _array_reason(self, problem: Attention) -> str | None:
        for name, heads in vectors(problem).items():
            if heads.dtype not in _DTYPES[problem.accumulator]:
                return f"{name} is {heads.dtype}, and sums are {problem.accumulator}"
        if problem.log_sum_exp is not None and problem.log_sum_exp.dtype != problem.accumulator:
            return f"the log-sum-exp is {problem.log_sum_exp.dtype}, and sums are {problem.accumulator}"
        return None

    def _size_reason(self, problem: Attention, target: Target) -> str | None:
        sizes = (problem.batch, problem.query_length, problem.key_length, problem.query_heads)
        if not min(*sizes, problem.head_size, problem.value_head_size):
            return "an axis has no elements"
        if max(problem.query_length, problem.key_length) > _MOST_LENGTH:
            return "a sequence is longer than its index"
        rows = problem.batch * problem.query_heads * max(problem.query_length, problem.key_length)
        if ceil(rows / 8) > MAX_GRID:
            return f"it would take {ceil(rows / 8)} thread blocks, and a grid has at most {MAX_GRID}"
        if not any(True for _ in self.configurations(problem, target)):
            reason = knobs_reason(problem, TILES[-1], target.shared_memory)
            return f"vectors don't fit in its smallest tiles: {reason}"
        return None

    def _function_reason(self, problem: Attention) -> str | None:
        wanted = {"Mask": "bool"}
        for function in functions(problem):
            found = function.program.outputs[0].dtype
            if found != (dtype := wanted.get(function.name, problem.accumulator)):
                return f"a function of scores returns {found}, and its kernels want {dtype}"
        return None

    def _place_reason(self, problem: Attention, target: Target) -> str | None:
        batches = problem.batch * problem.query_heads
        scores = (batches, problem.query_length, problem.key_length)
        backward = problem.backward
        gradients = [] if backward is None else [gradient.place for gradient in backward.load_gradients]
        numbers = [*places(problem).values(), *gradients]
        numbers += [operand for function in functions(problem) for operand in function.operands]
        length = max(problem.query_length, problem.key_length)
        heads = [one.place for one in vectors(problem).values()]
        if reason := affine_reason(numbers, scores) or affine_reason(heads, (problem.batch, length, batches)):
            return reason
        sinks = [backward.d_sinks] if backward is not None and backward.d_sinks is not None else []
        if reason := summed_reason([*gradients, *sinks], batches):
            return reason
        plan = self.build(next(self.configurations(problem, target)), problem, target)
        if (count := max(len(launch.arguments) for launch in plan.launches)) > MAX_ARGUMENTS:
            return f"a launch would have {count} arguments, and {MAX_ARGUMENTS} fit"
        return None

    def configurations(self, problem: Attention, target: Target) -> Iterator[AttentionSimtKnobs]:
        return candidates(problem, target)

    def build(self, config: AttentionSimtKnobs, problem: Attention, target: Target) -> Plan:
        if reason := knobs_reason(problem, config, target.shared_memory):
            raise ValueError(f"{self.name}: {config} does not fit: {reason}")
        arch = "sm_90a" if target.compute_capability == 90 else target.arch
        return Unit(problem, config, target.sm_count).stage().plan(arch)
