"""The engine of any convolution: what it plans and refuses, that it compiles, and that it computes what is right."""

from dataclasses import replace

import jax
import pytest

from checking.cases.convolution import convolution
from checking.cases.dtypes import BF16, E4M3, F16, F64, I8, I32
from checking.compiler_log import compile_checked
from checking.convolution.calls import arrays, check, convolutions, emulate
from checking.emulation.plans import Emulated
from checking.product.calls import run_plan
from checking.targets import A100, H100
from jaxdnn import device
from jaxdnn.engines.convolution.simt.engine import ConvolutionSimt
from jaxdnn.engines.convolution.simt.knobs import ConvolutionSimtKnobs, knobs_reason

ENGINE = ConvolutionSimt()
GPU = jax.default_backend() == "gpu"
# Small tiles, so that there are several along each axis.
SMALL = ConvolutionSimtKnobs(32, 16, 4, 4, 8, resident=1)
WIDE = ConvolutionSimtKnobs(32, 32, 4, 4, 16, split_k=3, resident=1)
TENSOR = ConvolutionSimtKnobs(32, 16, 16, 16, 32, resident=1)
DOUBLE = ConvolutionSimtKnobs(32, 16, 16, 16, 8, split_k=2, resident=1)

CASES = {
    "plain": (SMALL, convolution((2, 5, 6, 3), (3, 2, 3, 20), padding="SAME")),
    "vectors": (SMALL, convolution((2, 5, 6, 8), (3, 3, 8, 20), padding="SAME")),
    "split": (WIDE, convolution((2, 5, 6, 8), (3, 3, 8, 36), padding="SAME")),
    "one dimension": (SMALL, convolution((2, 33, 4), (4, 4, 6), padding=((3, 0),))),
    "three dimensions": (SMALL, convolution((1, 4, 5, 4, 4), (3, 2, 3, 4, 5), strides=(1, 2, 1), padding="SAME")),
    "no dimension": (SMALL, convolution((5, 6), (3, 4), groups=2)),
    "strides": (SMALL, convolution((2, 9, 8, 4), (3, 3, 4, 6), strides=(2, 3), padding="SAME")),
    "dilation": (SMALL, convolution((2, 9, 8, 4), (3, 2, 4, 6), rhs_dilation=(3, 2), padding=((2, 1), (0, 3)))),
    "zeros between": (
        SMALL,
        convolution((2, 4, 3, 4), (3, 3, 4, 6), lhs_dilation=(2, 3), strides=(1, 2), padding=((1, 2), (3, 1))),
    ),
    "cut off": (SMALL, convolution((2, 9, 8, 4), (3, 3, 4, 6), padding=((-2, 1), (1, -3)))),
    "flipped": (SMALL, convolution((2, 6, 5, 4), (3, 2, 4, 6), padding="SAME", flip=True)),
    "groups": (SMALL, convolution((2, 6, 5, 12), (3, 2, 4, 18), padding="SAME", groups=3)),
    "depthwise": (SMALL, convolution((2, 6, 5, 6), (3, 3, 1, 12), padding="SAME", groups=6)),
    "bfloat16": (TENSOR, convolution((2, 5, 6, 8), (3, 3, 8, 24), BF16, padding="SAME")),
    "bfloat16, groups": (
        replace(TENSOR, split_k=2),
        convolution((2, 5, 6, 12), (3, 3, 4, 24), BF16, padding="SAME", groups=3, rhs_dilation=(2, 1)),
    ),
    "float16": (TENSOR, convolution((2, 5, 6, 3), (3, 3, 3, 5), F16, strides=(2, 1))),
    "float64": (DOUBLE, convolution((2, 5, 6, 4), (3, 3, 4, 6), F64, padding="SAME")),
    "float8": (SMALL, convolution((2, 5, 6, 4), (3, 3, 4, 6), E4M3, out_dtype=BF16)),
    "int8": (SMALL, convolution((2, 5, 6, 4), (3, 3, 4, 6), I8, out_dtype=I32)),
    "bias": (
        SMALL,
        convolution((2, 5, 6, 4), (3, 3, 2, 6), groups=2, epilogue="bias gelu", extras=(((6,), "float32"),)),
    ),
    "sums": (WIDE, convolution((2, 5, 6, 4), (3, 3, 4, 6), padding="SAME", epilogue="sums of channels")),
}
# Integers have no gradients; those of 8-bit floats are of 16-bit ones.
RESULTS = {"int8": ("output",), "float8": ("output",)}
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


LARGE = {
    "float32": convolution(
        (32, 28, 28, 128), (3, 3, 128, 128), padding="SAME", precision="highest", rhs_dilation=(2, 2)
    ),
    "unaligned": convolution((32, 28, 28, 3), (7, 7, 3, 33), padding="SAME", strides=(2, 2)),
    "groups": convolution((32, 56, 56, 256), (3, 3, 16, 256), BF16, padding="SAME", groups=16, rhs_dilation=(2, 2)),
    "transposed": convolution((2, 16, 16, 16, 64), (2, 2, 2, 64, 32), F16, kind="conv_transpose", strides=(2, 2, 2)),
    "float64": convolution((8, 28, 28, 64), (3, 3, 64, 64), F64, padding="SAME"),
    "bias": convolution(
        (32, 56, 56, 64),
        (3, 3, 32, 64),
        BF16,
        padding="SAME",
        groups=2,
        rhs_dilation=(2, 2),
        epilogue="bias gelu",
        extras=(((64,), "float32"),),
    ),
}


@pytest.mark.parametrize("target", [A100, H100], ids=lambda target: target.arch)
@pytest.mark.parametrize("name", LARGE)
def test_configurations_compile(name, target):
    for result in ("output", "image", "filter"):
        problem = convolutions(LARGE[name], result).problem
        found = {replace(knobs, split_k=min(knobs.split_k, 2)): 0 for knobs in ENGINE.configurations(problem, target)}
        for knobs in list(found)[: len(found) if target is H100 and name == "unaligned" else 1]:
            compile_checked(ENGINE.build(knobs, problem, target), knobs)


def test_sizes_are_not_in_the_code():
    cases = [convolution((n, size, size, 8), (3, 3, 8, 16), padding="SAME") for n in (2, 3) for size in (40, 44)]
    units = {ENGINE.build(SMALL, convolutions(case, "output").problem, H100).unit for case in cases}
    assert len(units) == 1


PLAIN = convolutions(CASES["plain"][1], "output").problem
LARGEST = convolutions(convolution((32, 56, 56, 256), (3, 3, 256, 256), BF16, padding="SAME"), "output").problem


@pytest.mark.parametrize(
    ("problem", "target", "said"),
    [
        (PLAIN, replace(A100, arch="sm_75"), "compute capability 8.0"),
        (replace(PLAIN, n=2**30), H100, "32-bit index"),
        (replace(PLAIN, windows=2 * PLAIN.windows), H100, "3 spatial dimensions"),
        (replace(PLAIN, b=replace(PLAIN.b, dtype="float64")), H100, "does not multiply float32 by float64"),
        (LARGEST, H100, "by cuDNN are faster"),
    ],
)
def test_reasons(problem, target, said):
    assert said in (ENGINE.reason(problem, target) or "")


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        (replace(SMALL, thread_n=6), "thread_n 6"),
        (replace(SMALL, depth=2), "can't share tiles of 16 x 2 of b evenly"),
        (replace(SMALL, split_k=64), "split_k is 64"),
        (ConvolutionSimtKnobs(4096, 128, 32, 32, 16), "bytes of shared memory"),
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
