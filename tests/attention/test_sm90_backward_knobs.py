"""Which knobs attention's gradients on Hopper get, and what of them comes in tiles."""

from dataclasses import replace

import pytest

from checking.attention.calls import CAUSAL, DROPOUT, bias, mask
from checking.attention.gradients import SCALE, Gradients, scaled
from checking.targets import H100
from jaxdnn.engines.attention.score_tile import ScoreTile
from jaxdnn.engines.attention.sm90.backward.knobs import AttentionSm90BackwardKnobs
from jaxdnn.engines.attention.sm90.engine import AttentionSm90
from jaxdnn.engines.attention.summed import summed
from jaxdnn.pointwise import Term

ENGINE = AttentionSm90()
CALLS = {
    "bias": Gradients((150, 304, 64, 64), (4, 2), 2, **bias(1, 4, 150, 304)),
    "one bias": Gradients((200, 136, 64, 64), batch=2, **bias(1, 1, 200, 136), logits_soft_cap=2.0),
    "no rows of 16 bytes": Gradients((150, 300, 64, 64), (4, 2), 2, **bias(1, 4, 150, 300)),
    "128": Gradients((4096, 4096, 128, 128), (8, 8), **bias(1, 8, 4096, 4096), **CAUSAL),
    "of a bias": Gradients((200, 264, 64, 64), (4, 2), 3, by="qkvf", **bias(1, 4, 200, 264), **CAUSAL),
    "of each bias": Gradients((130, 136, 64, 64), batch=2, by="qkvf", **bias(2, 2, 130, 136)),
    "of no rows of 16 bytes": Gradients((150, 300, 64, 64), (4, 2), 3, by="qkvf", **bias(1, 4, 150, 300)),
    "of a scale": Gradients(
        (200, 264, 64, 64), batch=2, score_mod=scaled, score_mod_operands=SCALE, by="f", **bias(1, 2, 200, 264)
    ),
    "of 128": Gradients((4096, 4096, 128, 128), (8, 8), by="qkvf", **bias(1, 8, 4096, 4096), **CAUSAL),
    "of keys": Gradients((170, 200, 64, 64), batch=3, by="qkvf", **bias(3, 1, 1, 200), **CAUSAL),
}


@pytest.mark.parametrize(
    ("shape", "heads", "batch", "parts"),
    [
        ((65_536, 65_536, 128, 128), (8, 8), 1, 2),
        ((65_536, 65_536, 128, 128), (32, 32), 1, 8),
        ((65_536, 65_536, 128, 128), (32, 2), 1, 1),  # of few tiles
        ((4096, 4096, 128, 128), (16, 16), 4, 1),
        ((1024, 1024, 64, 64), (32, 32), 16, 1),
    ],
)
def test_large_sums_are_of_parts_of_the_heads(shape, heads, batch, parts):
    problem = Gradients(shape, heads, batch).problem
    knobs = next(ENGINE.configurations(problem, H100))
    assert knobs.parts == parts
    rows, *steps = ENGINE.build(knobs, problem, H100).launches
    assert len(steps) == 2 * parts
    mains = steps[::2]
    assert len({launch.arguments for launch in mains}) == parts
    assert {launch.kernel for launch in mains} == {"attention_sm90_backward"}
    assert rows.kernel == "attention_sm90_backward_rows"


@pytest.mark.parametrize(
    ("name", "tiled", "sums"),
    [("no rows of 16 bytes", False, 2), ("bias", True, 2), ("one bias", True, 2), ("128", True, 1)],
)
def test_what_comes_in_tiles(name, tiled, sums):
    """A bias whose rows begin where TMA wants them. If there is no room for it beside queries and two sums in shared
    memory, there is one: 4 x 4096 tokens, 16 heads of 128, take 4,361 us then, and not 7,852.
    """
    problem = CALLS[name].problem
    knobs = next(ENGINE.configurations(problem, H100))
    assert isinstance(knobs, AttentionSm90BackwardKnobs)
    assert (knobs.score_tiles, knobs.sums) == (tiled, sums)
    if not tiled:
        with pytest.raises(ValueError, match="multiples of 16 bytes"):
            ENGINE.build(replace(knobs, score_tiles=True), problem, H100)
    if sums == 1:
        with pytest.raises(ValueError, match="bytes of shared memory"):
            ENGINE.build(replace(knobs, sums=2), problem, H100)


@pytest.mark.parametrize(
    ("name", "stages", "once", "cluster"),
    [
        ("of a bias", 2, True, 2),
        ("of each bias", 2, True, 2),
        ("of no rows of 16 bytes", 0, False, 2),
        ("of a scale", 2, False, 1),
        ("of 128", 1, True, 2),
        ("of keys", 0, False, 1),
    ],
)
def test_what_gradients_of_a_bias_load(name, stages, once, cluster):
    """A tile of it once for all scores that add to it, if it is what the gradient is of."""
    problem = CALLS[name].problem
    plan = ENGINE.build(next(ENGINE.configurations(problem, H100)), problem, H100)
    *_, launch = (one for one in plan.launches if "loaded_gradient" in one.kernel)
    config = plan.unit[plan.unit.index(f"struct Loaded{launch.kernel[-1]}Config") :]
    config = config[: config.index("};")]
    assert (f"kLoadedStages = {stages}" in config) == (stages > 0)
    assert ("kLoadedOnce = true" in config) == once
    assert launch.cluster == (cluster, 1, 1)


@pytest.mark.parametrize(
    ("name", "head_stride", "batch_stride", "same"),
    [
        ("of a bias", 8, 0, True),
        ("of a bias", 0, 8, False),
        ("of each bias", 8, 8, True),
        ("of a scale", 0, 0, True),
        ("of a scale", 8, 0, False),
    ],
)
def test_which_tiles_all_members_of_a_sum_read(name, head_stride, batch_stride, same):
    problem = CALLS[name].problem
    place = problem.backward.load_gradients[-1].place
    tile = ScoreTile(0, place.buffer, "bfloat16", 8, head_stride, batch_stride)
    found = summed(place, problem.batch * problem.query_heads)
    assert found.share(tile, problem.query_heads) == same


@pytest.mark.parametrize(
    ("length", "size", "batch", "keywords", "heads"),
    [
        (1024, 128, 16, CAUSAL, 16),
        (4096, 128, 4, CAUSAL, 8),
        (4096, 128, 4, {}, 4),
        (16_384, 128, 1, {}, 2),
        (1024, 64, 16, CAUSAL, 64),
        (4096, 64, 4, CAUSAL, 16),
        (4096, 64, 4, {}, 16),
        (512, 64, 32, bias(1, 2048 // 64, 512, 512), 32),
    ],
)
def test_heads_that_are_worked_through_together(length, size, batch, keywords, heads):
    """A round of tiles of 128 keys with blocks of 64 queries, four with blocks of 128."""
    problem = Gradients((length, length, size, size), (2048 // size, 2048 // size), batch, **keywords).problem
    assert next(ENGINE.configurations(problem, H100)).swizzle == heads


@pytest.mark.parametrize(
    ("shape", "heads", "batch", "shares"),
    [
        ((4963, 4963, 128, 128), (8, 2), 1, 4),
        ((2048, 2048, 128, 128), (32, 8), 8, 1),  # enough tiles
        ((4096, 4096, 128, 128), (8, 8), 1, 1),  # nothing to share
        ((65_536, 65_536, 128, 128), (32, 2), 1, 1),  # more memory than it is worth
    ],
)
def test_few_tiles_share_heads(shape, heads, batch, shares):
    knobs = next(ENGINE.configurations(Gradients(shape, heads, batch, **CAUSAL).problem, H100))
    assert knobs.shares == shares


@pytest.mark.parametrize(
    ("keywords", "term", "together"),
    [
        ({}, None, True),
        (mask(2, 1, 640, 640), None, True),
        (mask(1, 16, 640, 640), None, False),
        (DROPOUT, None, False),
        ({"lengths": True}, Term(1, 16), True),
        ({"lengths": True}, Term(1, 2), False),
    ],
)
def test_heads_of_a_group_go_together_where_they_see_the_same(keywords, term, together):
    """Lengths of an element of the batch, which has 16 heads, or of every second head."""
    problem = Gradients((640, 640, 64, 64), (16, 4), 2, **keywords, **CAUSAL).problem
    if term is not None:
        of_heads = replace(problem.mask.key_lengths, terms=((term,), (), ()))
        problem = replace(problem, mask=replace(problem.mask, key_lengths=of_heads))
    assert ("call.together" in ENGINE.build(AttentionSm90BackwardKnobs(), problem, H100).unit) == together
