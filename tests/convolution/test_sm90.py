"""The Hopper engine of convolutions: what it plans and refuses, and that it compiles and computes what is right."""

from dataclasses import replace

import jax
import pytest

import jaxdnn
from checking.cases.convolution import convolution
from checking.cases.dtypes import BF16, E4M3, F32
from checking.convolution.exact import calls, only
from checking.convolution.plans import ENGINE, check_compiled, check_emulated, check_on_gpu, emulated_plan
from checking.convolution.sm90 import (
    COMPUTED,
    FORCED,
    LARGE,
    MAPPED,
    PROBLEMS,
    RUNS,
    SMALL,
)
from checking.emulation.plans import Emulated
from checking.targets import A100, H100
from jaxdnn.engines.base import MAX_ARGUMENTS
from jaxdnn.engines.convolution.implicit_gemm import implicit_gemm
from jaxdnn.engines.convolution.sm90.knobs import knobs_reason
from jaxdnn.engines.product.sm90.knobs import Sm90Knobs
from jaxdnn.plan import Counter, Scalar, TensorMap
from jaxdnn.planning.calls import find_calls

ALONE = Sm90Knobs(tile_m=64, tile_n=64, stages=3, cluster_m=1, consumers=1)
GPU = jax.default_backend() == "gpu"


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    plans = [emulated_plan(PROBLEMS[name].problem, knobs) for name, knobs in RUNS]
    return Emulated(plans, tmp_path_factory.mktemp("emulated"))


@pytest.mark.parametrize(("name", "knobs"), RUNS)
def test_its_text_computes_what_is_right(name, knobs, emulated):
    check_emulated(PROBLEMS[name], emulated, RUNS.index((name, knobs)))


@pytest.mark.parametrize("name", LARGE)
def test_configurations_compile(name):
    served = [call.problem for call in calls(LARGE[name]).values() if not ENGINE.reason(call.problem, H100)]
    assert served
    for problem in served:
        check_compiled(problem, 8 if name == "28" else 2)


@pytest.mark.parametrize(("channels", "features"), [(64, 104), (104, 64), (16, 64)])
def test_maps_ask_for_lines_of_their_own(channels, features):
    """Of rows of whole lines for two at once, and else for one, whose neighbour is of another row."""
    case = convolution((2, 28, 28, channels), (3, 3, channels, features), BF16, padding="SAME")
    asked = set()
    for call in calls(case).values():
        for knobs in ENGINE.configurations(call.problem, H100):
            for launch in ENGINE.build(knobs, call.problem, H100).launches:
                maps = [one for one in launch.arguments if isinstance(one, TensorMap) and one.dtype == 9]
                asked |= {(one.strides[0] % 128 == 0, one.l2_promotion) for one in maps}
    assert asked == {(True, 3), (False, 2)}


def test_a_plan_is_what_it_is():
    """Windows of 3 x 2 in steps of 2 x 3, around an image of 11 x 10."""
    call = calls(SMALL["stride"])["output"]
    plan = ENGINE.build(Sm90Knobs(tile_m=128, tile_n=64, cluster_m=1), call.problem, H100)
    (launch,) = plan.launches
    image, filter_, _ = (one for one in launch.arguments if isinstance(one, TensorMap))
    assert (image.dimensions, image.strides) == ((64, 10, 11, 2), (128, 1280, 11 * 1280))
    assert (image.box, image.element_strides) == ((64, 128), (1, 3, 2, 1))
    assert image.corners == ((-2, 7 - 9), (-1, 7 - 10))
    assert (filter_.dimensions, filter_.strides, filter_.box) == ((24, 64, 6), (48, 64 * 48), (64, 64, 1))
    assert not filter_.corners


@pytest.mark.parametrize(
    ("result", "channels", "line", "lines", "last"),
    [
        ("image", 16, 32, 1, 4),
        ("image", 32, 64, 1, 4),
        ("image", 88, 128, 2, 2),
        ("image", 80, 128, 2, 1),
        # Rows of a filter lie along columns, and each line brings as many of them.
        ("output", 80, 64, 3, 4),
        ("output", 96, 64, 3, 4),
    ],
)
def test_lines_are_few_and_their_padding_is_not_multiplied(result, channels, line, lines, last):
    sizes = (64, channels) if result == "image" else (channels, 64)
    problem = calls(convolution((2, 9, 9, sizes[0]), (3, 3, *sizes), BF16))[result].problem
    gemm = implicit_gemm(problem)
    assert (gemm.line, gemm.lines, gemm.last_steps) == (line, lines, last)
    unit = ENGINE.build(ALONE, problem, H100).unit
    assert result == "output" or (f"kLines = {lines}," in unit and f"kLastSteps = {last}," in unit)


def test_sizes_are_not_in_the_code():
    units = set()
    for n, size, channels in ((2, 9, 64), (5, 30, 512)):
        case = convolution((n, size, size, channels), (3, 3, channels, 64), BF16, padding="SAME")
        units.add(ENGINE.build(Sm90Knobs(tile_n=64), calls(case)["output"].problem, H100).unit)
    assert len(units) == 1


def test_a_filter_of_8_bits_is_transposed_first():
    plan = ENGINE.build(Sm90Knobs(tile_n=128), calls(LARGE["int8"])["output"].problem, H100)
    assert [launch.kernel for launch in plan.launches] == ["product_copy", "convolution_sm90"]
    assert plan.scratch == (9 * 128 * 256,)


def test_no_launch_has_more_arguments_than_it_may():
    def calls_with(count):
        def function(x, w, *operands):
            epilogue = lambda acc, *operands: sum(operands, acc)  # noqa: E731
            return jaxdnn.conv_transpose(x, w, (4, 4), "SAME", operands=operands, epilogue=epilogue)

        shapes = [(2, 3, 3, 64), (5, 5, 64, 32), *[(2, 12, 12, 32)] * count]
        (call,) = find_calls(jax.vmap(function), *(jax.ShapeDtypeStruct((2, *shape), BF16) for shape in shapes))
        return call.problem

    most = 0
    for count in range(8, 24):
        problem = calls_with(count)
        if reason := ENGINE.reason(problem, H100):
            assert "and a launch has room for" in reason
            break
        plan = ENGINE.build(next(ENGINE.configurations(problem, H100)), problem, H100)
        most = max(len(launch.arguments) for launch in plan.launches)
    assert MAX_ARGUMENTS - 8 <= most <= MAX_ARGUMENTS


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        (only(convolution((2, 9, 9, 4), (3, 3, 4, 8), E4M3, out_dtype=BF16)), "which are less than 16 bytes"),
        (only(convolution((2, 9, 9, 64), (3, 3, 64, 8), F32, precision="highest")), "precision HIGHEST forbids"),
        (only(convolution((2, 30, 64), (3, 64, 8), BF16, strides=(9,))), "a stride is 9"),
        (
            only(convolution((1, 9, 9, 40, 64), (1, 1, 2, 64, 8), BF16, padding="SAME", rhs_dilation=(1, 1, 32))),
            "a window reaches 32 places far, and TMA's im2col mode 31 with 3 spatial dimensions",
        ),
        (
            only(convolution((1, 9, 9, 9, 64), (2, 2, 2, 64, 8), BF16, padding=((0, 0), (0, 0), (17, 0)))),
            "windows begin -17 from the image's first place",
        ),
        (
            only(convolution((1, 300, 9, 64), (2, 2, 64, 8), BF16, padding=((-1, -130), (0, 0)))),
            "-131 from its last one, and TMA's im2col mode has -128 to 127 with 2 spatial dimensions",
        ),
        (only(convolution((8, 64), (16, 32), BF16, groups=4)), "it has 0 spatial dimensions"),
        (only(convolution((2, 9, 48), (3, 24, 128), BF16, groups=2)), "24 channels, which are no multiple of"),
        (only(convolution((2, 9, 128), (3, 64, 80), BF16, groups=2)), "no tile fits the 40 columns"),
        (only(LARGE["float32"], "filter"), "want float32 to lie along the places"),
        (only(convolution((2, 5, 32), (3, 16, 32), BF16, groups=2), "filter"), "over 6 places, which are too few"),
        (only(convolution((2, 9, 9, 32), (3, 3, 16, 64), F32, groups=2)), "have to be transposed in each group"),
        (
            only(convolution((128, 28, 28, 512), (3, 3, 16, 512), BF16, strides=(2, 2), groups=32), "filter"),
            "so few channels in a group",
        ),
        (only(LARGE["sound"], "filter"), "so few channels in a group"),
        (only(LARGE["down"], "image"), "most places of the image meet no window"),
        (only(convolution((64, 112, 112, 12), (3, 3, 12, 32), BF16)), "aligned copies of its operands, 18 MiB"),
    ],
)
def test_reasons(problem, said):
    assert said in (ENGINE.reason(problem, H100) or "")


def test_tiles_of_which_some_have_few_stages_are_dealt():
    """A phase of a stride that meets no tap has one stage, of zeros: the ring of tiles that are taken is too short."""
    dealt = only(convolution((64, 56, 56, 128), (1, 1, 64, 2048), BF16, groups=2, strides=(2, 2)), "image")
    taken = only(convolution((64, 14, 14, 512), (3, 3, 512, 512), BF16, padding="SAME"), "image")
    for problem, counts in ((dealt, False), (taken, True)):
        (launch,) = ENGINE.build(next(ENGINE.configurations(problem, H100)), problem, H100).launches
        assert any(isinstance(argument, Counter) for argument in launch.arguments) == counts


def test_to_few_channels_copies_count_for_nothing():
    """cuDNN takes longer than they do."""
    features = only(convolution((104, 128, 240, 3), (4, 4, 3, 50), BF16, strides=(4, 4)), "filter")
    assert ENGINE.reason(features, H100) is None


def test_it_needs_hopper():
    assert "it needs compute capability 9.0" in (ENGINE.reason(only(SMALL["same"]), A100) or "")


def test_splits_end_where_a_convolution_of_a_batch_does():
    problem = calls(*MAPPED["both, mapped"])["filter"].problem
    gemm = implicit_gemm(problem)
    assert not isinstance(gemm, str)
    gemm = replace(gemm, product=replace(gemm.product, k=3 * 64))
    said = [knobs_reason(gemm, replace(ALONE, split_k=splits), H100.shared_memory) for splits in (1, 2, 3)]
    assert [bool(reason) for reason in said] == [False, True, False]
    assert "the last of 3 stages" in (said[1] or "")


def test_knobs_that_do_not_fit():
    problem = only(SMALL["groups"])
    gemm = implicit_gemm(problem)
    assert not isinstance(gemm, str)
    for knobs in (Sm90Knobs(tile_n=128), Sm90Knobs(tile_n=64, cluster_m=1, cluster_n=2)):
        assert "a cluster has 128 columns; the 64 of a" in (knobs_reason(gemm, knobs, H100.shared_memory) or "")
    with pytest.raises(ValueError, match="does not fit"):
        ENGINE.build(Sm90Knobs(tile_n=128), problem, H100)


@pytest.mark.parametrize(
    ("direction", "knobs", "said"),
    [
        ("output", Sm90Knobs(tile_n=64, cluster_m=1), "groups is 1; expected 2"),
        ("output", Sm90Knobs(tile_n=32, cluster_m=1, groups=2), "tile_n is 32; expected 64, the columns of merged"),
        ("filter", Sm90Knobs(tile_n=64, cluster_m=1, groups=2, split_k=2), "groups is 2; expected 1"),
        ("filter", Sm90Knobs(tile_n=64, cluster_m=1), "what groups have of each other is left out where splits are"),
    ],
)
def test_knobs_that_do_not_fit_merged_groups(direction, knobs, said):
    gemm = implicit_gemm(only(LARGE["32 groups"], direction))
    assert not isinstance(gemm, str)
    assert said in (knobs_reason(gemm, knobs, H100.shared_memory) or "")


@pytest.mark.parametrize(
    ("problem", "fields", "said"),
    [
        (only(LARGE["28"], "filter"), {}, "those of a filter's gradient are summed over"),
        (only(LARGE["32 groups"]), {}, "its channels are those of groups"),
        (only(LARGE["volume of few channels"]), {}, "or less than a line"),
        (only(LARGE["strided"], "image"), {}, "not those of the result, one after the other"),
        (only(LARGE["28"]), {"cluster_m": 2}, "expected blocks alone"),
        (only(LARGE["28"]), {"split_k": 2}, "K is split"),
        (only(LARGE["float32"]), {}, "or copies"),
        (only(LARGE["residual"]), {}, "one matrix of 16-bit elements"),
        (only(SMALL["shortcut"]), {}, "expected fetch = 'tma'"),
        (only(LARGE["28"]), {}, ""),
    ],
)
def test_whose_places_can_not_be_columns(problem, fields, said):
    gemm = implicit_gemm(problem)
    assert not isinstance(gemm, str)
    knobs = Sm90Knobs(**{"tile_m": 128, "tile_n": 192, "stages": 4, "cluster_m": 1, "swapped": True} | fields)
    reason = knobs_reason(gemm, knobs, H100.shared_memory) or ""
    assert said in reason
    assert bool(said) == bool(reason)


def test_tiles_whose_places_are_columns_cover_the_result_once():
    """More of them would be cut off where they are stored, and take time."""
    problem = only(LARGE["28"])
    knobs = Sm90Knobs(tile_m=128, tile_n=192, stages=4, cluster_m=1, schedule="pingpong", swapped=True)
    places, columns = 256 * 28 * 28, 128
    for sm_count, blocks in ((132, 131), (2000, 1046)):
        (launch,) = ENGINE.build(knobs, problem, replace(H100, sm_count=sm_count)).launches
        assert launch.grid[0] == blocks
    numbers = [argument.value for argument in launch.arguments if isinstance(argument, Scalar)]
    # n; and m, the rows of tiles, and the image's channels.
    assert (numbers.count(places), numbers.count(columns)) == (1, 3)


def test_merged_groups_cost_no_more_than_one_of_their_channels():
    """A tile reads the image once, whole lines of it, and of the filter what its groups have."""
    merged, one = (
        only(convolution((128, 14, 14, 1024), (3, 3, c, 1024), BF16, padding="SAME", groups=1024 // c))
        for c in (16, 64)
    )
    boxes = []
    for problem in (merged, one):
        knobs = Sm90Knobs(tile_m=256, tile_n=64, cluster_m=1, groups=4 if problem is merged else 1)
        (launch,) = ENGINE.build(knobs, problem, H100).launches
        boxes.append([argument.box for argument in launch.arguments if isinstance(argument, TensorMap)][:2])
    assert boxes == [[(64, 256), (64, 16, 1)], [(64, 256), (64, 64, 1)]]


@pytest.mark.skipif(not GPU, reason="there is no GPU")
@pytest.mark.parametrize("name", COMPUTED)
def test_results(name):
    check_on_gpu(COMPUTED[name], FORCED.get(name, ()))
