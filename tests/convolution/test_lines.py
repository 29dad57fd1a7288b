"""The engine of depthwise convolutions by whole lines: what it plans and refuses, that it compiles, and that what it
computes is right.
"""

from dataclasses import replace

import jax
import numpy as np
import pytest

from checking.cases.convolution import convolution
from checking.cases.dtypes import BF16, F16
from checking.compiler_log import compile_checked, stack_frames
from checking.convolution.calls import arrays, check, convolutions, emulate
from checking.convolution.plans import check_where_finite
from checking.emulation.plans import Emulated
from checking.product.calls import run_plan
from checking.targets import A100, H100
from jaxdnn import device
from jaxdnn.engines.convolution.lines.engine import ConvolutionLines
from jaxdnn.engines.convolution.lines.knobs import LinesKnobs, lines_reason

ENGINE = ConvolutionLines()
GPU = jax.default_backend() == "gpu"


def depthwise(a, window, dtype=BF16, **fields):
    return convolution(a, (*window, 1, a[-1]), dtype, groups=a[-1], **fields)


# Edges: parts that begin within an image, and that have several; threads that have nothing; rows past an image, and
# places; more steps than stages.
CASES = {
    "same": (LinesKnobs(4, 3, 4), depthwise((3, 9, 12, 40), (3, 3), padding="SAME")),
    "several images": (LinesKnobs(7, 4, 2), depthwise((5, 3, 14, 8), (3, 3), F16, padding="SAME")),
    "5 x 2": (LinesKnobs(5, 8, 3), depthwise((2, 7, 10, 24), (5, 2), padding="SAME")),
    "valid": (LinesKnobs(6, 3, 4), depthwise((2, 8, 14, 72), (2, 3), F16)),
    "cut off, flipped": (
        LinesKnobs(5, 5, 3), depthwise((2, 7, 11, 8), (4, 3), padding=((2, -1), (-2, 3)), flip=True)
    ),
    "padding past the window": (LinesKnobs(4, 4, 2), depthwise((2, 3, 2, 8), (2, 2), padding=((4, 3), (2, 5)))),
    "bias": (
        LinesKnobs(9, 3, 2),
        depthwise((2, 7, 9, 24), (3, 3), padding="SAME", epilogue="bias gelu", extras=(((24,), "float32"),)),
    ),
}  # fmt: skip
WIDTHS = {"valid, image": 7, "cut off, flipped, image": 11, "padding past the window, image": 2}
CALLS = [
    (f"{name}, {result}", replace(chosen, width=WIDTHS.get(f"{name}, {result}", chosen.width)),
     convolutions(case, result))
    for name, (chosen, case) in CASES.items()
    for result in ("output", "image", "filter")
]  # fmt: skip
NAMES = [name for name, *_ in CALLS]
LARGE = {
    "56": depthwise((256, 56, 56, 144), (3, 3), padding="SAME"),
    "14": depthwise((256, 14, 14, 576), (3, 3), F16, padding="SAME"),
    "7": depthwise((256, 7, 7, 960), (3, 3), padding="SAME"),
    "gelu": depthwise(
        (256, 28, 28, 192), (3, 3), padding="SAME", epilogue="bias gelu", extras=(((192,), "float32"),)
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    plans = [ENGINE.build(chosen, call.problem, H100) for _, chosen, call in CALLS]
    return Emulated(plans, tmp_path_factory.mktemp("emulated"))


@pytest.mark.parametrize("number", range(len(CALLS)), ids=NAMES)
def test_its_text_computes_what_is_right(number, emulated):
    emulate(emulated, number, CALLS[number][2])


@pytest.mark.parametrize("side", ["a", "b"])
@pytest.mark.parametrize("number", range(len(CALLS)), ids=NAMES)
def test_what_is_no_number_stays_in_its_windows(number, side, emulated):
    """Zeros past an edge meet it, in images, results' gradients and filters."""
    call = CALLS[number][2]
    operands = arrays(call)
    spoilt = operands[getattr(call.problem, side).buffer.index]
    spoilt[0, 0, ..., 0] = np.nan  # the first row of an image; of a filter the first taps
    spoilt[-1, ..., -1, -1] = np.nan
    spoilt[-1, spoilt.shape[1] // 2, ..., 1] = np.nan
    check_where_finite(call, operands, emulated, number)


@pytest.mark.parametrize("name", LARGE)
def test_configurations_compile(name):
    for result in ("output", "image", "filter"):
        problem = convolutions(LARGE[name], result).problem
        for chosen in list(ENGINE.configurations(problem, H100))[:2]:
            log = compile_checked(ENGINE.build(chosen, problem, H100), chosen).log
            assert not any(stack_frames(log).values()), f"{chosen} keeps sums in local memory"


@pytest.mark.parametrize(
    ("case", "chosen"),
    [
        (LARGE["56"], True),
        (LARGE["14"], True),
        # Multiply-adds bound it.
        (depthwise((128, 56, 56, 96), (7, 7), padding="SAME"), False),
        # Too few threads.
        (depthwise((256, 56, 56, 8), (3, 3), padding="SAME"), False),
    ],
)
def test_it_is_chosen_where_it_is_faster(case, chosen):
    for result in ("output", "image", "filter"):
        reason = ENGINE.reason(convolutions(case, result).problem, H100)
        assert (reason is None) == chosen, reason


def test_a_plan_is_what_it_is():
    """Eight strips of seven places, of 72 pairs of channels; 109 of 14336 rows a block."""
    problem = convolutions(LARGE["56"], "output").problem
    (launch,) = ENGINE.build(LinesKnobs(7, 8, 132), problem, H100).launches
    assert (launch.kernel, launch.grid, launch.block) == ("lines_fprop", (132, 1, 1), (576, 1, 1))
    assert launch.shared_memory == 8 * (-(-58 * 288 // 128) * 128 + 16)


def test_numbers_of_images_and_rows_are_not_in_the_code():
    cases = [depthwise((n, rows, 40, 96), (3, 3), padding="SAME") for n in (2, 3) for rows in (40, 44)]
    for result in ("output", "filter"):
        problems = [convolutions(case, result).problem for case in cases]
        units = {ENGINE.build(LinesKnobs(5, 4), one, H100).unit.partition("product_split")[0] for one in problems}
        assert len(units) == 1


PLAIN = convolutions(CASES["same"][1], "output").problem


@pytest.mark.parametrize(
    ("problem", "target", "said"),
    [
        (PLAIN, A100, "compute capability 9.0"),
        (replace(PLAIN, k=2), H100, "1 x 2 channels"),
        (convolutions(depthwise((2, 40, 16), (3,)), "output").problem, H100, "the convolution 1"),
        (convolutions(depthwise((2, 9, 9, 16), (3, 3), strides=(2, 1)), "output").problem, H100, "without strides"),
        (
            convolutions(depthwise((2, 9, 9, 16), (3, 3), rhs_dilation=(1, 2)), "output").problem,
            H100,
            "without strides",
        ),
        (
            replace(PLAIN, a=replace(PLAIN.a, spatial_strides=(PLAIN.a.spatial_strides[0] * 2, 80))),
            H100,
            "one after the other",
        ),
        (
            convolutions(depthwise((1, 9, 4, 16), (1, 1), padding=((0, 0), (-8, 8))), "output").problem,
            H100,
            "no place of a line",
        ),
        (convolutions(depthwise((9, 9, 1021, 64), (3, 3), padding="SAME"), "output").problem, H100, "no block has"),
    ],
)
def test_reasons(problem, target, said):
    assert said in (ENGINE.reason(problem, target) or "")


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        (LinesKnobs(5, 4, 1), "does not divide"),
        (LinesKnobs(4, 4, 11), "none of the 27 rows"),
        (LinesKnobs(4, 4, 999), "none of the 27 rows"),
        (LinesKnobs(4, 999, 1), "bytes of shared memory"),
    ],
)
def test_knobs_that_do_not_fit(chosen, said):
    assert lines_reason(PLAIN) is None
    with pytest.raises(ValueError, match="does not fit") as caught:
        ENGINE.build(chosen, PLAIN, H100)
    assert said in str(caught.value)


def test_knobs_that_make_no_sense():
    with pytest.raises(ValueError, match="stages"):
        LinesKnobs(stages=2)


@pytest.mark.skipif(not GPU, reason="there is no GPU")
@pytest.mark.parametrize("number", range(len(CALLS)), ids=NAMES)
def test_results(number):
    _, chosen, call = CALLS[number]
    operands, target = arrays(call), device.gpus()[0]
    for one in (chosen, *list(ENGINE.configurations(call.problem, target))[:2]):
        plan = ENGINE.build(one, call.problem, target)
        found, again = (run_plan(plan, call.signature.results.values(), operands) for _ in range(2))
        check(call, operands, found)
        assert all(first.tobytes() == second.tobytes() for first, second in zip(found, again, strict=True))
