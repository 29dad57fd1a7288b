"""The CPU's engine of convolutions: that it computes what is right, with every instruction set."""

from dataclasses import replace
from itertools import islice

import jax
import pytest

from checking.cases.convolution import convolution
from checking.cases.dtypes import BF16, F16, F64
from checking.convolution.calls import arrays, check, convolutions
from checking.product.calls import run_plan
from jaxdnn import _native, device
from jaxdnn.config import Options
from jaxdnn.engines.convolution.host.engine import HostConvolution
from jaxdnn.engines.convolution.host.knobs import HostDepthwiseKnobs, HostWindowKnobs

ENGINE = HostConvolution()
CPU = device.find_target("cpu", Options())
ISAS = _native.host()["isas"]


def depthwise(a, window, dtype="float32", **fields):
    return convolution(a, (*window, 1, a[-1]), dtype, groups=a[-1], **fields)


SMALL = HostDepthwiseKnobs(width=3, span=5)  # fewer channels than a vector has, and tiles that end early
WIDE = HostDepthwiseKnobs(width=20, span=32)
DEPTHWISE = {
    "few channels": (SMALL, depthwise((2, 7, 6, 7), (3, 3), padding="SAME")),
    "many": (WIDE, depthwise((2, 9, 30, 53), (3, 11), padding="SAME")),
    "one dimension": (WIDE, depthwise((2, 37, 40), (4,), padding=((3, 0),))),
    "three dimensions": (SMALL, depthwise((2, 4, 5, 6, 20), (3, 2, 3), padding="SAME")),
    "none": (SMALL, depthwise((5, 6), ())),
    "strides": (WIDE, depthwise((2, 9, 17, 40), (3, 3), strides=(2, 3), padding="SAME")),
    "dilation": (WIDE, depthwise((2, 9, 17, 40), (3, 3), rhs_dilation=(2, 3), padding="SAME")),
    "zeros between": (
        WIDE,
        depthwise((2, 5, 4, 40), (3, 3), lhs_dilation=(2, 4), rhs_dilation=(1, 2), padding=((1, 2), (3, 1))),
    ),
    "cut off": (WIDE, depthwise((2, 9, 8, 40), (3, 3), padding=((-2, 1), (1, -3)))),
    "flipped": (WIDE, depthwise((2, 7, 6, 40), (3, 2), padding="SAME", flip=True)),
    "float64": (WIDE, depthwise((2, 7, 6, 20), (3, 3), F64, padding="SAME")),
    "bfloat16": (WIDE, depthwise((2, 7, 16, 40), (3, 3), BF16, padding="SAME")),
    "float16": (WIDE, depthwise((2, 7, 16, 40), (3, 3), F16, padding="SAME")),
    "bias": (
        WIDE,
        depthwise((2, 7, 6, 40), (3, 3), padding="SAME", epilogue="bias gelu", extras=(((40,), "float32"),)),
    ),
}

# Tiles that end within a line of places, a panel and a group; blocks that end within a tap; and, of a filter's
# gradient, splits.
TILES = HostWindowKnobs(rows=37, columns=32, depth=64, splits=2, tiles_per_task=2)
DENSE = {
    "same": convolution((2, 9, 14, 40), (3, 3, 40, 33), padding="SAME"),
    "few channels": convolution((2, 9, 17, 3), (5, 5, 3, 32), padding="SAME", strides=(2, 2)),
    "one dimension": convolution((3, 37, 80), (3, 80, 65), padding="SAME"),
    "three dimensions": convolution((2, 4, 5, 6, 20), (3, 2, 3, 20, 24), padding="SAME"),
    "strides": convolution((2, 9, 17, 24), (3, 3, 24, 40), strides=(2, 3), padding="SAME"),
    "one tap of a stride": convolution((2, 9, 8, 72), (1, 1, 72, 65), strides=(2, 2)),
    "dilation": convolution((2, 9, 17, 24), (3, 3, 24, 40), rhs_dilation=(2, 3), padding="SAME"),
    "zeros between": convolution(
        (2, 5, 4, 24), (3, 3, 24, 40), lhs_dilation=(2, 4), rhs_dilation=(1, 2), padding=((1, 2), (3, 1))
    ),
    "no taps": convolution(
        (2, 5, 40), (2, 40, 40), strides=(2,), lhs_dilation=(2,), rhs_dilation=(2,), padding=((1, 1),)
    ),
    "cut off": convolution((2, 9, 8, 24), (3, 3, 24, 40), padding=((-2, 1), (1, -3))),
    "flipped": convolution((2, 7, 6, 24), (3, 2, 24, 40), padding="SAME", flip=True),
    "groups": convolution((2, 7, 6, 60), (3, 3, 20, 105), padding="SAME", groups=3),
    "groups of the batch": convolution((4, 5, 24), (2, 24, 60), batch_groups=2),
    "float64": convolution((2, 7, 6, 24), (3, 3, 24, 40), F64, padding="SAME"),
    "bfloat16": convolution((2, 7, 16, 64), (3, 3, 64, 64), BF16, padding="SAME"),
    "bfloat16, odd": convolution((2, 7, 16, 35), (3, 3, 35, 37), BF16, padding="SAME", strides=(1, 2)),
    "float16": convolution((2, 7, 16, 40), (3, 3, 40, 33), F16, padding="SAME"),
    "bias": convolution(
        (2, 7, 6, 24), (3, 3, 24, 40), padding="SAME", epilogue="bias gelu", extras=(((40,), "float32"),)
    ),
    "sums of channels": convolution((2, 7, 6, 24), (3, 3, 24, 40), padding="SAME", epilogue="sums of channels"),
}

LEFT = {("few channels", "image"), ("no taps", "filter")}  # to XLA
RESULTS = ("output", "image", "filter")
CALLS = [
    *((f"depthwise, {name}, {one}", *own, one) for name, own in DEPTHWISE.items() for one in RESULTS),
    *(
        (f"{name}, {one}", TILES, case, one)
        for name, case in DENSE.items()
        for one in RESULTS
        if (name, one) not in LEFT
    ),
]
CALLS = [(name, knobs, convolutions(case, result)) for name, knobs, case, result in CALLS]
CALLS += [(f"mapped, {one}", TILES, convolutions(DENSE["groups"], one, (0, 0))) for one in RESULTS]
OPERAND = convolution(
    (2, 7, 6, 24), (3, 3, 24, 64), padding="SAME", epilogue="operand alone", extras=(((2, 7, 6, 64), "float32"),)
)
CALLS += [("operand alone", TILES, convolutions(OPERAND, "output"))]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("number", range(len(CALLS)), ids=[name for name, *_ in CALLS])
def test_results(number, isa, cpus):
    _, knobs, call = CALLS[number]
    assert ENGINE.reason(call.problem, CPU) is None
    with jax.default_device(cpus[0]):
        for one in (knobs, *islice(ENGINE.configurations(call.problem, CPU), 1)):
            plan = replace(ENGINE.build(one, call.problem, CPU), arch=isa)
            found = run_plan(plan, call.signature.results.values(), arrays(call))
            check(call, arrays(call), found)


PLAIN = convolutions(DEPTHWISE["many"][1], "output").problem
WIDE_PLAIN = convolutions(DENSE["same"], "output").problem


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        (replace(PLAIN, b=replace(PLAIN.b, dtype="bfloat16")), "multiply float32 by bfloat16"),
        (replace(PLAIN, windows=2 * PLAIN.windows), "3 spatial dimensions"),
        (convolutions(depthwise((2, 5, 4), (3,), epilogue="sums of channels"), "output").problem, "reduces"),
        (replace(WIDE_PLAIN, c=7), "faster for windows of 63 elements"),
        (convolutions(DENSE["few channels"], "image").problem, "faster for 3 channels of the result"),
        (convolutions(DENSE["no taps"], "filter").problem, "image of a filter's gradient is dilated"),
    ],
)
def test_reasons(problem, said):
    assert said in (ENGINE.reason(problem, CPU) or "")


def test_the_same_bits_whatever_the_count_of_threads():
    for case in DENSE.values():
        problem = convolutions(case, "output").problem
        few, many = (next(iter(ENGINE.configurations(problem, replace(CPU, sm_count=count)))) for count in (1, 64))
        assert few == many
