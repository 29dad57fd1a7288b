"""Second derivatives, of small cases: reverse over reverse, forward over reverse, reverse over forward, hessians.

The backward kernels are fused and the tangent is linear: these are the places where a rule that forgets an output (a
statistic, the sum with the residual) gives right gradients and wrong second derivatives.
"""

import functools

import jax
import jax.numpy as jnp
import pytest

from checking.cases import TABLE
from checking.compare import check, runs
from checking.transforms import as_one


def scalar(function):
    """A nonlinear function of all the outputs, so that the second derivatives have every term."""

    def loss(*arrays):
        outputs = function(*arrays)
        return sum((i + 1) * jnp.sum(jnp.sin(output)) for i, output in enumerate(outputs))

    return loss


def everything(arrays):
    return tuple(range(len(arrays)))


def jacrev_of_grad(function, arrays):
    every = everything(arrays)
    return jax.jacrev(jax.grad(scalar(function), every), every)(*arrays)


def hessian(function, arrays):
    """Forward over reverse."""
    return jax.hessian(scalar(function), everything(arrays))(*arrays)


def grad_of_jvp(function, arrays):
    every = everything(arrays)

    def directional(*arrays):
        tangents = tuple(jnp.cos(3 * array) for array in arrays)
        return jax.jvp(scalar(function), arrays, tangents)[1]

    return jax.grad(directional, every)(*arrays)


def jvp_of_jvp(function, arrays):
    ones = tuple(jnp.ones_like(array) for array in arrays)
    return jax.jvp(lambda *a: jax.jvp(scalar(function), a, ones)[1], arrays, ones)[1]


def grad_of_one_grad(operand, function, arrays):
    """The gradient of a gradient's size, as a gradient penalty has it: only one operand is differentiated inside."""

    def penalty(*arrays):
        return jnp.sum(jnp.square(jax.grad(scalar(function), operand)(*arrays)))

    return jax.grad(penalty, everything(arrays))(*arrays)


ORDERS = [jacrev_of_grad, hessian, grad_of_jvp, jvp_of_jvp]


@pytest.mark.parametrize(("case", "engine"), runs(TABLE.small))
@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.__name__)
def test_second_derivative(order, case, engine):
    check(order, case, as_one, engine, surroundings=True)


PENALTIES = [functools.partial(grad_of_one_grad, operand) for operand in range(3)]


@pytest.mark.parametrize(("case", "engine"), runs(TABLE.deep))
@pytest.mark.parametrize("operand", [0, 1, 2])
def test_gradient_penalty(operand, case, engine):
    check(PENALTIES[operand], case, as_one, engine, surroundings=True)


def third_derivative(function, arrays):
    loss = scalar(function)
    along = jax.grad(lambda x: jnp.sum(jnp.square(jax.grad(loss)(x, *arrays[1:]))))
    return jax.jvp(along, arrays[:1], (jnp.ones_like(arrays[0]),))[1]


@pytest.mark.parametrize(("case", "engine"), runs(TABLE.deep))
def test_third_derivative(case, engine):
    check(third_derivative, case, as_one, engine, surroundings=True)
