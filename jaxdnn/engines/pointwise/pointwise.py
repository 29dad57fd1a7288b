"""Pointwise functions of arrays on CUDA GPUs, with sums of them over rows: what an epilogue's derivatives are.

The kernel is cpp/kernels/pointwise/pointwise.cuh.
"""

import inspect
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from inspect import Parameter
from typing import Any

import jax
import jax.numpy as jnp

from jaxdnn.device import Target
from jaxdnn.engines.base import sizes_reason
from jaxdnn.engines.product.affine import affine_reason
from jaxdnn.engines.product.element_epilogue import (
    MAX_GRID,
    ElementEpilogue,
    Stage,
    Stored,
    axis_stage,
    ctype,
    itemsize,
    joined,
    reduction,
)
from jaxdnn.engines.product.problem import (
    EpilogueOperand,
    Matrix,
    Reduced,
    arguments_reason,
    dense_operand,
    dense_result,
)
from jaxdnn.engines.unit import arguments, entry_text, numbers, struct_text
from jaxdnn.plan import Launch, Operand, Plan, Scratch
from jaxdnn.pointwise import Program, UnsupportedOperation, collapse, functor, trace
from jaxdnn.spec import Signature

THREADS = 256
WIDTHS = (8, 4, 2, 1)
LARGEST_VECTOR = {1: 32, 2: 32, 4: 32, 8: 16}  # bytes of an array that a thread takes at once, by size of its elements
# Of 8192 x 14336 bfloat16, gelu's derivative with the sum over rows took 183 us with 32 threads along the columns and
# 32 blocks for each multiprocessor, 195 with 128 and 16; that of silu(gate) * up 285 and 290.
MOST_ACROSS = 32


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
        for name in ("rows", "blocks"):
            if getattr(self, name) < 1:
                raise ValueError(f"pointwise: {name} is {getattr(self, name)}; expected at least 1")


@dataclass(frozen=True)
class PointwiseCall:
    """results = program(operands), over matrices of `rows` x `columns`."""

    batch: int
    rows: int
    columns: int
    program: Program
    operands: tuple[EpilogueOperand, ...]
    results: tuple[Matrix | Reduced, ...]
    coarse: bool

    def strips(self, knobs: PointwiseKnobs) -> int:
        """Blocks along the columns."""
        return math.ceil(self.columns / (knobs.across * knobs.width))

    def chunk(self, knobs: PointwiseKnobs, sm_count: int) -> int:
        """Rows of a block."""
        step = THREADS // knobs.across * knobs.rows
        wanted = max(1, sm_count * knobs.blocks // (self.strips(knobs) * self.batch))
        return math.ceil(math.ceil(self.rows / wanted) / step) * step


def pointwise_call(spec: Any, signature: Signature) -> PointwiseCall | str:
    """An `EpilogueSpec`'s call, or the reason why it is none."""
    if reason := sizes_reason(signature):
        return reason
    if spec.batch:
        return "it is mapped"
    arrays = ((name, array.shape, array.dtype.name) for name, array in signature.operands.items())
    return _pointwise_call(spec, tuple(arrays), tuple(array.dtype.name for array in signature.results.values()))


@lru_cache(maxsize=256)
def _pointwise_call(
    spec: Any, operands: tuple[tuple[str, tuple[int, ...], str], ...], results: tuple[str, ...]
) -> PointwiseCall | str:
    shape = operands[0][1]
    types = [jax.ShapeDtypeStruct(of, dtype) for _, of, dtype in operands]
    shapes = [one.shape for one in types]

    def function(*arrays: Any) -> Any:
        return spec.evaluate(*arrays)

    named = [Parameter(name, Parameter.POSITIONAL_ONLY) for name, _, _ in operands]
    function.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
    function.__name__ = f"{spec.direction} of {spec.program.title}"
    try:
        program = collapse(trace(function, shape, (), types), shape, shapes, spec.groups)
    except UnsupportedOperation as error:
        return f"`{error.primitive}`: {error.reason}"
    except (TypeError, ValueError) as error:
        return f"it is no pointwise function: {error}"
    if isinstance(program, str):
        return program
    first_row, first_column = spec.groups[0], spec.groups[0] + spec.groups[1]
    batch, rows, columns = map(math.prod, (shape[:first_row], shape[first_row:first_column], shape[first_column:]))
    sizes = {"b": batch, "m": rows, "n": columns}
    stored = []
    for index, (output, dtype) in enumerate(zip(program.outputs, results, strict=True)):
        result = dense_result(output, index, sizes, dtype)
        if isinstance(result, str):
            return result
        stored.append(result)
    loads = [
        dense_operand(load, Operand(load.operand), types[load.operand].dtype.name) for load in program.affine_loads
    ]
    wide = [load.dtype for load in loads if load.broadcast == "full" and load.dtype not in ("bfloat16", "float16")]
    return PointwiseCall(batch, rows, columns, program, tuple(loads), tuple(stored), coarse=not wide)


class Pointwise:
    """One pass over all arrays, with sums over rows."""

    name = "pointwise"
    platform = "cuda"
    op = "epilogue"
    notes = ("deterministic",)

    def supports(self, spec: Any, signature: Signature, target: Target) -> str | None:
        call = pointwise_call(spec, signature)
        if isinstance(call, str):
            return call
        for operand in call.operands:
            if operand.column_stride > 1 and not operand.gathered:
                return "an operand runs along the rows in memory"
        for result in call.results:
            if isinstance(result, Reduced) and result.axes not in ((1,), (0, 1)):
                return "a result is reduced over columns, or over the batch alone"
        if reason := arguments_reason(call.operands, call.results):
            return reason
        if reason := affine_reason(call.operands, (call.batch, call.rows, call.columns)):
            return reason
        if max(call.rows, call.columns, call.batch) >= 2**31 - 1024:
            return "a dimension is longer than its 32-bit index"
        knobs = next(self._configurations(call))
        if _blocks(call, knobs, target) > MAX_GRID:
            return f"it would take {_blocks(call, knobs, target)} thread blocks, and a grid has at most {MAX_GRID}"
        return None

    def candidates(self, spec: Any, signature: Signature, target: Target) -> Iterator[PointwiseKnobs]:  # noqa: ARG002
        return self._configurations(_known(spec, signature))

    def _configurations(self, call: PointwiseCall) -> Iterator[PointwiseKnobs]:
        arrays = [o for o in call.operands if o.column_stride] + [r for r in call.results if isinstance(r, Matrix)]
        size = max((jnp.dtype(array.dtype).itemsize for array in arrays), default=4)
        widest = next(w for w in WIDTHS if call.columns % w == 0 and w * size <= LARGEST_VECTOR[size])
        for width in (w for w in WIDTHS if w <= widest):
            across = 1
            while across < MOST_ACROSS and across * width < call.columns:
                across *= 2
            for rows in (2, 4, 1) if size < 8 else (2, 1):
                yield PointwiseKnobs(width, across, rows)

    def plan(self, config: PointwiseKnobs, spec: Any, signature: Signature, target: Target) -> Plan:
        call = _known(spec, signature)
        if call.columns % config.width:
            raise ValueError(f"{spec.title}: width is {config.width}; expected a divisor of {call.columns} columns")
        emitted = functor(call.program, coarse=call.coarse)
        chunk = call.chunk(config, target.sm_count)
        chunks = math.ceil(call.rows / chunk)
        stored, stages, reductions, buffers = [], [], [], []
        for result, register in zip(call.results, emitted.results, strict=True):
            if isinstance(result, Matrix):
                stored.append(Stored(result.buffer, ctype(result.dtype), result.row_stride, result.batch_stride))
                reductions.append("jaxdnn::Whole")
                continue
            part = Scratch(len(buffers))
            buffers.append(call.batch * chunks * call.columns * itemsize(ctype(register)))
            stored.append(Stored(part, ctype(register), call.columns, chunks * call.columns))
            outer, length = (1, call.batch * chunks) if 0 in result.axes else (call.batch, chunks)
            reductions.append(reduction(result, ctype(register)))
            to = (result.buffer, ctype(result.dtype))
            stages.append(axis_stage(reductions[-1], part, to, (outer, length, call.columns), len(stages)))
        scattered = tuple(i for i, operand in enumerate(call.operands) if _scattered(operand, config.width))
        epilogue = ElementEpilogue(emitted, call.operands, tuple(stored), scattered)
        types = {**epilogue.types(), "Reductions": f"jaxdnn::TypeList<{', '.join(reductions)}>"}
        constants = {"Width": config.width, "Across": config.across, "Rows": config.rows}
        found = epilogue.parameters()
        found += numbers(rows=call.rows, columns=call.columns, chunk=chunk, chunks=chunks, strips=call.strips(config))
        entry = entry_text("pointwise", "jaxdnn::Pointwise<Config>", str(THREADS), found)
        launch = Launch("pointwise", arguments(found), (_blocks(call, config, target), 1, 1), (THREADS, 1, 1))
        text = f"\n{epilogue.text()}\n{struct_text('Config', types, constants)}\n{entry}"
        whole = joined(
            [Stage(("pointwise/pointwise.cuh", "product/reduce_axis.cuh"), text, (launch,), tuple(buffers)), *stages]
        )
        unit = "".join(f'#include "{header}"\n' for header in whole.headers) + whole.text
        return Plan(spec.title, unit, target.arch, whole.launches, whole.scratch)


def _scattered(operand: EpilogueOperand, width: int) -> bool:
    """Whether a thread's neighbouring columns are not side by side in every row, as a vector."""
    terms = operand.terms[2]
    strides = [operand.batch_stride, operand.row_stride, *(term.stride for of in operand.terms[:2] for term in of)]
    repeated = len(terms) == 1 and terms[0].stride == terms[0].divisor == 1 and terms[0].modulus % width == 0
    return bool(terms) and not (repeated and not any(stride % width for stride in strides))


def _known(spec: Any, signature: Signature) -> PointwiseCall:
    call = pointwise_call(spec, signature)
    assert not isinstance(call, str), "the call is supported"
    return call


def _blocks(call: PointwiseCall, knobs: PointwiseKnobs, target: Target) -> int:
    chunks = math.ceil(call.rows / call.chunk(knobs, target.sm_count))
    return call.strips(knobs) * chunks * call.batch
