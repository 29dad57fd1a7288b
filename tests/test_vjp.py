"""Reverse-mode derivatives of every case of the table."""

import jax
import pytest
from calls import expected_native_calls, native_calls
from cases import DIFFERENTIABLE, EMPTY, NOT_FINITE
from checking import check, runs


def vjp(function, primals, cotangents):
    outputs, pull_back = jax.vjp(function, *primals)
    return outputs, pull_back(cotangents)


def arguments(case):
    return case.primals(), case.cotangents()


@pytest.mark.parametrize(("case", "engine"), runs([*DIFFERENTIABLE, *EMPTY, *NOT_FINITE]))
def test_vjp(case, engine):
    text = check(vjp, case, arguments, engine)
    assert native_calls(text) == expected_native_calls(case, engine, differentiated=True)
