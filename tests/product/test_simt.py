"""The exact matmul engine: what it plans and refuses, that it all compiles, and that a GPU computes what is right."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from checking.compiler_log import compile_checked
from checking.product.calls import ProductCase, run
from checking.product.cases import EXACT as CASES
from checking.product.cases import gated, residual
from checking.product.measured import problem
from checking.product.results import check_configurations
from checking.targets import A100, H100, H200
from jaxdnn import device
from jaxdnn.engines.product.simt.engine import Simt
from jaxdnn.engines.product.simt.heuristic import shapes
from jaxdnn.engines.product.simt.knobs import SimtKnobs, knobs_reason

ENGINE = Simt()
GPU = jax.default_backend() == "gpu"


@pytest.mark.parametrize("target", [A100, H100], ids=lambda target: target.arch)
@pytest.mark.parametrize("name", [name for name in CASES if "odd" not in name and "batch" not in name])
def test_configurations_compile(name, target):
    product = CASES[name].product()
    assert ENGINE.reason(product, target) is None
    found = {replace(knobs, split_k=min(knobs.split_k, 2)): 0 for knobs in ENGINE.configurations(product, target)}
    assert found
    # Large products try every tile, once.
    count = 1 if "large" not in name else len(found) if target is H100 else 4
    found = dict(list(found.items())[:count])
    for knobs in found:
        compile_checked(ENGINE.build(knobs, product, target), knobs)


def test_tiles_of_more_than_4_gib_compile():
    product = ProductCase(256, 256, 2**24).product()
    plan = ENGINE.build(SimtKnobs(), product, H100)
    assert "kFar = true" in plan.unit
    compile_checked(plan, SimtKnobs())


def test_a_plan_is_what_it_is():
    plan = ENGINE.build(SimtKnobs(split_k=4), ProductCase(300, 200, 4096, "float32").product(), H100)
    first, second = plan.launches
    assert plan.arch == "sm_90a"
    assert (first.kernel, first.grid, first.block) == ("product_simt", (3 * 2 * 4, 1, 1), (128, 1, 1))
    assert (second.kernel, second.grid, second.block) == ("product_split", (1, 300, 1), (256, 1, 1))
    assert plan.scratch == (4 * 300 * 200 * 4,)
    assert len(plan.unit.splitlines()) < 120


@pytest.mark.parametrize(
    ("m", "n", "knobs", "grid"),
    [
        (100, 100, SimtKnobs(32, 32, 16, 16, 64), (4, 4, 1)),
        (100, 100, SimtKnobs(32, 32, 16, 16, 64, split_k=2), (4, 4, 2)),
        (100, 100, SimtKnobs(32, 64, 16, 32, 32), (4 * 2, 1, 1)),
        (8, 65_535 * 32, SimtKnobs(32, 32, 16, 16, 64), (1, 65_535, 1)),
        (8, 65_536 * 32, SimtKnobs(32, 32, 16, 16, 64), (65_536, 1, 1)),
        (65_536 * 32, 8, SimtKnobs(32, 32, 16, 16, 64), (65_536, 1, 1)),
    ],
)
def test_few_accumulators_a_lane_have_a_grid_of_tiles(m, n, knobs, grid):
    plan = ENGINE.build(knobs, ProductCase(m, n, 256, "bfloat16").product(), H100)
    assert plan.launches[0].grid == grid


@pytest.mark.parametrize(("batch", "grid"), [(65_535, (1, 1, 65_535)), (65_536, (65_536, 1, 1))])
def test_matrices_are_a_dimension_of_the_grid(batch, grid):
    plan = ENGINE.build(SimtKnobs(32, 32, 16, 16, 64), ProductCase(8, 8, 8, "bfloat16", batch=batch).product(), H100)
    assert plan.launches[0].grid == grid


# Of which a lane has eight accumulators, with operands whose rows are aligned and are not.
FEW = [
    pytest.param(shape.knobs, size, id=f"{shape.knobs.depth} x {shape.knobs.stages}, {size}")
    for size in ((192, 384, 40), (193, 385, 41))
    for shape in shapes(ProductCase(*size, "bfloat16").product())
    if shape.knobs.thread_m * shape.knobs.thread_n == 8 * 32
]


@pytest.mark.parametrize(("knobs", "size"), FEW)
@pytest.mark.parametrize("epilogue", ["plain", "residual", "gated"])
def test_few_accumulators_a_lane_spill_nothing(knobs, size, epilogue):
    m, n, k = size
    own = {
        "plain": {},
        "residual": {"epilogue": residual, "operands": (("bfloat16", (1, 1, n)), ("bfloat16", (1, m, n)))},
        "gated": {"epilogue": gated, "accumulators": 2},
    }
    plan = ENGINE.build(knobs, ProductCase(m, n, k, "bfloat16", **own[epilogue]).product(), H100)
    compile_checked(plan, knobs)


def test_reductions_take_one_launch_an_axis():
    product = CASES["float32 reductions"].product()
    plan = ENGINE.build(SimtKnobs(), product, H100)
    assert [launch.kernel for launch in plan.launches] == [
        "product_simt",
        *(f"product_reduce_{i}" for i in range(8)),
    ]


def test_sizes_are_not_in_the_code():
    units = {
        ENGINE.build(SimtKnobs(), ProductCase(m, 512, 4 * k).product(), H100).unit for m in (7, 300) for k in (7, 300)
    }
    assert len(units) == 1


@pytest.mark.parametrize(
    ("product", "target", "said"),
    [
        (ProductCase(8, 8, 8).product(), replace(A100, arch="sm_75"), "compute capability 8.0"),
        (replace(ProductCase(8, 8, 8).product(), m=2**31), H100, "32-bit index"),
        (ProductCase(8, 8, 8, "float64", b_dtype="float32").product(), H100, "does not multiply float64 by float32"),
    ],
)
def test_reasons(product, target, said):
    assert said in (ENGINE.reason(product, target) or "")


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        (SimtKnobs(thread_n=12), "thread_n 12"),
        (SimtKnobs(stages=12), "bytes of shared memory"),
        (SimtKnobs(split_k=64), "split_k is 64"),
        (SimtKnobs(tile_m=8, tile_n=16, thread_m=4, thread_n=4), "tile_m is 8"),
    ],
)
def test_knobs_that_do_not_fit_have_a_reason(knobs, said):
    assert said in (knobs_reason(ProductCase(256, 256, 256).product(), knobs, A100) or "")


def test_knobs_are_validated():
    with pytest.raises(ValueError, match="tile_m must be a power of two; got 96"):
        SimtKnobs(tile_m=96)
    with pytest.raises(ValueError, match="SimtKnobs: stages must be an int of at least 2; got 1"):
        SimtKnobs(stages=1)


def test_warps_that_slice_k_share_a_function():
    """A gelu of 47 x 473 x 16 takes an H200 2.35 us in four slices, of two elements a lane each; 2.56 without."""
    first = next(iter(ENGINE.configurations(problem(47, 473, 16, 1, "bfloat16", "0", "0", "gelu"), H200)))
    assert (first.tile_m, first.tile_n, first.slice_k) == (16, 16, 4)


@pytest.mark.skipif(not GPU, reason="there is no GPU")
@pytest.mark.parametrize("name", CASES)
def test_results(name):
    check_configurations(ENGINE, CASES[name], device.gpus()[0], 2)


@pytest.mark.skipif(not GPU, reason="there is no GPU")
def test_not_a_number_passes_through_reductions():
    case = CASES["float32 reductions"]
    target, product, arrays = device.gpus()[0], case.product(), case.arrays()
    arrays[0][1, 5, 7] = jnp.nan
    plan = ENGINE.build(next(iter(ENGINE.configurations(product, target))), product, target)
    _, largest, by_column, by_row, _, _ = run(plan, product, arrays)
    assert jnp.isnan(largest)
    assert jnp.isnan(by_column[1]).all()
    assert jnp.isnan(by_row).sum() == 1
