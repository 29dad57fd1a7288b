"""The Hopper engine of convolutions by patches: what it plans, and that it computes what is right."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from checking.cases.convolution import convolution
from checking.cases.dtypes import BF16, F16
from checking.convolution import edges
from checking.convolution.exact import arrays, calls, only
from checking.convolution.plans import (
    ENGINE,
    FEW,
    by_patches,
    check_compiled,
    check_emulated,
    check_on_gpu,
    check_where_finite,
    patches,
)
from checking.emulation.plans import Emulated
from checking.targets import H100
from jaxdnn.plan import TensorMap

GPU = jax.default_backend() == "gpu"


def row(n):
    return ((n,), BF16)


# Edges: lines of places that end in a block, images that end in a tile, channels that end in a stage.
SMALL = edges.SMALL | edges.GROUPS | {
    "windows of 2, flipped": convolution((2, 8, 11, 40), (2, 4, 40, 64), F16, padding=((1, 0), (0, 2)), flip=True),
    "single lines": convolution((2, 5, 18, 32), (1, 3, 32, 64), BF16),
    "three dimensions": convolution((2, 3, 9, 6, 64), (3, 2, 3, 64, 32), BF16, padding="SAME"),
    "epilogue": convolution(
        (2, 6, 9, 64), (3, 3, 64, 64), BF16, padding="SAME", epilogue="bias gelu", extras=(row(64),)
    ),
    "odd features": convolution((2, 6, 9, 32), (3, 3, 32, 51), BF16, padding="SAME"),
    "features in pairs": convolution(
        (2, 6, 9, 64), (3, 3, 64, 50), F16, padding="SAME", epilogue="bias gelu", extras=(((50,), F16),)
    ),
    "residual": convolution(
        (3, 11, 9, 64), (3, 3, 64, 72), BF16, padding="SAME", epilogue="residual",
        extras=(row(72), ((3, 11, 9, 72), BF16)),
    ),
    "residual, one dimension": convolution(
        (3, 139, 64), (2, 64, 72), BF16, padding="SAME", epilogue="residual", extras=(row(72), ((3, 139, 72), BF16))
    ),
    "features between widths": convolution((2, 139, 16), (3, 16, 104), BF16, padding="SAME"),
    "twice as many": convolution((2, 70, 32), (4, 32, 200), F16, padding="SAME"),
    "residual, three dimensions": convolution(
        (2, 3, 9, 6, 64), (3, 2, 3, 64, 32), BF16, padding="SAME", epilogue="residual",
        extras=(row(32), ((2, 3, 9, 6, 32), BF16)),
    ),
}  # fmt: skip
MAPPED = {
    "images, mapped": (SMALL["dilated"], (0, None)),
    "both, mapped": (convolution((1, 7, 9, 32), (3, 3, 32, 16), BF16, padding="SAME"), (0, 0)),
    "residuals, mapped": (SMALL["residual"], (0, 0, None, 0)),
    "residual, both mapped": (SMALL["residual"], (0, 0, None, None)),
}
PROBLEMS = {
    f"{name}, {direction}": call
    for name, (case, axes) in ({name: (case, None) for name, case in SMALL.items()} | MAPPED).items()
    for direction, call in calls(case, axes).items()
    if direction != "filter"
}
IN_TURNS = {"schedule": "pingpong", "resident": True}
# What no heuristic would choose for so few places.
FORCED = {
    "same, output": [
        patches(tile_m=256, tile_n=48, stages=2, patch=64),
        patches(tile_m=128, tile_n=32, stages=3, patch=32, filter_stages=2),
        patches(tile_m=64, tile_n=64, stages=2, consumers=1, filter_stages=18, resident=True, epilogue_stages=1),
        patches(tile_m=192, tile_n=48, stages=2, consumers=3, patch=64, filter_stages=5, store="direct"),
        patches(tile_m=64, tile_n=64, stages=3, patch=64, filter_stages=27, **IN_TURNS),
        patches(tile_m=64, tile_n=48, stages=4, patch=64, filter_stages=27, consumers=3, **IN_TURNS),
    ],
    "same, image": [
        patches(tile_m=256, tile_n=64, stages=2, patch=64),
        patches(tile_m=128, tile_n=96, stages=4, patch=64, filter_stages=18, resident=True),
        patches(tile_m=64, tile_n=96, stages=4, patch=64, filter_stages=18, **IN_TURNS),
    ],
    "windows of 2, flipped, output": [patches(tile_m=256, tile_n=64, stages=2, patch=64, epilogue_stages=1)],
    "three dimensions, dilated, output": [patches(tile_m=64, tile_n=16, stages=2, patch=64, consumers=1)],
    "three dimensions, image": [patches(tile_m=192, tile_n=64, stages=2, consumers=3, patch=32, filter_stages=3)],
    # Several columns of tiles, and more rows of them than blocks.
    "groups of 32, output": [
        patches(tile_m=64, tile_n=64, stages=2, consumers=1, groups=2, filter_stages=4, resident=True, swizzle=1)
    ],
    "groups of 32, image": [
        patches(tile_m=64, tile_n=64, stages=2, consumers=1, groups=2, filter_stages=4, resident=True, swizzle=1),
        patches(tile_m=64, tile_n=64, stages=3, groups=2, filter_stages=4, swizzle=1, **IN_TURNS),
    ],
    "groups of 64, output": [patches(tile_m=256, tile_n=48, stages=2, patch=64, epilogue_stages=1)],
    # The filters of one column of tiles stay in a block.
    "one dimension, output": [
        patches(tile_m=128, tile_n=32, stages=2, patch=32, filter_stages=15, resident=True, swizzle=1),
        patches(tile_m=64, tile_n=16, stages=3, patch=64, filter_stages=9, swizzle=1, **IN_TURNS),
    ],
    "one dimension, dilated, image": [patches(tile_m=192, tile_n=32, consumers=3, stages=2, patch=32)],
    "features between widths, output": [
        patches(tile_m=128, tile_n=112, stages=4, patch=32, filter_stages=3, **IN_TURNS),
        patches(tile_m=192, tile_n=112, stages=3, consumers=3, patch=64, filter_stages=5),
    ],
    "twice as many, output": [
        patches(tile_m=128, tile_n=224, stages=3, patch=64, filter_stages=4, resident=True),
        patches(tile_m=192, tile_n=112, stages=2, consumers=3, patch=64, filter_stages=4, resident=True, swizzle=1),
    ],
    "residual, one dimension, output": [patches(tile_m=256, tile_n=80, stages=2, patch=64, fetch="tma")],
    # A block more than a convolution has.
    "both, mapped, output": [patches(tile_m=192, tile_n=16, consumers=3, stages=2, patch=64)],
    "residual, output": [
        patches(tile_m=256, tile_n=64, stages=2, patch=64, epilogue_stages=1, fetch="tma"),
        patches(tile_m=192, tile_n=64, consumers=3, stages=2, patch=64, fetch="tma"),
        patches(tile_m=128, tile_n=64, stages=2, patch=64),
    ],
    "residuals, mapped, output": [patches(tile_m=128, tile_n=96, stages=2, patch=64, fetch="tma")],
    "groups of 16, output": [patches(tile_m=256, tile_n=64, stages=2, groups=4)],
}
RUNS = {name: (name, by_patches(call.problem, FEW)[0]) for name, call in PROBLEMS.items()}
RUNS |= {f"{name}, forced {i}": (name, knobs) for name, several in FORCED.items() for i, knobs in enumerate(several)}
LARGE = {
    "56": convolution((256, 56, 56, 64), (3, 3, 64, 64), BF16, padding="SAME"),
    "512": convolution((1, 512, 512, 128), (3, 3, 128, 128), F16, padding="SAME"),
    "320": convolution((16, 64, 64, 320), (3, 3, 320, 320), BF16, padding="SAME"),
    "volume": convolution((4, 16, 56, 56, 64), (3, 3, 3, 64, 64), BF16, padding="SAME"),
    "volume of 32 channels": convolution((1, 128, 128, 128, 32), (3, 3, 3, 32, 32), BF16, padding="SAME"),
    "one dimension": convolution((64, 3000, 80), (3, 80, 512), BF16, padding="SAME"),
    "104 features": convolution((56, 3328, 16), (3, 16, 104), BF16, padding="SAME"),
    "200 features": convolution((86, 1000, 32), (7, 32, 200), BF16, padding="SAME"),
    "32 groups": convolution((128, 14, 14, 1024), (3, 3, 32, 1024), BF16, padding="SAME", groups=32),
    "16 groups": convolution((32, 56, 56, 256), (3, 3, 16, 256), BF16, padding="SAME", groups=16, rhs_dilation=(2, 2)),
    "gelu": convolution(
        (256, 56, 56, 64), (3, 3, 64, 64), BF16, padding="SAME", epilogue="bias gelu", extras=(row(64),)
    ),
    "residual": convolution(
        (256, 56, 56, 64), (3, 3, 64, 64), BF16, padding="SAME", epilogue="residual",
        extras=(row(64), ((256, 56, 56, 64), BF16)),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    plans = [ENGINE.build(knobs, PROBLEMS[name].problem, FEW) for name, knobs in RUNS.values()]
    return Emulated(plans, tmp_path_factory.mktemp("emulated"))


@pytest.mark.parametrize("run", RUNS)
def test_its_text_computes_what_is_right(run, emulated):
    check_emulated(PROBLEMS[RUNS[run][0]], emulated, list(RUNS).index(run))


@pytest.mark.parametrize("name", ["same, output", "dilated, image", "three dimensions, output"])
def test_what_is_no_number_stays_in_its_windows(name, emulated):
    """Patches have places that windows of neighbouring blocks, or of no block, meet."""
    call = PROBLEMS[name]
    operands = arrays(call)
    image = call.problem.a if call.problem.result == "output" else call.problem.b
    operands[image.buffer.index][0, ..., -1, -1, 0] = np.nan
    operands[image.buffer.index][-1, ..., 1, 2, -1] = np.nan
    check_where_finite(call, operands, emulated, list(RUNS).index(name))


def test_blocks_keep_a_column():
    """From one round to the next a block goes on by whole rows of tiles, whose columns have filters of their own."""
    problem = calls(LARGE["32 groups"])["output"].problem
    for sm_count, blocks in ((132, 128), (100, 96), (3, 16)):
        target = replace(H100, sm_count=sm_count)
        knobs = next(knobs for knobs in by_patches(problem, target) if knobs.resident)
        (launch,) = ENGINE.build(knobs, problem, target).launches
        assert launch.grid == (blocks, 1, 1)


@pytest.mark.parametrize("name", LARGE)
def test_configurations_compile(name):
    for direction in ("output", "image"):
        check_compiled(only(LARGE[name], direction), 2, by_patches)


@pytest.mark.parametrize(
    ("case", "chosen"),
    [
        (LARGE["56"], True),
        (LARGE["volume"], True),
        (LARGE["volume of 32 channels"], True),
        (LARGE["32 groups"], True),
        (LARGE["16 groups"], True),
        (LARGE["gelu"], True),
        (LARGE["320"], True),
        (LARGE["one dimension"], True),
        # A quarter of the places of their blocks are none of the image's.
        (convolution((256, 28, 28, 128), (3, 3, 128, 128), BF16, padding="SAME"), False),
        (convolution((256, 14, 14, 256), (3, 3, 256, 256), BF16, padding="SAME"), False),
        # Of 128 columns lines of the filter tie with multiplies.
        (LARGE["512"], False),
        # Too little to wait for the first patches.
        (convolution((1, 56, 56, 64), (3, 3, 64, 64), BF16, padding="SAME"), False),
    ],
)
def test_patches_are_chosen_where_they_are_faster(case, chosen):
    for direction in ("output", "image"):
        assert bool(next(ENGINE.configurations(only(case, direction), H100)).patch) == chosen


def test_a_plan_is_what_it_is():
    """Blocks of 8 x 8 of 9 x 17 places, whose patches are 10 x 10; 72 channels in lines of 64 bytes."""
    plan = ENGINE.build(patches(tile_m=128, tile_n=48, stages=2, patch=64), only(SMALL["same"]), H100)
    (launch,) = plan.launches
    image, filter_, result = (one for one in launch.arguments if isinstance(one, TensorMap))
    assert (image.dimensions, image.strides) == ((72, 17, 9, 1, 3), (144, 17 * 144, 153 * 144, 153 * 144))
    assert (image.box, image.corners) == ((32, 10, 10, 1, 1), ())
    assert (filter_.dimensions, filter_.box) == ((40, 72, 9), (64, 32, 1))
    assert (result.dimensions, result.box) == ((40, 17, 9, 1, 3), (16, 8, 2, 1, 1))
    assert launch.grid == (9, 1, 1), "3 images of 2 x 3 blocks, two a tile"


def test_a_plan_of_one_dimension_is_what_it_is():
    """Blocks of 64 of 93 places, whose patches are of 66."""
    plan = ENGINE.build(patches(tile_m=128, tile_n=48, stages=2, patch=64), only(SMALL["one dimension"]), H100)
    (launch,) = plan.launches
    image, filter_, result = (one for one in launch.arguments if isinstance(one, TensorMap))
    assert (image.dimensions, image.box) == ((72, 93, 1, 1, 3), (32, 66, 1, 1, 1))
    assert (filter_.dimensions, filter_.box) == ((40, 72, 3), (64, 32, 1))
    assert (result.dimensions, result.box) == ((40, 93, 1, 1, 3), (16, 16, 1, 1, 1))
    assert launch.grid == (3, 1, 1), "3 images of 2 blocks, two a tile"


def test_a_residual_that_convolutions_share_ends_with_their_images():
    for name, batch in (("residuals, mapped, output", 4), ("residual, both mapped, output", 1)):
        plan = ENGINE.build(patches(tile_n=72 + 24, stages=2, patch=64, fetch="tma"), PROBLEMS[name].problem, H100)
        *_, result, residual = (one for one in plan.launches[0].arguments if isinstance(one, TensorMap))
        assert (residual.box, residual.dimensions[:4]) == (result.box, result.dimensions[:4])
        assert (result.dimensions[4], residual.dimensions[4]) == (4 * 3, batch * 3)


def test_residuals_that_are_apart_are_no_tiles():
    problem = PROBLEMS["residuals, mapped, output"].problem
    assert all(knobs.fetch == "tma" for knobs in by_patches(problem, H100))
    apart = [replace(one, batch_stride=2 * one.batch_stride) for one in problem.operands]
    problem = replace(problem, operands=tuple(apart))
    assert all(knobs.fetch == "direct" for knobs in by_patches(problem, H100))
    with pytest.raises(ValueError, match="not one after the other; expected fetch = 'direct'"):
        ENGINE.build(patches(tile_n=64, stages=2, patch=64, fetch="tma"), problem, H100)


def test_sizes_are_not_in_the_code():
    units = set()
    for n, size, channels in ((2, 16, 64), (5, 33, 192)):
        case = convolution((n, size, size, channels), (3, 3, channels, 64), BF16, padding="SAME")
        units.add(ENGINE.build(patches(tile_n=64, stages=2, patch=64), only(case), H100).unit)
    assert len(units) == 1


@pytest.mark.skipif(not GPU, reason="there is no GPU")
@pytest.mark.parametrize("name", PROBLEMS)
def test_results(name):
    check_on_gpu(PROBLEMS[name], FORCED.get(name, ()))
