"""What an epilogue computes is settled when the product is called: Python's variables may move on afterwards."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn

ACTIVATIONS = (jnp.tanh, jax.nn.relu, jnp.square)
X = np.random.default_rng(0).standard_normal((6, 8)).astype(np.float32)
WEIGHTS = [0.5 * np.random.default_rng(i).standard_normal((8, 8)).astype(np.float32) for i in (1, 2, 3)]


@pytest.fixture(autouse=True)
def exact():
    """Where a GPU would round float32 to tf32."""
    with jax.default_matmul_precision("highest"):
        yield


def late(x, weights):
    """Three layers, whose epilogue looks its activation up when it is called."""
    for w, activation in zip(weights, ACTIVATIONS, strict=True):
        x = jaxdnn.matmul(x, w, epilogue=lambda y: activation(y))  # noqa: B023
    return x


def plain(x, weights):
    for w, activation in zip(weights, ACTIVATIONS, strict=True):
        x = activation(x @ w)
    return x


def total(function):
    return lambda *arrays: jnp.sum(jnp.sin(function(*arrays)))


TRANSFORMS = {
    "forward": lambda f: f,
    "jit": jax.jit,
    "gradient": lambda f: jax.grad(total(f), (0, 1)),
    "jit of gradient": lambda f: jax.jit(jax.grad(total(f), (0, 1))),
    "vmap of jit": lambda f: lambda x, w: jax.vmap(jax.jit(f), (0, None))(jnp.stack([x, -x]), w),
    "vmap of gradient": lambda f: lambda x, w: jax.vmap(jax.grad(total(f)), (0, None))(jnp.stack([x, -x]), w),
    "forward mode": lambda f: lambda x, w: jax.jvp(lambda x: f(x, w), (x,), (jnp.ones_like(x),))[1],
    "second derivative": lambda f: jax.hessian(total(f)),
    "remat": lambda f: jax.grad(jax.checkpoint(total(f)), (0, 1)),
}


@pytest.mark.parametrize("engine", [None, "xla"])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_closure_over_a_loop_variable(transform, engine):
    with jaxdnn.options(engine=engine):
        found = TRANSFORMS[transform](late)(X, WEIGHTS)
    expected = TRANSFORMS[transform](plain)(X, WEIGHTS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4), found, expected)


def test_an_activation_of_a_gated_linear_unit():
    scale = [1.0]

    def loss(x, gate, up):
        y = jaxdnn.gated_linear_unit(x, gate, up, activation=lambda y: scale[0] * jnp.tanh(y))
        scale[0] = 100.0
        return jnp.sum(y)

    found = jax.grad(loss, (0, 1, 2))(X, *WEIGHTS[:2])
    expected = jax.grad(lambda x, gate, up: jnp.sum(jnp.tanh(x @ gate) * (x @ up)), (0, 1, 2))(X, *WEIGHTS[:2])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4), found, expected)


def test_it_is_called_once():
    calls = []

    def counted(y):
        calls.append(y.shape)
        return jnp.tanh(y)

    def loss(x, w):
        return jnp.sum(jaxdnn.matmul(x, w, epilogue=counted))

    jax.jit(jax.value_and_grad(loss, (0, 1)))(X, WEIGHTS[0])
    assert len(calls) == 1
    calls.clear()
    jax.jit(jax.vmap(jax.grad(loss), (0, None)))(np.stack([X, X]), WEIGHTS[0])
    assert len(calls) == 1
    calls.clear()
    exported = jax.export.export(jax.jit(loss))(
        jax.ShapeDtypeStruct(jax.export.symbolic_shape("m, 8"), "float32"), WEIGHTS[0]
    )
    assert len(calls) == 1
    np.testing.assert_allclose(exported.call(X, WEIGHTS[0]), np.tanh(X @ WEIGHTS[0]).sum(), rtol=1e-5)


def test_what_it_reads_may_change_between_calls():
    scale = [1.0]

    def scaled(y):
        return scale[0] * y

    found = []
    for scale[0] in (1.0, 2.0):
        found.append(jaxdnn.matmul(X, WEIGHTS[0], epilogue=scaled))
    np.testing.assert_allclose(found[1], 2 * found[0], rtol=1e-6)


def ruled(slope):
    """A function whose backward rule, which is no other's, asks for the slope when it is called."""

    @jax.custom_vjp
    def function(y):
        return jnp.tanh(y)

    function.defvjp(lambda y: (jnp.tanh(y), y), lambda y, dy: (slope() * y * dy,))
    return function


def gradient(slope):
    return jax.grad(lambda x, w: jnp.sum(jaxdnn.matmul(x, w, epilogue=ruled(slope))))


def test_rules_are_not_called_when_lowered():
    slope = [3.0]
    traced = jax.jit(gradient(lambda: slope[0])).trace(X, WEIGHTS[0])
    slope[0] = 100.0
    found = traced.lower().compile()(X, WEIGHTS[0])
    np.testing.assert_allclose(found, 3.0 * (X @ WEIGHTS[0]) @ WEIGHTS[0].T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("transform", [jax.jit, lambda f: lambda s: jax.vmap(f)(s[None])[0]], ids=["jit", "vmap"])
def test_rules_may_hold_traced_arrays(transform):
    found = transform(lambda slope: gradient(lambda: slope)(X, WEIGHTS[0]))(jnp.float32(3))
    np.testing.assert_allclose(found, 3.0 * (X @ WEIGHTS[0]) @ WEIGHTS[0].T, rtol=1e-4, atol=1e-4)


def test_rules_leak_no_tracers():
    with jax.checking_leaks():
        jax.jit(gradient(lambda: 3.0))(X, WEIGHTS[0])


@pytest.mark.parametrize("engine", [None, "xla"])
def test_64_bits_of_the_trace_alone(engine):
    wide = X.astype("float64"), WEIGHTS[0].astype("float64")
    with jaxdnn.options(engine=engine):
        traced = jax.jit(jax.grad(total(lambda x, w: jaxdnn.matmul(x, w, epilogue=jnp.tanh)))).trace(*wide)
    with jax.enable_x64(False):
        compiled = traced.lower().compile()
    expected = jax.grad(total(lambda x, w: jnp.tanh(x @ w)))(*wide)
    np.testing.assert_allclose(compiled(*wide), expected, rtol=1e-10, atol=1e-10)


def test_the_share_of_a_device_has_the_rules_of_the_user(cpus):
    """A derivative that is no other's, of a function whose shapes are those of the whole array."""

    @jax.custom_jvp
    def steep(y):
        return jnp.tanh(y)

    steep.defjvp(lambda primals, tangents: (jnp.tanh(*primals), 3.0 * primals[0] * tangents[0]))

    def layer(x, w, bias):
        return jaxdnn.matmul(x, w, bias, epilogue=lambda y, bias: steep(y + jnp.broadcast_to(bias, y.shape)))

    def loss(x, w, bias):
        return jnp.sum(layer(x, w, bias))

    mesh = jax.make_mesh((2,), ("rows",), devices=cpus[:2], axis_types=(jax.sharding.AxisType.Auto,))
    rows, whole = (jax.NamedSharding(mesh, spec) for spec in (jax.P("rows"), jax.P()))
    bias = np.linspace(-1, 1, 8, dtype=np.float32)
    arrays = [jax.device_put(a, s) for a, s in ((X, rows), (WEIGHTS[0], whole), (bias, whole))]
    found = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*arrays)
    expected = jax.value_and_grad(loss, (0, 1, 2))(X, WEIGHTS[0], bias)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4), found, expected)
    np.testing.assert_allclose(found[1][2], 3.0 * (X @ WEIGHTS[0] + bias).sum(0), rtol=1e-4, atol=1e-4)
