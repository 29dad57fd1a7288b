"""The text of product/simt.cuh, run on the CPU: tiles that no size is a multiple of, operands of any layout."""

import functools

import numpy as np
import pytest

from checking.emulation.plans import Emulated, run_on_cpu
from checking.product.calls import ProductCase, result_types
from checking.product.cases import gated, gated_and_saved, gelu, looked_up, reductions, residual, several
from checking.product.tolerance import check
from checking.targets import H100
from jaxdnn.engines.product.simt import knobs as simt_knobs
from jaxdnn.engines.product.simt.engine import Simt
from jaxdnn.engines.product.simt.knobs import SimtKnobs, knobs_reason

SMALL = SimtKnobs(tile_m=32, tile_n=32, thread_m=4, thread_n=4, depth=8, stages=3, swizzle=2)
OPERANDS = (("float32", (1, 1, 40)), ("float32", (2, 36, 40)), ("int8", (1, 36, 1)), ("bool", (1, 1, 1)))
BIAS = (("float32", (1, 1, 40)),)
TABLES = (("float32", (1, 37, 9)), ("bfloat16", (1, 9, 40)), ("int8", (1, 37, 1)), ("uint8", (1, 1, 40)))


def many(acc, *rows):
    return acc * rows[0] + rows[1] * rows[2] + rows[3] * rows[4]


def few(depth, stages, split_k=1):
    """Of eight accumulators a lane: an epilogue from registers, and a grid without divisions."""
    return SimtKnobs(tile_m=32, tile_n=32, thread_m=16, thread_n=16, depth=depth, stages=stages, split_k=split_k)


# With 2 or 5 stages of K, what is copied past its end goes where the accumulators go next.
PRODUCTS = {
    "nn": (ProductCase(37, 41, 29, padding=3, batch=3, shared="b"), SMALL),
    "nt": (ProductCase(37, 41, 29, b_transposed=True, batch=2, shared="a"), SMALL),
    "tn": (ProductCase(37, 41, 37, a_transposed=True, padding=1), SMALL),
    "aligned": (ProductCase(68, 72, 12), SMALL),
    "aligned tt": (ProductCase(36, 72, 20, a_transposed=True, b_transposed=True, batch=2), SMALL),
    "one": (ProductCase(1, 1, 1), SMALL),
    "int8": (ProductCase(37, 40, 29, "int8"), SMALL),
    "float8": (ProductCase(37, 40, 29, "float8_e4m3fn", b_dtype="float8_e5m2", out="bfloat16"), SMALL),
    "several": (ProductCase(36, 40, 24, epilogue=several, batch=2, operands=OPERANDS), SMALL),
    "split": (
        ProductCase(36, 40, 60, epilogue=several, batch=2, operands=OPERANDS),
        SimtKnobs(tile_m=32, tile_n=64, thread_m=4, thread_n=8, depth=8, stages=2, split_k=3),
    ),
    "gated": (ProductCase(37, 33, 29, epilogue=gated, accumulators=2), SMALL),
    "reductions": (ProductCase(36, 40, 24, epilogue=reductions, batch=2, operands=BIAS), SMALL),
    "float64": (
        ProductCase(37, 33, 21, "float64", b_transposed=True),
        SimtKnobs(tile_m=32, tile_n=32, thread_m=16, thread_n=16, depth=8, stages=2),
    ),
    "bfloat16": (
        ProductCase(37, 40, 72, "bfloat16", epilogue=gelu, operands=BIAS),
        SimtKnobs(tile_m=32, tile_n=32, thread_m=16, thread_n=16, depth=32, stages=3),
    ),
    "float16 tt": (
        ProductCase(40, 33, 45, "float16", a_transposed=True, b_transposed=True),
        SimtKnobs(tile_m=32, tile_n=64, thread_m=16, thread_n=32, depth=32, stages=2),
    ),
    # Rows that begin in the middle of a word, and neighbours that cross the ends of M, N and K.
    "bfloat16 odd": (
        ProductCase(37, 41, 75, "bfloat16", batch=3, shared="b"),
        SimtKnobs(tile_m=64, tile_n=64, thread_m=32, thread_n=32, depth=64, stages=2),
    ),
    "bfloat16 odd tt": (
        ProductCase(51, 37, 33, "bfloat16", a_transposed=True, b_transposed=True, batch=2, shared="a"),
        SimtKnobs(tile_m=32, tile_n=64, thread_m=16, thread_n=32, depth=32, stages=2),
    ),
    # Rows of whole words, and one operand whose copies are asynchronous.
    "bfloat16 words": (
        ProductCase(40, 30, 200, "bfloat16"),
        SimtKnobs(tile_m=32, tile_n=32, thread_m=16, thread_n=16, depth=64, stages=2, split_k=2),
    ),
    "float16 words of both": (
        ProductCase(42, 30, 90, "float16", a_transposed=True),
        SimtKnobs(tile_m=64, tile_n=64, thread_m=32, thread_n=16, depth=64, stages=2),
    ),
    "float16 odd gated": (
        ProductCase(33, 45, 67, "float16", epilogue=gated, accumulators=2),
        SimtKnobs(tile_m=32, tile_n=64, thread_m=16, thread_n=32, depth=32, stages=2),
    ),
    # Of one stage, of fewer than are in flight, and of more than the ring has.
    "few": (ProductCase(37, 40, 40, "bfloat16", epilogue=gelu, operands=BIAS), few(64, 6)),
    "few and residual": (
        ProductCase(37, 40, 264, "bfloat16", epilogue=residual, operands=(*BIAS, ("bfloat16", (2, 37, 40))), batch=2),
        few(128, 4),
    ),
    "few, long": (ProductCase(40, 72, 520, "float16", a_transposed=True, b_transposed=True), few(64, 6)),
    "few, wide": (
        ProductCase(72, 72, 136, "bfloat16", batch=2, shared="b", padding=8),
        SimtKnobs(tile_m=64, tile_n=64, thread_m=16, thread_n=16, depth=64, stages=4),
    ),
    "few gated": (ProductCase(37, 40, 72, "bfloat16", epilogue=gated, accumulators=2, batch=2), few(64, 6)),
    "few gated and saved": (
        ProductCase(
            37, 40, 200, "bfloat16", b_transposed=True, epilogue=gated_and_saved, accumulators=2, operands=2 * BIAS
        ),
        few(128, 4),
    ),
    "few odd": (ProductCase(37, 41, 75, "bfloat16", batch=3, shared="b"), few(64, 2)),
    "few odd gated": (ProductCase(37, 41, 139, "bfloat16", epilogue=gated, accumulators=2), few(128, 2)),
    "few odd and residual": (
        ProductCase(
            37, 41, 77, "bfloat16", epilogue=residual, operands=(("float32", (1, 1, 41)), ("bfloat16", (1, 37, 41)))
        ),
        few(256, 2),
    ),
    "few, copied and waiting": (ProductCase(40, 30, 40, "bfloat16"), few(64, 4)),
    "few, waiting and copied": (ProductCase(30, 40, 72, "bfloat16", a_transposed=True), few(32, 3)),
    "few of tables": (ProductCase(37, 40, 40, "bfloat16", epilogue=looked_up, operands=TABLES), few(64, 2)),
    "few of many operands": (ProductCase(37, 40, 72, "bfloat16", epilogue=many, operands=5 * BIAS), few(64, 4)),
    # Of two stages, two, one and none.
    "few split": (
        ProductCase(
            37,
            40,
            264,
            "bfloat16",
            epilogue=several,
            batch=2,
            operands=(BIAS[0], ("float32", (2, 37, 40)), ("int8", (1, 37, 1)), ("bool", (1, 1, 1))),
        ),
        few(64, 4, split_k=4),
    ),
    "bfloat16 gated": (
        ProductCase(68, 72, 40, "bfloat16", epilogue=gated, accumulators=2),
        SimtKnobs(tile_m=32, tile_n=64, thread_m=16, thread_n=32, depth=32, stages=3),
    ),
}


@functools.cache
def product_of(name):
    return PRODUCTS[name][0].product()


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    plans = []
    for name, (_, knobs) in PRODUCTS.items():
        assert knobs_reason(product_of(name), knobs, H100) is None
        plans.append(Simt().build(knobs, product_of(name), H100))
    return Emulated(plans, tmp_path_factory.mktemp("simt"))


@pytest.mark.parametrize("name", PRODUCTS)
def test_simt(name, kernels):
    case, _ = PRODUCTS[name]
    results = [np.zeros(one.shape, one.dtype) for one in result_types(product_of(name))]
    kernels.run(list(PRODUCTS).index(name), case.arrays(), results)
    check(case, results)


def test_few_accumulators_of_more_tiles_than_a_grid_has(tmp_path, monkeypatch):
    case, knobs = ProductCase(37, 72, 72, "bfloat16", batch=2), few(64, 4)
    monkeypatch.setattr(simt_knobs, "MAX_GRID_YZ", 2)
    plan = Simt().build(knobs, case.product(), H100)
    assert plan.launches[0].grid == (2 * 3 * 2, 1, 1)
    results = [np.zeros(one.shape, one.dtype) for one in result_types(case.product())]
    run_on_cpu(plan, (case.arrays(), results), tmp_path)
    check(case, results)
