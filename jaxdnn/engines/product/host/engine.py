"""Products on the CPU: tiles of packed panels, with the epilogue in cache (cpp/host/product/call.h)."""

from collections.abc import Iterable

from jaxdnn.device import Target
from jaxdnn.engines.base import ProblemEngine
from jaxdnn.engines.product.host.heuristic import candidates
from jaxdnn.engines.product.host.knobs import HostKnobs, arrays_reason
from jaxdnn.engines.product.host.unit import Call
from jaxdnn.engines.product.problem import Product
from jaxdnn.plan import Plan

_FLOATS = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


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
        return arrays_reason(problem.operands, problem.results)

    def configurations(self, problem: Product, target: Target) -> Iterable[HostKnobs]:
        return candidates(problem, target)

    def build(self, config: HostKnobs, problem: Product, target: Target) -> Plan:
        del target
        call = Call(config, problem)
        return Plan(unit="", arch="", launches=tuple(call.launches()), scratch=call.scratch)
