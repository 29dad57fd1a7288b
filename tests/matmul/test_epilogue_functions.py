"""Epilogues as functions: what tells their derivatives apart, and operands whose dtype gives way to another's."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn
from checking.cases import BF16, F32
from checking.compare import engines

A, B = jnp.ones((4, 8), F32), jnp.ones((8, 6), F32)
ENGINES = engines("matmul")

# ------------------------------------------------------------ derivatives of one's own


def by_vjp(factor):
    """tanh with a derivative that only its backward function knows."""
    function = jax.custom_vjp(jnp.tanh)
    function.defvjp(lambda s: (jnp.tanh(s), s), lambda s, dy: (jnp.where(s > 0, factor * s * dy, 0),))
    return function


def by_jvp(factor):
    """tanh with a derivative that holds an array, and needs the accumulator: what does not is no kernel's work."""
    function = jax.custom_jvp(jnp.tanh)
    function.defjvp(lambda primals, tangents: (jnp.tanh(primals[0]), tangents[0] * factor * primals[0]))
    return function


def by_key(factor):
    """tanh with a derivative that holds what is no array of numbers."""
    key = jax.random.key(int(factor))
    function = jax.custom_jvp(jnp.tanh)

    @function.defjvp
    def _(primals, tangents):
        return jnp.tanh(primals[0]), tangents[0] * jax.random.key_data(key)[-1] * primals[0]

    return function


# "scalar" and "array" are JAX's own, which inside jit are traced; "numpy" is a constant there too.
RULES = {
    "backward function": by_vjp,
    "scalar": lambda factor: by_jvp(jnp.array(factor, F32)),
    "array": lambda factor: by_jvp(jnp.full((1, 6), factor, F32)),
    "numpy": lambda factor: by_jvp(np.full((1, 6), factor, F32)),
    "key": by_key,
}


def loss(factor, rule):
    return lambda a: jnp.sum(jaxdnn.matmul(a, B, epilogue=RULES[rule](factor)))


@pytest.mark.parametrize("jit", [jax.jit, lambda function: function], ids=["jit", "eager"])
@pytest.mark.parametrize("rule", RULES)
def test_epilogues_that_differ_in_their_derivative_alone(rule, jit):
    """In calls of their own, and in one program; every accumulator is 8."""
    for factor in (1.0, 2.0):
        found = jit(jax.grad(loss(factor, rule)))(A)
        np.testing.assert_allclose(found, np.full((4, 8), 6 * 8 * factor), rtol=1e-5)
    both = jit(jax.grad(lambda a: loss(1.0, rule)(a) + loss(10.0, rule)(a)))
    np.testing.assert_allclose(both(A), np.full((4, 8), 8 * 66), rtol=1e-5)


@pytest.mark.parametrize("rule", ["scalar", "array"])
def test_a_derivative_that_holds_an_argument(rule):
    """The factor is an argument of the program, of which there is no value when it is compiled."""
    found = jax.jit(lambda factor, a: jax.grad(loss(factor, rule))(a))(2.0, A)
    np.testing.assert_allclose(found, np.full((4, 8), 6 * 8 * 2), rtol=1e-5)


@pytest.mark.parametrize("activation", [jax.nn.relu, jax.nn.silu, jax.nn.softplus])
def test_the_same_derivative_compiles_once(activation):
    gradient = jax.grad(lambda a: jnp.sum(jaxdnn.matmul(a, B, epilogue=activation)))
    specs = [jax.make_jaxpr(gradient)(A).eqns for _ in range(2)]
    first, second = ([e.params["spec"] for e in equations if "spec" in e.params] for equations in specs)
    assert first == second
    assert [*map(hash, first)] == [*map(hash, second)]


# ------------------------------------------------------------ weak types


def scaled(acc, scale):
    return acc.astype(BF16) * scale


WEAK = {
    "Python float": (2.0, scaled),
    "array": (jnp.where(jnp.ones((4, 6), bool), 2.0, 0), scaled),
    "reduced": (2.0, lambda acc, scale: jnp.sum(scaled(acc, scale), axis=0)),
    "integer": (2, lambda acc, scale: jnp.floor(acc).astype(jnp.int8) * scale),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", WEAK)
def test_an_operand_gives_way_as_it_does_outside(engine, name):
    operand, epilogue = WEAK[name]
    with jaxdnn.options(engine=engine):
        found = jaxdnn.matmul(A, B, operand, epilogue=epilogue)
    expected = epilogue(A @ B, operand)
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found.astype(F32), expected.astype(F32))


@pytest.mark.parametrize("x64", [False, True])
def test_python_numbers_where_floats_have_64_bits(x64):
    with jax.enable_x64(x64):
        found = jaxdnn.matmul(A, B, 2.0, epilogue=jnp.multiply)
    assert found.dtype == F32
    np.testing.assert_array_equal(found, np.full((4, 6), 16))


def test_the_gradient_of_a_python_number_is_one():
    def total(function):
        return lambda scale: jnp.sum(function(scale))

    found = jax.grad(total(lambda scale: jaxdnn.matmul(A, B, scale, epilogue=jnp.multiply)))(2.0)
    assert jax.typeof(found) == jax.typeof(jax.grad(total(lambda scale: A @ B * scale))(2.0))
    assert float(found) == 4 * 6 * 8


# ------------------------------------------------------------ ranks, and exceptions


def test_nothing_of_ours_promotes_ranks():
    x, parameter = jnp.ones((4, 8)), jnp.ones(8)

    def functions(x, parameter):
        square = jnp.ones((8, 8))
        normalized = jaxdnn.layer_norm(x, parameter, parameter)
        return jnp.sum(jaxdnn.gated_linear_unit(normalized, square, square, parameter, parameter))

    with jax.numpy_rank_promotion("raise"):
        jax.grad(functions, (0, 1))(x, parameter)


def test_exceptions_cross_processes():
    error = pickle.loads(pickle.dumps(jaxdnn.UnsupportedOperation("sort", "here", "it is no pointwise function")))
    assert (error.primitive, error.where, error.reason) == ("sort", "here", "it is no pointwise function")


@jax.custom_vjp
def _scaled(acc, scale):
    return acc * scale


_scaled.defvjp(lambda acc, scale: (acc * scale, scale), lambda scale, cotangent: (cotangent * scale, None))


def test_a_rule_may_have_no_cotangent_for_an_operand():
    a, b, scale = jnp.ones((4, 8)), jnp.ones((8, 16)), jnp.full((16,), 3.0)

    def loss(a, b, scale):
        return jnp.sum(jaxdnn.matmul(a, b, scale, epilogue=_scaled))

    gradients = jax.jit(jax.grad(loss, (0, 1, 2)))(a, b, scale)
    for found, value in zip(gradients, (48.0, 12.0, 0.0), strict=True):
        assert (found == value).all()
