"""The Hopper engine of filter gradients by patches: what it plans and refuses, and that it computes what is right."""

import jax
import numpy as np
import pytest

from checking.cases.convolution import convolution
from checking.cases.dtypes import BF16, F16, F32
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
)
from checking.emulation.plans import Emulated
from checking.targets import H100
from jaxdnn.engines.convolution.implicit_gemm import ImplicitGemm, implicit_gemm
from jaxdnn.engines.convolution.sm90.halo_wgrad.knobs import WgradKnobs, wgrad_patches_reason
from jaxdnn.engines.convolution.sm90.knobs import ConvolutionKnobs
from jaxdnn.plan import TensorMap
from jaxdnn.planning.candidates import knobs_of, with_knobs

PADDED = ((1, 1), (1, 1))
GPU = jax.default_backend() == "gpu"

# Edges: lines and images that end in a tile, channels that end in a line, columns that end in a block.
SMALL = edges.SMALL | {
    "windows of 2, flipped": convolution((2, 8, 11, 40), (2, 4, 40, 72), F16, padding=((1, 0), (0, 2)), flip=True),
    "cut off": convolution((2, 10, 11, 32), (2, 3, 32, 16), BF16, padding=((-1, -2), (1, -1))),
    "wide windows": convolution((1, 9, 10, 32), (2, 5, 32, 24), BF16, padding="SAME"),
    "one dimension": convolution((2, 37, 64), (3, 64, 136), BF16, padding="SAME"),
    "eights": convolution((5, 7, 8, 64), (3, 3, 64, 64), BF16, padding="SAME"),
    "three dimensions": convolution((2, 3, 6, 9, 64), (3, 2, 3, 64, 32), BF16, padding="SAME"),
    "groups of 64": convolution((2, 6, 9, 128), (3, 3, 64, 128), BF16, padding="SAME", groups=2),
    "groups of 32": convolution((2, 6, 9, 192), (2, 2, 32, 192), BF16, padding="SAME", groups=6),
    # Whose places are no multiple of 16 bytes: the image's, the output's, both.
    "channels between lines": convolution((2, 10, 10, 68), (3, 3, 68, 64), BF16),
    "features between lines": convolution((2, 10, 12, 64), (3, 3, 64, 58), BF16, padding="SAME"),
    "odd": convolution((2, 9, 12, 35), (3, 2, 35, 43), F16, padding="SAME"),
}
MAPPED = {
    "filters, mapped": (convolution((2, 7, 10, 32), (2, 3, 32, 16), BF16, padding="SAME"), (None, 0)),
    "both, mapped": (convolution((1, 12, 16, 32), (3, 3, 32, 16), BF16, padding="SAME"), (0, 0)),
    "odd, mapped": (convolution((1, 12, 16, 33), (3, 3, 33, 17), BF16, padding="SAME"), (0, 0)),
    "odd filters, mapped": (convolution((2, 7, 10, 33), (2, 3, 33, 17), BF16, padding="SAME"), (None, 0)),
}
PROBLEMS = {
    name: calls(case, axes)["filter"]
    for name, (case, axes) in ({name: (case, None) for name, case in SMALL.items()} | MAPPED).items()
}
# What no heuristic would choose for so few places.
FORCED = {
    "same": [
        WgradKnobs(patch=64, width=8, height=4, stages=2, split_k=2),
        WgradKnobs(patch=128, width=8, height=2, stages=3, split_k=45),
        WgradKnobs(patch=32, run=2, runs=2, width=16, height=5, stages=2, split_k=3),
        WgradKnobs(patch=128, run=2, runs=1, column_blocks=2, width=16, height=3, stages=2),
        WgradKnobs(patch=64, lines=2, width=8, height=4, stages=2, split_k=2),
        WgradKnobs(patch=32, lines=4, runs=1, column_blocks=3, width=16, height=8, stages=2, split_k=3),
    ],
    "dilated": [WgradKnobs(patch=64, lines=2, runs=2, width=8, height=12, stages=2)],
    "groups of 16": [
        WgradKnobs(patch=32, lines=4, runs=2, width=8, height=8, images=2, stages=2),
        WgradKnobs(patch=64, run=2, runs=3, width=8, height=4, stages=2),
    ],
    "windows of 2, flipped": [WgradKnobs(patch=64, run=3, runs=3, width=8, height=4, stages=2)],
    "eights": [
        WgradKnobs(width=8, height=7, images=2, stages=2, split_k=3),
        WgradKnobs(patch=64, width=8, height=7, images=4, stages=2),
    ],
    # The last split has one tile, the other two.
    "both, mapped": [WgradKnobs(patch=64, width=16, height=5, stages=2, split_k=2)],
    "one dimension": [WgradKnobs(patch=128, runs=1, column_blocks=3, width=32, height=1, stages=2, split_k=2)],
}
LARGE = {
    "56": convolution((256, 56, 56, 64), (3, 3, 64, 64), BF16, padding="SAME"),
    "8": convolution((256, 8, 8, 512), (3, 3, 512, 512), BF16, padding="SAME"),
    "320": convolution((16, 64, 64, 320), (3, 3, 320, 320), F16, padding="SAME"),
    "volume": convolution((4, 16, 56, 56, 64), (3, 3, 3, 64, 64), BF16, padding="SAME"),
    "volume of 32 channels": convolution((1, 128, 128, 128, 32), (3, 3, 3, 32, 32), BF16, padding="SAME"),
    "16 groups": convolution((32, 56, 56, 256), (3, 3, 16, 256), BF16, padding="SAME", groups=16, rhs_dilation=(2, 2)),
    "5x5": convolution((64, 56, 56, 96), (5, 5, 96, 96), BF16, padding="SAME"),
    "one dimension": convolution((64, 3000, 128), (3, 128, 512), BF16, padding="SAME"),
}
LONG = convolution((2, 9, 300, 64), (3, 3, 64, 64), BF16, padding="SAME")
RUNS = {name: (name, by_patches(call.problem, FEW)[0]) for name, call in PROBLEMS.items()}
RUNS |= {f"{name}, forced {i}": (name, knobs) for name, several in FORCED.items() for i, knobs in enumerate(several)}


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    plans = [ENGINE.build(knobs, PROBLEMS[name].problem, FEW) for name, knobs in RUNS.values()]
    return Emulated(plans, tmp_path_factory.mktemp("emulated"))


@pytest.mark.parametrize("run", RUNS)
def test_its_text_computes_what_is_right(run, emulated):
    check_emulated(PROBLEMS[RUNS[run][0]], emulated, list(RUNS).index(run))


@pytest.mark.parametrize(
    "name",
    [
        "same",
        "same, forced 0",
        "same, forced 4",
        "same, forced 5",
        "dilated",
        "dilated, forced 0",
        "three dimensions, dilated",
        "eights, forced 0",
    ],
)
def test_what_is_no_number_stays_with_its_taps(name, emulated):
    """Tiles have places twice, and patches those that no window meets."""
    call = PROBLEMS[RUNS[name][0]]
    operands = arrays(call)
    image = operands[call.problem.a.buffer.index]
    image[0, ..., -1, -1, 3] = np.nan
    image[0, ..., -1, 2, 5] = np.inf
    image[-1, ..., 1, -1, 9] = np.nan
    check_where_finite(call, operands, emulated, list(RUNS).index(name))


@pytest.mark.parametrize("name", LARGE)
def test_configurations_compile(name):
    check_compiled(only(LARGE[name], "filter"), 2, by_patches)


@pytest.mark.parametrize(
    ("case", "chosen"),
    [
        (LARGE["56"], True),
        (LARGE["320"], True),
        (LARGE["volume"], True),
        (LARGE["volume of 32 channels"], True),
        (LARGE["16 groups"], True),
        (LARGE["5x5"], True),
        (convolution((256, 28, 28, 128), (3, 3, 128, 128), BF16, padding="SAME"), True),
        (convolution((128, 14, 14, 1024), (3, 3, 32, 1024), BF16, padding="SAME", groups=32), True),
        # What cuDNN takes longer for, few channels or not.
        (convolution((64, 56, 56, 128), (3, 3, 4, 128), BF16, padding="SAME", groups=32), True),
        (convolution((64, 112, 112, 24), (3, 3, 24, 24), BF16, padding="SAME"), True),
        # Features that are copied first.
        (convolution((80, 128, 19, 832), (3, 3, 832, 58), BF16, padding="SAME"), True),
        # Lines of less than 8 places.
        (convolution((256, 7, 7, 512), (3, 3, 512, 512), BF16, padding="SAME"), False),
        # Patches of 32 x 32 places for tiles of 8 x 8.
        (convolution((16, 65, 65, 256), (3, 3, 256, 256), BF16, padding="SAME", rhs_dilation=(12, 12)), False),
    ],
)
def test_patches_are_chosen_where_they_are_faster(case, chosen):
    problem = only(case, "filter")
    assert ENGINE.reason(problem, H100) is None
    assert isinstance(next(iter(ENGINE.configurations(problem, H100))), WgradKnobs) == chosen


def test_few_channels_that_would_be_copied_are_left_to_cudnn():
    case = convolution((7, 86, 8, 8, 51), (3, 3, 3, 51, 33), BF16, padding="SAME")
    assert "faster for so few channels" in (ENGINE.reason(only(case, "filter"), H100) or "")


def test_a_plan_is_what_it_is():
    """Tiles of 8 x 4 of 17 x 9 places, whose patches are 10 x 6; 72 channels in lines of 64 bytes."""
    knobs = WgradKnobs(patch=64, width=8, height=4, stages=2, split_k=5)
    plan = ENGINE.build(knobs, only(SMALL["same"], "filter"), H100)
    launch, added = plan.launches
    image, output, *_, last = (one for one in launch.arguments if isinstance(one, TensorMap))
    assert (image.dimensions, image.strides) == ((72, 17, 9, 1, 3), (144, 17 * 144, 153 * 144, 153 * 144))
    assert (image.box, image.corners) == ((32, 10, 6, 1, 1), ())
    assert (output.dimensions, output.box) == ((40, 17, 9, 1, 3), (64, 8, 4, 1, 1))
    assert (last.dimensions, last.box) == ((40, 1, 1, 1, 3), output.box), "one place more than two tiles"
    assert last.buffer.offset - output.buffer.offset == (8 * 17 + 16) * 80
    assert launch.grid == (3 * 5, 1, 1), "three lines of channels; 3 x 3 x 3 tiles, six a split"
    assert added.kernel == "product_split"
    assert plan.scratch == (5 * 9 * 72 * 40 * 4,)


def test_a_group_of_few_columns_is_multiplied_alone():
    """Two lines of the output are the 64 rows of a multiply; of groups of 16, two groups are merged for that."""
    for channels, merged in ((32, 1), (16, 2)):
        case = convolution((128, 14, 14, 1024), (3, 3, channels, 1024), BF16, padding="SAME", groups=1024 // channels)
        problem = only(case, "filter")
        knobs = next(iter(ENGINE.configurations(problem, H100)))
        assert (knobs.lines, knobs.patch, knobs.run, knobs.runs, knobs.images) == (2, 64, 3, 3, 2)
        launch, _ = ENGINE.build(knobs, problem, H100).launches
        image, output, *_ = (one for one in launch.arguments if isinstance(one, TensorMap))
        assert (image.box, output.box) == ((32, 10, 16, 1, 2), (32, 8, 14, 1, 2))
        assert launch.grid == (32 * knobs.split_k, 1, 1)
        assert ENGINE.build(knobs, problem, H100).scratch == (knobs.split_k * 9 * channels * merged * 1024 * 4,)


def test_sizes_are_not_in_the_code():
    units = set()
    for n, size, channels in ((2, 16, 64), (5, 33, 192)):
        case = convolution((n, size, size, channels), (3, 3, channels, 64), BF16, padding="SAME")
        units.add(ENGINE.build(WgradKnobs(stages=2), only(case, "filter"), H100).unit)
    assert len(units) == 1


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        (only(SMALL["same"]), "gradients of filters alone"),
        (only(convolution((2, 9, 9, 64), (3, 3, 64, 64), F32, padding="SAME"), "filter"), "of 16-bit floats"),
        (only(convolution((2, 9, 9, 64), (3, 3, 64, 64), BF16, strides=(1, 2)), "filter"), "with a stride"),
        (only(convolution((2, 9, 9, 64), (1, 1, 64, 64), BF16, padding=PADDED), "filter"), "a window of one tap"),
        (
            only(convolution((9, 9, 7, 64), (3, 3, 64, 64), BF16, padding="SAME"), "filter"),
            "8 places of a line, and the",
        ),
        (only(convolution((2, 10, 10, 132), (3, 3, 66, 64), BF16, groups=2), "filter"), "a multiple of 16"),
        (only(convolution((2, 10, 10, 128), (3, 3, 64, 132), BF16, groups=2), "filter"), "a multiple of 16"),
    ],
)
def test_reasons(problem, said):
    gemm = implicit_gemm(problem)
    assert isinstance(gemm, ImplicitGemm)
    assert said in (wgrad_patches_reason(gemm) or "")
    assert not by_patches(problem, H100) or problem.result != "filter"


@pytest.mark.parametrize(
    ("name", "knobs", "said"),
    [
        ("same", {"patch": 16}, "patch is 16; expected one of"),
        ("same", {"width": 12}, "expected lines of a multiple of 8"),
        ("same", {"height": 3}, "an even number of 8s"),
        ("same", {"lines": 3}, "lines is 3; expected one of"),
        ("same", {"patch": 64, "lines": 4, "height": 6}, "an even number of 8s by 4 lines"),
        ("same", {"patch": 64, "lines": 2, "run": 2}, "the 3 of the window"),
        ("dilated", {"patch": 64, "lines": 2, "runs": 2, "height": 8}, "expected a multiple of 6"),
        ("same", {"runs": 3, "column_blocks": 2}, "6 warp groups multiply; expected at most 3"),
        ("same", {"run": 2, "patch": 64, "runs": 3, "split_k": 28}, "the last one would have none of 27 tiles"),
        ("same", {"run": 4, "patch": 64}, "more than a plane of the window has"),
        ("wide windows", {"run": 5, "patch": 128, "runs": 2}, "a run has 320 taps and channels"),
        ("wide windows", {"run": 4, "patch": 128}, "would hold 128 accumulators"),
        ("same", {"stages": 20}, "bytes of shared memory, and a block has"),
        ("groups of 64", {"runs": 1, "column_blocks": 2}, "a block has 128 columns; the 64 of a group"),
        ("same", {"width": 24, "stages": 1}, "a tile is 24 x 4 places, of which an image has 17 x 9"),
        ("long", {"width": 264}, "more than the 256 places"),
        ("both, mapped", {"images": 2, "patch": 64}, "the 1 of each of several convolutions are no multiple of it"),
    ],
)
def test_knobs_that_do_not_fit(name, knobs, said):
    problem = only(LONG, "filter") if name == "long" else PROBLEMS[name].problem
    with pytest.raises(ValueError, match=r"WgradKnobs|does not fit") as caught:
        ENGINE.build(WgradKnobs(**{"height": 4, "stages": 2} | knobs), problem, H100)
    assert said in str(caught.value)


def test_knobs_of_either_kernel_can_be_asked_for():
    """An engine's configurations have not all the same knobs."""
    case = convolution((256, 56, 56, 64), (3, 3, 64, 64), BF16, padding="SAME")
    configs = list(ENGINE.configurations(only(case, "filter"), H100))
    assert {type(knobs) for knobs in configs} == {WgradKnobs, ConvolutionKnobs}
    for knobs in configs:
        assert with_knobs(ENGINE, configs, dict(knobs_of(knobs))) == knobs
    assert with_knobs(ENGINE, configs, {"tile_m": 64}).tile_m == 64
    assert with_knobs(ENGINE, configs, {"column_blocks": 1}).column_blocks == 1


@pytest.mark.skipif(not GPU, reason="there is no GPU")
@pytest.mark.parametrize("name", PROBLEMS)
def test_results(name):
    check_on_gpu(PROBLEMS[name], FORCED.get(name, ()))
