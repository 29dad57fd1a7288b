"""Clusters of thread blocks on Hopper that share what they load: that their code computes what is right, on the CPU and
on a GPU, and which products are given large ones.
"""

from dataclasses import replace

import jax
import pytest

from checking.compiler_log import compile_checked
from checking.emulation.plans import Emulated
from checking.product.calls import ProductCase
from checking.product.cases import gated, gelu
from checking.product.results import check_emulated, check_plan
from checking.targets import H100
from jaxdnn import device
from jaxdnn.engines.product.sm90.engine import Sm90
from jaxdnn.engines.product.sm90.knobs import Sm90Knobs

ENGINE = Sm90()
GPU = jax.default_backend() == "gpu"
TILES = Sm90Knobs(tile_m=64, tile_n=64, stages=3, consumers=1)
IN_TURNS = replace(TILES, consumers=2, schedule="pingpong")


def case(m, n, k, **fields):
    return ProductCase(m, n, k, "bfloat16", precision="default", **fields)


# More tiles than blocks, and fewer rows and columns of them than clusters cover.
PRODUCTS = {
    "4 x 2": (case(500, 280, 200), replace(TILES, cluster_m=4, cluster_n=2)),
    "2 x 4": (case(200, 520, 136), replace(TILES, cluster_m=2, cluster_n=4)),
    "8 x 1": (case(136, 200, 136), replace(TILES, cluster_m=8)),
    "1 x 4, one row of tiles": (case(50, 584, 136), replace(TILES, cluster_m=1, cluster_n=4)),
    "2 x 2, both transposed": (
        case(264, 200, 136, a_transposed=True, b_transposed=True),
        replace(IN_TURNS, cluster_m=2, cluster_n=2),
    ),
    "4 x 2, in turns, gelu": (
        case(500, 280, 200, epilogue=gelu, operands=(("bfloat16", (1, 1, 280)),)),
        replace(IN_TURNS, cluster_m=4, cluster_n=2),
    ),
    "2 x 1, three warp groups, gated": (
        case(700, 200, 136, accumulators=2, epilogue=gated),
        replace(TILES, tile_m=192, consumers=3, cluster_m=2),
    ),
}


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    few = replace(H100, sm_count=8)
    plans = [ENGINE.build(knobs, one.product(), few) for one, knobs in PRODUCTS.values()]
    return Emulated(plans, tmp_path_factory.mktemp("clusters"))


@pytest.mark.parametrize("name", PRODUCTS)
def test_its_text_computes_what_is_right(name, emulated):
    check_emulated(emulated, list(PRODUCTS).index(name), PRODUCTS[name][0])


@pytest.mark.parametrize("name", PRODUCTS)
def test_it_compiles(name):
    one, knobs = PRODUCTS[name]
    compile_checked(ENGINE.build(knobs, one.product(), H100), knobs)


@pytest.mark.skipif(not GPU, reason="there is no GPU")
@pytest.mark.parametrize("name", PRODUCTS)
def test_results(name):
    one, knobs = PRODUCTS[name]
    check_plan(ENGINE.build(knobs, one.product(), replace(device.gpus()[0], sm_count=16)), one)


@pytest.mark.parametrize("sizes", [(1472, 1584, 15336), (11136, 584, 3368), (400, 9000, 3000)])
def test_rows_across_lines_are_loaded_by_large_clusters(sizes):
    knobs = next(iter(ENGINE.configurations(case(*sizes).product(), H100)))
    assert knobs.cluster_m * knobs.cluster_n > 2


# Of whole lines, and of one row of tiles with a short K.
@pytest.mark.parametrize("sizes", [(1472, 1536, 15360), (3584, 4416, 3904), (384, 8960, 3008), (65, 38632, 640)])
def test_others_are_not(sizes):
    offered = list(ENGINE.configurations(case(*sizes).product(), H100))
    assert offered
    assert all(knobs.cluster_m * knobs.cluster_n <= 2 for knobs in offered)


def test_a_round_of_clusters_is_as_many_as_are_resident():
    """32 of four would fill 128 multiprocessors, but two of them wait: 51 us of 39. Transposed, 16 are enough."""
    knobs = next(iter(ENGINE.configurations(case(300, 200, 4096, batch=16).product(), H100)))
    assert knobs.swapped or knobs.cluster_m * knobs.cluster_n == 1
