"""The engine of depthwise convolutions on tensor cores: what it plans and refuses, that it compiles, and that it
computes what is right.
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
from jaxdnn.engines.convolution.depthwise.engine import ConvolutionDepthwise
from jaxdnn.engines.convolution.depthwise.knobs import DepthwiseKnobs
from jaxdnn.engines.convolution.sliding import sliding_reason

ENGINE = ConvolutionDepthwise()
GPU = jax.default_backend() == "gpu"


def depthwise(a, window, dtype=BF16, **fields):
    return convolution(a, (*window, 1, a[-1]), dtype, groups=a[-1], **fields)


def knobs(across, images, warps=8, stages=3, parts=1, **others):
    return DepthwiseKnobs(across, images, warps=warps, stages=stages, parts=parts, **others)


# Edges: strips that end past a line, lines of several ranges, images past the last one, channels past a slab, parts
# that begin within an image.
CASES = {
    "same": (knobs(2, 2, stages=4, parts=3), depthwise((3, 9, 17, 40), (3, 3), padding="SAME")),
    "whole strips": (knobs(1, 3, parts=4), depthwise((2, 6, 16, 8), (3, 3), padding="SAME")),
    "7 x 7": (knobs(2, 2, parts=2), depthwise((2, 9, 12, 24), (7, 7), padding="SAME")),
    "few warps": (knobs(3, 5, 4, stages=2, parts=2), depthwise((7, 5, 21, 16), (2, 3), F16, padding="SAME")),
    "16 strips": (knobs(4, 4, 16, parts=2), depthwise((4, 5, 29, 72), (3, 5), padding="SAME")),
    "wide slabs": (knobs(2, 2, slab=64, parts=2), depthwise((3, 5, 17, 104), (3, 3), F16, padding="SAME")),
    "causal, wide slabs": (
        knobs(2, 1, 8, slab=128, parts=5), depthwise((2, 70, 136), (4,), strides=(2,), padding=((3, 0),))
    ),
    "causal": (knobs(3, 2, stages=2, parts=2), depthwise((2, 70, 40), (4,), F16, padding=((3, 0),))),
    "strides": (knobs(1, 3, parts=2), depthwise((3, 11, 21, 32), (3, 3), strides=(2, 2), padding=((1, 1), (0, 1)))),
    "stride past the window": (knobs(2, 1), depthwise((1, 9, 33, 8), (2, 1), strides=(3, 2), padding="SAME")),
    "dilation": (knobs(3, 1, parts=3), depthwise((2, 13, 17, 16), (3, 3), rhs_dilation=(2, 3), padding="SAME")),
    "dilation and strides": (
        knobs(2, 2, parts=2), depthwise((2, 19, 17, 8), (3, 2), rhs_dilation=(3, 2), strides=(2, 1))
    ),
    "one row of a class": (knobs(2, 1), depthwise((2, 3, 9, 8), (2, 3), rhs_dilation=(5, 1), padding="SAME")),
    "cut off, flipped": (
        knobs(2, 1, 16), depthwise((2, 7, 9, 8), (4, 3), padding=((2, -1), (1, 3)), flip=True)
    ),
    "padding past the window": (knobs(1, 2), depthwise((1, 3, 2, 8), (2, 2), padding=((4, 3), (2, 5)))),
    "bias": (
        knobs(2, 1),
        depthwise((2, 7, 9, 24), (3, 3), padding="SAME", epilogue="bias gelu", extras=(((24,), "float32"),)),
    ),
}  # fmt: skip
# What a convolution with strides slides over, to its image, is dilated.
RESULTS = dict.fromkeys(
    ("strides", "stride past the window", "dilation and strides", "causal, wide slabs"), ("output", "filter")
)
CALLS = [
    (f"{name}, {result}", chosen, convolutions(case, result))
    for name, (chosen, case) in CASES.items()
    for result in RESULTS.get(name, ("output", "image", "filter"))
]
NAMES = [name for name, *_ in CALLS]
LARGE = {
    "7 x 7": depthwise((128, 56, 56, 96), (7, 7), padding="SAME"),
    "7 x 7, 14": depthwise((128, 14, 14, 384), (7, 7), padding="SAME"),
    "5 x 5": depthwise((64, 28, 28, 240), (5, 5), F16, padding="SAME"),
    "3 x 3": depthwise((256, 56, 56, 144), (3, 3), padding="SAME"),
    "3 x 3, stride 2": depthwise((256, 112, 112, 96), (3, 3), F16, padding="SAME", strides=(2, 2)),
    "3 x 3, dilation 6": depthwise((16, 65, 65, 256), (3, 3), padding="SAME", rhs_dilation=(6, 6)),
    "causal": depthwise((8, 4096, 4096), (4,), padding=((3, 0),)),
    "gelu": depthwise(
        (32, 56, 56, 96), (7, 7), padding="SAME", epilogue="bias gelu", extras=(((96,), "float32"),)
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    plans = [ENGINE.build(chosen, call.problem, H100) for _, chosen, call in CALLS]
    return Emulated(plans, tmp_path_factory.mktemp("emulated"))


@pytest.mark.parametrize("number", range(len(CALLS)), ids=NAMES)
def test_its_text_computes_what_is_right(number, emulated):
    _, _, call = CALLS[number]
    assert sliding_reason(call.problem) is None
    emulate(emulated, number, call)


SLID = ("same", "7 x 7", "causal", "strides", "dilation", "cut off, flipped")


@pytest.mark.parametrize(
    "number", [i for i, name in enumerate(NAMES) if name.rpartition(", ")[0] in SLID], ids=NAMES.__getitem__
)
def test_what_is_no_number_stays_in_its_windows(number, emulated):
    """A strip is multiplied by the zeros of bands, and places past an edge are zeros that meet what is none."""
    call = CALLS[number][2]
    operands = arrays(call)
    slid = call.problem.b if NAMES[number].endswith("image") else call.problem.a
    operands[slid.buffer.index][0, ..., -1, 0] = np.nan
    operands[slid.buffer.index][-1, ..., 1, -1] = np.nan
    check_where_finite(call, operands, emulated, number)


@pytest.mark.parametrize("name", LARGE)
def test_configurations_compile(name):
    for result in RESULTS.get("strides" if "stride" in name else name, ("output", "image", "filter")):
        problem = convolutions(LARGE[name], result).problem
        for chosen in list(ENGINE.configurations(problem, H100))[:2]:
            plan = ENGINE.build(chosen, problem, H100)
            log = compile_checked(plan, chosen).log
            assert not any(stack_frames(log).values()), f"{chosen} keeps sums in local memory"


@pytest.mark.parametrize(
    ("case", "chosen"),
    [
        (LARGE["7 x 7"], True),
        (LARGE["7 x 7, 14"], True),
        (LARGE["causal"], True),
        (LARGE["gelu"], True),
        # Too little to wait for the first rows.
        (depthwise((1, 28, 28, 32), (7, 7), padding="SAME"), False),
        (depthwise((1, 28, 28, 768), (3, 3), padding="SAME"), False),
    ],
)
def test_it_is_chosen_where_it_is_faster(case, chosen):
    for result in ("output", "image", "filter"):
        reason = ENGINE.reason(convolutions(case, result).problem, H100)
        assert (reason or "").startswith("" if chosen else "ordinary arithmetic takes less time")
        assert (reason is None) == chosen


def test_a_plan_is_what_it_is():
    """Seven strips of 8 places of two images are a step, of 3 slabs of channels."""
    problem = convolutions(LARGE["7 x 7"], "output").problem
    (launch,) = ENGINE.build(knobs(7, 2, 8, 8, 44), problem, H100).launches
    assert (launch.kernel, launch.grid, launch.block) == ("depthwise_fprop", (3 * 44, 1, 1), (256, 1, 1))
    copied = 2 * (6 + 2)  # lines of 8 places
    assert launch.shared_memory == 8 * copied * 32 * 16 + 2 * 32 * 16 * ((copied + 1) + (16 + 1))


def test_sizes_are_not_in_the_code():
    cases = [depthwise((n, size, size, 96), (3, 3), padding="SAME") for n in (2, 3) for size in (40, 44)]
    for result in ("output", "filter"):
        problems = [convolutions(case, result).problem for case in cases]
        assert (
            len({ENGINE.build(knobs(5, 2), problem, H100).unit.partition("product_split")[0] for problem in problems})
            == 1
        )


PLAIN = convolutions(CASES["same"][1], "output").problem


@pytest.mark.parametrize(
    ("problem", "target", "said"),
    [
        (PLAIN, A100, "compute capability 9.0"),
        (replace(PLAIN, k=2), H100, "1 x 2 channels"),
        (replace(PLAIN, n=2**30), H100, "32-bit index"),
        (replace(PLAIN, groups=2**27), H100, "more bytes than"),
        (replace(PLAIN, windows=(*PLAIN.windows, PLAIN.windows[0])), H100, "the convolution 3"),
        (replace(PLAIN, batch=2), H100, "a filter of its own"),
        (replace(PLAIN, b=replace(PLAIN.b, dtype="float32")), H100, "these are bfloat16 and float32"),
        (convolutions(depthwise((2, 9, 9, 12), (3, 3)), "output").problem, H100, "no vectors of 8"),
        (convolutions(CASES["strides"][1], "image").problem, H100, "is dilated"),
        (convolutions(depthwise((2, 40, 40, 32), (31, 31)), "output").problem, H100, "registers hold"),
        (
            convolutions(
                depthwise((2, 7, 6, 8), (3, 3), padding="SAME", epilogue="residual",
                          extras=(((8,), BF16), ((2, 7, 6, 8), BF16))),
                "output",
            ).problem,
            H100,
            "more than the channel",
        ),
        (
            convolutions(depthwise((2, 7, 6, 8), (3, 3), epilogue="sums of channels"), "output").problem,
            H100,
            "is reduced",
        ),
    ],
)  # fmt: skip
def test_reasons(problem, target, said):
    assert said in (ENGINE.reason(problem, target) or "")


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        (knobs(2, 2, parts=999), "rows of strips"),
        (knobs(2, 2, stages=99), "bytes of shared memory"),
        (knobs(2, 2, 16, slab=128), "registers for 8 channels, and has 128"),
    ],
)
def test_knobs_that_do_not_fit(chosen, said):
    with pytest.raises(ValueError, match="does not fit") as caught:
        ENGINE.build(chosen, PLAIN, H100)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"warps": 5}, "expected one of"),
        ({"across": 9}, "more than the 16"),
        ({"slab": 96}, "expected one of"),
        ({"slab": 32, "warps": 32}, "expected one of"),
        ({"stages": 1}, "stages"),
    ],
)
def test_knobs_that_make_no_sense(fields, said):
    with pytest.raises(ValueError, match=said):
        DepthwiseKnobs(**fields)


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
