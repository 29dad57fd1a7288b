"""Products on the CPU: tiles of packed panels, with the epilogue in cache (cpp/host/product/call.h)."""

from collections.abc import Iterable

from jaxdnn.device import Target
from jaxdnn.engines.base import ProblemEngine
from jaxdnn.engines.product.host.heuristic import candidates
from jaxdnn.engines.product.host.knobs import HostKnobs
from jaxdnn.engines.product.host.unit import Call
from jaxdnn.engines.product.problem import Product
from jaxdnn.plan import Plan
from jaxdnn.pointwise.bytecode import MAX_INDICES
from jaxdnn.pointwise.operations import DTYPES

_FLOATS = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


MAX_ARRAYS = 32  # kMaxArrays in cpp/host/product/call.h


class Host(ProblemEngine[Product, HostKnobs]):
    """Panels in registers, tiles in cache, XLA's own threads."""

    name = "host"
    platform = "cpu"
    problem = Product
    notes = ("deterministic",)

    def reason(self, problem: Product, target: Target) -> str | None:
        del target
        a, b = problem.a.dtype, {matrix.dtype for matrix in problem.b}
        same = b == {a}
        if not (same and a in ("float64", "int8")) and not {a, *b} <= set(_FLOATS):
            return f"its kernels don't multiply {a} by {' and '.join(sorted(b))}"
        if len(b) > 1:
            return f"its kernels take matrices b of one dtype; these are {' and '.join(sorted(b))}"
        expected = {"float64": "float64", "int8": "int32"}.get(a, "float32")
        if problem.accumulator != expected:
            return f"its kernels sum {a} in {expected}; {problem.accumulator} is asked for"
        if len(problem.operands) + len(problem.results) > MAX_ARRAYS:
            return f"the epilogue has more than {MAX_ARRAYS} operands and results"
        if any(len(operand.gathered) > MAX_INDICES for operand in problem.operands):
            return f"its epilogue looks an operand up by more than {MAX_INDICES} integers at once"
        if unknown := {array.dtype for array in (*problem.operands, *problem.results)} - set(DTYPES):
            return f"its epilogues don't have arrays of {' and '.join(sorted(unknown))}"
        return None

    def configurations(self, problem: Product, target: Target) -> Iterable[HostKnobs]:
        return candidates(problem, target)

    def build(self, config: HostKnobs, problem: Product, target: Target) -> Plan:
        del target
        call = Call(config, problem)
        return Plan(unit="", arch="", launches=tuple(call.launches()), scratch=call.scratch)
