"""Whose tiles are taken from a counter and whose are dealt, and what tensor maps ask of the L2 cache."""

from dataclasses import replace

import pytest

from checking.emulation.plans import Emulated
from checking.product.calls import ProductCase
from checking.product.results import check_emulated
from checking.targets import H100
from jaxdnn.engines.product.sm90.engine import Sm90
from jaxdnn.engines.product.sm90.knobs import Sm90Knobs
from jaxdnn.engines.product.tma import PROMOTE_128, PROMOTE_256
from jaxdnn.plan import Counter, TensorMap

ENGINE = Sm90()
FEW = replace(H100, sm_count=2)  # multiprocessors, each of which works through many tiles
TURNS = Sm90Knobs(tile_m=128, tile_n=128, stages=5, cluster_m=1, schedule="pingpong")


def launch_of(m, n, k, batch, knobs=TURNS):
    product = ProductCase(m, n, k, "bfloat16", batch=batch).product()
    return ENGINE.build(knobs, product, H100).launches[0]


@pytest.mark.parametrize(
    ("sizes", "batch", "knobs", "taken"),
    [
        ((256, 328, 128), 700, TURNS, True),
        ((128, 584, 192), 1664, TURNS, True),  # three stages
        ((256, 256, 256), 512, TURNS, False),  # four, and five of them in flight
        ((8192, 8192, 192), 1, TURNS, False),
        ((8192, 8192, 640), 1, TURNS, True),
        ((300, 304, 64), 1000, replace(TURNS, tile_m=64, tile_n=64), False),
        ((300, 304, 64), 1000, replace(TURNS, tile_m=64), True),
        ((300, 304, 24), 1000, TURNS, False),
        ((300, 304, 128), 4, TURNS, False),  # a tile for each block
    ],
)
def test_tiles_are_taken_where_that_is_faster(sizes, batch, knobs, taken):
    assert any(isinstance(one, Counter) for one in launch_of(*sizes, batch, knobs).arguments) == taken


@pytest.mark.parametrize(
    ("sizes", "batch", "promotion"),
    [
        ((4096, 4096, 4096), 1, (PROMOTE_256, PROMOTE_256)),
        ((512, 512, 512), 128, (PROMOTE_128, PROMOTE_128)),
        ((4096, 4104, 4096), 1, (PROMOTE_256, PROMOTE_128)),
        ((4096, 4096, 4104), 1, (PROMOTE_128, PROMOTE_256)),
    ],
)
def test_whole_lines_of_one_matrix_are_loaded_two_at_a_time(sizes, batch, promotion):
    a, b, *_ = (one for one in launch_of(*sizes, batch).arguments if isinstance(one, TensorMap))
    assert (a.l2_promotion, b.l2_promotion) == promotion


def test_the_ring_of_taken_tiles_is_as_long_as_stages_are_in_flight(tmp_path):
    """Of tiles of one stage, of which eight are in flight."""
    one = ProductCase(40, 136, 64, "bfloat16", batch=21)
    knobs = Sm90Knobs(tile_m=64, tile_n=128, stages=8, cluster_m=1, schedule="pingpong")
    plan = ENGINE.build(knobs, one.product(), FEW)
    assert any(isinstance(argument, Counter) for argument in plan.launches[0].arguments)
    check_emulated(Emulated([plan], tmp_path), 0, one)


@pytest.mark.parametrize("columns", [1, 2])
def test_tiles_are_worked_through_band_by_band(columns, tmp_path):
    """Of two matrices, whose second band has fewer rows; by those who copy and by those who multiply."""
    one = ProductCase(190, 64 * columns, 128, "bfloat16", batch=2)
    knobs = Sm90Knobs(tile_m=64, tile_n=64, stages=2, cluster_m=1, consumers=1, swizzle=2)
    plan = ENGINE.build(knobs, one.product(), FEW)
    check_emulated(Emulated([plan], tmp_path), 0, one)
