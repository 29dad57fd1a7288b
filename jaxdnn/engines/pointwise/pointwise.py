"""Pointwise functions of arrays on CUDA GPUs, with sums of them over rows: what an epilogue's derivatives are.

The kernel is cpp/kernels/pointwise/pointwise.cuh.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import jax.numpy as jnp

from jaxdnn.device import Target
from jaxdnn.engines.base import ProblemEngine, check_least
from jaxdnn.engines.pointwise.problem import Pointwise
from jaxdnn.engines.product.affine import affine_reason
from jaxdnn.engines.product.element_epilogue import (
    MAX_GRID,
    ElementEpilogue,
    Stored,
    ctype,
    itemsize,
)
from jaxdnn.engines.product.problem import EpilogueOperand, Matrix, Reduced, arguments_reason
from jaxdnn.engines.product.reduce import reduce_stage, reduction
from jaxdnn.engines.unit import Stage, arguments, entry_text, joined, numbers, struct_text
from jaxdnn.plan import Launch, Plan, Scratch
from jaxdnn.pointwise import functor

THREADS = 256
WIDTHS = (8, 4, 2, 1)
LARGEST_VECTOR = {1: 32, 2: 32, 4: 32, 8: 16}  # bytes of an array that a thread takes at once, by size of its elements
MOST_ACROSS = 32  # threads: benchmarks/results/product_kernels.md, pointwise


@dataclass(frozen=True)
class PointwiseKnobs:
    """How the arrays are cut into pieces; cpp/kernels/pointwise/pointwise.cuh draws it.

    Attributes:
      width: neighbouring columns of a thread.
      across: threads of a block along the columns; the others take other rows.
      rows: of a thread that are loaded together.
      blocks: for each multiprocessor, at least, where there are rows enough.
    """

    width: int = 8
    across: int = 32
    rows: int = 2
    blocks: int = 32

    def __post_init__(self) -> None:
        if self.width not in WIDTHS:
            raise ValueError(f"pointwise: width is {self.width}; expected one of {WIDTHS}")
        if self.across < 1 or THREADS % self.across:
            raise ValueError(f"pointwise: across is {self.across}; expected a power of two of at most {THREADS}")
        check_least(self, 1, "rows", "blocks")


class PointwiseEngine(ProblemEngine[Pointwise, PointwiseKnobs]):
    """One pass over all arrays, with sums over rows."""

    name = "pointwise"
    platform = "cuda"
    problem = Pointwise
    notes = ("deterministic",)

    def reason(self, problem: Pointwise, target: Target) -> str | None:
        for operand in problem.operands:
            if operand.column_stride > 1 and not operand.gathered:
                return "an operand runs along the rows in memory"
        for result in problem.results:
            if isinstance(result, Reduced) and result.axes not in ((1,), (0, 1)):
                return "a result is reduced over columns, or over the batch alone"
        if reason := arguments_reason(problem.operands, problem.results):
            return reason
        if reason := affine_reason(problem.operands, (problem.batch, problem.rows, problem.columns)):
            return reason
        if max(problem.rows, problem.columns, problem.batch) >= 2**31 - 1024:
            return "a dimension is longer than its 32-bit index"
        blocks = _blocks(problem, next(self.configurations(problem, target)), target)
        if blocks > MAX_GRID:
            return f"it would take {blocks} thread blocks, and a grid has at most {MAX_GRID}"
        return None

    def configurations(self, problem: Pointwise, target: Target) -> Iterator[PointwiseKnobs]:
        del target
        arrays = [o for o in problem.operands if o.column_stride]
        arrays += [r for r in problem.results if isinstance(r, Matrix)]
        size = max((jnp.dtype(array.dtype).itemsize for array in arrays), default=4)
        widest = next(w for w in WIDTHS if problem.columns % w == 0 and w * size <= LARGEST_VECTOR[size])
        for width in (w for w in WIDTHS if w <= widest):
            across = 1
            while across < MOST_ACROSS and across * width < problem.columns:
                across *= 2
            for rows in (2, 4, 1) if size < 8 else (2, 1):
                yield PointwiseKnobs(width, across, rows)

    def build(self, config: PointwiseKnobs, problem: Pointwise, target: Target) -> Plan:
        if problem.columns % config.width:
            raise ValueError(f"pointwise: width is {config.width}; expected a divisor of {problem.columns} columns")
        emitted = functor(problem.program, approximate=problem.approximate)
        chunk = _chunk(problem, config, target.sm_count)
        chunks = math.ceil(problem.rows / chunk)
        stored, stages, reductions, buffers = [], [], [], []
        for result, register in zip(problem.results, emitted.results, strict=True):
            if isinstance(result, Matrix):
                stored.append(Stored(result.buffer, ctype(result.dtype), result.row_stride, result.batch_stride))
                reductions.append("jaxdnn::Whole")
                continue
            part = Scratch(len(buffers))
            buffers.append(problem.batch * chunks * problem.columns * itemsize(ctype(register)))
            stored.append(Stored(part, ctype(register), problem.columns, chunks * problem.columns))
            outer, length = (1, problem.batch * chunks) if 0 in result.axes else (problem.batch, chunks)
            reductions.append(reduction(result, ctype(register)))
            to = (result.buffer, ctype(result.dtype))
            stages.append(reduce_stage(reductions[-1], part, to, (outer, length, problem.columns), len(stages)))
        scattered = tuple(i for i, operand in enumerate(problem.operands) if _scattered(operand, config.width))
        epilogue = ElementEpilogue(emitted, problem.operands, tuple(stored), scattered)
        types = {**epilogue.types(), "Reductions": f"jaxdnn::TypeList<{', '.join(reductions)}>"}
        constants = {"Width": config.width, "Across": config.across, "Rows": config.rows}
        found = epilogue.parameters()
        column_blocks = _column_blocks(problem, config)
        found += numbers(
            rows=problem.rows, columns=problem.columns, chunk=chunk, chunks=chunks, column_blocks=column_blocks
        )
        entry = entry_text("pointwise", "jaxdnn::Pointwise<Config>", str(THREADS), found)
        launch = Launch("pointwise", arguments(found), (_blocks(problem, config, target), 1, 1), (THREADS, 1, 1))
        text = f"\n{epilogue.text()}\n{struct_text('Config', types, constants)}\n{entry}"
        own = Stage(("pointwise/pointwise.cuh",), text, (launch,), tuple(buffers))
        return joined([own, *stages]).plan(target.arch)


def _scattered(operand: EpilogueOperand, width: int) -> bool:
    """Whether a thread's neighbouring columns are not side by side in every row, as a vector."""
    terms = operand.terms[2]
    strides = [operand.batch_stride, operand.row_stride, *(term.stride for of in operand.terms[:2] for term in of)]
    repeated = len(terms) == 1 and terms[0].stride == terms[0].divisor == 1 and terms[0].modulus % width == 0
    return bool(terms) and not (repeated and not any(stride % width for stride in strides))


def _column_blocks(problem: Pointwise, knobs: PointwiseKnobs) -> int:
    """Blocks along the columns."""
    return math.ceil(problem.columns / (knobs.across * knobs.width))


def _chunk(problem: Pointwise, knobs: PointwiseKnobs, sm_count: int) -> int:
    """Rows of a block."""
    step = THREADS // knobs.across * knobs.rows
    wanted = max(1, sm_count * knobs.blocks // (_column_blocks(problem, knobs) * problem.batch))
    return math.ceil(math.ceil(problem.rows / wanted) / step) * step


def _blocks(problem: Pointwise, knobs: PointwiseKnobs, target: Target) -> int:
    chunks = math.ceil(problem.rows / _chunk(problem, knobs, target.sm_count))
    return _column_blocks(problem, knobs) * chunks * problem.batch
