"""The engine of depthwise convolutions: what it plans and refuses, that it compiles, and that it computes what is
right.
"""

from dataclasses import replace

import jax
import numpy as np
import pytest

from checking.cases.convolution import convolution
from checking.cases.dtypes import BF16, E4M3, F16, F64, I8, I32
from checking.compiler_log import compile_checked
from checking.convolution.calls import arrays, check, convolutions, empty, emulate
from checking.emulation.plans import Emulated
from checking.product.calls import run_plan
from checking.targets import A100, H100
from jaxdnn import device
from jaxdnn.engines.convolution.direct.engine import ConvolutionDirect
from jaxdnn.engines.convolution.direct.heuristic import seconds
from jaxdnn.engines.convolution.direct.knobs import ConvolutionDirectKnobs, knobs_reason
from jaxdnn.engines.convolution.problem import Window

ENGINE = ConvolutionDirect()
GPU = jax.default_backend() == "gpu"
# So that there are several tiles along each axis, blocks along channels, and a block has several tiles.
SMALL = ConvolutionDirectKnobs(width=2, strips=2, groups=3, height=2, parts=2, stages=2)
WIDE = ConvolutionDirectKnobs(4, strips=2, groups=4, height=3, parts=3, stages=3, tap_rows=2, tap_columns=2)
ONE = ConvolutionDirectKnobs(width=3, strips=3, groups=8, height=4, parts=1, stages=4)


def depthwise(a, window, multiplier=1, dtype="float32", channels=1, **fields):
    """Of so many channels a group."""
    groups = a[-1] // channels
    return convolution(a, (*window, channels, groups * multiplier), dtype, groups=groups, **fields)


CASES = {
    "plain": (SMALL, depthwise((2, 7, 6, 5), (3, 3), padding="SAME")),
    "tall": (WIDE, depthwise((2, 9, 5, 8), (4, 2), padding=((3, 2), (0, 1)))),
    "vectors": (ONE, depthwise((2, 9, 10, 16), (3, 3), dtype=BF16, padding="SAME")),
    "single elements": (WIDE, depthwise((2, 3, 9, 10, 7), (2, 3, 3), dtype=BF16, padding="SAME")),
    "rows that end early": (ONE, depthwise((1, 5, 9, 4), (2, 3), rhs_dilation=(7, 1), padding=((4, 3), (1, 0)))),
    "one row of a class": (SMALL, depthwise((2, 3, 6, 4), (1, 3), rhs_dilation=(5, 1), padding="SAME")),
    "one dimension": (WIDE, depthwise((2, 23, 8), (4,), padding=((3, 0),), dtype=F16)),
    "three dimensions": (SMALL, depthwise((2, 4, 5, 6, 4), (3, 2, 3), padding="SAME")),
    "none": (SMALL, depthwise((5, 6), ())),
    "strides": (SMALL, depthwise((2, 9, 8, 4), (3, 3), strides=(2, 3), padding="SAME")),
    "stride past the window": (SMALL, depthwise((2, 9, 8, 4), (2, 1), strides=(3, 2), padding="SAME")),
    "dilation": (SMALL, depthwise((2, 9, 11, 4), (3, 3), rhs_dilation=(2, 3), padding="SAME")),
    "dilation and strides": (WIDE, depthwise((2, 13, 11, 4), (3, 2), rhs_dilation=(3, 2), strides=(2, 3))),
    "zeros between": (
        SMALL,
        depthwise((2, 5, 4, 4), (3, 3), lhs_dilation=(2, 4), rhs_dilation=(1, 2), padding=((1, 2), (3, 1))),
    ),
    "zeros between, strides": (
        SMALL,
        depthwise((2, 5, 7, 4), (4, 3), lhs_dilation=(2, 6), strides=(3, 4), padding=((2, 1), (2, 3))),
    ),
    "three dimensions of zeros": (
        SMALL,
        depthwise((1, 3, 3, 3, 4), (2, 3, 2), lhs_dilation=(2, 1, 3), padding=((1, 1), (0, 2), (2, 0))),
    ),
    "cut off": (SMALL, depthwise((2, 9, 8, 4), (3, 3), padding=((-2, 1), (1, -3)))),
    "padding past the window": (SMALL, depthwise((1, 3, 2, 4), (2, 2), padding=((4, 3), (2, 5)))),
    "flipped": (SMALL, depthwise((2, 7, 6, 4), (3, 2), padding="SAME", flip=True)),
    "multiplier": (SMALL, depthwise((2, 7, 6, 4), (3, 3), 3, padding="SAME")),
    "groups of channels": (SMALL, depthwise((2, 7, 6, 8), (3, 2), 3, channels=2, padding="SAME", strides=(2, 1))),
    "float64": (SMALL, depthwise((2, 7, 6, 4), (3, 3), dtype=F64, padding="SAME")),
    "float8": (SMALL, depthwise((2, 7, 6, 4), (3, 3), dtype=E4M3, padding="SAME", out_dtype=BF16)),
    "int8": (SMALL, depthwise((2, 7, 6, 4), (3, 3), dtype=I8, padding="SAME", out_dtype=I32)),
    "bias": (WIDE, depthwise((2, 7, 6, 8), (3, 3), padding="SAME", epilogue="bias gelu", extras=(((8,), "float32"),))),
    "sums": (SMALL, depthwise((2, 7, 6, 4), (3, 3), padding="SAME", epilogue="sums of channels")),
}
# Integers have no gradients; and a product has no window of a single place.
RESULTS = {"int8": ("output",), "zeros between, strides": ("output", "image")}
CALLS = [
    (f"{name}, {result}", knobs, convolutions(case, result))
    for name, (knobs, case) in CASES.items()
    for result in RESULTS.get(name, ("output", "image", "filter"))
]
NAMES = [name for name, *_ in CALLS]


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    plans = [ENGINE.build(knobs, call.problem, H100) for _, knobs, call in CALLS]
    return Emulated(plans, tmp_path_factory.mktemp("emulated"))


@pytest.mark.parametrize("number", range(len(CALLS)), ids=NAMES)
def test_its_text_computes_what_is_right(number, emulated):
    _, knobs, call = CALLS[number]
    assert ENGINE.reason(call.problem, H100) is None
    assert knobs_reason(call.problem, knobs, H100) is None
    emulate(emulated, number, call)


def test_what_meets_no_place_is_not_multiplied(tmp_path):
    """A window that ends before the image does leaves its last column out, of which the first tap takes none."""
    call = convolutions(depthwise((1, 4, 5, 3), (2, 3), strides=(1, 2)), "filter")
    operands, found = arrays(call), empty(call)
    operands[0][:, :, 4] = np.inf
    Emulated([ENGINE.build(replace(SMALL, width=4), call.problem, H100)], tmp_path).run(0, operands, found)
    assert np.isfinite(found[0][:, :2]).all()
    assert not np.isfinite(found[0][:, 2]).any()


LARGE = {
    "7 x 7": depthwise((128, 56, 56, 96), (7, 7), dtype=BF16, padding="SAME"),
    "7 x 7, float32": depthwise((128, 14, 14, 384), (7, 7), padding="SAME"),
    "3 x 3": depthwise((256, 56, 56, 144), (3, 3), dtype=BF16, padding="SAME"),
    "3 x 3, stride 2": depthwise((256, 112, 112, 96), (3, 3), dtype=F16, padding="SAME", strides=(2, 2)),
    "3 x 3, dilation 6": depthwise((16, 65, 65, 256), (3, 3), dtype=BF16, padding="SAME", rhs_dilation=(6, 6)),
    "causal": depthwise((8, 4096, 4096), (4,), dtype=BF16, padding=((3, 0),)),
    "3 x 3 x 3": depthwise((4, 16, 56, 56, 64), (3, 3, 3), dtype=BF16, padding="SAME"),
    "multiplier": depthwise((32, 56, 56, 32), (3, 3), 4, dtype=BF16, padding="SAME"),
    "31 x 31": depthwise((8, 32, 32, 128), (31, 31), dtype=BF16, padding="SAME"),
    "float64": depthwise((8, 56, 56, 96), (7, 7), dtype=F64, padding="SAME"),
    "gelu": depthwise(
        (32, 56, 56, 96), (7, 7), dtype=BF16, padding="SAME", epilogue="bias gelu", extras=(((96,), "float32"),)
    ),
}


@pytest.mark.parametrize("target", [A100, H100], ids=lambda target: target.arch)
@pytest.mark.parametrize("name", LARGE)
def test_configurations_compile(name, target):
    for result in ("output", "image", "filter"):
        problem = convolutions(LARGE[name], result).problem
        assert ENGINE.reason(problem, target) is None
        several = target is H100 and name in ("7 x 7", "3 x 3")
        for knobs in list(ENGINE.configurations(problem, target))[: 3 if several else 1]:
            compile_checked(ENGINE.build(knobs, problem, target), knobs)


def test_a_plan_is_what_it_is():
    problem = convolutions(LARGE["7 x 7"], "output").problem
    knobs = ConvolutionDirectKnobs(width=14, strips=4, groups=32, height=28, parts=50)
    (launch,) = ENGINE.build(knobs, problem, H100).launches
    assert (launch.kernel, launch.grid, launch.block) == ("convolution_fprop", (3 * 50, 1, 1), (32 * 4, 1, 1))


def test_sizes_are_not_in_the_code():
    cases = [depthwise((n, size, size, 96), (3, 3), dtype=BF16, padding="SAME") for n in (2, 3) for size in (40, 44)]
    knobs = ConvolutionDirectKnobs()
    units = {ENGINE.build(knobs, convolutions(case, "output").problem, H100).unit for case in cases}
    assert len(units) == 1


def test_channels_that_threads_load_one_by_one_take_longer():
    """They wait for them, of 51 channels in bfloat16, where 52 are copied by fours."""
    knobs = ConvolutionDirectKnobs(width=2, strips=5, groups=32, height=4, parts=56, stages=4, resident=4)
    odd, even = (
        seconds(
            convolutions(depthwise((2, 7, 16, 9, c), (5, 5, 5), dtype=BF16, padding="SAME"), "output").problem,
            knobs,
            H100,
        )
        for c in (51, 52)
    )
    assert odd > 1.5 * even


PLAIN = convolutions(CASES["plain"][1], "output").problem


@pytest.mark.parametrize(
    ("problem", "target", "said"),
    [
        (PLAIN, replace(A100, arch="sm_75"), "compute capability 8.0"),
        (replace(PLAIN, c=8, k=4), H100, "8 x 4 channels"),
        (replace(PLAIN, n=2**30), H100, "32-bit index"),
        (replace(PLAIN, windows=2 * PLAIN.windows), H100, "3 spatial dimensions"),
        (replace(PLAIN, windows=(Window(900, 300, 601), PLAIN.windows[1])), H100, "windows are too large"),
        (replace(PLAIN, b=replace(PLAIN.b, dtype="float64")), H100, "does not multiply float32 by float64"),
    ],
)
def test_reasons(problem, target, said):
    assert said in (ENGINE.reason(problem, target) or "")


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        (ConvolutionDirectKnobs(strips=32, groups=64), "2048 threads"),
        (ConvolutionDirectKnobs(stages=9999), "bytes of shared memory"),
        (ConvolutionDirectKnobs(parts=99), "there are 2 tiles"),
    ],
)
def test_knobs_that_do_not_fit_have_a_reason(knobs, said):
    assert said in (knobs_reason(PLAIN, knobs, A100) or "")


@pytest.mark.skipif(not GPU, reason="there is no GPU")
@pytest.mark.parametrize("number", range(len(CALLS)), ids=NAMES)
def test_results(number):
    _, knobs, call = CALLS[number]
    operands, target = arrays(call), device.gpus()[0]
    for one in (knobs, *list(ENGINE.configurations(call.problem, target))[:2]):
        plan = ENGINE.build(one, call.problem, target)
        found, again = (run_plan(plan, call.signature.results.values(), operands) for _ in range(2))
        check(call, operands, found)
        assert all(first.tobytes() == second.tobytes() for first, second in zip(found, again, strict=True))
