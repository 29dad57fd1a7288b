"""Forward-mode derivatives of every case of the table."""

import jax
import pytest
from cases import CASES, EMPTY
from checking import check, engines


def jvp(function, primals, tangents):
    return jax.jvp(function, primals, tangents)


def arguments(case):
    return case.primals(), case.tangents()


@pytest.mark.parametrize("engine", engines())
@pytest.mark.parametrize("case", [*CASES, *EMPTY], ids=str)
def test_jvp(case, engine):
    check(jvp, case, arguments, engine)
