"""Donated buffers: results take the place of operands, and kernels that read them twice must not notice."""

import functools

import jax
import jax.numpy as jnp
import pytest

import jaxdnn
from checking.cases import TABLE
from checking.compare import as_tuple, assert_close, runs
from checking.transforms import forward, primals, vjp, with_cotangents


@pytest.mark.parametrize(("case", "donated", "engine"), runs(TABLE.donated))
def test_forward(case, donated, engine):
    arrays = [jnp.array(array) for array in case.primals()]
    with jaxdnn.options(engine=engine):
        outputs = jax.jit(as_tuple(case.call), donate_argnums=donated)(*arrays)
    assert all(arrays[i].is_deleted() for i in donated)
    assert_close(outputs, forward, case, primals)


@pytest.mark.parametrize(("case", "engine"), runs(case for case, _ in TABLE.donated))
def test_backward(case, engine):
    """Gradients may take the place of cotangents."""
    given, cotangents = jax.tree.map(jnp.array, with_cotangents(case))
    with jaxdnn.options(engine=engine):
        _, pull_back = jax.vjp(as_tuple(case.call), *given)

        @functools.partial(jax.jit, donate_argnums=1)
        def gradients(pull_back, cotangents):
            gradients = pull_back(cotangents)
            # One result for each donated array, in its type: without one, JAX warns that a donation was of no use.
            return gradients, [jnp.sin(cotangent) for cotangent in cotangents]

        results = gradients(pull_back, cotangents)[0]
    assert all(cotangent.is_deleted() for cotangent in cotangents)
    outputs = as_tuple(case.call)(*case.primals())
    assert_close((outputs, results), vjp, case, with_cotangents)
