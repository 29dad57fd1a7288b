"""The CPU norm: what it has more bits for than the tolerance of norms asks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn


@pytest.fixture(autouse=True)
def on_cpu(cpus):
    with jax.default_device(cpus[0]), jaxdnn.options(engine="host"):
        yield


@pytest.mark.parametrize("columns", [5, 100, 4096, 100_003])
@pytest.mark.parametrize("value", [3.14159, -7.7, 1e-30, 65504])
def test_a_row_of_equal_numbers_has_their_mean(columns, value):
    """One that is off by a few roundings would leave noise that epsilon does not hide."""
    x = jnp.full((2, columns), value, jnp.float32)
    y, mean, _ = jaxdnn.layer_norm(x, return_statistics=True)
    np.testing.assert_array_equal(y, np.zeros_like(y))
    np.testing.assert_array_equal(mean, x[:, 0])


@pytest.mark.parametrize("columns", [2, 5, 23, 24, 100, 771, 40_000])
@pytest.mark.parametrize("ulps", [1, 10, 1000, 100_000])
def test_statistics_of_nearly_equal_numbers(ulps, columns):
    """A standard deviation of so many units in the last place of the mean is as exact as any other."""
    eps = float(jnp.finfo(jnp.float32).eps)
    x = (1e4 * (1 + ulps * eps * np.random.default_rng(columns).standard_normal((40, columns)))).astype(np.float32)
    x[:, 0] *= 1 + 4 * np.float32(eps)  # not all are equal
    _, mean, rstd = jaxdnn.layer_norm(x, epsilon=0.0, return_statistics=True)
    np.testing.assert_allclose(mean, x.mean(1, dtype=np.float64), rtol=2 * eps)
    np.testing.assert_allclose(rstd, 1 / x.std(1, dtype=np.float64), rtol=8 * eps)


@pytest.mark.parametrize("columns", [4, 100, 600])
def test_sums_of_tasks_are_added_in_double(columns):
    """One is nothing to 2^24 in float32, and here every row is a task's."""
    x = np.resize(np.float32([1, -1]), (200, columns))
    d_y = np.ones_like(x)
    d_y[0] = 2.0**24
    d_y[-1] = -(2.0**24)
    parameters = np.ones(columns, np.float32), np.zeros(columns, np.float32)
    with jaxdnn.options(knobs={"rows_per_task": 1}):
        _, vjp = jax.vjp(lambda *parameters: jaxdnn.layer_norm(x, *parameters, epsilon=0.0), *parameters)
        d_scale, d_bias = vjp(d_y)
    np.testing.assert_array_equal(d_scale, 198 * x[0])
    np.testing.assert_array_equal(d_bias, np.full(columns, 198))
