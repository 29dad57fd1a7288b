"""Every case of the table against the float64 reference, on every engine that this machine has."""

import pytest
from cases import CASES, EMPTY, NOT_FINITE
from checking import check, dtypes_of, engines


def forward(function, *arrays):
    return function(*arrays)


def primals(case):
    return case.primals()


@pytest.mark.parametrize("engine", engines())
@pytest.mark.parametrize("case", [*CASES, *EMPTY, *NOT_FINITE], ids=str)
def test_forward(case, engine):
    check(forward, case, primals, engine)


@pytest.mark.parametrize("case", [*CASES, *EMPTY], ids=str)
def test_types(case):
    outputs = case.call(*case.primals())
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    assert dtypes_of(outputs) == list(case.outputs.values())
    assert [output.shape for output in outputs] == [case.shape_of(name) for name in case.outputs]
