"""Attention on Hopper's tensor cores (cpp/kernels/attention/sm90*.cuh)."""

from collections.abc import Iterator
from math import ceil, prod

from jaxdnn.device import Target
from jaxdnn.engines.attention.function import (
    ScoreFunction,
    function_reason,
    mask_function,
    score_function,
    slope_function,
)
from jaxdnn.engines.attention.lists import block_lists, mask_places
from jaxdnn.engines.attention.problem import Attention, Heads
from jaxdnn.engines.attention.sm90.backward.heuristic import backward_candidates
from jaxdnn.engines.attention.sm90.backward.knobs import SIZES, AttentionSm90BackwardKnobs, backward_knobs_reason
from jaxdnn.engines.attention.sm90.backward.unit import backward_places, backward_plan
from jaxdnn.engines.attention.sm90.gradients.heuristic import gradient_candidates
from jaxdnn.engines.attention.sm90.gradients.knobs import AttentionSm90GradientKnobs, gradient_knobs_reason
from jaxdnn.engines.attention.sm90.gradients.unit import gradient_plan
from jaxdnn.engines.attention.sm90.heuristic import candidates
from jaxdnn.engines.attention.sm90.knobs import VALUE_SIZES, AttentionSm90Knobs, knobs_reason
from jaxdnn.engines.attention.sm90.unit import numbers_of_batch, plan
from jaxdnn.engines.attention.summed import summed_reason
from jaxdnn.engines.base import MAX_ARGUMENTS, ProblemEngine
from jaxdnn.engines.product.affine import affine_reason
from jaxdnn.plan import Plan

_DTYPES = ("bfloat16", "float16", "float32")
_LARGEST_FLOAT32 = 128  # elements of a vector, of which gradients need features in shared memory, too
_MOST_LENGTH = 2**29  # sums of a position and a band's bounds have 31 bits
_MOST_TILES = 2**31  # of 64 queries, the smallest
Knobs = AttentionSm90Knobs | AttentionSm90BackwardKnobs | AttentionSm90GradientKnobs


class AttentionSm90(ProblemEngine[Attention, Knobs]):
    """Forward, tiles of queries, whose weights never leave the registers of the warp groups that multiply them.

    Backward, tiles of keys, whose gradients never leave them either, and which add to those of queries in turn. Large
    vectors' gradients don't fit there together: they have two kernels, of which one has tiles of queries.
    """

    name = "sm90"
    platform = "cuda"
    problem = Attention
    notes = ("deterministic", "tensor cores", "rounds float32 operands to tf32")

    def reason(self, problem: Attention, target: Target) -> str | None:
        if target.compute_capability != 90:
            return f"it needs compute capability 9.0, and {target.name} is {target.arch}"
        arrays = {"query": problem.query, "key": problem.key, "value": problem.value, "out": problem.out}
        gradients: dict[str, Heads] = {}
        if problem.backward is not None:
            named = {name: getattr(problem.backward, name) for name in ("d_out", "d_query", "d_key", "d_value")}
            gradients = {name: heads for name, heads in named.items() if heads is not None}
            if "d_out" in gradients:
                arrays["d_out"] = gradients.pop("d_out")
        for name, heads in arrays.items():
            if heads.dtype not in _DTYPES or heads.dtype != problem.query.dtype:
                return f"{name} is {heads.dtype}; it takes {' or '.join(_DTYPES)}, the same of all"
        if problem.query.dtype == "float32":
            if problem.exact:
                return "it rounds float32 operands to tf32, and precision HIGHEST forbids that"
            if problem.backward is not None and (reason := self._float32_reason(problem)):
                return reason
        for name, heads in gradients.items():
            if heads.dtype not in (problem.query.dtype, "float32"):
                return f"{name} is {heads.dtype}; it stores {problem.query.dtype} or float32"
            if problem.batch > 1 and not heads.batch_stride:
                return f"{name} is a sum over elements of the batch, which its tiles are not"
        if problem.accumulator != "float32":
            return f"the tensor cores sum {problem.query.dtype} in float32, and {problem.accumulator} is wanted"
        return (
            self._size_reason(problem)
            or next(
                (why for name, heads in (arrays | gradients).items() if (why := heads_reason(problem, name, heads))),
                None,
            )
            or self._number_reason(problem)
            or self._function_reason(problem)
        )

    def _size_reason(self, problem: Attention) -> str | None:
        for name, size in (("head size", problem.head_size), ("value's head size", problem.value_head_size)):
            if size % 8 or not 8 <= size <= VALUE_SIZES[-1]:
                return f"the {name} is {size}; it takes multiples of 8 up to {VALUE_SIZES[-1]}"
        if problem.backward is not None and problem.backward.d_out is None and not _in_one_kernel(problem):
            return f"it has gradients of a log-sum-exp alone for 16-bit vectors of up to {SIZES[-1]} elements"
        if not min(problem.batch, problem.query_heads, problem.query_length, problem.key_length):
            return "an axis has no elements"
        if max(problem.query_length, problem.key_length) > _MOST_LENGTH:
            return "a sequence is longer than its index"
        if ceil(problem.query_length / 64) * problem.batch * problem.query_heads >= _MOST_TILES:
            return "there are more tiles than its 32-bit index counts"
        return None

    def _float32_reason(self, problem: Attention) -> str | None:
        """Of gradients."""
        assert problem.backward is not None
        if problem.backward.load_gradients:
            return "it has no gradients of what scores of float32 load"
        if max(problem.head_size, problem.value_head_size) > _LARGEST_FLOAT32:
            return f"it has gradients of float32 vectors of at most {_LARGEST_FLOAT32} elements, which fit twice"
        return None

    def _number_reason(self, problem: Attention) -> str | None:
        numbers = numbers_of_batch(problem) if problem.backward is None else backward_places(problem)
        for name in ("log_sum_exp", "d_log_sum_exp"):
            if name in numbers and numbers[name].dtype != "float32":
                return f"it has the log-sum-exp as float32, and {name} is {numbers[name].dtype}"
        if problem.sinks is not None and problem.sinks.dtype not in _DTYPES:
            return f"sinks are {problem.sinks.dtype}; it takes {', '.join(_DTYPES)}"
        extents = (problem.batch * problem.query_heads, problem.query_length, problem.key_length)
        numbers |= mask_places(problem)
        if problem.backward is not None:
            summed = [gradient.place for gradient in problem.backward.load_gradients]
            numbers |= {f"d_loaded{i}": place for i, place in enumerate(summed)}
            if reason := summed_reason(summed, extents[0]):
                return reason
        operands = [operand for function, _ in functions(problem) for operand in function.operands]
        return affine_reason([*numbers.values(), *operands], extents)

    def _function_reason(self, problem: Attention) -> str | None:
        for function, dtype in functions(problem):
            if reason := function_reason(function, dtype):
                return reason
        lists = block_lists(problem, 64, 64)
        if lists is not None and lists.matrices * prod(lists.blocks) >= _MOST_TILES:
            return "its mask has more blocks than their 32-bit index counts"
        if problem.backward is None:
            smallest = plan(problem, AttentionSm90Knobs(64, 64), 1)
        elif _in_one_kernel(problem):
            smallest = backward_plan(problem, AttentionSm90BackwardKnobs(), 1)
        else:
            smallest = gradient_plan(problem, AttentionSm90GradientKnobs(), 1)
        if max(len(launch.arguments) for launch in smallest.launches) > MAX_ARGUMENTS:
            return "its functions of scores load too many arrays"
        return None

    def configurations(self, problem: Attention, target: Target) -> Iterator[Knobs]:
        if problem.backward is None:
            return candidates(problem, target)
        return (backward_candidates if _in_one_kernel(problem) else gradient_candidates)(problem, target)

    def build(self, config: Knobs, problem: Attention, target: Target) -> Plan:
        if reason := _knobs_reason(problem, config, target.shared_memory):
            raise ValueError(f"{self.name}: {config} does not fit: {reason}")
        match config:
            case AttentionSm90Knobs():
                return plan(problem, config, target.sm_count)
            case AttentionSm90BackwardKnobs():
                return backward_plan(problem, config, target.sm_count)
            case AttentionSm90GradientKnobs():
                return gradient_plan(problem, config, target.sm_count)


def _knobs_reason(problem: Attention, config: Knobs, shared_memory: int) -> str | None:
    """Why the knobs don't fit the call, or None."""
    match config:
        case AttentionSm90Knobs():
            return knobs_reason(problem, config, shared_memory)
        case AttentionSm90BackwardKnobs():
            return backward_knobs_reason(problem, config, shared_memory)
        case AttentionSm90GradientKnobs():
            return gradient_knobs_reason(problem, config, shared_memory)


def _in_one_kernel(problem: Attention) -> bool:
    """Whether a warp group's registers hold the gradients of its keys and values; and weights are there only once."""
    return problem.query.dtype != "float32" and max(problem.head_size, problem.value_head_size) <= SIZES[-1]


def functions(problem: Attention) -> list[tuple[ScoreFunction, str]]:
    """Of scores, with what they have to return."""
    score = score_function(problem) if problem.backward is None else slope_function(problem)
    found = ((score, problem.accumulator), (mask_function(problem), "bool"))
    return [(function, dtype) for function, dtype in found if function is not None]


def heads_reason(problem: Attention, name: str, heads: Heads) -> str | None:
    """Why vectors can't be moved 16 bytes at once, as TMA and the kernel's stores do, or None."""
    if heads.feature_stride != 1:
        return f"the elements of a vector of {name} are {heads.feature_stride} apart, and TMA needs them dense"
    if heads.batch_stride is None:
        return f"a batch of {name} joins axes of which the array has not all, and TMA has one stride for it"
    if heads.buffer.offset % 16:
        return f"{name} starts at byte {heads.buffer.offset} of its buffer, and TMA needs a multiple of 16"
    queries = name in ("query", "out", "d_out", "d_query")
    extents = (
        problem.query_length if queries else problem.key_length,
        problem.query_heads if queries else problem.key_heads,
        problem.batch,
    )
    strides = (heads.length_stride, heads.head_stride, heads.batch_stride)
    for axis, extent, stride in zip(("length", "head", "batch"), extents, strides, strict=True):
        size = stride * heads.itemsize
        if extent > 1 and (size % 16 or (size == 0 and axis != "batch")):
            return f"the {axis} stride of {name} is {size} bytes, and TMA needs a multiple of 16"
        if size >= 2**40:
            return f"the {axis} stride of {name} is {size} bytes, and TMA has 40 bits for it"
    return None
