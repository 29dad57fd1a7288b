"""Derivatives of maxima and minima, whose places XLA's fusion must not lose."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn
from checking.cases.epilogues import EPILOGUES
from checking.compiling import QUICKLY
from jaxdnn.primitives.fused import extrema
from jaxdnn.primitives.fused.traced import located


def several(x, scale):
    """Extrema at the top, in functions that are jitted, and behind derivatives of their own."""
    y = jax.nn.gelu(x * scale)
    top = jax.lax.reduce_max(y, (0,))
    inside = jax.jit(lambda y: y - jnp.min(y, axis=-1, keepdims=True))(y)
    return {"top": top, "inside": inside, "of relu": jnp.max(jax.nn.relu(x)), "softmax": jax.nn.softmax(x)}


def total(function):
    return lambda *arrays: sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(function(*arrays)))


TRANSFORMS = {
    "forward": lambda f: f,
    "gradient": lambda f: jax.grad(total(f), (0, 1)),
    "forward over reverse": lambda f: jax.hessian(total(f)),
    "reverse over reverse": lambda f: jax.jacrev(jax.jacrev(total(f))),
    "vmap of gradient": lambda f: lambda x, s: jax.vmap(jax.grad(total(f)), (0, None))(jnp.stack([x, -x]), s),
    "remat": lambda f: jax.grad(jax.checkpoint(total(f))),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_it_is_the_same_function(transform):
    x, scale = (np.random.default_rng(0).standard_normal(shape).astype(np.float32) for shape in ((8, 6), (6,)))
    found, expected = (TRANSFORMS[transform](f)(x, scale) for f in (located(several), several))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, expected)


def test_some_element_has_the_derivative_however_often_they_are_computed(cpus):
    """XLA:CPU computes what the outer maximum is of twice, and rounds it in two ways."""
    random = np.random.default_rng(0)
    x, dx = random.standard_normal((12, 3, 36)), random.standard_normal((12, 3, 36))

    def function(x):
        return jnp.max(jnp.abs(jnp.maximum(x * 0.3 - jnp.max(x, axis=-1, keepdims=True) * 0.1, x)), axis=1)

    optimized = {"xla_backend_optimization_level": 3}
    optimized |= {name: True for name in ("xla_cpu_use_fusion_emitters",) if name in QUICKLY}

    def along(function):
        return jax.jit(lambda x, dx: jax.jvp(function, (x,), (dx,)), compiler_options=optimized)(x, dx)[1]

    with jax.default_device(cpus[0]):
        expected = jax.jvp(function, (x,), (dx,))[1]  # an operation at a time
        np.testing.assert_allclose(along(located(function)), expected, rtol=1e-12, atol=1e-12)
        assert np.isnan(along(function)).any()


def test_equal_elements_share_the_derivative_and_nan_has_none():
    x = np.array([[1, 3, 3, 2], [np.nan, 0, 5, 5], [-np.inf] * 4, [0, -1, -1, 0]])
    shares = jax.jacrev(located(lambda x: jnp.max(x, axis=1)))(x)[np.arange(4), np.arange(4)]
    np.testing.assert_array_equal(shares, [[0, 0.5, 0.5, 0], [np.nan] * 4, [0.25] * 4, [0.5, 0, 0, 0.5]])
    least = jax.grad(located(jnp.min))(x[::3])
    np.testing.assert_array_equal(least, [[0] * 4, [0, 0.5, 0.5, 0]])


@pytest.mark.parametrize("largest", [True, False])
def test_what_is_compared_is_not_beyond_the_extremum(largest, monkeypatch):
    """As XLA may have found it in an array that it rounded in another way."""
    x = jnp.asarray(np.tile(np.random.default_rng(0).standard_normal((5, 7)), 2))  # the extremum is there twice
    name = "max" if largest else "min"
    rounded = getattr(jnp, name)(x, (1,), keepdims=True) - (1e-12 if largest else -1e-12)
    monkeypatch.setattr(extrema.jnp, name, lambda *_, **__: rounded)
    compared = np.asarray(extrema._bounded(x, (1,), largest))
    np.testing.assert_array_equal(compared.max(1) if largest else compared.min(1), np.squeeze(rounded, 1))


def test_complex_numbers_have_maxima():
    random = np.random.default_rng(0)
    a, b = (random.standard_normal((3, 3)) + 1j * random.standard_normal((3, 3)) for _ in range(2))
    found = jax.grad(lambda a: jnp.sum(jnp.abs(jaxdnn.matmul(a, b, epilogue=lambda y: jnp.max(y, 1)))))(a)
    np.testing.assert_allclose(found, jax.grad(lambda a: jnp.sum(jnp.abs(jnp.max(a @ b, 1))))(a), rtol=1e-12)


def test_others_are_left_alone():
    def function(x):
        return jnp.sum(jnp.tanh(x))

    text, expected = (str(jax.make_jaxpr(jax.grad(f))(jnp.ones(3))) for f in (located(function), function))
    assert text == expected


def test_replicated_values_stay_so(cpus):
    mesh = jax.make_mesh((2,), ("i",), devices=cpus[:2], axis_types=(jax.sharding.AxisType.Auto,))
    x, scale = np.linspace(-2, 2, 12, dtype=np.float32).reshape(4, 3), np.ones(3, np.float32)

    def loss(x, scale):
        return total(located(several))(x, scale)[None]

    def sharded(x, scale):
        return jax.shard_map(loss, mesh=mesh, in_specs=(jax.P("i"), jax.P()), out_specs=jax.P("i"))(x, scale).sum()

    found = jax.jit(jax.grad(sharded, (0, 1)))(x, scale)
    halves = [jax.grad(total(several), (0, 1))(x[i : i + 2], scale) for i in (0, 2)]
    np.testing.assert_allclose(found[0], np.concatenate([half[0] for half in halves]), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found[1], sum(half[1] for half in halves), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["largest", "least of each row", "extrema"])
def test_what_a_maximum_is_of_is_computed_once(name):
    """In derivatives alone: nothing else tells the greatest element from its neighbours."""

    def loss(a, b):
        return sum(map(jnp.sum, jax.tree.leaves(jaxdnn.matmul(a, b, epilogue=EPILOGUES[name]))))

    def reductions(function):
        """What a program reduces to extrema, and what optimization barriers and choices between arrays return."""
        text = jax.jit(function).lower(np.ones((5, 8), np.float32), np.ones((8, 6), np.float32)).as_text()
        reduced = re.findall(r"stablehlo\.reduce\((%\w+) init: %\w+\) applies stablehlo\.(?:max|min)imum", text)
        barriers = set(re.findall(r"(%\w+) = stablehlo\.optimization_barrier", text))
        choices = set(re.findall(r"(%\w+) = call @_where", text))
        return set(reduced), barriers, choices

    _, barriers, _ = reductions(loss)
    assert not barriers
    reduced, barriers, choices = reductions(jax.grad(loss))
    assert barriers
    assert barriers < reduced <= barriers | choices
