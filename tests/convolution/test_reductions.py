"""What an epilogue reduces of a convolution on Hopper: batch statistics, however the kernel's tiles are cut from it."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from checking.calls import calls_of
from checking.cases.convolution import convolution
from checking.cases.dtypes import BF16, F16
from checking.convolution.exact import arrays
from checking.convolution.plans import (
    ENGINE,
    FEW,
    by_patches,
    by_places,
    check_compiled,
    check_emulated,
    check_where_finite,
)
from checking.emulation.plans import Emulated
from checking.targets import H100
from jaxdnn.engines.convolution.sm90.knobs import ConvolutionKnobs
from jaxdnn.engines.product.sm90.knobs import Sm90Knobs
from jaxdnn.plan import Counter
from jaxdnn.planning.calls import find_calls


def reduced(image, filter_, dtype=BF16, epilogue="reductions", **fields):
    return convolution(image, filter_, dtype, epilogue=epilogue, **{"padding": "SAME"} | fields)


def statistics(*shapes, **fields):
    return reduced(*shapes, epilogue="sums of channels", **fields)


def patches(tile_m=128, tile_n=32, patch=64, filter_stages=6, **knobs):
    return ConvolutionKnobs(
        tile_m=tile_m, tile_n=tile_n, patch=patch, filter_stages=filter_stages, **{"cluster_m": 1, "stages": 2} | knobs
    )


def places(tile_m=128, tile_n=32, **knobs):
    return Sm90Knobs(tile_m=tile_m, tile_n=tile_n, **{"stages": 3, "cluster_m": 1} | knobs)


def plain(*shapes):
    return convolution(*shapes, BF16, padding="SAME")


def problem(case):
    """Without what a gradient reads."""
    types = [jax.ShapeDtypeStruct(case.shape_of(name), dtype) for name, dtype in case.dtypes.items()]
    (call,) = find_calls(case.call, *types)
    return call.problem


PINGPONG = {"schedule": "pingpong"}
# Bands of two rows of tiles: a block comes to the same columns again.
PROBLEMS = {
    "blocks with absent places": (reduced((3, 11, 9, 64), (3, 3, 64, 72)), None, [
        patches(), patches(swizzle=2), patches(tile_m=192, consumers=3), patches(tile_m=64, tile_n=96, consumers=1),
        patches(along_lines=True), patches(along_lines=True, swizzle=2, store="direct"),
    ]),
    # As many rows in blocks as there are places, in another order.
    "whole blocks": (reduced((5, 8, 16, 32), (3, 3, 32, 72), F16), None, [patches(swizzle=2, store="direct")]),
    "statistics": (statistics((3, 11, 9, 64), (3, 3, 64, 72)), None, [
        patches(swizzle=2), patches(tile_m=256),
        patches(tile_m=64, tile_n=96, stages=3, filter_stages=18, resident=True, **PINGPONG),
        patches(tile_m=64, tile_n=96, stages=4, filter_stages=18, resident=True, consumers=3, **PINGPONG),
        patches(tile_m=64, tile_n=96, filter_stages=18, resident=True, along_lines=True, **PINGPONG),
        places(swizzle=1), places(tile_m=64, swizzle=1, **PINGPONG), places(tile_n=96), places(stages=2, tile_n=256),
        places(tile_m=192, tile_n=48, consumers=3, swizzle=1), places(tile_m=64, tile_n=96, cluster_m=2, consumers=1),
    ]),
    "three dimensions": (reduced((2, 3, 9, 6, 64), (3, 2, 3, 64, 32)), None, [patches()]),
    "blocks, mapped": (reduced((2, 9, 10, 32), (3, 3, 32, 72)), (0, 0), [patches(swizzle=2)]),
    # Three blocks, of which a tile has two: the next one is of another convolution.
    "blocks past the images, mapped": (reduced((3, 7, 6, 32), (3, 3, 32, 72)), (0, 0), [
        patches(swizzle=2), patches(along_lines=True),
    ]),
    "statistics past the images, mapped": (statistics((3, 8, 8, 32), (3, 3, 32, 64)), (0, 0), [
        patches(tile_n=64, filter_stages=5),
    ]),
    "many places": (reduced((2, 17, 16, 64), (3, 3, 64, 72)), None, [
        places(swizzle=2), places(tile_m=64, swizzle=2, **PINGPONG), places(swizzle=2, cluster_m=2),
        places(tile_m=256, tile_n=16), places(tile_m=192, consumers=3, tile_n=48), places(tile_n=96, store="direct"),
        places(swizzle=1),
    ]),
    "many places, mapped": (reduced((2, 17, 16, 32), (2, 2, 32, 72)), (0, 0), [places(swizzle=2, **PINGPONG)]),
    "phases": (
        reduced((2, 6, 5, 64), (3, 4, 64, 32), F16, lhs_dilation=(3, 2), padding=((2, 1), (0, 4))), (0, 0), [
            places(tile_n=16, store="rows"), places(cluster_m=2, store="rows"), places(store="direct"),
        ],
    ),
    "few places": (reduced((2, 6, 7, 64), (3, 3, 64, 72)), None, [places(), places(tile_m=64, **PINGPONG)]),
    "3 channels": (reduced((3, 5, 13, 3), (3, 3, 3, 40)), None, [
        places(stages=2, swizzle=2, store="rows"), places(tile_m=64, stages=2, consumers=1, store="direct"),
    ]),
    "3 channels, mapped": (reduced((2, 9, 40, 3), (7, 7, 3, 64), strides=(2, 2)), (0, 0), [
        places(stages=2, swizzle=2, store="rows"),
    ]),
    "3 channels, statistics": (statistics((3, 5, 13, 3), (3, 3, 3, 40)), None, [None]),
}  # fmt: skip


def forward(case, axes=None):
    """The call that reduces, with what its gradient reads, before those of its gradient."""
    return calls_of(case, axes)[0]


CALLS = {name: forward(case, axes) for name, (case, axes, _) in PROBLEMS.items()}


def first(problem):
    """By patches, if there are such."""
    return (by_patches(problem, FEW) or by_places(problem, FEW))[0]


RUNS = [(name, knobs or first(CALLS[name].problem)) for name, (_, _, several) in PROBLEMS.items() for knobs in several]
LARGE = {
    "56": (256, 56, 56, 64), "28": (256, 28, 28, 128), "14": (256, 14, 14, 256), "7": (256, 7, 7, 512),
}  # fmt: skip


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    plans = [ENGINE.build(knobs, CALLS[name].problem, FEW) for name, knobs in RUNS]
    return Emulated(plans, tmp_path_factory.mktemp("emulated"))


@pytest.mark.parametrize("run", range(len(RUNS)), ids=[f"{name} {i}" for i, (name, _) in enumerate(RUNS)])
def test_its_text_computes_what_is_right(run, emulated):
    check_emulated(CALLS[RUNS[run][0]], emulated, run)


def test_what_is_no_number_stays_in_its_channel(emulated):
    """So it does of a warp's columns, which change; places that are none add nothing to the others."""
    call = CALLS["statistics"]
    operands = arrays(call)
    filters = operands[call.problem.b.buffer.index]
    filters[1, 1, 2, 5], filters[1, 1, 7, 40], filters[1, 1, 0, 71] = np.nan, np.inf, -np.inf
    for number in [i for i, (name, _) in enumerate(RUNS) if name == "statistics"]:
        with np.errstate(invalid="ignore"):
            check_where_finite(call, operands, emulated, number)


def test_warps_have_lines_of_their_own_where_rows_would_leave_more():
    """Or where the rows of a tile are no neighbours; then tiles are dealt."""
    for name, knobs, own in (
        ("many places", places(swizzle=2), True),
        ("few places", places(), False),
        ("few places", patches(), True),
        ("3 channels", places(store="rows"), True),
    ):
        plan = ENGINE.build(knobs, CALLS[name].problem, FEW)
        launch = plan.launches[0] if "copy" not in plan.launches[0].kernel else plan.launches[1]
        assert ("kOwnLines = true" in plan.unit) == own
        assert not (own and any(isinstance(one, Counter) for one in launch.arguments))
    plan = ENGINE.build(places(swizzle=2), CALLS["many places"].problem, FEW)
    lines = 8 * plan.launches[0].grid[0]
    assert plan.scratch[0] == lines * 72 * 4


@pytest.mark.parametrize(
    ("knobs", "lines"),
    [
        (places(swizzle=1), 1),  # three blocks, of which each has one of three columns of tiles
        (places(tile_n=96), 3),
        (places(tile_m=64, tile_n=96, cluster_m=2, consumers=1), 2),  # two rows of a cluster
        (places(swizzle=2), 0),  # each comes to other columns: a line of each of 19 times 16 places
        (places(tile_n=96, store="direct"), 0),  # from registers: its warps meet nowhere
        (patches(tile_m=64, tile_n=96, stages=3, filter_stages=18, resident=True, **PINGPONG), 3),
    ],
    ids=str,
)
def test_blocks_whose_tiles_are_of_the_same_columns_have_one_line(knobs, lines):
    plan = ENGINE.build(knobs, CALLS["statistics"].problem, FEW)
    assert ("kBlockLines = true" in plan.unit) == (lines > 0)
    assert set(plan.scratch) == {(lines or 19) * 72 * 4}


def test_blocks_keep_to_the_columns_that_they_have_sums_of():
    """Of few, where that takes no more rounds."""
    several = problem(statistics(LARGE["14"], (3, 3, 256, 256)))
    one = problem(statistics(LARGE["28"], (3, 3, 128, 128)))
    chosen, of_one = (next(k for k in ENGINE.configurations(each, H100) if not k.swapped) for each in (several, one))
    assert (chosen.swizzle, of_one.swizzle) == (1, 8)
    narrow = places(tile_n=32, swizzle=1)
    for knobs, sm_count, blocks in (
        (chosen, 132, 132), (chosen, 6, 6), (chosen, 7, 7), (replace(chosen, swizzle=8), 132, 131), (narrow, 7, 7),
    ):  # fmt: skip
        target = replace(H100, sm_count=sm_count)
        assert ENGINE.build(knobs, several, target).launches[0].grid[0] == blocks


@pytest.mark.parametrize("name", LARGE)
def test_statistics_take_the_tiles_that_results_alone_do(name):
    image = LARGE[name]
    kernel = (3, 3, image[-1], image[-1])
    alone, sums = (problem(case(image, kernel)) for case in (plain, statistics))
    chosen, expected = (next(ENGINE.configurations(one, H100)) for one in (sums, alone))
    # A transposed one that has sums as well leaves in parts, and has room for another stage.
    assert replace(chosen, stagger=0, swizzle=expected.swizzle, stages=expected.stages) == expected
    assert chosen.stages == expected.stages + expected.swapped
    for one in (sums, forward(statistics(image, kernel)).problem):
        check_compiled(one, 2, ENGINE.configurations)
