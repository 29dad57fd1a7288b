"""Rules that only convolutions have: gradients that are convolutions, and what policies and vmap make of them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental import jet

import jaxdnn
from checking.calls import primitives
from jaxdnn.engines.convolution.problem import Convolution
from jaxdnn.planning.calls import find_calls

LAYOUT = ("NHWC", "HWIO", "NHWC")
RANDOM = np.random.default_rng(0)
X, W = (RANDOM.standard_normal(shape).astype("float32") for shape in ((2, 6, 5, 4), (3, 2, 4, 8)))
CALL = {"window_strides": (2, 1), "padding": "SAME", "dimension_numbers": LAYOUT}


def loss(convolve, x, w):
    return jnp.sum(jnp.sin(convolve(x, w, **CALL)))


def specs(function, *arrays):
    return [call.spec for call in find_calls(function, *arrays)]


def test_gradients_are_calls_of_the_same_op_with_the_same_windows():
    found = specs(jax.grad(partial(loss, jaxdnn.conv_general_dilated), (0, 1)), X, W)
    assert sorted(spec.result for spec in found) == ["filter", "image", "output"]
    assert len({spec.windows for spec in found}) == 1


def test_second_derivatives_are_too():
    gradient = jax.grad(partial(loss, jaxdnn.conv_general_dilated), (0, 1))
    _, product = jax.jvp(lambda t: gradient(X * t, W), (1.0,), (1.0,))
    assert all(np.all(np.isfinite(one)) for one in product)
    jaxpr = jax.make_jaxpr(lambda t: jax.jvp(lambda t: gradient(X * t, W), (t,), (1.0,)))(1.0).jaxpr
    assert set(primitives(jaxpr)) == {"jaxdnn_convolution"}


def test_a_dilated_image_is_an_input_gradient():
    def dilated(x, w):
        call = {**CALL, "window_strides": (1, 1), "padding": ((1, 1), (1, 0))}
        return jaxdnn.conv_general_dilated(x, w, **call, lhs_dilation=(2, 3))

    (found,) = find_calls(dilated, X, W)
    assert found.spec.result == "image"
    assert all(window.base_dilation == 1 for window in found.problem.windows)
    transposed = specs(lambda x, w: jaxdnn.conv_transpose(x, w, (2, 2), "SAME"), X, W)
    assert [spec.result for spec in transposed] == ["image"]


@pytest.mark.parametrize(("axes", "batch", "n"), [((0, None), 1, 6), ((None, 0), 3, 2), ((0, 0), 3, 2)])
def test_mapped_axes_are_images_or_a_batch(axes, batch, n):
    """No group, and no copy: an array that does not carry the axis is read again."""
    arrays = [array if axis is None else np.stack([array] * 3) for array, axis in zip((X, W), axes, strict=True)]
    (found,) = find_calls(jax.vmap(lambda x, w: jaxdnn.conv_general_dilated(x, w, **CALL), axes), *arrays)
    problem = found.problem
    assert isinstance(problem, Convolution)
    assert (problem.batch, problem.n, problem.groups) == (batch, n, 1)
    strides = [array.size // 3 if batch > 1 and axis == 0 else 0 for array, axis in zip(arrays, axes, strict=True)]
    assert [problem.a.batch_stride, problem.b.batch_stride] == strides
    assert [array.shape for array in found.signature.operands.values()] == [array.shape for array in arrays]


@pytest.mark.parametrize("policy", ["dots_saveable", "nothing_saveable", "everything_saveable"])
def test_policies_see_convolutions(policy):
    """As many run as of JAX's."""

    def convolutions(convolve, name):
        def block(x, w):
            return jnp.sin(convolve(jnp.sin(convolve(x, w, **CALL)), W.swapaxes(2, 3), **CALL))

        saving = jax.checkpoint(block, policy=getattr(jax.checkpoint_policies, policy))
        text = str(jax.make_jaxpr(jax.grad(lambda x, w: jnp.sum(saving(x, w)), (0, 1)))(X, W))
        return text.count(f"{name}[")

    ours = convolutions(jaxdnn.conv_general_dilated, "jaxdnn_convolution")
    assert ours == convolutions(jax.lax.conv_general_dilated, "conv_general_dilated") > 4


def test_taylor_terms():
    arrays, series = (X[:1, :3, :3], W), ([X[:1, 1:4, :3], X[:1, 3:, 2:]], [W * 0.5, W - 1])

    def plain(x, w):
        # JAX has no rule for convolutions: the sum over the filter's places.
        rows, columns = -(-x.shape[1] // 2), x.shape[2]
        padded = jnp.pad(x, ((0, 0), (1, 1), (0, 1), (0, 0)))
        return sum(
            jnp.einsum("nhwc,ck->nhwk", padded[:, r : r + 2 * rows - 1 : 2, s : s + columns], w[r, s])
            for r in range(3)
            for s in range(2)
        )

    functions = partial(jaxdnn.conv_general_dilated, **CALL), plain
    ours, theirs = (jax.tree.leaves(jet.jet(function, arrays, series)) for function in functions)
    for got, want in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("padding", [(-2, 1), (-1, 1), (-3, 2), (2, -1), (-9, 4), (4, -10), (-12, 20)], ids=str)
@pytest.mark.parametrize("result", ["output", "image", "filter"])
def test_images_that_are_cut_off(padding, result):
    """XLA's convolutions on CPUs may read what lies outside of them."""
    random = np.random.default_rng(0)
    a, b = random.standard_normal((4, 12, 3)), random.standard_normal((3, 3, 4))
    low, high = padding

    def exact(a, b):
        places = jnp.pad(a, ((0, 0), (12, 20), (0, 0)))[:, 12 - low : 24 + high]
        windows = jnp.stack([places[:, i : i + 3] for i in range(places.shape[1] - 2)], 1)
        return jnp.einsum("nowc,wck->nok", windows, b)

    def ours(a, b):
        return jaxdnn.conv_general_dilated(a, b, (1,), (padding,), dimension_numbers=("NHC", "HIO", "NHC"))

    number = ("output", "image", "filter").index(result)
    with jax.enable_x64(True):
        cotangent = random.standard_normal(exact(a, b).shape)
        want = (exact(a, b), *jax.vjp(exact, a, b)[1](cotangent))[number]

    @jax.jit
    def found(a, b, cotangent):
        y, vjp = jax.vjp(ours, a, b)
        return (y, *vjp(cotangent))[number]

    for _ in range(3):
        got = found(*(array.astype("float32") for array in (a, b, cotangent)))
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("padding", [np.array([[2, 1]]), "same", "causal"])
def test_padding_as_an_array_and_in_lower_case(padding):
    x, w = X[:, :, 0], W[:, 0]
    got = jaxdnn.conv_general_dilated(x, w, (1,), padding, dimension_numbers=("NWC", "WIO", "NWC"))
    low_high = [(2, 1)] if isinstance(padding, np.ndarray) else [(1, 1)] if padding == "same" else [(2, 0)]
    want = jax.lax.conv_general_dilated(x, w, (1,), low_high, dimension_numbers=("NWC", "WIO", "NWC"))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("padding", ["SAME", ((1, 1),), ((-1, 2),)], ids=str)
def test_strides_over_a_size_that_is_known_when_the_program_runs(padding):
    """What they leave over is symbolic padding."""

    def convolve(x):
        return jaxdnn.conv_general_dilated(x, W[:, 0], (2,), padding, dimension_numbers=("NWC", "WIO", "NWC"))

    def found(x):
        y, pull_back = jax.vjp(convolve, x)
        return y, *pull_back(jnp.cos(y))

    (size,) = export.symbolic_shape("size")
    given = jax.ShapeDtypeStruct((2, size, 4), "float32")
    forward, exported = (
        export.export(jax.jit(function), disabled_checks=jaxdnn.export_checks())(given)
        for function in (convolve, found)
    )
    # XLA's convolutions on CPUs may read outside of an image that is cut off; what they read is right now and then.
    assert ("slice" in forward.mlir_module()) == (padding == ((-1, 2),))
    for known in (9, 10):
        x = RANDOM.standard_normal((2, known, 4)).astype("float32")
        for got, want in zip(exported.call(x), found(x), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
