"""Few queries and many keys on Hopper: heads that share a tile, keys that are split, and how splits combine."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from checking.attention.calls import ALIGNED, DROPOUT, RESIDUAL, arrays, call, check, mask, slopes
from checking.compiler_log import compile_checked
from checking.emulation.plans import Emulated
from checking.product.calls import run_plan
from checking.targets import H100
from jaxdnn import device
from jaxdnn.engines.attention.sm90.engine import AttentionSm90
from jaxdnn.engines.attention.sm90.heuristic import most_blocks
from jaxdnn.engines.attention.sm90.knobs import AttentionSm90Knobs, knobs_reason, tile_count
from jaxdnn.plan import Scalar, TensorMap
from jaxdnn.pointwise import Term

ENGINE = AttentionSm90()
GPU = jax.default_backend() == "gpu"


def lengths(batch):
    return {"key_value_seq_lengths": jax.ShapeDtypeStruct((batch,), "int32")}


def sinks(heads, dtype):
    return {"sinks": jax.ShapeDtypeStruct((heads,), dtype)}


# With rows of a tile, heads that share it, and splits: heads that are no power of two, or more than a tile has; splits
# without keys; sinks, which count once; edges of masks in several splits; rows of several warp groups.
SMALL = {
    "one query": (call((1, 400, 64, 64), (8, 2), 3, **lengths(3), **RESIDUAL), (64, 4, 3)),
    "three heads of four": (call((5, 300, 72, 40), (6, 2), 2, "float16", **ALIGNED, **RESIDUAL), (64, 4, 2)),
    "more heads than rows": (call((1, 200, 128, 128), (66, 1)), (64, 64, 2)),
    "heads alone": (call((3, 500, 32, 32), **sinks(2, "float32"), **RESIDUAL), (64, 1, 5)),
    "heads and sinks": (call((2, 100, 16, 16), (6, 2), **sinks(6, "bfloat16")), (64, 4, 1)),
    "window": (call((4, 600, 64, 64), (4, 1), local_window_size=(150, 0), **RESIDUAL), (64, 4, 2)),
    "rows that see nothing": (call((90, 40, 64, 64), (4, 2), 2, **lengths(2), **ALIGNED, **RESIDUAL), (128, 2, 1)),
    "two warp groups": (call((40, 290, 128, 128), (4, 1), **ALIGNED), (128, 4, 2)),
    "function of scores": (
        call((3, 300, 64, 64), (8, 2), 2, score_mod=slopes, **DROPOUT, **ALIGNED, **RESIDUAL),
        (64, 4, 2),
    ),
    "mask": (call((70, 500, 64, 64), (4, 2), 2, **mask(2, 1, 70, 500), **RESIDUAL), (64, 1, 3)),
    "three warp groups": (call((110, 300, 64, 64), (4, 2), 3, lengths=True), (192, 2, 2)),
}
LARGE = {
    "batch of 64": call((1, 8192, 128, 128), (32, 8), 64, **lengths(64)),
    "one of 32k": call((1, 32768, 128, 128), (32, 8)),
    "eight queries of 128k": call((8, 131072, 128, 128), (32, 8), **ALIGNED),
    "no groups": call((1, 32768, 64, 64), (32, 32)),
    "one key head": call((1, 32768, 128, 128), (32, 1), 8),
    "window": call((4, 32768, 128, 128), (32, 8), local_window_size=(1023, 0), **ALIGNED),
    "large heads": call((1, 32768, 256, 256), (16, 8), **sinks(16, "float32"), **RESIDUAL),
    "64 queries": call((64, 32768, 128, 128), (32, 8), **ALIGNED),
    "a tile for each multiprocessor": call((1, 2959, 128, 128), (16, 16), 8),  # 55.7 us, in two splits 62.4
}


def small_plan(name, sm_count=3):
    one, (tile_m, heads, splits) = SMALL[name]
    others = {"query_in_registers": heads == 4, "blocks": 2 if tile_m == 64 else 1}
    knobs = AttentionSm90Knobs(tile_m, 64, query_stages=2, heads=heads, splits=splits, **others)
    return ENGINE.build(knobs, one.problem, replace(H100, sm_count=sm_count))


def chosen(name, target=H100):
    return next(iter(ENGINE.configurations(LARGE[name].problem, target)))


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    return Emulated([small_plan(name) for name in SMALL], tmp_path_factory.mktemp("emulated"))


@pytest.mark.parametrize("name", SMALL)
def test_its_text_computes_what_is_right(name, emulated):
    one, _ = SMALL[name]
    operands, types = arrays(one), one.signature.results.values()
    results = [np.zeros(type_.shape, type_.dtype) for type_ in types]
    emulated.run(list(SMALL).index(name), operands, results)
    check(one, operands, results)


@pytest.mark.parametrize("name", LARGE)
def test_configurations_compile(name):
    problem = LARGE[name].problem
    assert ENGINE.reason(problem, H100) is None
    for knobs in list(ENGINE.configurations(problem, H100))[:2]:
        compile_checked(ENGINE.build(knobs, problem, H100), knobs)


@pytest.mark.parametrize(
    ("name", "heads", "tiles"),
    [
        ("batch of 64", 4, 512),
        ("one of 32k", 4, 8),
        ("eight queries of 128k", 4, 8),
        ("no groups", 1, 32),
        ("one key head", 32, 8),
        ("64 queries", 4, 16),
    ],
)
def test_heads_that_share_keys_share_a_tile(name, heads, tiles):
    assert (chosen(name).heads, tile_count(LARGE[name].problem, chosen(name))) == (heads, tiles)


@pytest.mark.parametrize("sm_count", [132, 114, 78, 16])
# But that which has lengths, and that which has too few keys to be worth another launch.
@pytest.mark.parametrize("name", sorted(LARGE.keys() - {"batch of 64", "window"}))
def test_splits_fill_the_machine(name, sm_count):
    """No multiprocessor has much more to read than its share; and keys aren't split where it wouldn't have."""
    problem, knobs = LARGE[name].problem, chosen(name, replace(H100, sm_count=sm_count))
    tiles, blocks = tile_count(problem, knobs), most_blocks(problem, knobs)

    def longest(splits):
        return -(-tiles * splits // sm_count) * -(-blocks // splits) / (tiles * blocks / sm_count)

    assert longest(knobs.splits) <= 1.3
    assert all(longest(fewer) > 1.25 for fewer in range(1, knobs.splits))


def test_a_block_alone_draws_its_multiprocessors_share():
    knobs = chosen("a tile for each multiprocessor")
    assert (knobs.blocks, knobs.splits) == (2, 1)


def test_elements_of_different_lengths_end_together():
    name = "batch of 64"
    problem, knobs = LARGE[name].problem, chosen(name)
    one_length = replace(problem, mask=replace(problem.mask, key_lengths=None))
    assert next(iter(ENGINE.configurations(one_length, H100))).splits == 1
    assert 4 <= knobs.splits <= 16
    assert knobs.splits == 16, "two blocks of a multiprocessor end apart from the others, half a part each"


def test_window_is_all_that_is_split():
    problem, knobs = LARGE["window"].problem, chosen("window")
    # 1024 keys, the 3 of later queries, and the rest of the block that the first is in.
    assert most_blocks(problem, knobs) == -(-(1024 + 3 + knobs.tile_n - 1) // knobs.tile_n)
    assert 1 < knobs.splits <= most_blocks(problem, knobs)


def test_plan_of_one_query():
    problem, knobs = LARGE["one of 32k"].problem, chosen("one of 32k")
    attention, combine = ENGINE.build(knobs, problem, H100).launches
    query, key, _ = (one for one in attention.arguments if isinstance(one, TensorMap))
    assert (query.dimensions, query.box) == ((128, 1, 32, 1), (64, 16, 4, 1))
    assert (key.dimensions, key.box) == ((128, 32768, 8, 1), (64, knobs.tile_n, 1, 1))
    assert attention.grid == (8 * knobs.splits, 1, 1)
    assert (combine.grid, combine.block) == ((32, 1, 1), (32, 8, 1))
    assert Scalar("int32", knobs.splits) in attention.arguments
    assert Scalar("int32", knobs.splits) in combine.arguments


def test_workspace_is_what_splits_leave():
    one, (_, _, splits) = SMALL["three heads of four"]
    rows = splits * one.problem.batch * one.problem.query_heads * one.problem.query_length
    assert small_plan("three heads of four").scratch == (rows * 40 * 4, rows * 4)
    assert small_plan("heads and sinks").workspace == 0


def test_sizes_are_not_in_the_code():
    stated = [
        call((queries, keys, 64, 64), heads, batch, **lengths(batch)).problem
        for queries, keys, heads, batch in ((1, 4096, (8, 2), 2), (3, 100_000, (9, 3), 5))
    ]
    units = {
        ENGINE.build(AttentionSm90Knobs(64, 128, 3, heads=4, splits=n), one, H100).unit
        for n, one in zip((4, 7), stated, strict=True)
    }
    assert len(units) == 1


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"heads": 8}, "rows of 8 heads; expected at most 4"),
        ({"splits": 65}, "split in 65, and there are 64 blocks"),
    ],
)
def test_knobs_that_do_not_fit(knobs, said):
    problem = replace(LARGE["batch of 64"].problem, key_length=8192)
    reason = knobs_reason(problem, replace(AttentionSm90Knobs(64, 128), **knobs), H100.shared_memory)
    assert said in (reason or "")


@pytest.mark.parametrize("knobs", [{"heads": 3}, {"heads": 128}, {"splits": 0}, {"splits": 129}, {"blocks": 2}])
def test_knobs_are_validated(knobs):
    with pytest.raises(ValueError, match=r"AttentionSm90Knobs: .* (must be|expected) "):
        AttentionSm90Knobs(**knobs)


def test_lengths_of_each_head_keep_heads_apart():
    problem = LARGE["batch of 64"].problem
    of_heads = replace(problem.mask.key_lengths, terms=((Term(1, 2),), (), ()))  # every second head's
    problem = replace(problem, mask=replace(problem.mask, key_lengths=of_heads))
    assert "expected at most 1" in (knobs_reason(problem, AttentionSm90Knobs(heads=4), 2**20) or "")
    assert next(iter(ENGINE.configurations(problem, H100))).heads == 1


@pytest.mark.parametrize(
    ("keywords", "heads"), [({}, 16), ({"score_mod": slopes}, 4), (DROPOUT, 4), (mask(1, 1, 1, 4096), 1)]
)
def test_functions_are_applied_to_rows_of_one_head(keywords, heads):
    problem = call((1, 4096, 64, 64), (16, 1), **keywords).problem
    assert next(iter(ENGINE.configurations(problem, H100))).heads == heads


@pytest.mark.skipif(not GPU, reason="there is no GPU")
@pytest.mark.parametrize("name", SMALL)
def test_results(name):
    one, operands = SMALL[name][0], arrays(SMALL[name][0])
    for sm_count in (device.gpus()[0].sm_count, 3):
        plan = small_plan(name, sm_count)
        results, again = (run_plan(plan, one.signature.results.values(), operands) for _ in range(2))
        check(one, operands, results)
        assert all(map(np.array_equal, results, again)), "it is not deterministic"
