"""The Hopper engine of convolutions: what it plans and refuses, and that it compiles and computes what is right."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn
from checking.calls import calls_of
from checking.cases.convolution import FIRST, convolution
from checking.cases.dtypes import BF16, E4M3, F16, F32, I8, I32
from checking.compiler_log import kernels, launch_bounds
from checking.convolution import problems
from checking.emulation.plans import Emulated
from checking.product.calls import run_plan
from jaxdnn import _native, device
from jaxdnn.engines.base import MAX_ARGUMENTS
from jaxdnn.engines.convolution.implicit_gemm import implicit_gemm
from jaxdnn.engines.convolution.problem import Convolution
from jaxdnn.engines.convolution.sm90.engine import ConvolutionSm90
from jaxdnn.engines.convolution.sm90.knobs import knobs_reason
from jaxdnn.engines.product.sm90.knobs import Sm90Knobs
from jaxdnn.plan import TensorMap
from jaxdnn.planning.calls import find_calls

ENGINE = ConvolutionSm90()
H100, A100 = device._NAMED[90], device._NAMED[80]
GPU = jax.default_backend() == "gpu"
FEW = replace(H100, sm_count=3)  # multiprocessors, so that each works through several tiles


def calls(case, axes=None):
    """The calls of a case that are convolutions, by their directions."""
    found = [call for call in calls_of(case, axes) if isinstance(call.problem, Convolution)]
    return {call.problem.result: call for call in found}


def row(n, dtype=BF16):
    return ((n,), dtype)


# Edges in each direction: places of several images in a tile, channels that end in a stage, taps outside of the image.
SMALL = {
    "same": convolution((3, 9, 8, 72), (3, 3, 72, 40), BF16, padding="SAME"),
    "stride": convolution((2, 11, 10, 64), (3, 2, 64, 24), F16, strides=(2, 3), padding=((1, 0), (2, 1))),
    "flipped": convolution((2, 9, 7, 16), (3, 2, 16, 72), BF16, padding=((1, 1), (0, 1)), flip=True),
    "one dimension": convolution((3, 70, 64), (4, 64, 48), BF16, rhs_dilation=(3,), padding=((-2, 5),)),
    "three dimensions": convolution((2, 4, 5, 6, 64), (3, 2, 3, 64, 32), BF16, padding="SAME"),
    "wider than the image": convolution((2, 3, 3, 64), (5, 5, 64, 16), BF16, padding=((3, 4), (2, 3))),
    "single places": convolution((2, 7, 6, 64), (1, 1, 64, 32), BF16, strides=(2, 3)),
    "stride and dilation": convolution(
        (2, 17, 13, 64), (3, 2, 64, 32), BF16, strides=(2, 4), rhs_dilation=(3, 2), padding=((2, 3), (-1, 1)), flip=True
    ),
    "dilated image": convolution((2, 6, 5, 64), (3, 4, 64, 32), F16, lhs_dilation=(3, 2), padding=((2, 1), (0, 4))),
    "dilated image, stride": convolution(
        (2, 9, 7, 64), (3, 2, 64, 32), BF16, lhs_dilation=(3, 4), strides=(2, 6), padding=((2, 1), (3, 0))
    ),
    "transposed": convolution((1, 3, 4, 3, 64), (2, 2, 2, 64, 32), BF16, kind="conv_transpose", strides=(2, 2, 2)),
    "lines of 64 bytes": convolution((2, 9, 8, 96), (3, 3, 96, 32), BF16, padding="SAME"),
    "lines of 64 bytes, flipped": convolution((2, 9, 8, 32), (3, 3, 32, 96), BF16, padding="SAME", flip=True),
    "lines of 32 bytes": convolution((2, 9, 8, 16), (3, 3, 16, 48), BF16, strides=(2, 1), padding="SAME"),
    "groups of 32": convolution((2, 6, 7, 64), (3, 3, 32, 128), BF16, padding="SAME", groups=2),
    "groups of 16": convolution((2, 6, 7, 32), (3, 3, 16, 32), BF16, rhs_dilation=(2, 2), padding="SAME", groups=2),
    "groups of 48": convolution((2, 5, 4, 96), (2, 3, 48, 64), BF16, padding="SAME", groups=2),
    "few channels": convolution((2, 12, 11, 8), (3, 3, 8, 16), BF16, padding="SAME"),
    "groups": convolution((2, 6, 7, 128), (3, 3, 64, 128), BF16, padding="SAME", groups=2),
    "epilogue": convolution(
        (2, 6, 7, 64), (3, 3, 64, 64), BF16, padding="SAME", epilogue="bias gelu", extras=(row(64),)
    ),
    "reductions": convolution((2, 6, 7, 64), (3, 3, 64, 40), BF16, padding="SAME", epilogue="sums of channels"),
    "stored elsewhere": convolution((2, 64, 6, 7), (36, 64, 3, 3), BF16, layout=FIRST, padding="SAME"),
}
MAPPED = {
    "images, mapped": (SMALL["few channels"], (0, None)),
    "both, mapped": (convolution((2, 4, 8, 64), (3, 2, 64, 40), BF16, padding="SAME"), (0, 0)),
    "filters, mapped": (SMALL["stride"], (None, 0)),
}
PROBLEMS = {
    f"{name}, {direction}": call
    for name, (case, axes) in ({name: (case, None) for name, case in SMALL.items()} | MAPPED).items()
    for direction, call in calls(case, axes).items()
    if not ENGINE.reason(call.problem, H100)
}
ALONE = Sm90Knobs(tile_m=64, tile_n=64, stages=3, cluster_m=1, consumers=1)
# What no heuristic would choose for so few places.
FORCED = {
    "same, output": [
        Sm90Knobs(tile_m=128, tile_n=64, stages=3, cluster_m=2),
        Sm90Knobs(tile_m=128, tile_n=64, stages=3, cluster_m=1, split_k=5),
    ],
    "same, image": [Sm90Knobs(tile_m=64, tile_n=64, stages=3, cluster_m=1, cluster_n=2, consumers=1)],
    "flipped, image": [Sm90Knobs(tile_m=64, tile_n=64, stages=3, cluster_m=2, cluster_n=2, consumers=1)],
    "stride, filter": [
        Sm90Knobs(tile_m=128, tile_n=64, stages=3, cluster_m=2),
    ],
    "three dimensions, filter": [Sm90Knobs(tile_m=256, tile_n=64, stages=3, cluster_m=1, split_k=3)],
    "groups, filter": [Sm90Knobs(tile_m=64, tile_n=64, stages=3, cluster_m=2, consumers=1)],
}
RUNS = [(name, None) for name in PROBLEMS] + [(name, knobs) for name, several in FORCED.items() for knobs in several]
LARGE = {
    "56": convolution((256, 56, 56, 64), (3, 3, 64, 64), BF16, padding="SAME"),
    "28": convolution((256, 28, 28, 128), (3, 3, 128, 128), F16, padding="SAME"),
    "7": convolution((256, 7, 7, 512), (3, 3, 512, 512), BF16, padding="SAME"),
    "down": convolution((256, 56, 56, 256), (1, 1, 256, 512), BF16, strides=(2, 2)),
    "strided": convolution((64, 56, 56, 128), (3, 3, 128, 256), BF16, strides=(2, 2), padding="SAME"),
    "dilated": convolution((16, 65, 65, 256), (3, 3, 256, 256), BF16, padding="SAME", rhs_dilation=(12, 12)),
    "volume": convolution((4, 16, 56, 56, 64), (3, 3, 3, 64, 64), BF16, padding="SAME"),
    "volume of few channels": convolution((1, 64, 64, 64, 32), (3, 3, 3, 32, 32), BF16, padding="SAME"),
    "16 groups": convolution((32, 56, 56, 256), (3, 3, 16, 256), BF16, padding="SAME", groups=16, rhs_dilation=(2, 2)),
    "sound": convolution((64, 3000, 80), (3, 80, 512), BF16, padding="SAME"),
    "gelu": convolution(
        (64, 28, 28, 128), (3, 3, 128, 256), BF16, padding="SAME", epilogue="bias gelu", extras=(row(256),)
    ),
    "residual": convolution(
        (64, 128, 28, 28), (128, 128, 3, 3), BF16, layout=FIRST, padding="SAME", epilogue="residual",
        extras=(((128, 1, 1), BF16), ((64, 128, 28, 28), BF16)),
    ),
    "reductions": convolution((64, 28, 28, 128), (3, 3, 128, 128), BF16, padding="SAME", epilogue="sums of channels"),
    "float8": convolution((64, 28, 28, 128), (3, 3, 128, 256), E4M3, padding="SAME", out_dtype=BF16),
    "float32": convolution((64, 28, 28, 64), (3, 3, 64, 64), F32, padding="SAME"),
    "int8": convolution((64, 28, 28, 128), (3, 3, 128, 256), I8, padding="SAME", out_dtype=I32),
}  # fmt: skip


def operand(type_, random):
    """Small numbers, of which sums and products are exact."""
    values = random.integers(-3, 4, type_.shape)
    return (values if np.issubdtype(type_.dtype, np.integer) else values / 4).astype(type_.dtype)


def arrays(call):
    """What is no number in the image of one convolution of a batch must not reach the one before."""
    random = np.random.default_rng(0)
    found = [operand(type_, random) for type_ in call.signature.operands.values()]
    image = call.problem.b if call.problem.result == "image" else call.problem.a
    if image.batch_stride:
        found[image.buffer.index][2] = np.nan
    return found


def check(call, operands, found):
    """Against the problem, in float64: sums are exact, and rounded once."""
    for got, want in zip(found, problems.run(call.problem, operands), strict=True):
        eps = float(jnp.finfo(got.dtype).eps) if jnp.issubdtype(got.dtype, jnp.floating) else 0
        bound = eps * max(1.0, float(np.max(np.abs(want), initial=0, where=np.isfinite(want))))
        np.testing.assert_allclose(np.float64(got).ravel(), want, rtol=0, atol=bound)


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    plans = []
    for name, knobs in RUNS:
        problem = PROBLEMS[name].problem
        plans.append(ENGINE.build(knobs or next(ENGINE.configurations(problem, FEW)), problem, FEW))
    return Emulated(plans, tmp_path_factory.mktemp("emulated"))


@pytest.mark.parametrize(("name", "knobs"), RUNS)
def test_its_text_computes_what_is_right(name, knobs, emulated):
    call = PROBLEMS[name]
    operands, types = arrays(call), call.signature.results.values()
    results = [np.zeros(type_.shape, type_.dtype) for type_ in types]
    emulated.run(RUNS.index((name, knobs)), operands, results)
    check(call, operands, results)


@pytest.mark.parametrize("name", LARGE)
def test_configurations_compile(name):
    served = [call.problem for call in calls(LARGE[name]).values() if not ENGINE.reason(call.problem, H100)]
    assert served
    for problem in served:
        # What differs in numbers alone is the same code.
        offered = [replace(knobs, split_k=min(knobs.split_k, 2)) for knobs in ENGINE.configurations(problem, H100)]
        for knobs in list(dict.fromkeys(offered))[: None if name == "28" else 2]:
            plan = ENGINE.build(knobs, problem, H100)
            unit = _native.compile(plan.unit, plan.arch)
            assert "serialized" not in unit.log, "the compiler has the tensor cores wait for each multiply"
            for kernel, (registers, spilled) in kernels(unit.log).items():
                assert not spilled, f"{kernel} spills {spilled} bytes under {knobs}"
                assert registers * launch_bounds(plan.unit)[kernel][0] <= 65_536


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


def test_sizes_are_not_in_the_code():
    units = set()
    for n, size, channels in ((2, 9, 64), (5, 30, 512)):
        case = convolution((n, size, size, channels), (3, 3, channels, 64), BF16, padding="SAME")
        units.add(ENGINE.build(Sm90Knobs(tile_n=64), calls(case)["output"].problem, H100).unit)
    assert len(units) == 1


def test_a_filter_of_8_bits_is_transposed_first():
    plan = ENGINE.build(Sm90Knobs(tile_n=128), calls(LARGE["int8"])["output"].problem, H100)
    assert [launch.kernel for launch in plan.launches] == ["product_copy_b", "convolution_sm90"]
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


def only(case, direction="output"):
    return calls(case)[direction].problem


GROUPS = convolution((128, 14, 14, 1024), (3, 3, 32, 1024), BF16, padding="SAME", groups=32)


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        (only(convolution((2, 9, 9, 4), (3, 3, 4, 8), BF16)), "4 channels in a group, which are less than 16 bytes"),
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
        (only(convolution((2, 9, 48), (3, 24, 128), BF16, groups=2)), "24 channels, which are no multiple of"),
        (only(convolution((2, 9, 128), (3, 64, 80), BF16, groups=2)), "no tile fits the 40 columns"),
        (only(LARGE["float32"], "filter"), "want float32 to lie along the places"),
        (only(GROUPS, "output"), "so few channels in a group"),
        (only(GROUPS, "filter"), "so few channels in a group"),
        (only(LARGE["sound"], "filter"), "so few channels in a group"),
        (only(LARGE["down"], "image"), "most places of the image meet no window"),
    ],
)
def test_reasons(problem, said):
    assert said in (ENGINE.reason(problem, H100) or "")


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


COMPUTED = PROBLEMS | {
    f"{dtype} {size}, {direction}": call
    for dtype in (E4M3, F32, I8)
    for size in (9, 30)
    for direction, call in calls(
        convolution(
            (3, size, size + 1, 32), (3, 2, 32, 64), dtype, padding="SAME", out_dtype=I32 if dtype == I8 else F32
        )
    ).items()
    if not ENGINE.reason(call.problem, H100)
}


@pytest.mark.skipif(not GPU, reason="there is no GPU")
@pytest.mark.parametrize("name", COMPUTED)
def test_results(name):
    call = COMPUTED[name]
    operands = arrays(call)
    for target in (device.gpus()[0], replace(device.gpus()[0], sm_count=3)):
        for knobs in (*ENGINE.configurations(call.problem, target), *FORCED.get(name, ())):
            plan = ENGINE.build(knobs, call.problem, target)
            results, again = (run_plan(plan, call.signature.results.values(), operands) for _ in range(2))
            check(call, operands, results)
            same = [one.tobytes() == other.tobytes() for one, other in zip(results, again, strict=True)]
            assert all(same), f"{knobs} is not deterministic"
