"""Generated units are small enough to read, and state what differs from their kernel's defaults."""

import re
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import pytest
from test_matmul_sm90 import BIAS, ENGINE, H100, case, gelu, saved
from test_pointwise_kernel import ENGINE as POINTWISE
from test_pointwise_kernel import call_of

from jaxdnn.engines.product.sm90.knobs import Sm90Knobs
from jaxdnn.engines.product.sm90.unit import DEFAULTS


def test_defaults_are_the_kernels():
    header = (Path(__file__).parents[1] / "cpp/kernels/product/sm90.cuh").read_text()
    name, members = DEFAULTS
    body = header[header.index(f"struct {name} {{") :]
    found = dict(re.findall(r"\bk(\w+) = (\w+)", body[: body.index("\n};")]))
    assert found == {key: str(value).lower() for key, value in members.items()}


def test_what_equals_a_default_is_not_stated():
    product = case(4096, 4096, 4096).product()
    unit = ENGINE.build(replace(Sm90Knobs(), tile_n=128), product, H100, "matmul").unit
    assert "struct Config : ProductSm90Defaults" in unit
    assert "kStages" not in unit
    assert "kClusterM = 2" in unit


@pytest.mark.parametrize(
    ("epilogue", "most"),
    [(gelu, 50), (lambda sums, bias: (*saved(sums, bias), jnp.max(jnp.abs(sums))), 60)],
    ids=["gelu", "two results and a maximum"],
)
def test_products_with_epilogues(epilogue, most):
    product = case(4096, 4096, 4096, epilogue=epilogue, operands=BIAS).product()
    plan = ENGINE.build(next(ENGINE.configurations(product, H100)), product, H100, "matmul")
    assert len(plan.unit.splitlines()) <= most


def test_the_derivative_of_an_epilogue():
    call = call_of("gelu")
    knobs = next(iter(POINTWISE.candidates(call.spec, call.signature, H100)))
    plan = POINTWISE.plan(knobs, call.spec, call.signature, H100)
    functor = plan.unit[plan.unit.index("struct Epilogue") :]
    statements = functor[: functor.index("template")].splitlines()
    assert len(plan.unit.splitlines()) - len(statements) <= 45
