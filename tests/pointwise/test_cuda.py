"""Emitted source as CUDA: it compiles at run time without spills, and a GPU computes with it what JAX computes."""

import re

import jax
import pytest

from checking.pointwise.layouts import LAYOUTS
from checking.pointwise.loads import LOADS
from checking.pointwise.runs import Call, Compiled
from checking.pointwise.table import TABLE
from checking.pointwise.tolerance import check
from jaxdnn import _native

CALLS = {**TABLE, **LAYOUTS, **LOADS}
PORTION = 40
NAMES = [list(CALLS)[start : start + PORTION] for start in range(0, len(CALLS), PORTION)]


def calls(names: list[str]) -> list[Call]:
    return [CALLS[name] for name in names]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("names", NAMES, ids=lambda names: f"{names[0]} ... {names[-1]}")
def test_source_compiles(names, arch):
    log = _native.compile(Compiled(calls(names)).unit, arch).log
    assert not re.search(r"[1-9]\d* bytes spill", log), log
    # Of what jax.numpy does for signed integers, some is pointless for unsigned ones.
    assert set(re.findall(r"warning #(\d+)", log)) <= {"186"}, log


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="there is no GPU")
@pytest.mark.parametrize("names", NAMES, ids=lambda names: f"{names[0]} ... {names[-1]}")
def test_results_of_a_gpu(names):
    compiled = Compiled(calls(names))
    major, minor = jax.devices()[0].compute_capability.split(".")
    wrong = []
    for k, name in enumerate(names):
        try:
            check(CALLS[name], gpu=compiled.run(k, f"sm_{major}{minor}"))
        except AssertionError as error:
            wrong.append(f"{name}: {error}")
    assert not wrong, "\n".join(wrong)
