"""The matmul engine for few rows: what it plans and refuses; that it compiles; that a GPU computes what is right."""

import itertools
from dataclasses import replace

import jax
import pytest

from checking.compiler_log import compile_checked
from checking.product.calls import ProductCase
from checking.product.cases import gated, gelu, reductions, several
from checking.product.results import check_configurations
from checking.targets import A100, H100
from jaxdnn import device
from jaxdnn.engines.product.skinny.engine import Skinny
from jaxdnn.engines.product.skinny.knobs import SkinnyKnobs, knobs_reason, skinny
from jaxdnn.plan import TensorMap

ENGINE = Skinny()
GPU = jax.default_backend() == "gpu"


def cases():
    """By name."""
    found = {}
    for dtype in ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8", "float32"):
        sixteen = dtype in ("bfloat16", "float16")
        common = {"out": "float32" if "float8" in dtype else "", "precision": "default"}
        for m, b in itertools.product((1, 7, 16, 33, 64), (False, True) if sixteen else (True,)):
            found[f"{dtype} {m} n{'nt'[b]}"] = ProductCase(m, 1000, 336, dtype, b_transposed=b, **common)
        along_k = {"b_transposed": True, **common}
        found[f"{dtype} short k"] = ProductCase(5, 200, 16, dtype, **along_k)
        found[f"{dtype} deep"] = ProductCase(16, 136, 4016, dtype, **along_k)
        found[f"{dtype} few columns"] = ProductCase(200, 24, 336, dtype, **along_k)
        found[f"{dtype} batch"] = ProductCase(13, 200, 336, dtype, batch=3, padding=16, shared="b", **along_k)
        if sixteen:
            found[f"{dtype} tn"] = ProductCase(40, 200, 336, dtype, a_transposed=True, **common)
            found[f"{dtype} few columns tn"] = ProductCase(200, 24, 336, dtype, a_transposed=True, **common)
        if dtype != "int8":
            bias = (("bfloat16", (1, 1, 264)),)
            found[f"{dtype} gelu"] = ProductCase(16, 264, 1040, dtype, epilogue=gelu, operands=bias, **along_k)
            found[f"{dtype} gated"] = ProductCase(16, 264, 1040, dtype, epilogue=gated, accumulators=2, **along_k)
            found[f"{dtype} reductions"] = ProductCase(
                16, 264, 1040, dtype, epilogue=reductions, batch=3, operands=bias, **along_k
            )
            operands = (("float32", (1, 1, 264)), ("float32", (2, 16, 264)), ("int8", (1, 16, 1)), ("bool", (1, 1, 1)))
            found[f"{dtype} several"] = ProductCase(
                16, 264, 1040, dtype, epilogue=several, batch=2, operands=operands, **along_k
            )
    found["mixed float8"] = ProductCase(
        16, 200, 336, "float8_e4m3fn", "float8_e5m2", "bfloat16", b_transposed=True, precision="default"
    )
    return found


CASES = cases()


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("float16")])
def test_configurations_compile(name):
    product = CASES[name].product()
    assert ENGINE.reason(product, H100) is None
    found = list(ENGINE.configurations(product, H100))
    assert found
    tried = list({replace(knobs, stages=2): 0 for knobs in found})
    for knobs in tried if "64" in name or "several" in name else tried[:1]:
        compile_checked(ENGINE.build(knobs, product, H100), knobs)


def test_a_plan_is_what_it_is():
    product = ProductCase(16, 4096, 14336, "bfloat16").product()
    plan = ENGINE.build(SkinnyKnobs(128, 5, 8), product, H100)
    (launch,) = plan.launches
    assert (launch.grid, launch.block, launch.cluster) == ((32 * 8, 1, 1), (288, 1, 1), (8, 1, 1))
    assert not plan.scratch
    wide, narrow = (argument for argument in launch.arguments if isinstance(argument, TensorMap))
    assert (wide.dimensions, wide.box) == ((4096, 14336, 1), (64, 64, 1))
    assert (narrow.dimensions, narrow.box) == ((14336, 16, 1), (64, 16, 1))
    assert len(plan.unit.splitlines()) < 80


def test_the_first_configuration_fills_the_device():
    """All blocks run at once: a second round of them would leave most of the memory's bandwidth idle."""
    for m, n, k in ((1, 28672, 4096), (16, 28672, 4096), (64, 28672, 4096), (16, 4096, 14336), (16, 4096, 4096)):
        one = skinny(ProductCase(m, n, k, "bfloat16").product())
        assert not isinstance(one, str)
        knobs = next(iter(ENGINE.configurations(one.product, H100)))
        resident = H100.shared_memory // one.shared_memory(knobs)
        assert one.tiles(knobs) * knobs.split_k <= H100.sm_count * resident


@pytest.mark.parametrize(
    ("case", "target", "said"),
    [
        (ProductCase(16, 256, 256, "bfloat16"), A100, "Hopper's tensor cores"),
        (ProductCase(16, 256, 256, "float64"), H100, "don't multiply float64 by float64"),
        (ProductCase(16, 256, 256, "float32", b_transposed=True), H100, "rounds float32 operands to tf32"),
        (ProductCase(16, 256, 256, "float32", precision="default"), H100, "run along k"),
        (ProductCase(65, 256, 256, "bfloat16"), H100, "at most 64 rows or columns"),
        (ProductCase(256, 16, 256, "bfloat16", accumulators=2), H100, "two acc"),
        (ProductCase(16, 257, 256, "bfloat16"), H100, "the row stride of b is 514 bytes"),
    ],
)
def test_reasons(case, target, said):
    assert said in (ENGINE.reason(case.product(), target) or "")


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        (SkinnyKnobs(stages=40), "bytes of shared memory"),
        (SkinnyKnobs(split_k=8), "split_k is 8"),
    ],
)
def test_knobs_that_do_not_fit_have_a_reason(knobs, said):
    one = skinny(ProductCase(16, 256, 256, "bfloat16").product())
    assert not isinstance(one, str)
    assert said in (knobs_reason(one, knobs, H100) or "")


def test_knobs_are_validated():
    with pytest.raises(ValueError, match="tile must be 64, 128 or 256; got 96"):
        SkinnyKnobs(tile=96)
    with pytest.raises(ValueError, match="split_k must be 1, 2, 4 or 8; got 3"):
        SkinnyKnobs(split_k=3)


@pytest.mark.skipif(not GPU, reason="there is no GPU")
@pytest.mark.parametrize("name", CASES)
def test_results(name):
    check_configurations(ENGINE, CASES[name], device.gpus()[0], 2)
