"""Tiles of the kernel for any GPU of which warps multiply slices of K: that they compute what is right, on the CPU and
on a GPU, and what has none.
"""

import functools
import itertools
from dataclasses import replace

import jax
import pytest

from checking.emulation.plans import Emulated
from checking.product.calls import ProductCase
from checking.product.cases import gated, gelu
from checking.product.results import check_emulated, check_plan
from checking.targets import H100
from jaxdnn.engines.product.simt.engine import Simt
from jaxdnn.engines.product.simt.knobs import SimtKnobs, knobs_reason

GPU = jax.default_backend() == "gpu"
FOUR = SimtKnobs(tile_m=16, tile_n=16, thread_m=16, thread_n=16, depth=128, stages=3, slice_k=4, resident=3)
EIGHT, TWO = replace(FOUR, depth=256, slice_k=8), replace(FOUR, tile_n=32, slice_k=2)
SIZES = {
    "one stage": (24, 40, 120),
    "more stages than there is room for": (40, 24, 648),
    "rows that are not aligned": (37, 27, 333),
}
EPILOGUES = {
    "plain": {},
    "gelu": {"epilogue": gelu},
    "gated": {"epilogue": gated, "accumulators": 2},
}


def case(size, epilogue, **fields):
    m, n, k = SIZES[size]
    operands = (("bfloat16", (1, 1, n)),) if epilogue == "gelu" else ()
    return ProductCase(m, n, k, "bfloat16", operands=operands, **EPILOGUES[epilogue], **fields)


CASES = {
    f"{size}, {epilogue}": (case(size, epilogue), knobs)
    for size, (epilogue, knobs) in itertools.product(
        SIZES, (("plain", FOUR), ("plain", EIGHT), ("gelu", TWO), ("gated", FOUR))
    )
} | {
    "both transposed": (case("one stage", "gelu", a_transposed=True, b_transposed=True), FOUR),
    "float16": (replace(case("one stage", "plain"), dtype="float16"), FOUR),
    "many matrices": (case("rows that are not aligned", "plain", batch=3), FOUR),
    "split": (ProductCase(40, 24, 2048, "bfloat16"), replace(FOUR, split_k=3)),
}


@functools.cache
def plans():
    return [Simt().build(knobs, product.product(), H100) for product, knobs in CASES.values()]


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    return Emulated(plans(), tmp_path_factory.mktemp("slices"))


@pytest.mark.parametrize("name", CASES)
def test_its_text_computes_what_is_right(name, emulated):
    check_emulated(emulated, list(CASES).index(name), CASES[name][0])


@pytest.mark.skipif(not GPU, reason="there is no GPU")
@pytest.mark.parametrize("name", CASES)
def test_results(name):
    product, knobs = CASES[name]
    check_plan(Simt().build(knobs, product.product(), H100), product, knobs)


@pytest.mark.parametrize(
    ("product", "knobs", "said"),
    [
        (
            case("one stage", "gated"),
            EIGHT,
            "slice_k is 8; expected 1, or few accumulators a lane of tensor cores, and",
        ),
        (ProductCase(64, 64, 256), SimtKnobs(slice_k=2), "slice_k is 2; expected 1, or few"),
        (ProductCase(64, 64, 256, "bfloat16"), replace(FOUR, tile_m=32, thread_m=32), "slice_k is 4; expected 1, or"),
        (ProductCase(64, 64, 256, "bfloat16"), replace(FOUR, depth=64), "depth is 64; expected a multiple of 128"),
    ],
)
def test_what_has_no_slices(product, knobs, said):
    assert said in (knobs_reason(product.product(), knobs, H100) or "")
