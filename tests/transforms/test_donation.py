"""Donated buffers: results take the place of operands, and kernels that read them twice must not notice."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn
from checking.cases import BF16, F32, NormCase
from checking.compare import as_tuple, assert_close, engines
from checking.transforms import forward, primals, vjp, with_cotangents

CASES = [
    NormCase("layer_norm", (33, 768), scale=F32, bias=F32),
    NormCase("rms_norm", (5, 4099), x=BF16, scale=BF16, residual=BF16),
    NormCase("layer_norm", (3, 65_536), scale=F32, bias=F32, residual=F32, statistics=True),
]


@pytest.mark.parametrize("engine", engines())
@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward(case, engine):
    donated = tuple(range(2 if case.residual else 1))
    arrays = [jnp.array(array) for array in case.primals()]
    with jaxdnn.options(engine=engine):
        outputs = jax.jit(as_tuple(case.call), donate_argnums=donated)(*arrays)
    assert all(arrays[i].is_deleted() for i in donated)
    assert_close(outputs, forward, case, primals)


@pytest.mark.parametrize("engine", engines())
@pytest.mark.parametrize("case", CASES, ids=str)
def test_backward(case, engine):
    """The gradient of x may take the place of the cotangent, and the parameters' that of the parameters."""
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


def test_training_step():
    """Parameters are donated and updated, step after step, as a training loop does."""
    case = NormCase("layer_norm", (16, 32), scale=F32, bias=F32)
    x, scale, bias = map(jnp.array, case.primals())
    target = np.roll(np.asarray(x), 1)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(parameters):
        def loss(parameters):
            return jnp.mean(jnp.square(case.call(x, *parameters) - target))

        value, gradients = jax.value_and_grad(loss)(parameters)
        return jax.tree.map(lambda p, g: p - 0.5 * g, parameters, gradients), value

    parameters, losses = (scale, bias), []
    for _ in range(20):
        parameters, value = step(parameters)
        losses.append(float(value))
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]
