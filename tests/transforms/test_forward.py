"""Every case of the table against the float64 reference, on every engine that this machine has."""

import jax
import pytest

from checking.calls import expected_native_calls, native_calls
from checking.cases import TABLE
from checking.compare import check, dtypes_of, runs
from checking.transforms import forward, primals


@pytest.mark.parametrize(("case", "engine"), runs([*TABLE.every, *TABLE.empty, *TABLE.not_finite]))
def test_forward(case, engine):
    text = check(forward, case, primals, engine)
    # The right answer from another engine would hide that this one never ran.
    assert native_calls(text) == expected_native_calls(case, engine, differentiated=False)


@pytest.mark.parametrize("case", [*TABLE.every, *TABLE.empty], ids=str)
def test_types(case):
    outputs = jax.tree.leaves(case.call(*case.primals()))
    assert dtypes_of(outputs) == list(case.outputs.values())
    assert [output.shape for output in outputs] == [case.shape_of(name) for name in case.outputs]
