"""Every case of the table against the float64 reference, on every engine that this machine has."""

import jax
import pytest
from calls import expected_native_calls, native_calls
from cases import CASES, EMPTY, NOT_FINITE
from checking import check, dtypes_of, runs


def forward(function, *arrays):
    return function(*arrays)


def primals(case):
    return case.primals()


@pytest.mark.parametrize(("case", "engine"), runs([*CASES, *EMPTY, *NOT_FINITE]))
def test_forward(case, engine):
    text = check(forward, case, primals, engine)
    # The right answer from another engine would hide that this one never ran.
    assert native_calls(text) == expected_native_calls(case, engine, differentiated=False)


@pytest.mark.parametrize("case", [*CASES, *EMPTY], ids=str)
def test_types(case):
    outputs = jax.tree.leaves(case.call(*case.primals()))
    assert dtypes_of(outputs) == list(case.outputs.values())
    assert [output.shape for output in outputs] == [case.shape_of(name) for name in case.outputs]
