"""Every case of the table against the float64 reference, on every engine that this machine has."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn
from checking.calls import expected_native_calls, native_calls
from checking.cases import CASES, EMPTY, NOT_FINITE
from checking.compare import check, dtypes_of, runs
from checking.transforms import forward, primals


@pytest.mark.parametrize(("case", "engine"), runs([*CASES, *EMPTY, *NOT_FINITE]))
def test_forward(case, engine):
    text = check(forward, case, primals, engine)
    # The right answer from another engine would hide that this one never ran.
    assert native_calls(text) == expected_native_calls(case, engine, differentiated=False)


@pytest.mark.parametrize("columns", [100, 4096, 100_003])
@pytest.mark.parametrize("value", [3.14159, -7.7, 1e-30, 65504])
def test_a_row_of_equal_numbers_has_their_mean(cpus, columns, value):
    """On the CPU, where a mean that is off by a few roundings would leave noise that epsilon does not hide."""
    x = jax.device_put(jnp.full((2, columns), value, jnp.float32), cpus[0])
    with jaxdnn.options(engine="host"):
        y, mean, _ = jaxdnn.layer_norm(x, return_statistics=True)
    np.testing.assert_array_equal(y, np.zeros_like(y))
    np.testing.assert_array_equal(mean, x[:, 0])


@pytest.mark.parametrize("case", [*CASES, *EMPTY], ids=str)
def test_types(case):
    outputs = jax.tree.leaves(case.call(*case.primals()))
    assert dtypes_of(outputs) == list(case.outputs.values())
    assert [output.shape for output in outputs] == [case.shape_of(name) for name in case.outputs]
