"""Convolutions as XLA gets them: of integers for GPUs, for which it has none, exact; float8; and single places."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxdnn
from jaxdnn.primitives.convolution.taps import by_taps


def drawn(seed):
    """Two arrays, and what `lax.conv_general_dilated` takes besides."""
    random = np.random.default_rng(seed)

    def several(low, high, count):
        return [int(one) for one in random.integers(low, high, count)]

    rank = seed % 4
    groups = several(1, 4, 1)[0]
    counts = (1, groups) if seed % 3 == 0 else (groups, 1)
    (n, c, o), sizes, window = several(1, 3, 3), several(1, 9, rank), several(1, 4, rank)
    numbers = lax.ConvDimensionNumbers(*(tuple(map(int, random.permutation(rank + 2))) for _ in range(3)))

    def array(shape, order):
        values = jnp.asarray(random.integers(-128, 128, shape), "int32")
        return jnp.transpose(values, np.argsort(order))

    parameters = {
        "window_strides": several(1, 4, rank),
        "padding": [tuple(several(-1, 4, 2)) for _ in range(rank)],
        "lhs_dilation": several(1, 3, rank),
        "rhs_dilation": several(1, 3, rank),
        "feature_group_count": counts[0],
        "batch_group_count": counts[1],
    }
    lhs = array((n * counts[1], c * counts[0], *sizes), numbers.lhs_spec)
    return lhs, array((o * groups, c, *window), numbers.rhs_spec), numbers, parameters


@pytest.mark.parametrize("seed", range(24))
def test_is_what_lax_defines(seed):
    lhs, rhs, numbers, parameters = drawn(seed)
    with jax.default_device(jax.devices("cpu")[0]):  # XLA has no convolutions of integers for GPUs
        host = [jnp.asarray(np.asarray(array)) for array in (lhs, rhs)]
        expected = lax.conv_general_dilated(*host, dimension_numbers=numbers, **parameters)
    np.testing.assert_array_equal(by_taps(lhs, rhs, numbers, **parameters), expected)


def lowered(platform, dtype="int8", accumulator="int32"):
    image, window = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((2, 9, 9, 4), (3, 3, 4, 5)))

    def call(image, window):
        return jaxdnn.conv_general_dilated(
            image,
            window,
            (1, 1),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            preferred_element_type=accumulator,
        )

    return jax.jit(call).trace(image, window).lower(lowering_platforms=(platform,)).as_text()


def test_what_xla_gets_for_a_gpu():
    with jaxdnn.options(target="sm_90", engine="xla"):
        text = lowered("cuda")
    assert "stablehlo.convolution" not in text
    assert "stablehlo.dot_general" in text


def test_what_xla_gets_for_a_cpu():
    """Bytes, of which it has fast products, and of int32 slow loops."""
    assert "(tensor<2x9x9x4xi8>, tensor<3x3x4x5xi8>) -> tensor<2x9x9x5xi32>" in lowered("cpu")


def test_float8_for_a_gpu():
    """In bfloat16, behind a barrier that XLA takes no cast across."""
    with jaxdnn.options(target="sm_90", engine="xla"):
        text = lowered("cuda", "float8_e4m3fn", "float32")
    (barrier,) = (line for line in text.splitlines() if "optimization_barrier" in line)
    assert "tensor<2x9x9x4xbf16>, tensor<3x3x4x5xbf16>" in barrier
    assert "(tensor<2x9x9x4xbf16>, tensor<3x3x4x5xbf16>) -> tensor<2x9x9x5xf32>" in text


def single_places(image, window):
    return jaxdnn.conv_general_dilated(image, window, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))


IMAGE, WINDOW = (np.random.default_rng(7).standard_normal(shape) for shape in ((2, 5, 3, 4), (1, 1, 4, 6)))
OUTPUT = np.einsum("nhwc,ijck->nhwk", IMAGE, WINDOW)


def squares(image, window):
    return jnp.sum(single_places(image, window) ** 2)


PASSES = {
    "output": (single_places, OUTPUT),
    "image": (jax.grad(squares), 2 * np.einsum("nhwk,ijck->nhwc", OUTPUT, WINDOW)),
    "filter": (jax.grad(squares, 1), 2 * np.einsum("nhwk,nhwc->ck", OUTPUT, IMAGE)[None, None]),
    "mapped filters": (
        lambda image, window: jax.vmap(single_places, (None, 0))(image, jnp.stack([window, 2 * window])),
        np.stack([OUTPUT, 2 * OUTPUT]),
    ),
}


@pytest.mark.parametrize("wanted", PASSES)
def test_single_places_are_a_product(wanted):
    run, expected = PASSES[wanted]
    arrays = [jnp.asarray(array, "float32") for array in (IMAGE, WINDOW)]
    with jaxdnn.options(target="sm_90", engine="xla"):
        text = jax.jit(run).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert "stablehlo.convolution" not in text
    assert "stablehlo.dot_general" in text
    with jaxdnn.options(engine="xla"):
        np.testing.assert_allclose(run(*arrays), expected, rtol=1e-4, atol=1e-4)


def test_single_places_of_groups():
    """Each of which has channels of its own."""
    window = WINDOW[:, :, :2]
    halves = [
        np.einsum("nhwc,ijck->nhwk", image, filters)
        for image, filters in zip(np.split(IMAGE, 2, -1), np.split(window, 2, -1), strict=True)
    ]
    with jaxdnn.options(engine="xla"):
        got = jaxdnn.conv_general_dilated(
            jnp.asarray(IMAGE, "float32"),
            jnp.asarray(window, "float32"),
            (1, 1),
            "VALID",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=2,
        )
    np.testing.assert_allclose(got, np.concatenate(halves, -1), rtol=1e-4, atol=1e-4)
