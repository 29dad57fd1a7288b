"""Images and results with more than 2^31 elements: offsets need 64 bits."""

import jax
import jax.numpy as jnp
import numpy as np

import jaxdnn
from checking.compare import difference
from checking.memory import needs_memory
from jaxdnn.planning.calls import find_calls
from jaxdnn.planning.select import select

FEW = 8
# Of a call: an image, the filter, strides, groups, and an engine that serves it, or one of its gradients.
CALLS = {
    "im2col": ((64, 64, 64), (3, 3, 64, 64), (1, 1), 1, "sm90"),
    "strides": ((64, 64, 64), (3, 3, 64, 128), (2, 2), 1, "sm90"),
    "places": ((64, 64, 64), (1, 1, 64, 64), (1, 1), 1, "sm90"),
    "windows that tile": ((64, 64, 32), (2, 2, 32, 128), (2, 2), 1, "sm90"),
    "few channels": ((96, 96, 3), (7, 7, 3, 16), (2, 2), 1, "sm90"),
    "groups": ((32, 32, 256), (3, 3, 16, 256), (1, 1), 16, "sm90"),
    "depthwise": ((56, 56, 96), (7, 7, 1, 96), (1, 1), 96, "depthwise"),
    "lines of depthwise": ((56, 56, 144), (3, 3, 1, 144), (1, 1), 144, "lines"),
}


@needs_memory(60)
def test_the_last_images_are_as_of_few():
    """A batch of zeros ends with images, past element 2^31. The gradient of the filter is theirs alone."""
    for name, call in CALLS.items():
        assert not wrong(*call), name


def wrong(shape, filters, strides, groups, engine):
    """What is, of the result and both gradients; empty if nothing is."""
    count = 2**31 // int(np.prod(shape)) + 2 * FEW
    keys = jax.random.split(jax.random.key(0), 3)
    x, w = (jax.random.normal(key, size, "bfloat16") for key, size in zip(keys, ((FEW, *shape), filters), strict=False))

    def convolve(x, w):
        numbers = ("NHWC", "HWIO", "NHWC")
        return jaxdnn.conv_general_dilated(x, w, strides, "SAME", dimension_numbers=numbers, feature_group_count=groups)

    def all_three(x, w, dy):
        y, pull_back = jax.vjp(convolve, x, w)
        return (y, *pull_back(dy))

    def after_zeros(array):
        return jnp.zeros((count, *array.shape[1:]), array.dtype).at[-FEW:].set(array)

    def at_the_end(x, w, dy):
        y, dx, dw = all_three(after_zeros(x), w, after_zeros(dy))
        return (y[-FEW:], dx[-FEW:], dw), [jnp.any(array[:-FEW]) for array in (y, dx)]

    dy = jax.random.normal(keys[2], jax.eval_shape(convolve, x, w).shape, "bfloat16")
    served = [select(call.spec, call.signature, "cuda").engine for call in find_calls(at_the_end, x, w, dy)]
    assert engine in served
    assert "xla" not in served
    found, elsewhere = jax.jit(at_the_end)(x, w, dy)
    assert not any(elsewhere), "of zeros"
    with jaxdnn.options(engine="xla"):
        expected = jax.jit(all_three)(*(array.astype("float32") for array in (x, w, dy)))
    pairs = ((np.asarray(got), np.asarray(want, np.float64)) for got, want in zip(found, expected, strict=True))
    # Results are rounded, and so are their sums, to float32.
    return "".join(difference(got, want, 2**-8 * np.abs(want) + 1e-5 * np.abs(want).max()) for got, want in pairs)
