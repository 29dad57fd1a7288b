"""The same bits from run to run."""

import jax
import numpy as np
import pytest

import jaxdnn
from checking.cases import TABLE
from checking.compare import as_tuple, runs
from checking.transforms import vjp, with_cotangents


@pytest.mark.parametrize(("case", "engine"), runs(TABLE.repeated))
def test_runs_are_bitwise_equal(case, engine):
    function = jax.jit(lambda *arrays: vjp(as_tuple(case.call), *arrays))
    given = with_cotangents(case)
    with jaxdnn.options(engine=engine):
        first = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(function(*given))]
        for _ in range(99):
            assert [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(function(*given))] == first
