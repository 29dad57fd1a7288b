"""Forward-mode derivatives of every case of the table."""

import jax
import pytest

from checking.cases import TABLE
from checking.compare import check, runs
from checking.transforms import jvp, with_tangents


def linearized(function, primals, tangents):
    """The tangent as a linear function of its own, and that function transposed."""
    outputs, tangent = jax.linearize(function, *primals)
    return outputs, tangent(*tangents), jax.linear_transpose(tangent, *primals)(outputs)


@pytest.mark.parametrize(("case", "engine"), runs(TABLE.small))
def test_linearize(case, engine):
    check(linearized, case, with_tangents, engine)


@pytest.mark.parametrize(("case", "engine"), runs([*TABLE.differentiable, *TABLE.empty]))
def test_jvp(case, engine):
    check(jvp, case, with_tangents, engine)
