"""Generated units are small enough to read, and state what differs from their kernel's defaults."""

import re
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from checking.product.calls import ProductCase
from checking.product.cases import gelu
from checking.targets import H100
from jaxdnn.engines.product.sm90.engine import Sm90
from jaxdnn.engines.product.sm90.knobs import Sm90Knobs
from jaxdnn.engines.product.sm90.unit import DEFAULTS

ENGINE = Sm90()
SQUARE = ProductCase(4096, 4096, 4096, "bfloat16", precision="default")
BIAS = replace(SQUARE, operands=(("bfloat16", (1, 1, 4096)),))


def saved_and_largest(acc, bias):
    return jax.nn.gelu(acc + bias), acc.astype(jnp.bfloat16), jnp.max(jnp.abs(acc))


def test_defaults_are_the_kernels():
    header = (Path(__file__).parents[2] / "cpp/kernels/product/sm90.cuh").read_text()
    name, members = DEFAULTS
    body = header[header.index(f"struct {name} {{") :]
    found = dict(re.findall(r"\bk(\w+) = (\w+)", body[: body.index("\n};")]))
    assert found == {key: str(value).lower() for key, value in members.items()}


def test_what_equals_a_default_is_not_stated():
    product = SQUARE.product()
    unit = ENGINE.build(replace(Sm90Knobs(), tile_n=128, cluster_m=1), product, H100).unit
    assert "struct Config : ProductSm90Defaults" in unit
    assert "kStages" not in unit
    assert "kClusterM = 1" in unit


@pytest.mark.parametrize(
    ("epilogue", "most"),
    [(gelu, 50), (saved_and_largest, 60)],
    ids=["gelu", "two results and a maximum"],
)
def test_units_are_short(epilogue, most):
    product = replace(BIAS, epilogue=epilogue).product()
    plan = ENGINE.build(next(ENGINE.configurations(product, H100)), product, H100)
    assert len(plan.unit.splitlines()) <= most
