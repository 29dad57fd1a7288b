"""The CPU's engine of depthwise convolutions: that it computes what is right, with every instruction set."""

from dataclasses import replace

import jax
import pytest

from checking.cases.convolution import convolution
from checking.cases.dtypes import BF16, F16, F64
from checking.convolution.calls import arrays, check, convolutions
from checking.product.calls import run_plan
from jaxdnn import _native, device
from jaxdnn.config import Options
from jaxdnn.engines.convolution.host import HostConvolution, HostConvolutionKnobs

ENGINE = HostConvolution()
CPU = device.find_target("cpu", Options())
ISAS = _native.host()["isas"]
SMALL = HostConvolutionKnobs(width=3, span=5)  # fewer channels than a vector has, and tiles that end early
WIDE = HostConvolutionKnobs(width=20, span=32)


def depthwise(a, window, dtype="float32", **fields):
    return convolution(a, (*window, 1, a[-1]), dtype, groups=a[-1], **fields)


CASES = {
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
CALLS = [
    (f"{name}, {result}", knobs, convolutions(case, result))
    for name, (knobs, case) in CASES.items()
    for result in ("output", "image", "filter")
]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("number", range(len(CALLS)), ids=[name for name, *_ in CALLS])
def test_results(number, isa, cpus):
    _, knobs, call = CALLS[number]
    assert ENGINE.reason(call.problem, CPU) is None
    with jax.default_device(cpus[0]):
        for one in (knobs, *ENGINE.configurations(call.problem, CPU)):
            plan = replace(ENGINE.build(one, call.problem, CPU), arch=isa)
            found = run_plan(plan, call.signature.results.values(), arrays(call))
            check(call, arrays(call), found)


PLAIN = convolutions(CASES["many"][1], "output").problem


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        (replace(PLAIN, k=2), "1 x 2 channels"),
        (replace(PLAIN, n=0), "no elements"),
        (replace(PLAIN, b=replace(PLAIN.b, dtype="bfloat16")), "multiply float32 by bfloat16"),
        (replace(PLAIN, windows=2 * PLAIN.windows), "3 spatial dimensions"),
        (convolutions(depthwise((2, 5, 4), (3,), epilogue="sums of channels"), "output").problem, "reduces"),
    ],
)
def test_reasons(problem, said):
    assert said in (ENGINE.reason(problem, CPU) or "")
