"""Which knobs attention on Hopper gets where calls are much alike."""

import pytest

from checking.attention.calls import CAUSAL, bias, call
from checking.targets import H100
from jaxdnn.engines.attention.sm90.engine import AttentionSm90
from jaxdnn.engines.attention.sm90.knobs import AttentionSm90Knobs

ENGINE = AttentionSm90()


@pytest.mark.parametrize(("heads", "tile_m"), [(6, 192), (8, 128), (12, 192), (13, 128)])
def test_rounds_of_tiles_are_counted(heads, tile_m):
    """132 and 264 tiles of 192 queries are one and two rounds; a few more, another one of all blocks."""
    problem = call((4096, 4096, 128, 128), (heads, heads)).problem
    assert next(ENGINE.configurations(problem, H100)).tile_m == tile_m


@pytest.mark.parametrize(("queries", "skips"), [(512, True), (384, False)])
def test_warp_groups_without_queries_let_blocks_pass(queries, skips):
    problem = call((queries, queries, 64, 64), (16, 16), 32, **bias(1, 16, queries, queries)).problem
    knobs = next(ENGINE.configurations(problem, H100))
    assert (knobs.tile_m, knobs.skips, knobs.cluster) == (192, skips, 1 if skips else 2)


@pytest.mark.parametrize(
    ("length", "size", "tile_m", "halves"),
    [(512, 128, 128, True), (1024, 128, 128, True), (2048, 128, 192, False), (1024, 64, 128, False)],
)
def test_half_blocks_of_causal_calls(length, size, tile_m, halves):
    problem = call((length, length, size, size), (2048 // size, 2048 // size), 16_384 // length, **CAUSAL).problem
    knobs = next(ENGINE.configurations(problem, H100))
    assert (knobs.tile_m, knobs.halves) == (tile_m, halves)


@pytest.mark.parametrize("knobs", [{"tile_m": 100}, {"tile_n": 100}, {"stages": 0}])
def test_knobs_are_validated(knobs):
    with pytest.raises(ValueError, match=r"AttentionSm90Knobs: .* (must be|expected) "):
        AttentionSm90Knobs(**knobs)
