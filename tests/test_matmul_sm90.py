"""The Hopper matmul kernel compiles without spills for every configuration that its heuristic offers."""

import pytest
from test_kernels import kernels

from jaxdnn import _native, device
from jaxdnn.engines.sm90_heuristic import candidates
from jaxdnn.engines.sm90_matmul import build
from jaxdnn.engines.sm90_product import Matrix, Product, identity, tma_reason
from jaxdnn.plan import Operand, Result

TARGET = device._NAMED[90]


def product(m, n, k, *, dtype="bfloat16", result="bfloat16", a_transposed=False, b_transposed=False, sums=1):
    a = Matrix(Operand(0), dtype, *((k, m) if a_transposed else (m, k)), m if a_transposed else k)
    rows, columns = (n, k) if b_transposed else (k, n)
    b = tuple(Matrix(Operand(1 + i), dtype, rows, columns, columns) for i in range(sums))
    results = tuple(Matrix(Result(i), result, m, n, n) for i in range(sums))
    return Product(m, n, k, 1, a, b, results, a_transposed, b_transposed, (), identity(sums))


PRODUCTS = {
    "square": product(4096, 4096, 4096),
    "wide": product(8192, 28672, 4096),
    "transposed a": product(4096, 4096, 4096, a_transposed=True),
    "transposed b": product(4096, 4096, 4096, b_transposed=True),
    "float16 to float32": product(1024, 1024, 1024, dtype="float16", result="float32"),
    "float8": product(4096, 4096, 4096, dtype="float8_e4m3fn", b_transposed=True),
    "tfloat32": product(2048, 2048, 2048, dtype="float32", result="float32", b_transposed=True),
    "two sums": product(8192, 14336, 4096, sums=2),
    "deep": product(512, 512, 16384),
    "odd": product(333, 264, 72),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_configurations_compile(name):
    one = PRODUCTS[name]
    assert tma_reason(one) is None
    configurations = list(candidates(one, TARGET))
    assert configurations
    for knobs in configurations:
        unit, launches, _ = build(one, knobs, TARGET.sm_count)
        assert {launch.kernel for launch in launches} <= set(kernels_of(unit)), knobs
        for kernel, (registers, spilled) in kernels(_native.compile(unit, "sm_90a").log).items():
            assert not spilled, f"{kernel} spills {spilled} bytes under {knobs}"
            assert registers <= 255


def kernels_of(unit):
    return [line.split("(")[0].split()[-1] for line in unit.splitlines() if "matmul_s" in line and "(" in line]


def test_strides_that_the_copy_engine_refuses_have_a_reason():
    assert "multiple of 16" in (tma_reason(product(64, 64, 63)) or "")
