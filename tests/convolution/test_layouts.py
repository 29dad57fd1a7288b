"""Any layout is read and written by one kernel whose arrays have their channels last: what that costs in transposes."""

import re
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn
from checking.compare import engines, needs_native
from jaxdnn.planning.calls import find_calls

CHANNELS = 8
SHAPE = (2, CHANNELS, 6, 6)


def normal(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype("float32")


def layer(x, weights, bias, residual):
    return jaxdnn.conv_general_dilated(
        x,
        weights,
        (1, 1),
        "SAME",
        precision="highest",
        operands=[bias, residual],
        epilogue=lambda acc, bias, residual: jax.nn.relu(acc + bias) + residual,
    )


def plain(x, weights, bias, residual):
    y = jax.lax.conv_general_dilated(x, weights, (1, 1), "SAME", precision="highest")
    return jax.nn.relu(y + bias) + residual


def chain(block):
    def three(x, weights, bias):
        for _ in range(3):
            x = block(x, weights, bias, x)
        return x

    return three


@needs_native
@pytest.mark.skipif("host" not in engines("convolution"), reason="an image's transposes are told by their size alone")
def test_a_chain_costs_two_transposes():
    """Of three convolutions in NCHW, each with an image in NCHW among its epilogue's operands."""
    arrays = normal(*SHAPE), normal(CHANNELS, CHANNELS, 1, 1), normal(CHANNELS, 1, 1)
    compiled = jax.jit(chain(layer)).lower(*arrays).compile()
    text = compiled.as_text()
    assert len(re.findall(r'custom_call_target="jaxdnn_\w+"', text)) == 3
    sizes = [prod(map(int, dims.split(","))) for dims in re.findall(r"= f32\[([\d,]+)\]\S* transpose\(", text)]
    assert sizes.count(prod(SHAPE)) == 2
    np.testing.assert_allclose(compiled(*arrays), chain(plain)(*arrays), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("window", [1, 3])
def test_gradients_of_a_chain(window):
    arrays = normal(*SHAPE), normal(CHANNELS, CHANNELS, window, window) / 4, normal(CHANNELS, 1, 1)

    def gradients(block):
        return jax.jit(jax.grad(lambda *arrays: jnp.sum(jnp.sin(chain(block)(*arrays))), (0, 1, 2)))(*arrays)

    for got, want in zip(gradients(layer), gradients(plain), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4)


def epilogues(function, *arrays):
    return [call for call in find_calls(function, *arrays) if call.spec.op == "epilogue"]


def test_the_derivative_of_an_epilogue_in_another_layout_is_pointwise():
    """What it sums for a bias, over all but the channels, is summed in the order of memory."""
    arrays = normal(*SHAPE), normal(CHANNELS, CHANNELS, 3, 3), normal(CHANNELS, 1, 1), normal(*SHAPE)
    (call,) = epilogues(jax.grad(lambda *arrays: jnp.sum(layer(*arrays)), (0, 1, 2, 3)), *arrays)
    assert not isinstance(call.problem, str)
    assert [result.reduction for result in call.problem.results if hasattr(result, "reduction")] == ["sum"]


def test_statistics_are_part_of_the_kernel():
    def statistics(acc):
        return acc, jnp.sum(acc, (0, 2, 3)), jnp.sum(acc * acc, (0, 2, 3))

    def call(x, weights):
        return jaxdnn.conv_general_dilated(x, weights, (1, 1), "SAME", epilogue=statistics)

    (found,) = find_calls(call, normal(*SHAPE), normal(CHANNELS, CHANNELS, 3, 3))
    results = found.problem.results
    assert [getattr(result, "axes", None) for result in results] == [None, (1,), (1,)]
    assert [result.column_stride for result in results[1:]] == [1, 1]
