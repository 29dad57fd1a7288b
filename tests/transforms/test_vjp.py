"""Reverse-mode derivatives of every case of the table."""

import pytest

from checking.calls import expected_native_calls, native_calls
from checking.cases import TABLE
from checking.compare import check, runs
from checking.transforms import vjp, with_cotangents


@pytest.mark.parametrize(("case", "engine"), runs([*TABLE.differentiable, *TABLE.empty, *TABLE.not_finite]))
def test_vjp(case, engine):
    text = check(vjp, case, with_cotangents, engine)
    assert native_calls(text) == expected_native_calls(case, engine, differentiated=True)
