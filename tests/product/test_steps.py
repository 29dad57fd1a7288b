"""The steps after a product's multiplication, of which only the kernels' own text is run, by the threads of a CPU."""

from dataclasses import replace

import numpy as np
import pytest

from checking.emulation.plans import run_on_cpu
from checking.product.calls import ProductCase
from jaxdnn.engines.product import split_k
from jaxdnn.engines.product.element_epilogue import element_epilogue
from jaxdnn.engines.product.reduce import reduce_stage
from jaxdnn.engines.unit import joined
from jaxdnn.plan import Operand, Plan, Result


def plan_of(stage):
    """A plan of one step, which reads the first operand in place of the first scratch buffer."""
    launches = [replace(one, arguments=(Operand(0), *one.arguments[1:])) for one in stage.launches]
    unit = "".join(f'#include "{header}"\n' for header in stage.headers) + stage.text
    return Plan(unit, "sm_90", tuple(launches), stage.scratch)


@pytest.mark.parametrize(("m", "n", "batch", "splits"), [(5, 3, 2, 2), (70, 1, 1, 6), (2, 257, 1, 5)])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int8"])
def test_split(dtype, m, n, batch, splits, monkeypatch, tmp_path):
    """With few blocks along rows and matrices, so that they stride."""
    monkeypatch.setattr(split_k, "MAX_GRID_YZ", 1)
    case = ProductCase(m, n, 8, dtype, batch=batch, epilogue=lambda acc: acc + acc)
    product = case.product()
    epilogue, after = element_epilogue(product, 1)
    assert not after.launches
    plan = plan_of(split_k.split_stage(product, epilogue, splits))
    acc = np.random.default_rng(0).integers(-9, 9, (batch, splits, m, n)).astype(product.accumulator)
    result = np.zeros((batch, m, n), product.results[0].dtype)
    run_on_cpu(plan, ([acc], [result]), tmp_path)
    np.testing.assert_array_equal(result, (2 * acc.sum(1)).astype(result.dtype))


@pytest.mark.parametrize("extents", [(1, 5000, 1), (3, 37, 1), (2, 9, 3), (1, 130, 33)])
@pytest.mark.parametrize(("reduction", "register"), [("sum", "double"), ("max", "float"), ("min", "jaxdnn::int32")])
def test_reduce(reduction, register, extents, tmp_path):
    of = f"jaxdnn::ReductionOf<jaxdnn::Reduction::{reduction}, {register}>"
    stage = reduce_stage(of, Result(0), (Result(0), register), extents, 0)
    dtype = {"double": np.float64, "float": np.float32}.get(register, np.int32)
    values = np.random.default_rng(0).integers(-999, 999, extents).astype(dtype)
    result = np.zeros((extents[0], extents[2]), dtype)
    run_on_cpu(plan_of(joined([stage])), ([values], [result]), tmp_path)
    np.testing.assert_array_equal(result, getattr(np, reduction)(values, axis=1))
