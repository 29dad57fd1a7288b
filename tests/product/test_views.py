"""Products whose b has rows as far apart as TMA refuses, loaded as they lie: which are, and that their code computes
what is right, on the CPU and on a GPU.
"""

import functools
import re
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checking.compiler_log import compile_checked
from checking.emulation.plans import Emulated
from checking.product.calls import ProductCase
from checking.product.cases import gated, gelu
from checking.product.results import check_emulated, check_plan
from checking.targets import H100
from jaxdnn import device
from jaxdnn.engines.product.sm90.engine import Sm90
from jaxdnn.engines.product.sm90.knobs import Sm90Knobs, knobs_reason
from jaxdnn.engines.product.views import OVERLAP, row_views
from jaxdnn.plan import Operand

ENGINE = Sm90()
GPU = jax.default_backend() == "gpu"
KNOBS = Sm90Knobs(tile_m=128, tile_n=128, stages=3, cluster_m=1, store="rows")
IN_TURNS = replace(KNOBS, tile_m=64, tile_n=64, schedule="pingpong")


def two(acc, bias):
    return acc + bias, acc.astype(jnp.float32)


def largest(acc):
    return acc, jnp.max(acc, axis=1)


def case(m, n, k, dtype="bfloat16", **fields):
    return ProductCase(m, n, k, dtype, precision="default", **fields)


# By their number of views, and how far rows of b are from a multiple of 16 bytes.
PRODUCTS = {
    "8, 2 bytes": (case(75, 265, 600), KNOBS),
    "8, 6 bytes": (case(75, 139, 200), IN_TURNS),
    "8, 10 bytes": (case(75, 141, 200), IN_TURNS),
    "8, 14 bytes": (case(70, 143, 64), IN_TURNS),
    "4, 4 bytes": (case(75, 130, 77, "float16"), KNOBS),
    "4, 12 bytes": (case(75, 134, 300, "float16"), KNOBS),
    "2, 8 bytes": (case(75, 244, 330), KNOBS),
    "few": (case(3, 17, 9), IN_TURNS),
    "last columns in a box past the last": (case(75, 183, 200), KNOBS),
    "gelu": (case(150, 265, 136, epilogue=gelu, operands=(("bfloat16", (1, 1, 265)),)), KNOBS),
    "gated": (case(70, 131, 136, accumulators=2, epilogue=gated), replace(KNOBS, tile_n=64)),
    "two results": (case(70, 131, 72, epilogue=two, operands=(("bfloat16", (1, 1, 131)),)), IN_TURNS),
    "wide": (case(75, 515, 72), replace(KNOBS, tile_n=256)),
    "two blocks of rows": (case(300, 131, 72), replace(KNOBS, tile_m=256)),
    "shared by two rows": (case(390, 265, 136), replace(KNOBS, cluster_m=2)),
    "shared by four rows": (case(490, 260, 136), replace(KNOBS, cluster_m=4)),
    "shared by four": (case(390, 265, 136), replace(KNOBS, cluster_m=2, cluster_n=2)),
    "batch": (case(37, 139, 72, batch=3), IN_TURNS),
    "batch, one b": (case(37, 139, 77, batch=3, shared="b"), IN_TURNS),
    "batch, one a": (case(37, 139, 72, batch=3, shared="a"), IN_TURNS),
    "gaps": (case(37, 139, 77, padding=3), IN_TURNS),
}  # fmt: skip


@functools.cache
def product_of(name):
    return PRODUCTS[name][0].product()


def knobs_of(name):
    return replace(PRODUCTS[name][1], views=row_views(product_of(name)))


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    few = replace(H100, sm_count=4)
    plans = [ENGINE.build(knobs_of(name), product_of(name), few) for name in PRODUCTS]
    return Emulated(plans, tmp_path_factory.mktemp("views"))


@pytest.mark.parametrize("name", PRODUCTS)
def test_its_text_computes_what_is_right(name, emulated):
    check_emulated(emulated, list(PRODUCTS).index(name), PRODUCTS[name][0])


@pytest.mark.parametrize("name", ["2, 8 bytes", "4, 12 bytes", "8, 6 bytes"])
def test_what_is_no_number_stays_in_its_row(name, emulated):
    """So does the first element of a, in whose place a copy loads what there is not."""
    product, operands = product_of(name), PRODUCTS[name][0].arrays()
    a = operands[product.a.buffer.index]
    a.reshape(product.m, product.k)[0, 0] = np.nan
    result = np.zeros((product.m, product.n), product.results[0].dtype)
    emulated.run(list(PRODUCTS).index(name), operands, [result])
    found = np.isnan(result.astype(np.float32))
    assert found[0].all()
    assert not found[1:].any()


@pytest.mark.parametrize("name", PRODUCTS)
def test_it_compiles(name):
    compile_checked(ENGINE.build(knobs_of(name), product_of(name), H100), knobs_of(name))


@pytest.mark.skipif(not GPU, reason="there is no GPU")
@pytest.mark.parametrize("name", PRODUCTS)
def test_results(name):
    few = replace(device.gpus()[0], sm_count=4)
    check_plan(ENGINE.build(knobs_of(name), product_of(name), few), PRODUCTS[name][0])


@pytest.mark.parametrize(
    ("product", "knobs", "said"),
    [
        (case(75, 264, 64), {"views": 8}, "expected 1, of rows"),
        (case(75, 265, 64), {"views": 4}, "expected 8, of rows"),
        (case(75, 265, 64, b_transposed=True), {"views": 8}, "expected 1, of rows"),
        (case(75, 265, 64, a_transposed=True), {"views": 8}, "expected 1, of rows"),
        (case(75, 265, 64, "float32"), {"views": 4}, "expected 1, of rows"),
        (case(75, 265, 4), {"views": 8}, "expected 1, of rows"),
        (case(75, 265, 77, batch=3), {"views": 8}, "expected 1, of rows"),  # whose matrices are 10 bytes off
        (case(75, 265, 512), {"views": 8, "split_k": 2}, "expected store = 'rows', one split and no reduction"),
        (case(75, 265, 64), {"views": 8, "store": "direct"}, "expected store = 'rows'"),
        (case(75, 265, 64, epilogue=largest), {"views": 8}, "no reduction"),
    ],
)
def test_what_has_no_views(product, knobs, said):
    assert said in (knobs_reason(product.product(), replace(KNOBS, **knobs), H100.shared_memory) or "")


@pytest.mark.parametrize("fields", [{"row_stride": 267}, {"buffer": Operand(2, 2)}, {"row_stride": 265 + 2**37}])
def test_views_of_both_are_alike(fields):
    """They begin at 16 bytes, and their rows are as far from a multiple of that, and no farther apart than 40 bits."""
    product = case(75, 265, 64, accumulators=2, epilogue=gated).product()
    first, second = product.b
    assert row_views(product) == 8
    assert row_views(replace(product, b=(first, replace(second, **fields)))) == 1


def test_overlaps_are_the_kernels():
    header = (Path(__file__).parents[2] / "cpp/kernels/core/views.cuh").read_text()
    assert re.findall(r"kViewOverlap = (\d+);", header) == [str(OVERLAP)]


@pytest.mark.parametrize(
    ("product", "views"),
    [
        (case(264, 85_443, 2048), 8),  # 338 us, 596 by a copy of 350 MB
        (case(347, 7842, 1640), 4),  # 33 and 48
        (case(2388, 24_655, 768, accumulators=2, epilogue=gated), 1),  # 589 and 398, since accumulators move often
        (case(5124, 700, 2048), 1),  # 67 and 36
    ],
)
def test_few_rows_are_multiplied_by_views(product, views):
    assert next(iter(ENGINE.configurations(product.product(), H100))).views == views
