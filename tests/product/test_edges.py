"""How much is loaded of the last tiles of rows that run along K. That this is right, others test of ragged products."""

import pytest

from checking.emulation.plans import Emulated
from checking.product.calls import ProductCase
from checking.product.cases import gated
from checking.product.results import check_emulated
from checking.targets import H100
from jaxdnn.engines.base import MAX_TENSOR_MAPS
from jaxdnn.engines.product.edges import edges
from jaxdnn.engines.product.sm90.engine import Sm90
from jaxdnn.engines.product.sm90.knobs import Sm90Knobs, operand_maps
from jaxdnn.plan import TensorMap


def product(m, n, **fields):
    return ProductCase(m, n, 256, "bfloat16", precision="default", **fields).product()


@pytest.mark.parametrize(
    ("m", "tile", "cluster", "expected"),
    [
        (896, 128, (1, 1), (128, 0)),
        (898, 128, (1, 1), (8, 120)),
        (920, 128, (1, 1), (24, 104)),
        (956, 128, (1, 1), (64, 64)),
        (1020, 128, (1, 1), (128, 0)),  # in groups of 8 all of them
        (896, 128, (2, 1), (8, 120)),  # a tile of the last cluster that is none of the matrix
        (898, 128, (1, 2), (8, 56)),  # of shares of 64
        (960, 128, (1, 2), (8, 56)),  # one of two is there
        (970, 128, (1, 2), (16, 48)),
    ],
)
def test_what_there_is_of_the_last_rows_is_loaded(m, tile, cluster, expected):
    (edge,) = edges(product(m, 512), (tile, 256), cluster, 1)
    assert (edge.name, edge.lines, edge.less) == ("a", *expected)


def test_columns_have_edges_where_they_run_along_k():
    for b_transposed, expected in ((True, [("a", 128, 0), ("b", 40, 72)]), (False, [("a", 128, 0)])):
        found = edges(product(128, 1160, b_transposed=b_transposed), (128, 112), (1, 1), 1)
        assert [(one.name, one.lines, one.less) for one in found] == expected
    assert edges(product(200, 64, a_transposed=True), (128, 64), (1, 1), 1) == []


def test_both_matrices_have_boxes_of_their_own():
    both = product(300, 104, accumulators=2, epilogue=gated, b_transposed=True)
    knobs = Sm90Knobs(tile_m=128, tile_n=64, stages=3, cluster_m=1)
    maps = [one for one in Sm90().build(knobs, both, H100).launches[0].arguments if isinstance(one, TensorMap)]
    assert [one.box[1] for one in maps[:6]] == [128, 64, 64, 48, 40, 40]
    assert len(maps) - 1 == operand_maps(both, knobs) == 6
    operands = [one.buffer for one in maps[:6]]
    assert operands[3:] == operands[:3]


def test_boxes_of_both_matrices_hold_what_is_multiplied(tmp_path):
    """Of whole tiles and of the last ones, in pairs that share columns."""
    both = ProductCase(150, 104, 136, "bfloat16", accumulators=2, epilogue=gated, b_transposed=True)
    knobs = Sm90Knobs(tile_m=128, tile_n=64, stages=3, cluster_m=2)
    check_emulated(Emulated([Sm90().build(knobs, both.product(), H100)], tmp_path), 0, both)


def test_views_leave_no_room_for_edges():
    both = product(300, 100, accumulators=2, epilogue=gated)
    assert MAX_TENSOR_MAPS == 2 * 8 + 1
    assert [len(edges(both, (128, 64), (1, 1), views)) for views in (4, 8)] == [1, 0]
