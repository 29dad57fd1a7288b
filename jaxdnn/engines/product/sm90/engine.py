"""Products on Hopper's tensor cores (cpp/kernels/product/sm90.cuh)."""

from collections.abc import Iterator
from math import ceil

from jaxdnn.device import Target
from jaxdnn.engines.base import ProblemEngine
from jaxdnn.engines.product.affine import affine_reason
from jaxdnn.engines.product.operands import packed
from jaxdnn.engines.product.problem import Product, arguments_reason
from jaxdnn.engines.product.sm90.heuristic import candidates
from jaxdnn.engines.product.sm90.knobs import Sm90Knobs, knobs_reason
from jaxdnn.engines.product.sm90.short_k.heuristic import candidates as short_k_candidates
from jaxdnn.engines.product.sm90.short_k.heuristic import lines_reason
from jaxdnn.engines.product.sm90.short_k.knobs import knobs_reason as short_k_knobs_reason
from jaxdnn.engines.product.sm90.short_k.knobs import whole_rows_reason
from jaxdnn.engines.product.sm90.short_k.unit import ShortKUnit
from jaxdnn.engines.product.sm90.unit import Unit
from jaxdnn.engines.product.small import small_reason
from jaxdnn.engines.product.unaligned import unaligned_reason
from jaxdnn.plan import Plan
from jaxdnn.pointwise.cuda import register_type

_FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
# What is multiplied, and the dtype that its products are summed in.
_ACCUMULATORS = {
    ("bfloat16", "bfloat16"): "float32",
    ("float16", "float16"): "float32",
    ("float32", "float32"): "float32",
    ("int8", "int8"): "int32",
    **{(a, b): "float32" for a in _FLOAT8 for b in _FLOAT8},
}
# Of an epilogue's operands and results.
_STORED = ("bool", "int8", "int16", "int32", "uint8", "uint16", "uint32", *_FLOAT8, "bfloat16", "float16", "float32")
_WIDE = ("double", "int64", "uint64")  # C++ types that an epilogue may compute in before it narrows a result
_MOST_TILES = 2**31  # of 64 x 64, the smallest


def _tiles(rows: int, columns: int) -> int:
    return ceil(rows / 64) * ceil(columns / 64)


class Sm90(ProblemEngine[Product, Sm90Knobs]):
    """Tiles of the result, each multiplied by the warp groups of a block from copies that a producer starts."""

    name = "sm90"
    platform = "cuda"
    problem = Product
    notes = ("deterministic", "tensor cores", "rounds float32 operands to tf32")

    def outdone(self, problem: Product, target: Target) -> str | None:
        return small_reason(problem, target, "sm90") or unaligned_reason(problem, target, "sm90")

    def reason(self, problem: Product, target: Target) -> str | None:
        if target.compute_capability != 90:
            return f"it needs compute capability 9.0, and {target.name} is {target.arch}"
        for b in problem.b:
            accumulator = _ACCUMULATORS.get((problem.a.dtype, b.dtype))
            if accumulator is None:
                return f"Hopper's tensor cores don't multiply {problem.a.dtype} by {b.dtype}"
            if problem.accumulator != accumulator:
                return f"Hopper's tensor cores sum {b.dtype} in {accumulator}, and {problem.accumulator} is wanted"
            if b.dtype != problem.b[0].dtype or bool(b.batch_stride) != bool(problem.b[0].batch_stride):
                return "the two matrices b differ in dtype, or in being batched"
        if problem.rounding_reason:
            return problem.rounding_reason
        for array in (*problem.operands, *problem.results):
            if array.dtype not in _STORED:
                return f"an epilogue's operand or result is {array.dtype}, and it takes {', '.join(_STORED)}"
        program = problem.program
        computed = [register_type(program.instructions[output.value].dtype) for output in program.outputs]
        if wide := [register for register in computed if register in _WIDE]:
            return f"an epilogue's result is computed as a {wide[0]}, and its registers have 32 bits"
        if any(result.axes == (0,) for result in problem.reduced):
            return "a result is reduced over the batch alone"
        if max(problem.m, problem.n, problem.k, problem.batch) >= 2**31 - 1024:
            return "a dimension is longer than its 32-bit index"
        _, copies = packed(problem)
        copied = sum(_tiles(copy.source.rows, copy.source.columns) for copy in copies)  # by one launch
        if max(_tiles(problem.m, problem.n), copied) * problem.batch * 4 >= _MOST_TILES:
            return "there are more tiles than its 32-bit index counts"
        for copy in copies:
            if copy.matrix.row_stride * copy.matrix.itemsize * copy.matrix.rows >= 2**40:
                return "a copy of an operand is longer than the 40 bits that TMA has for a stride"
        if reason := arguments_reason(problem.operands, problem.results):
            return reason
        if reason := affine_reason(problem.operands, (problem.batch, problem.m, problem.n)):
            return reason
        if next(self.configurations(problem, target), None) is None:
            return "no tile leaves room for what its epilogue stores"
        return None

    def configurations(self, problem: Product, target: Target) -> Iterator[Sm90Knobs]:
        whole = whole_rows_reason(problem) is None
        first = whole and lines_reason(problem, target) is None
        if first:
            yield from short_k_candidates(problem, target)
        yield from candidates(problem, target, matrices=True)
        if whole and not first:
            yield from short_k_candidates(problem, target)

    def build(self, config: Sm90Knobs, problem: Product, target: Target) -> Plan:
        fits = short_k_knobs_reason if config.whole_rows else knobs_reason
        if reason := fits(problem, config, target.shared_memory):
            raise ValueError(f"{self.name}: {config} does not fit: {reason}")
        unit = (ShortKUnit if config.whole_rows else Unit)(problem, config, target.sm_count)
        return Plan(unit.text, "sm_90a", tuple(unit.launches), tuple(unit.scratch))
