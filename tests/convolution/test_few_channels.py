"""The Hopper engine of convolutions with images of few channels: that it compiles and computes what is right."""

import jax
import numpy as np
import pytest

from checking.cases.convolution import convolution
from checking.cases.dtypes import BF16, F16
from checking.convolution.exact import arrays, calls, only
from checking.convolution.plans import (
    ENGINE,
    check_compiled,
    check_emulated,
    check_on_gpu,
    check_where_finite,
    emulated_plan,
)
from checking.emulation.plans import Emulated
from checking.targets import H100
from jaxdnn.engines.product.sm90.knobs import Sm90Knobs
from jaxdnn.plan import TensorMap

GPU = jax.default_backend() == "gpu"


def row(n):
    return ((n,), BF16)


# Edges: lines of places that end in a segment, of windows that end in a group, of the image that end in 16 bytes.
SMALL = {
    "3 channels": convolution((3, 5, 16, 3), (3, 3, 3, 40), BF16, padding="SAME"),
    "3 channels, stride": convolution((2, 9, 40, 3), (7, 7, 3, 64), F16, strides=(2, 2), padding=((3, 2), (3, 2))),
    "3 channels, unaligned": convolution((2, 9, 13, 3), (5, 2, 3, 96), BF16, strides=(3, 1), padding=((0, 1), (-1, 2))),
    "1 channel, one dimension": convolution((3, 150, 1), (11, 1, 24), BF16, strides=(4,), padding=((5, 5),)),
    "4 channels, three dimensions": convolution((2, 3, 4, 18, 4), (2, 3, 3, 4, 64), BF16, padding="SAME"),
    "blocks": convolution((2, 6, 32, 3), (7, 7, 3, 64), BF16, strides=(2, 2), padding=((3, 3), (3, 3))),
    "blocks, fewer lines of the window": convolution(
        (3, 8, 24, 4), (2, 3, 4, 72), F16, strides=(1, 1), padding=((0, 1), (2, 1))
    ),
    "blocks, places that meet no window": convolution((2, 4, 36, 5), (1, 2, 5, 24), BF16, strides=(2, 3)),
    "3 channels, epilogue": convolution(
        (2, 4, 21, 3), (3, 3, 3, 64), BF16, padding="SAME", epilogue="bias gelu", extras=(row(64),)
    ),
}
MAPPED = {
    "images, mapped": (SMALL["3 channels, stride"], (0, None)),
    "blocks, images mapped": (convolution((2, 4, 32, 3), (3, 3, 3, 16), BF16, padding="SAME"), (0, None)),
    "both, mapped": (SMALL["3 channels"], (0, 0)),
}
PROBLEMS = {
    f"{name}, {direction}": call
    for name, (case, axes) in ({name: (case, None) for name, case in SMALL.items()} | MAPPED).items()
    for direction, call in calls(case, axes).items()
}
# What no heuristic would choose for so few places.
FORCED = {
    "3 channels, output": [Sm90Knobs(tile_m=64, tile_n=32, stages=2, cluster_m=1, consumers=1)],
    "3 channels, stride, output": [Sm90Knobs(tile_m=256, tile_n=32, stages=2, cluster_m=1, store="direct")],
    "blocks, image": [Sm90Knobs(tile_m=128, tile_n=64, stages=2, cluster_m=2, store="rows")],
    "blocks, fewer lines of the window, image": [Sm90Knobs(tile_m=256, tile_n=16, stages=2, cluster_m=1, store="rows")],
    # More tiles than blocks, of as many stages as it takes to take them in turn.
    "both, mapped, filter": [Sm90Knobs(tile_m=64, tile_n=32, stages=2, cluster_m=1, consumers=1, store="rows")],
    "3 channels, stride, filter": [Sm90Knobs(tile_m=256, tile_n=64, stages=2, cluster_m=1, split_k=2, store="rows")],
}
RUNS = [(name, None) for name in PROBLEMS] + [(name, knobs) for name, several in FORCED.items() for knobs in several]
LARGE = {
    "stem": convolution((256, 224, 224, 3), (7, 7, 3, 64), BF16, strides=(2, 2), padding=((3, 3), (3, 3))),
    "VGG": convolution((64, 224, 224, 3), (3, 3, 3, 64), F16, padding="SAME"),
    "patches": convolution((64, 224, 224, 3), (7, 7, 3, 128), BF16, strides=(4, 4), padding=((3, 3), (3, 3))),
    "latent": convolution((16, 64, 64, 4), (3, 3, 4, 320), BF16, padding="SAME"),
    "film": convolution((4, 16, 112, 112, 3), (3, 3, 3, 3, 64), BF16, padding="SAME"),
    "3 channels, gelu": convolution(
        (64, 224, 224, 3), (3, 3, 3, 128), BF16, padding="SAME", epilogue="bias gelu", extras=(row(128),)
    ),
    "3 channels, reductions": convolution(
        (64, 224, 224, 3), (7, 7, 3, 64), BF16, strides=(2, 2), padding="SAME", epilogue="sums of channels"
    ),
}


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    plans = [emulated_plan(PROBLEMS[name].problem, knobs) for name, knobs in RUNS]
    return Emulated(plans, tmp_path_factory.mktemp("emulated"))


@pytest.mark.parametrize(("name", "knobs"), RUNS)
def test_its_text_computes_what_is_right(name, knobs, emulated):
    check_emulated(PROBLEMS[name], emulated, RUNS.index((name, knobs)))


@pytest.mark.parametrize("name", [name for name in PROBLEMS if "3 channels" in name and "image" not in name])
def test_what_is_no_number_stays_in_its_windows(name, emulated):
    """Lines of windows are filled up with their neighbours, and lines of places with windows that reach too far."""
    call = PROBLEMS[name]
    operands = arrays(call)
    operands[call.problem.a.buffer.index][..., 1, 4, 0] = np.inf
    # Before a window's line is the last channel of a place. Of a filter's gradient it is kept for the last place alone,
    # which windows past the end would find.
    operands[call.problem.a.buffer.index][..., 3, 4, 1 if "filter" in name else -1] = np.nan
    operands[call.problem.a.buffer.index][..., -1, -1, -1] = np.nan
    check_where_finite(call, operands, emulated, RUNS.index((name, None)))


@pytest.mark.parametrize("name", LARGE)
def test_configurations_compile(name):
    served = [call.problem for call in calls(LARGE[name]).values() if not ENGINE.reason(call.problem, H100)]
    assert served
    for problem in served:
        check_compiled(problem, 2)


def test_a_plan_of_few_channels_is_what_it_is():
    """Windows of 5 lines of 6 elements, around an image of 9 lines of 39, which is copied for its lines' sake."""
    call = calls(SMALL["3 channels, unaligned"])["output"]
    plan = ENGINE.build(Sm90Knobs(tile_m=64, tile_n=96, cluster_m=1, consumers=1, store="rows"), call.problem, H100)
    copy, launch = plan.launches
    assert copy.kernel == "product_copy"
    image, filter_ = (one for one in launch.arguments if isinstance(one, TensorMap))
    assert (image.dimensions, image.strides) == ((39, 9, 1, 2), (80, 720, 720))
    assert (image.box, image.swizzle) == ((64, 5, 1, 1), 0)
    assert (filter_.dimensions, filter_.strides) == ((96, 6, 5, 1), (192, 6 * 192, 30 * 192))
    assert filter_.box == (64, 8, 6, 1), "five groups of 8, and one of zeros"


def test_a_plan_of_blocks_is_what_it_is():
    """Blocks of 16 places of two lines, of windows of 7 x 7 in steps of 2, around an image of 6 lines of 32."""
    call = calls(SMALL["blocks"])["image"]
    plan = ENGINE.build(Sm90Knobs(tile_m=64, tile_n=64, cluster_m=1, consumers=1, store="rows"), call.problem, H100)
    (launch,) = plan.launches
    output, even, odd = (one for one in launch.arguments if isinstance(one, TensorMap))
    assert (output.dimensions, output.element_strides) == ((64, 16, 3, 2), (1, 8, 1, 1))
    assert output.corners == ((-1, -1 + 8 - 15), (-1, -1 + 2 - 2))
    assert even == odd
    assert (even.dimensions, even.strides, even.box) == ((64, 21, 7), (128, 21 * 128), (64, 64, 1))


def test_sizes_are_not_in_the_code():
    units = set()
    for n, size in ((2, 16), (5, 32)):
        case = convolution((n, size, size, 3), (3, 3, 3, 64), BF16, padding="SAME")
        units.add(ENGINE.build(Sm90Knobs(tile_n=64, cluster_m=1), calls(case)["output"].problem, H100).unit)
    assert len(units) == 1


# AlexNet's first layer.
WIDE = convolution((64, 224, 224, 3), (11, 11, 3, 96), BF16, strides=(4, 4), padding=((2, 2), (2, 2)))


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        (only(convolution((2, 9, 9, 3), (3, 3, 3, 8), BF16, rhs_dilation=(1, 2))), "a window is dilated"),
        (only(convolution((2, 90, 90, 3), (3, 3, 3, 8), BF16, strides=(1, 6))), "cover 320 elements of a line"),
        (only(WIDE), "a window has 448 elements"),
        (only(WIDE, "filter"), "a window has 440 elements"),
        (only(WIDE, "image"), "for so few channels, strides apart"),
    ],
)
def test_reasons(problem, said):
    assert said in (ENGINE.reason(problem, H100) or "")


def test_blocks_have_no_patches():
    """Whose columns read rows of the filter of their own, which the kernel by patches doesn't know of."""
    problem = PROBLEMS["blocks, places that meet no window, image"].problem
    offered = list(ENGINE.configurations(problem, H100))
    assert offered
    assert not any(getattr(knobs, "patch", 0) for knobs in offered)


def test_blocks_are_not_split():
    with pytest.raises(ValueError, match="each line of a block is another result"):
        ENGINE.build(Sm90Knobs(tile_n=16, split_k=2, cluster_m=1, store="rows"), only(SMALL["blocks"], "image"), H100)


@pytest.mark.skipif(not GPU, reason="there is no GPU")
@pytest.mark.parametrize("name", PROBLEMS)
def test_results(name):
    check_on_gpu(PROBLEMS[name], FORCED.get(name, ()))
