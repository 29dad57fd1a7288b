"""Eager and jitted calls, and options, which JAX's caches must know about."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn
from checking.calls import native_calls, primitives
from checking.cases import BF16, F32, NormCase
from checking.compare import as_tuple, assert_close, engines, platform
from checking.transforms import forward, primals, vjp, with_cotangents

CASE = NormCase("layer_norm", (6, 33), x=BF16, scale=F32, bias=F32, statistics=True)


@pytest.mark.parametrize("engine", engines())
def test_eager_is_jitted(engine):
    x, scale, bias = (jnp.asarray(array) for array in CASE.primals())
    with jaxdnn.options(engine=engine):
        eager = CASE.call(x, scale, bias)
        jitted = jax.jit(CASE.call)(x, scale, bias)
    assert_close(eager, forward, CASE, primals)
    for one, other in zip(eager, jitted, strict=True):
        np.testing.assert_array_equal(one, other)


def test_eager_gradient():
    assert_close(vjp(as_tuple(CASE.call), *with_cotangents(CASE)), vjp, CASE, with_cotangents)


def test_without_jit():
    """As one steps through a model in a debugger: each call is compiled by itself still."""
    with jax.disable_jit():
        assert_close(vjp(as_tuple(CASE.call), *with_cotangents(CASE)), vjp, CASE, with_cotangents)
        gradient = jax.grad(lambda a: jaxdnn.matmul(a, a, epilogue=jax.nn.gelu).sum())(jnp.eye(3))
    np.testing.assert_allclose(gradient, 2 * jax.grad(jax.nn.gelu)(1.0) * np.eye(3) + (1 - np.eye(3)), atol=1e-6)


def test_numpy_and_lists_are_arrays():
    np.testing.assert_allclose(jaxdnn.rms_norm([[3.0, 4.0]]), [[0.8485281, 1.1313708]], rtol=1e-6)
    np.testing.assert_allclose(jaxdnn.rms_norm(np.float32([3, 4]), np.ones(2, np.float32)).sum(), 1.9798989, rtol=1e-6)


class Traces:
    """A jitted function that counts how often it is traced."""

    def __init__(self):
        self.count = 0

        def function(x):
            self.count += 1
            return jaxdnn.rms_norm(x)

        self.function = jax.jit(function)


def test_other_options_trace_again():
    x, traces = jnp.ones((2, 8), jnp.float32), Traces()
    traces.function(x)
    traces.function(x)
    assert traces.count == 1
    with jaxdnn.options(engine="xla"):
        traces.function(x)
        traces.function(x)
    assert traces.count == 2
    traces.function(x)
    assert traces.count == 2
    with jaxdnn.options(engine="xla"):
        traces.function(x)
    assert traces.count == 2


def custom_calls(function, *arguments):
    return native_calls(jax.jit(function).lower(*arguments).compile().as_text())


@pytest.mark.skipif(platform() not in ("cpu", "cuda"), reason="no native engine runs on this platform")
def test_option_inside_a_jitted_function():
    def both(x):
        with jaxdnn.options(engine="xla"):
            portable = jaxdnn.rms_norm(x)
        return portable, jaxdnn.rms_norm(x + 1)

    x = jnp.ones((4, 16), jnp.float32)
    assert custom_calls(both, x) == 1
    with jaxdnn.options(engine="xla"):
        assert custom_calls(lambda x: both(x), x) == 0


def test_options_nest():
    with jaxdnn.options(deterministic=False, engine="xla") as outer:
        with jaxdnn.options(workspace_limit=7) as inner:
            assert (inner.engine, inner.deterministic, inner.workspace_limit) == ("xla", False, 7)
        assert outer.workspace_limit is None
    with jaxdnn.options() as fresh:
        assert fresh == jaxdnn.config.Options()


def test_options_end_with_an_exception():
    with pytest.raises(RuntimeError, match="on purpose"), jaxdnn.options(engine="xla"):
        raise RuntimeError("on purpose")
    with jaxdnn.options() as now:
        assert now.engine is None


def test_one_options_object_may_be_entered_twice():
    portable = jaxdnn.options(engine="xla")
    with portable, portable, jaxdnn.options() as now:
        assert now.engine == "xla"
    with portable, jaxdnn.options() as now:
        assert now.engine == "xla"
    with jaxdnn.options() as now:
        assert now.engine is None


def test_a_gradient_runs_the_fused_backward():
    """Neither the tangent nor the reference is left in a jitted gradient, and each direction is one custom call."""
    case = CASE.replace(residual=BF16)
    primals, cotangents = with_cotangents(case)

    def gradient(*primals):
        return jax.vjp(case.call, *primals)[1](cotangents)

    jaxpr = jax.make_jaxpr(jax.jit(gradient))(*primals)
    assert primitives(jaxpr.jaxpr) == {"jaxdnn_norm_forward": 1, "jaxdnn_norm_backward": 1}
    if platform() in ("cpu", "cuda"):
        assert custom_calls(gradient, *primals) == 2
