"""The Hopper engine of convolutions by patches, along lines: where they are chosen, what it plans, and that it computes
what is right.
"""

import jax
import numpy as np
import pytest

from checking.cases.convolution import convolution
from checking.cases.dtypes import BF16, F16
from checking.compiler_log import compile_checked
from checking.convolution import edges
from checking.convolution.exact import arrays, calls, only
from checking.convolution.plans import (
    ENGINE,
    FEW,
    by_patches,
    check_emulated,
    check_on_gpu,
    check_where_finite,
)
from checking.emulation.plans import Emulated
from checking.targets import H100
from jaxdnn.engines.convolution.implicit_gemm import ImplicitGemm, implicit_gemm
from jaxdnn.engines.convolution.sm90.halo.knobs import Patches
from jaxdnn.engines.convolution.sm90.knobs import ConvolutionKnobs
from jaxdnn.plan import TensorMap

GPU = jax.default_backend() == "gpu"
IN_TURNS = {"schedule": "pingpong", "resident": True}


def lines(tile_m=128, patch=64, filter_stages=6, **knobs):
    given = {"cluster_m": 1, "stages": 2} | knobs
    return ConvolutionKnobs(tile_m=tile_m, patch=patch, filter_stages=filter_stages, along_lines=True, **given)


def row(n):
    return ((n,), BF16)


CASES = edges.SMALL | {
    # Lines of 14, 16 apart, so that a warp's rows are one.
    "fourteen": convolution((3, 14, 14, 64), (3, 3, 64, 32), BF16, padding="SAME"),
    "windows of 2, flipped": convolution((2, 8, 11, 40), (2, 4, 40, 64), F16, padding=((1, 0), (0, 2)), flip=True),
    "not padded": convolution((2, 9, 10, 32), (3, 5, 32, 64), BF16),
    "padded by more than a window": convolution((2, 3, 5, 32), (2, 2, 32, 64), BF16, padding=((3, 4), (4, 3))),
    "lines of one place": convolution((3, 9, 1, 32), (3, 1, 32, 64), BF16, padding=((1, 1), (0, 0))),
    "groups of 32": convolution((2, 6, 7, 192), (2, 2, 32, 192), BF16, padding="SAME", groups=6),
    "epilogue": convolution(
        (2, 6, 9, 64), (3, 3, 64, 64), BF16, padding="SAME", epilogue="bias gelu", extras=(row(64),)
    ),
    "odd features": convolution((2, 6, 9, 32), (3, 3, 32, 51), BF16, padding="SAME"),
    "residual": convolution(
        (3, 11, 9, 64), (3, 3, 64, 72), BF16, padding="SAME", epilogue="residual",
        extras=(row(72), ((3, 11, 9, 72), BF16)),
    ),
}  # fmt: skip
MAPPED = {
    "images, mapped": (CASES["dilated"], (0, None)),
    "both, mapped": (convolution((1, 7, 9, 32), (3, 3, 32, 16), BF16, padding="SAME"), (0, 0)),
}
PROBLEMS = {
    f"{name}, {direction}": call
    for name, (case, axes) in ({name: (case, None) for name, case in CASES.items()} | MAPPED).items()
    for direction, call in calls(case, axes).items()
    if direction != "filter"
}
RUNS = {
    "same, output": [
        lines(tile_n=48, filter_stages=27, **IN_TURNS),
        lines(tile_m=256, tile_n=48, patch=32),
        lines(tile_m=192, tile_n=48, consumers=3, store="direct"),
    ],
    "same, image": [lines(tile_m=64, tile_n=96, stages=4, filter_stages=18, **IN_TURNS)],
    "fourteen, output": [lines(tile_n=32, patch=128, filter_stages=9, consumers=3, **IN_TURNS)],
    "fourteen, image": [lines(tile_m=64, tile_n=64, consumers=1)],
    "dilated, output": [lines(tile_n=32, patch=128)],
    "dilated, image": [lines(tile_m=192, tile_n=64, consumers=3, filter_stages=3)],
    "three dimensions, dilated, output": [lines(tile_m=64, tile_n=16, consumers=1)],
    "three dimensions, dilated, image": [lines(tile_m=128, tile_n=32, patch=32)],
    "groups of 16, output": [lines(tile_m=256, tile_n=64, patch=128, groups=4)],
    "windows of 2, flipped, output": [lines(tile_n=64)],
    "windows of 2, flipped, image": [lines(tile_n=48, patch=128)],
    "not padded, output": [lines(tile_n=64)],
    "not padded, image": [lines(tile_n=32)],
    "padded by more than a window, output": [lines(tile_n=64)],
    "padded by more than a window, image": [lines(tile_n=32)],
    "lines of one place, output": [lines(tile_m=64, tile_n=64, filter_stages=3, **IN_TURNS)],
    "groups of 32, output": [
        lines(tile_n=64, patch=128, groups=2, filter_stages=4, consumers=3, swizzle=1, **IN_TURNS)
    ],
    "epilogue, output": [lines(tile_n=64, patch=128)],
    "odd features, output": [lines(tile_n=64, store="rows")],
    "residual, output": [lines(tile_n=96), lines(tile_n=96, fetch="tma")],
    "images, mapped, output": [lines(tile_n=32, patch=128)],
    # A tile goes on to lines past a convolution's end.
    "both, mapped, output": [lines(tile_m=192, tile_n=16, consumers=3)],
}
NAMES = [(name, knobs) for name, several in RUNS.items() for knobs in several]
IDS = [f"{name}, {several.index(knobs)}" for name, several in RUNS.items() for knobs in several]


def patches_of(case, direction="output", **fields):
    gemm = implicit_gemm(only(case, direction))
    assert isinstance(gemm, ImplicitGemm)
    return Patches(gemm, along_lines=True, **fields)


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    plans = [ENGINE.build(knobs, PROBLEMS[name].problem, FEW) for name, knobs in NAMES]
    return Emulated(plans, tmp_path_factory.mktemp("emulated"))


@pytest.mark.parametrize("run", range(len(NAMES)), ids=IDS)
def test_its_text_computes_what_is_right(run, emulated):
    check_emulated(PROBLEMS[NAMES[run][0]], emulated, run)


@pytest.mark.parametrize("name", ["same, output", "fourteen, output", "dilated, image"])
def test_what_is_no_number_stays_in_its_windows(name, emulated):
    """A line's last windows and the next one's first ones read the same zeros, and nothing of each other."""
    call = PROBLEMS[name]
    operands = arrays(call)
    image = call.problem.a if call.problem.result == "output" else call.problem.b
    operands[image.buffer.index][0, ..., -1, -1, 0] = np.nan
    operands[image.buffer.index][-1, ..., 1, 0, -1] = np.nan
    check_where_finite(call, operands, emulated, [name for name, _ in NAMES].index(name))


@pytest.mark.parametrize("run", range(len(NAMES)), ids=IDS)
def test_it_compiles(run):
    name, knobs = NAMES[run]
    compile_checked(ENGINE.build(knobs, PROBLEMS[name].problem, H100), knobs)


@pytest.mark.skipif(not GPU, reason="there is no GPU")
@pytest.mark.parametrize("name", RUNS)
def test_results(name):
    check_on_gpu(PROBLEMS[name], RUNS[name], chosen=False)


@pytest.mark.parametrize(
    ("case", "pitch", "lines_of_image"),
    [
        (convolution((2, 14, 14, 64), (3, 3, 64, 32), BF16, padding="SAME"), 16, 15),
        (convolution((2, 28, 28, 64), (3, 3, 64, 32), BF16, padding="SAME"), 32, 29),
        (convolution((2, 20, 20, 64), (5, 5, 64, 32), BF16, padding="SAME"), 24, 22),
        # Of windows that are padded at one end alone, or not, neighbours have no zeros in common.
        (convolution((2, 14, 13, 64), (3, 3, 64, 32), BF16, padding=((2, 0), (0, 2))), 16, 16),
        (convolution((2, 14, 18, 64), (3, 3, 64, 32), BF16), 24, 14),
        (convolution((2, 14, 14, 64), (3, 3, 64, 32), BF16, padding=((1, 1), (1, 1)), rhs_dilation=(2, 2)), 16, 15),
    ],
)
def test_how_far_lines_are_apart(case, pitch, lines_of_image):
    patches = patches_of(case)
    assert (patches.pitch, patches.axes[1].places) == (pitch, lines_of_image)
    assert patches.rows == 2 * lines_of_image * pitch


def test_a_patch_has_lines_wherever_a_tile_begins():
    """Lines of 24 places: a tile may begin at the 17th, and its windows reach 4 places and lines further."""
    patches = patches_of(convolution((2, 20, 20, 64), (5, 5, 64, 32), BF16, padding="SAME"))
    assert (patches.ahead(128), patches.lines(128)) == (16, 7 + 4)
    assert patches.stage(128) == (16 + 11 * 24) * 128


@pytest.mark.parametrize(
    ("case", "chosen"),
    [
        (convolution((128, 14, 14, 1024), (3, 3, 32, 1024), BF16, padding="SAME", groups=32), True),
        (convolution((64, 28, 28, 512), (3, 3, 64, 512), BF16, padding="SAME", groups=8), True),
        (convolution((64, 20, 20, 96), (5, 5, 96, 96), BF16, padding="SAME"), True),
        # Blocks have no more places than there are, or a line's zeros would be more than theirs.
        (convolution((256, 56, 56, 64), (3, 3, 64, 64), BF16, padding="SAME"), False),
        (convolution((128, 7, 7, 1024), (3, 3, 64, 1024), BF16, padding="SAME", groups=16), False),
        (convolution((32, 100, 100, 64), (3, 3, 64, 64), BF16, padding="SAME"), False),
    ],
)
def test_lines_are_chosen_where_they_are_faster(case, chosen):
    for direction in ("output", "image"):
        knobs = next(ENGINE.configurations(only(case, direction), H100))
        assert knobs.patch
        assert knobs.along_lines == chosen


def test_a_plan_is_what_it_is():
    """Lines of 17 places, 24 apart, 10 of each of 3 images, are 6 tiles of 128."""
    plan = ENGINE.build(lines(tile_n=48), only(CASES["same"]), H100)
    (launch,) = plan.launches
    image, _, result = (one for one in launch.arguments if isinstance(one, TensorMap))
    assert (image.box, result.box) == ((32, 24, 1, 1, 1), (16, 8, 1, 1, 1))
    assert (result.dimensions, launch.grid) == ((40, 17, 9, 1, 3), (6, 1, 1))
    assert "kPitch = 24, kPatchLines = 9, kAhead = 16" in plan.unit


@pytest.mark.parametrize(
    ("case", "knobs", "said"),
    [
        (convolution((2, 9, 300, 64), (3, 3, 64, 48), BF16), lines(tile_n=48), "lines are 304 places apart"),
        (convolution((2, 40, 7, 64), (5, 1, 64, 48), BF16), lines(tile_m=256, tile_n=48), "a tile has 36 lines"),
    ],
)
def test_knobs_that_do_not_fit(case, knobs, said):
    problem = only(case)
    with pytest.raises(ValueError, match=said):
        ENGINE.build(knobs, problem, H100)
    assert not any(one.along_lines and one.tile_m == knobs.tile_m for one in by_patches(problem, H100))
