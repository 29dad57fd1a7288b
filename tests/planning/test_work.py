"""The flops and bytes that `explain` tells."""

import jax
import jax.numpy as jnp
import pytest
from jax import export

import jaxdnn


def test_totals_are_those_counted_by_hand():
    """A product has 2 m n k flops, and each of its gradients too; a norm 5 an element, and its gradient 12."""
    rows, wide, narrow, layers = 16, 64, 32, 3

    def loss(x, up, down):
        def layer(x, _):
            return jaxdnn.matmul(jaxdnn.rms_norm(jaxdnn.matmul(x, up)), down), None

        return jnp.sum(jax.lax.scan(layer, x, None, length=layers)[0])

    shapes = (rows, wide), (wide, narrow), (narrow, wide)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    product, elements = 2 * rows * wide * narrow, rows * narrow
    # A product and its gradients read two of these and write the third; one of the three is always the weight.
    moved = 4 * (rows * wide + wide * narrow + elements)
    rstd = 4 * rows
    forward = layers * (2 * product + 5 * elements), layers * (2 * moved + 8 * elements + rstd)
    backward = layers * (4 * product + 12 * elements), layers * (4 * moved + 12 * elements + rstd)
    step = jaxdnn.explain(jax.value_and_grad(loss, (0, 1, 2)), *arrays, platform="cpu")
    for explanation in (step, jaxdnn.explain(loss, *arrays, platform="cpu")):
        assert (explanation.forward.flops, explanation.forward.bytes) == forward
        assert (explanation.backward.flops, explanation.backward.bytes) == backward
        total = f"In total: forward {explanation.forward}; backward {explanation.backward} "
        assert total in " ".join(str(explanation).split())

    only_forward = jaxdnn.explain(lambda x: jaxdnn.matmul(x, x), jax.ShapeDtypeStruct((8, 8), jnp.int8), platform="cpu")
    assert (only_forward.forward.flops, only_forward.backward.flops) == (2 * 8**3, 0)
    assert "backward" not in str(only_forward).partition("In total")[2].partition("Forward,")[0]


@pytest.mark.parametrize("target", [None, "sm_90"])
def test_symbolic_shapes(target):
    x = jax.ShapeDtypeStruct(export.symbolic_shape("n, 64"), jnp.float32)
    w = jax.ShapeDtypeStruct((64, 32), jnp.float32)
    with jaxdnn.options(target=target):
        explanation = jaxdnn.explain(lambda x, w: jaxdnn.rms_norm(jaxdnn.matmul(x, w)), x, w)
    assert str(explanation.forward.flops) == "4256*n"
    assert "the shapes are symbolic" in " ".join(str(explanation).split())
