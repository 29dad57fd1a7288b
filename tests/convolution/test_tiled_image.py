"""Windows that tile an image, on Hopper: gradients as one product, and lines of patches that are read as they lie."""

import jax
import numpy as np
import pytest

import jaxdnn
from checking.cases.convolution import convolution
from checking.cases.dtypes import BF16, F16, F32
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
from jaxdnn.engines.convolution.tiled_image import tiled_image
from jaxdnn.engines.product.problem import Product
from jaxdnn.engines.product.sm90.knobs import Sm90Knobs
from jaxdnn.plan import TensorMap
from jaxdnn.planning.calls import find_calls

GPU = jax.default_backend() == "gpu"

# Windows whose lines end in whole pieces of 16, 8 and 4 bytes, taps that run against places, dimensions of other sizes.
SMALL = {
    "three dimensions, flipped": convolution(
        (1, 3, 4, 3, 64), (2, 3, 2, 64, 32), BF16, kind="conv_transpose", strides=(2, 3, 2)
    ),
    "pieces of 8 bytes, flipped": convolution(
        (2, 5, 6, 24), (2, 3, 24, 20), BF16, kind="conv_transpose", strides=(2, 3)
    ),
    "pieces of 4 bytes": convolution((2, 12, 15, 20), (4, 3, 20, 72), F16, strides=(4, 3)),
    "one dimension": convolution((3, 60, 18), (4, 18, 40), BF16, strides=(4,)),
    "epilogue": convolution(
        (2, 5, 6, 64), (2, 2, 64, 24), BF16, kind="conv_transpose", strides=(2, 2), epilogue="bias gelu",
        extras=(((24,), BF16),),
    ),
    "small windows": convolution((3, 8, 24, 3), (4, 4, 3, 96), BF16, strides=(4, 4)),
    "lines": convolution((3, 32, 48, 3), (16, 16, 3, 72), BF16, strides=(16, 16)),
    "lines that end in a multiply": convolution((2, 40, 60, 2), (20, 20, 2, 24), BF16, strides=(20, 20)),
    "lines of many channels": convolution((3, 6, 20, 24), (2, 4, 24, 72), BF16, strides=(2, 4), flip=True),
    "lines of three dimensions": convolution((2, 4, 6, 8, 32), (2, 3, 2, 32, 40), F16, strides=(2, 3, 2)),
    "lines, flipped": convolution((2, 16, 24, 3), (8, 8, 3, 40), F16, strides=(8, 8), flip=True),
}  # fmt: skip
MAPPED = {
    "images, mapped": (SMALL["pieces of 4 bytes"], (0, None)),
    "both, mapped": (SMALL["pieces of 8 bytes, flipped"], (0, 0)),
    "lines, both mapped": (convolution((4, 32, 128, 3), (16, 16, 3, 40), BF16, strides=(16, 16)), (0, 0)),
}
PROBLEMS = {
    f"{name}, {direction}": call
    for name, (case, axes) in ({name: (case, None) for name, case in SMALL.items()} | MAPPED).items()
    for direction, call in calls(case, axes).items()
    if direction == "image" or "lines" in name or "small" in name
}
FORCED = {
    "three dimensions, flipped, image": [Sm90Knobs(tile_m=128, tile_n=256, stages=2, cluster_m=1, store="rows")],
    "pieces of 4 bytes, image": [Sm90Knobs(tile_m=64, tile_n=48, stages=2, cluster_m=2, consumers=1, store="rows")],
}
RUNS = [(name, None) for name in PROBLEMS] + [(name, knobs) for name, several in FORCED.items() for knobs in several]
LARGE = {
    "patches": convolution((128, 224, 224, 3), (16, 16, 3, 768), BF16, strides=(16, 16)),
    "volume": convolution((1, 64, 64, 64, 64), (2, 2, 2, 64, 32), BF16, kind="conv_transpose", strides=(2, 2, 2)),
}


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    plans = [emulated_plan(PROBLEMS[name].problem, knobs) for name, knobs in RUNS]
    return Emulated(plans, tmp_path_factory.mktemp("emulated"))


@pytest.mark.parametrize(("name", "knobs"), RUNS)
def test_its_text_computes_what_is_right(name, knobs, emulated):
    check_emulated(PROBLEMS[name], emulated, RUNS.index((name, knobs)))


@pytest.mark.parametrize("name", ["lines, output", "lines, filter", "lines, image", "three dimensions, flipped, image"])
def test_what_is_no_number_stays_in_its_window(name, emulated):
    """Lines of 48 elements are filled up to whole multiplies, and the last tile of places with other lines."""
    call = PROBLEMS[name]
    operands = arrays(call)
    which = call.problem.b if call.problem.result == "image" else call.problem.a
    operands[which.buffer.index][-1, ..., 0, 1] = np.nan
    check_where_finite(call, operands, emulated, RUNS.index((name, None)))


@pytest.mark.parametrize("name", LARGE)
def test_configurations_compile(name):
    served = [call.problem for call in calls(LARGE[name]).values() if not ENGINE.reason(call.problem, H100)]
    assert any(problem.result == "image" for problem in served)
    for problem in served:
        check_compiled(problem, 2)


def test_places_of_a_line_are_channels():
    """Of 4 places of 24 channels; of volumes too, but of few channels, whose lines are short and many."""
    call = PROBLEMS["lines of many channels, output"]
    assert (call.problem.c, [window.filter for window in call.problem.windows]) == (4 * 24, [2, 1])
    call = PROBLEMS["lines of three dimensions, filter"]
    assert (call.problem.c, [window.filter for window in call.problem.windows]) == (2 * 32, [2, 3, 1])


def test_gradients_of_filters_are_not_left_to_cudnn():
    """It takes 346 us to that of 2 x 2 x 2 windows of 32 channels, as a transposed convolution has it, and this 54."""
    problem = only(LARGE["volume"], "filter")
    assert (problem.c, ENGINE.reason(problem, H100)) == (32, None)


@pytest.mark.parametrize("name", PROBLEMS)
def test_gradients_of_images_are_one_product(name):
    problem = PROBLEMS[name].problem
    found = tiled_image(problem)
    assert (found is not None) == (problem.result == "image")
    assert found is None or found.product.m * found.product.n == problem.rows * problem.c


def test_lines_are_read_where_they_lie():
    """Of 16 places with 3 channels, 48 of a stage's 64 elements, which three of four multiplies have."""
    plan = ENGINE.build(Sm90Knobs(tile_m=128, tile_n=64, cluster_m=1), only(LARGE["patches"]), H100)
    (launch,) = plan.launches
    image, filter_, _ = (one for one in launch.arguments if isinstance(one, TensorMap))
    assert (image.dimensions, image.strides) == ((48, 14, 16, 128 * 14), (96, 14 * 96, 16 * 14 * 96))
    assert (image.box, image.corners) == ((64, 128), ((0, 0), (0, -15)))
    assert (filter_.dimensions, filter_.box) == ((768, 48, 16), (64, 64, 1))
    assert "kSteps = 3," in plan.unit


@pytest.mark.parametrize(
    ("shape", "window", "dtype"),
    [((2, 28, 28, 3), 14, BF16), ((2, 40, 40, 3), 16, BF16), ((2, 32, 32, 3), 16, F32), ((2, 16, 16, 16, 3), 8, BF16)],
)
def test_other_patches_are_copied(shape, window, dtype):
    """Lines of no whole 16 bytes, images that are no whole windows, elements that are not multiplied either way."""
    spatial = "DHW"[5 - len(shape) :]
    size = (window,) * len(spatial)

    def embed(x, w):
        numbers = (f"N{spatial}C", f"{spatial}IO", f"N{spatial}C")
        return jaxdnn.conv_general_dilated(x, w, size, "VALID", dimension_numbers=numbers)

    arrays = [jax.ShapeDtypeStruct(one, dtype) for one in (shape, (*size, 3, 64))]
    (call,) = find_calls(embed, *arrays)
    assert isinstance(call.problem, Product)


@pytest.mark.parametrize(
    "case",
    [
        convolution((2, 13, 12, 20), (4, 3, 20, 72), BF16, strides=(4, 3)),
        convolution((2, 12, 12, 20), (4, 3, 20, 72), BF16, strides=(4, 3), padding=((4, 0), (0, 0))),
        convolution((2, 12, 12, 20), (4, 4, 20, 72), BF16, strides=(4, 3)),
        convolution((2, 12, 12, 17), (4, 3, 17, 72), BF16, strides=(4, 3)),
    ],
)
def test_images_that_windows_do_not_tile(case):
    """Or whose windows' lines have no pieces to store."""
    assert tiled_image(only(case, "image")) is None


def test_knobs_that_do_not_fit():
    problem = PROBLEMS["pieces of 4 bytes, image"].problem
    for knobs in (Sm90Knobs(tile_n=64), Sm90Knobs(tile_n=64, cluster_m=1, split_k=2, store="rows")):
        with pytest.raises(ValueError, match="expected store = 'rows' and one split"):
            ENGINE.build(knobs, problem, H100)


@pytest.mark.skipif(not GPU, reason="there is no GPU")
@pytest.mark.parametrize("name", PROBLEMS)
def test_results(name):
    check_on_gpu(PROBLEMS[name], FORCED.get(name, ()))
