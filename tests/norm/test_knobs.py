"""Knobs of the CUDA norm engine: what the heuristic chooses, what is refused, and that results don't depend on them."""

from dataclasses import replace

import jax
import numpy as np
import pytest

import jaxdnn
from checking.calls import calls_of, configurations, native
from checking.cases import BF16, F32, NormCase
from checking.compare import platform
from checking.targets import A100, H200
from jaxdnn.engines.norm.direct.knobs import NormKnobs

ODD = NormCase("layer_norm", (64, 1028), x=BF16, scale=F32, bias=F32)
WIDE = NormCase("layer_norm", (4096, 16_384), x=BF16, scale=F32, bias=F32)


def planned(case, direction=0, target=H200, **knobs):
    """The plan of a case's first configuration with some knobs set."""
    (engine,) = native("cuda", "norm")
    call = calls_of(case)[direction]
    config = replace(configurations(engine, call, target)[0], **knobs)
    return engine.build(config, call.problem, target)


def first(case, target=H200):
    (engine,) = native("cuda", "norm")
    return configurations(engine, calls_of(case)[0], target)[0]


def test_heavy_parameters_come_from_the_cache():
    knobs = first(WIDE)
    assert (knobs.parameters, knobs.vector, knobs.ahead, knobs.turns) == ("memory", 4, 2, 1)
    assert knobs.prefetch * 16_384 * 2 == 4 * 2**20
    # Where a multiprocessor has few rows, it is better to keep the parameters of the first one.
    assert first(replace(WIDE, shape=(512, 16_384))).parameters == "registers"


def test_rows_are_asked_for_early_in_one_turn_alone():
    assert first(replace(WIDE, shape=(16_384, 4096))).stages == 2
    assert first(replace(WIDE, shape=(16_384, 4096))).prefetch == 0
    assert first(NormCase("rms_norm", (8192, 8192), x=BF16, scale=F32, residual=BF16)).prefetch == 128
    assert first(NormCase("rms_norm", (8192, 8192), x=BF16, scale=F32, residual=BF16), A100).prefetch == 0


def test_skewed_rows_have_few_loads_of_parameters():
    """Wide ones are kept for eight rows, where registers hold them; others come from the L1 cache with a long row."""
    rows = NormCase("layer_norm", (30_001, 771), x=BF16, scale=F32, bias=F32)
    for columns, threads in ((301, 128), (771, 128), (1626, 128), (2053, 128), (3003, 128), (5121, 256)):
        knobs = first(replace(rows, shape=(30_001, columns)))
        assert (knobs.vector, knobs.threads, knobs.turns, knobs.stages) == (4, threads, 8, 2)
    knobs = first(replace(rows, shape=(200, 5121)))  # too few for rings of eight turns
    assert (knobs.vector, knobs.parameters, knobs.ahead) == (4, "memory", 2)
    assert first(replace(rows, shape=(4097, 5124))).vector == 4  # 8 bytes divide a row
    assert first(replace(rows, shape=(4097, 37))).vector == 1


def test_skewed_rows_are_read_four_columns_at_a_time():
    rows = NormCase("layer_norm", (90_000, 301), x=BF16, scale=BF16, bias=BF16)
    for columns, turns in ((301, 8), (771, 8), (1155, 8), (1626, 1), (2053, 1), (3003, 1), (5121, 1)):
        knobs = first(replace(rows, shape=(90_000, columns)))
        assert (knobs.vector, knobs.turns) == (4, turns)
        assert knobs.parameters == ("memory" if turns == 1 else "registers")
    assert first(NormCase("rms_norm", (90_000, 301), x=BF16, scale=BF16, residual=BF16)).vector == 8


def test_one_parameter_of_a_long_skewed_row_comes_as_soon_as_the_row():
    rows = NormCase("rms_norm", (4097, 5121), x=BF16, scale=BF16)
    assert (first(rows).turns, first(rows).stages, first(rows).prefetch) == (1, 0, 409)
    assert first(replace(rows, shape=(40_000, 771))).turns == 8
    assert first(NormCase("rms_norm", (4097, 5121), x=BF16, scale=BF16, residual=BF16)).turns > 1


@pytest.mark.parametrize(
    ("columns", "layout"),
    [(19, (1, 3, 8)), (61, (1, 4, 16)), (97, (1, 4, 32)), (201, (1, 7, 32)), (198, (2, 4, 32)), (60, (4, 4, 4))],
)
def test_narrow_accesses_are_few_of_a_thread(columns, layout):
    knobs = first(NormCase("rms_norm", (40_000, columns), x=BF16, scale=BF16))
    assert (knobs.vector, knobs.vectors, knobs.threads_per_row) == layout


def test_few_long_rows_are_in_flight_in_two_launches():
    few = NormCase("rms_norm", (64, 262_144), x=BF16, scale=F32)
    assert (first(few).join, first(few).stages, first(few).turns) == ("launches", 2, 4)
    assert first(replace(few, shape=(7, 262_144))).turns == 1  # there are not so many rows
    # 47 to 58 us in one turn, 55 to 68 in a ring.
    longer = first(NormCase("rms_norm", (50, 294_400), scale=F32))
    assert (longer.join, longer.stages, longer.turns) == ("launches", 0, 1)
    call = calls_of(few)[1]
    (engine,) = native("cuda", "norm")
    assert configurations(engine, call, H200)[0].stages == 2
    # float32 rows have 64 KiB in flight by themselves.
    assert configurations(engine, calls_of(replace(few, x=F32))[1], H200)[0].stages == 0


def test_clusters_work_through_rows_that_are_many_enough():
    pair = NormCase("rms_norm", (3711, 25_472), x=BF16, scale=F32)
    assert (first(pair).cluster, first(pair).turns, first(pair).stages) == (2, 4, 2)
    # Two blocks a multiprocessor, or one and the next row.
    eight = NormCase("rms_norm", (527, 93_504), scale=F32)
    assert (first(eight).cluster, first(eight).turns, first(eight).stages, first(eight).blocks_per_sm) == (8, 4, 0, 2)
    wide = NormCase("rms_norm", (52, 185_752), scale=F32)
    assert (first(wide).cluster, first(wide).turns, first(wide).stages, first(wide).blocks_per_sm) == (8, 4, 1, 1)
    longer = first(NormCase("rms_norm", (334, 224_624), scale=F32))
    assert (longer.cluster, longer.threads, longer.turns, longer.stages) == (8, 1024, 4, 1)
    assert first(NormCase("layer_norm", (300, 150_016), x=BF16, scale=BF16)).cluster == 1
    # No more rows than clusters run at once.
    for few in (first(replace(one, shape=(15, one.columns))) for one in (eight, wide)):
        assert few.cluster == 1 or few.turns == 1
    # Nor two of each: 13.6 us, and 19.6 in turns.
    two = first(NormCase("rms_norm", (35, 43_968), scale=F32))
    assert (two.cluster, two.threads, two.turns) == (2, 1024, 1)
    assert first(eight, A100).join == "launches"


def test_no_more_clusters_than_run_at_once():
    knobs = {"vector": 4, "vectors": 6, "threads_per_row": 512, "stages": 1, "splits": 8, "join": "cluster"}
    knobs |= {"blocks_per_sm": 1, "hold": False, "turns": 0}
    long = NormCase("rms_norm", (527, 93_504), scale=F32)
    assert planned(long, direction=1, **knobs).launches[0].grid[0] == 15 * 8


def test_partial_sums_are_added_by_one_wave_of_blocks():
    for rows, columns in ((20, 142_884), (118, 11_731), (1_048_576, 128)):
        reduce = planned(NormCase("layer_norm", (rows, columns), x=BF16, scale=F32, bias=F32), direction=1).launches[-1]
        # Two of 1024 threads a multiprocessor, and a few more where even a thread a column is more than that.
        assert reduce.kernel == "norm_reduce"
        assert reduce.grid[0] * reduce.grid[1] <= max(2 * H200.sm_count, 2 * -(-columns // 1024))


def test_the_only_block_of_a_group_writes_its_gradients():
    for rows, columns in ((1, 262_144), (8, 100)):
        plan = planned(NormCase("layer_norm", (rows, columns), x=BF16, scale=BF16, bias=F32), direction=1)
        assert plan.launches[-1].kernel != "norm_reduce"
        assert len(plan.scratch) == (plan.launches[0].kernel == "norm_backward_measure")


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("ahead is 9", {"ahead": 9}),
        ("ahead is -1", {"ahead": -1}),
        ("expected up to `vectors` with parameters = 'memory'", {"parameters": "registers"}),
        ("prefetch must be an int of at least 0; got -1", {"prefetch": -1}),
        ("prefetch needs blocks in the order of the rows", {"turns": 0}),
        ("needs at least as many columns", {"case": NormCase("rms_norm", (64, 5), x=BF16), "vector": 8}),
        (
            "whole warps; got threads_per_row = 16",
            {"case": ODD, "vector": 8, "threads_per_row": 16, "rows_per_block": 2},
        ),
        ("registers or memory; got 'shared'", {"case": ODD, "vector": 8, "stages": 2, "parameters": "shared"}),
        ("has no bulk prefetch", {"target": A100, "prefetch": 1}),
        ("knobs of the forward pass", {"direction": 1, "prefetch": 1}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_knobs(message, arguments):
    with pytest.raises(ValueError, match=message):
        planned(**{"case": WIDE, **arguments})


def test_groups_that_begin_between_vectors_have_vectors_that_divide_a_row():
    (engine,) = native("cuda", "norm")
    for rows, allowed in ((4, True), (3, False)):
        call = calls_of(NormCase("rms_norm", (rows, 1027), x=F32, scale=F32), (0, 0))[0]
        knobs = NormKnobs(4, 9, 32, rows_per_block=1)
        if allowed:
            engine.build(knobs, call.problem, H200)
        else:
            with pytest.raises(ValueError, match="groups of a multiple of the vector"):
                engine.build(knobs, call.problem, H200)


@pytest.mark.skipif(platform() != "cuda", reason="there is no GPU")
@pytest.mark.parametrize(
    "case",
    [
        NormCase("layer_norm", (1001, 5120), x=BF16, scale=F32, bias=F32, statistics=True),
        NormCase("rms_norm", (1001, 2048), x=BF16, scale=F32, residual=BF16),
    ],
    ids=str,
)
@pytest.mark.parametrize("in_axes", [None, 0, (0, None)], ids=["plain", "mapped", "shared-parameters"])
def test_results_do_not_depend_on_what_comes_early(case, in_axes):
    def results(**knobs):
        function = case.call if in_axes is None else jax.vmap(case.call, axes)
        with jaxdnn.options(engine="direct", fallback=False, knobs={"stages": 0, "turns": 1, **knobs}):
            return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(jax.jit(function)(*arrays))]

    axes = in_axes if in_axes in (None, 0) else tuple(None if name in ("scale", "bias") else 0 for name in case.dtypes)
    random = np.random.default_rng(0)
    arrays = []
    for i, (name, dtype) in enumerate(case.dtypes.items()):
        mapped = axes == 0 or (isinstance(axes, tuple) and axes[i] == 0)
        arrays.append(jax.numpy.asarray(random.standard_normal((2,) * mapped + case.shape_of(name)), dtype))
    expected = results(parameters="memory", ahead=0, prefetch=0)
    for ahead, prefetch in ((1, 0), (2, 0), (0, 1), (0, 1000), (2, 7)):
        assert results(parameters="memory", ahead=ahead, prefetch=prefetch) == expected, (ahead, prefetch)
