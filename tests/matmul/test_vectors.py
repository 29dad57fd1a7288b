"""One matrix times a batch of vectors, `jax.vmap(lambda x: w @ x)`, as layers are written for one example: one product,
whose rows are the vectors.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn
from checking.compare import engines
from jaxdnn.planning.calls import find_calls

matmul = functools.partial(jaxdnn.matmul, precision="highest")
BIAS_GELU = {"epilogue": lambda acc, bias: jax.nn.gelu(acc + bias)}


def normalized(acc, scale):
    """Results of the accumulator's shape and reduced ones."""
    return acc * scale, jnp.sum(acc), jnp.max(acc, axis=0)


# The function of an example, whether its other operands are mapped, and the shapes of the matrix and of those.
LAYERS = {
    "plain": (lambda x, w: matmul(w, x), (), [(24, 16)]),
    "transposed": (lambda x, w: matmul(w.T, x), (), [(16, 24)]),
    "bias": (lambda x, w, b: matmul(w, x, b, **BIAS_GELU), (None,), [(24, 16), (24,)]),
    "residual": (lambda x, w, r: matmul(w, x, r, epilogue=jnp.add), (0,), [(24, 16), (5, 24)]),
    "reductions": (lambda x, w, s: matmul(w, x, s, epilogue=normalized), (None,), [(24, 16), (24,)]),
    "rows in two dimensions": (
        lambda x, w: jaxdnn.dot_general(w, x, (((2,), (0,)), ((), ())), precision="highest"),
        (),
        [(3, 8, 16)],
    ),
}
OF_JAX = {
    "plain": lambda x, w: w @ x,
    "transposed": lambda x, w: w.T @ x,
    "bias": lambda x, w, b: jax.nn.gelu(w @ x + b),
    "residual": lambda x, w, r: w @ x + r,
    "reductions": lambda x, w, s: normalized(w @ x, s),
    "rows in two dimensions": lambda x, w: w @ x,
}


def arrays(name, *vectors):
    random = np.random.default_rng(0)
    return [random.standard_normal(shape).astype(np.float32) for shape in [(*vectors, 16), *LAYERS[name][2]]]


def mapped(name, function):
    _, others, _ = LAYERS[name]
    return jax.vmap(function, (0, None, *others))


@pytest.mark.parametrize("engine", engines("matmul"))
@pytest.mark.parametrize("name", LAYERS)
@jax.default_matmul_precision("highest")
def test_results(name, engine):
    given = arrays(name, 5)
    with jaxdnn.options(engine=engine):
        got = jax.jit(mapped(name, LAYERS[name][0]))(*given)
    expected = mapped(name, OF_JAX[name])(*given)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), got, expected)


@pytest.mark.parametrize("name", LAYERS)
@jax.default_matmul_precision("highest")
def test_gradients(name):
    def gradients(function):
        def loss(*given):
            return sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(mapped(name, function)(*given)))

        given = arrays(name, 5)
        return jax.jit(jax.grad(loss, range(len(given))))(*given)

    pairs = zip(gradients(LAYERS[name][0]), gradients(OF_JAX[name]), strict=True)
    for got, expected in pairs:
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", LAYERS)
def test_vectors_are_rows(name):
    (call,) = find_calls(mapped(name, LAYERS[name][0]), *arrays(name, 5))
    problem = call.problem
    assert not isinstance(problem, str)
    assert (problem.m, problem.n, problem.k, problem.batch) == (5, 24, 16, 1)
    assert (problem.a.buffer.index, problem.b[0].buffer.index) == (1, 0)
    assert problem.b_transposed == (name != "transposed")


def test_vectors_are_columns_of_an_array():
    """Mapped along its second axis, it is read as it lies."""
    x, w = arrays("plain", 5)[0].T, arrays("plain", 5)[1]
    of_columns = jax.vmap(lambda x, w: matmul(w, x), (1, None))
    (call,) = find_calls(of_columns, x, w)
    problem = call.problem
    assert (problem.m, problem.n, problem.k, problem.batch, problem.a_transposed) == (5, 24, 16, 1, True)
    np.testing.assert_allclose(of_columns(x, w), x.T @ w.T, rtol=1e-5, atol=1e-5)


def test_batches_of_batches():
    x, w = np.ones((2, 3, 16), np.float32), np.ones((24, 16), np.float32)
    each = jax.vmap(jax.vmap(lambda x, w: matmul(w, x), (0, None)), (0, None))
    (call,) = find_calls(each, x, w)
    assert (call.problem.m, call.problem.batch) == (6, 1)
    np.testing.assert_array_equal(each(x, w), np.full((2, 3, 24), 16))


def test_matrices_stay_a_batch():
    """Each with columns of its own, or with an a of its own."""
    of_matrices = jax.vmap(lambda x, w: matmul(w, x), (0, None))
    (call,) = find_calls(of_matrices, np.ones((5, 16, 3), np.float32), np.ones((24, 16), np.float32))
    assert (call.problem.m, call.problem.n, call.problem.batch) == (24, 3, 5)
    (call,) = find_calls(jax.vmap(jaxdnn.matmul), np.ones((5, 24, 16), np.float32), np.ones((5, 16), np.float32))
    assert (call.problem.m, call.problem.n, call.problem.batch) == (24, 1, 5)
