"""Programs find their operands' elements, wherever those lie, and put results where they belong."""

import math

import jax.numpy as jnp
import pytest
from jax import lax

from checking.cases.dtypes import F32
from checking.pointwise.layouts import LAYOUTS, call
from checking.pointwise.runs import Call, Emitted, run_host
from checking.pointwise.tolerance import check


@pytest.fixture(scope="module")
def emitted(tmp_path_factory) -> Emitted:
    return Emitted(list(LAYOUTS.values()), tmp_path_factory.mktemp("layout") / "unit")


@pytest.mark.parametrize("name", LAYOUTS)
def test_results(name, emitted):
    check(LAYOUTS[name], host=run_host(LAYOUTS[name]), emitted=emitted.run(list(LAYOUTS).index(name)))


# Five dimensions as batch, rows and columns, several ways.
GROUPED = {
    (2, 2, 1): (lambda acc, a, b: acc * a + b, "float32[4,5,6]", "float32[2,3,1,1,1]"),
    (0, 3, 2): (lambda acc, a, b: acc * a + b, "float32[5,6]", "float32[2,3,4,1,1]"),
    (1, 3, 1): (lambda acc, a, b: acc * a[:, None, None, None] + b, "float32[2,6]", "float32[3,4,5,6]"),
    (5, 0, 0): (lambda acc, a, b: acc * a + b, "float32[2,3,4,5,6]", "float32[]"),
    (0, 0, 5): (lambda acc, a, b: acc + a * b, "float32[2,3,4,5,6]", "float32[]"),
    (3, 1, 1): (lambda acc, a, b: acc + a * b + jnp.arange(3)[:, None, None, None], "float32[6]", "float32[5,1]"),
    (1, 2, 2): (
        lambda acc, a, b: (
            acc + a * lax.broadcasted_iota(F32, acc.shape, 1) - lax.broadcasted_iota(F32, acc.shape, 2) / b
        ),
        "float32[]",
        "float32[]",
    ),
}


@pytest.mark.parametrize("groups", GROUPED)
def test_joined_dimensions(groups):
    function, *operands = GROUPED[groups]
    one = call(function, "float32[2,3,4,5,6]", *operands)
    grouped = Call(one.function, one.shape, one.accumulators, one.operands, groups)
    assert grouped.extents == tuple(math.prod(one.shape[sum(groups[:i]) : sum(groups[: i + 1])]) for i in range(3))
    check(grouped, host=run_host(grouped))
