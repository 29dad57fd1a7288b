"""Forward-mode derivatives of every case of the table."""

import jax
import pytest
from cases import CASES, EMPTY, SMALL
from checking import check, engines


def jvp(function, primals, tangents):
    return jax.jvp(function, primals, tangents)


def arguments(case):
    return case.primals(), case.tangents()


def linearized(function, primals, tangents):
    """The tangent as a linear function of its own, and that function transposed."""
    outputs, tangent = jax.linearize(function, *primals)
    return outputs, tangent(*tangents), jax.linear_transpose(tangent, *primals)(outputs)


@pytest.mark.parametrize("engine", engines())
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_linearize(case, engine):
    check(linearized, case, arguments, engine)


@pytest.mark.parametrize("engine", engines())
@pytest.mark.parametrize("case", [*CASES, *EMPTY], ids=str)
def test_jvp(case, engine):
    check(jvp, case, arguments, engine)
