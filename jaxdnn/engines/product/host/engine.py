"""Products on the CPU: tiles of packed panels, with the epilogue in cache (cpp/host/product/call.h)."""

from collections.abc import Iterable

from jaxdnn.device import Target
from jaxdnn.engines.product.host.heuristic import candidates
from jaxdnn.engines.product.host.knobs import HostKnobs
from jaxdnn.engines.product.host.unit import Call
from jaxdnn.engines.product.problem import Product, ProductEngine
from jaxdnn.plan import Plan
from jaxdnn.pointwise.bytecode import MAX_INDICES
from jaxdnn.pointwise.operations import DTYPES

_FLOATS = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


MAX_ARRAYS = 32  # kMaxArrays in cpp/host/product/call.h


class Host(ProductEngine):
    """Panels in registers, tiles in cache, XLA's own threads."""

    name = "host"
    platform = "cpu"
    notes = ("deterministic",)

    def reason(self, product: Product, target: Target) -> str | None:
        del target
        a, b = product.a.dtype, {matrix.dtype for matrix in product.b}
        same = b == {a}
        if not (same and a in ("float64", "int8")) and not {a, *b} <= set(_FLOATS):
            return f"its kernels don't multiply {a} by {' and '.join(sorted(b))}"
        if len(b) > 1:
            return f"its kernels take matrices b of one dtype; these are {' and '.join(sorted(b))}"
        expected = {"float64": "float64", "int8": "int32"}.get(a, "float32")
        if product.accumulator != expected:
            return f"its kernels sum {a} in {expected}; {product.accumulator} is asked for"
        if len(product.operands) + len(product.results) > MAX_ARRAYS:
            return f"the epilogue has more than {MAX_ARRAYS} operands and results"
        if any(len(operand.gathered) > MAX_INDICES for operand in product.operands):
            return f"its epilogue looks an operand up by more than {MAX_INDICES} integers at once"
        if unknown := {array.dtype for array in (*product.operands, *product.results)} - set(DTYPES):
            return f"its epilogues don't have arrays of {' and '.join(sorted(unknown))}"
        return None

    def configurations(self, product: Product, target: Target) -> Iterable[HostKnobs]:
        return candidates(product, target)

    def build(self, config: HostKnobs, product: Product, target: Target, title: str) -> Plan:
        del target
        call = Call(config, product)
        return Plan(op=title, unit="", arch="", launches=tuple(call.launches()), scratch=call.scratch)
