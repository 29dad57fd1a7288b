"""Bad input of the matmul family is an error while tracing, which says what was expected."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn

A, B = jnp.ones((3, 4), jnp.float32), jnp.ones((4, 5), jnp.float32)
NUMBERS = (((1,), (0,)), ((), ()))


def with_epilogue(epilogue, *operands, **keywords):
    return lambda: jaxdnn.matmul(A, B, *operands, epilogue=epilogue, **keywords)


def closing_over():
    return jax.jit(lambda bias: jaxdnn.matmul(A, B, epilogue=lambda acc: acc + bias))(jnp.ones(5))


def prints(acc):
    jax.debug.print("acc {}", acc[0, 0])
    return acc


BAD = {
    "contracted sizes": (lambda: jaxdnn.matmul(A, A), TypeError, r"contracting dimensions.*(\(4,\)|4).*(\(3,\)|3)"),
    "contracted sizes of dot_general": (lambda: jaxdnn.dot_general(A, A, NUMBERS), TypeError, "contracting dimensions"),
    "batch sizes": (
        lambda: jaxdnn.matmul(jnp.ones((2, 3, 4)), jnp.ones((3, 4, 5))),
        ValueError,
        r"Incompatible .*matmul arguments.*\[2,3,4\].*\[3,4,5\]",
    ),
    "a scalar": (lambda: jaxdnn.matmul(A, 2.0), ValueError, "must have ndim at least 1"),
    "no array": (lambda: jaxdnn.matmul(A, None), TypeError, "None"),
    "dimension numbers": (
        lambda: jaxdnn.dot_general(A, B, (((7,), (0,)), ((), ()))),
        TypeError,
        "lhs_contracting|dimensions",
    ),
    "precision": (lambda: jaxdnn.matmul(A, B, precision="highestest"), ValueError, "highestest"),
    "dtype of the result": (lambda: jaxdnn.matmul(A, B, out_dtype="float31"), TypeError, "float31"),
    "operands without an epilogue": (
        lambda: jaxdnn.matmul(A, B, jnp.ones(5)),
        ValueError,
        "^matmul: got 1 operands for an epilogue, and no epilogue",
    ),
    "an operand that does not broadcast": (
        with_epilogue(lambda acc, bias: acc + bias, jnp.ones(7, jnp.float32)),
        ValueError,
        r"lambda acc, bias: acc \+ bias: tracing it on acc: float32\[3, 5\], bias: float32\[7\] failed",
    ),
    "another shape": (with_epilogue(lambda acc: acc[:, :2]), ValueError, "slice|output's shape"),
    "transposed": (
        with_epilogue(lambda acc: acc.T),
        ValueError,
        r"float32\[5, 3\]; expected the output's shape \[3, 5\]",
    ),
    "more dimensions": (with_epilogue(lambda acc: acc[None] + jnp.zeros((2, 1, 1))), ValueError, "output's shape"),
    "too few parameters": (with_epilogue(lambda acc: acc, jnp.ones(5)), TypeError, "positional argument"),
    "an epilogue that is no function": (with_epilogue(3), TypeError, "epilogue must be a function .*got 3"),
    "an operand that is no array": (
        with_epilogue(lambda acc, b: acc + b["x"], {"x": A}),
        TypeError,
        "operand 0 of the epilogue must be an array; got a dict",
    ),
    "an operand of dot_general that is no array": (
        lambda: jaxdnn.dot_general(A, B, NUMBERS, operands=[{"x": A}], epilogue=lambda acc, b: acc + b["x"]),
        TypeError,
        "^dot_general: operand 0 of the epilogue must be an array; got a dict",
    ),
    "operands of dot_general without an epilogue": (
        lambda: jaxdnn.dot_general(A, B, NUMBERS, operands=[A]),
        ValueError,
        "^dot_general: got 1 operands for an epilogue",
    ),
    "aliases of dot_general": (
        lambda: jaxdnn.dot_general(A, B, NUMBERS, epilogue=lambda acc: acc, input_output_aliases={0: 0}),
        ValueError,
        "^dot_general: input_output_aliases=.*no operand 0; .* there are 0",
    ),
    "a bias that is no array": (
        lambda: jaxdnn.gated_linear_unit(A, B, B, {"x": A}),
        TypeError,
        "^gated_linear_unit: gate_bias must be an array; got a dict",
    ),
    "an activation that is no function": (
        lambda: jaxdnn.gated_linear_unit(A, B, B, activation="silu"),
        TypeError,
        "activation must be a function of an array; got 'silu'",
    ),
    "no result": (with_epilogue(lambda _: None), TypeError, "return one array or more"),
    "a side effect": (with_epilogue(prints), ValueError, "side effects"),
    "closes over an array": (closing_over, TypeError, "closes over|pass it"),
    "gate and up of two shapes": (
        lambda: jaxdnn.gated_linear_unit(A, B, B[:, :3]),
        ValueError,
        r"gate and up must be two matrices of one shape .*float32\[4, 5\] and float32\[4, 3\]",
    ),
    "gate and up of two dtypes": (
        lambda: jaxdnn.gated_linear_unit(A, B, B.astype(jnp.bfloat16)),
        ValueError,
        r"one dtype; got float32\[4, 5\] and bfloat16\[4, 5\]",
    ),
    "gate that is no matrix": (
        lambda: jaxdnn.gated_linear_unit(A, jnp.ones((2, 4, 5)), jnp.ones((2, 4, 5))),
        ValueError,
        "two matrices",
    ),
    "a bias of another shape": (
        lambda: jaxdnn.gated_linear_unit(A, B, B, jnp.ones(4)),
        ValueError,
        r"gate_bias must have shape \(5,\); got \(4,\)",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    call, error, message = BAD[name]
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("name", ["another shape", "transposed", "a side effect", "closes over an array"])
def test_without_a_fallback_too(name):
    call, error, message = BAD[name]
    with jaxdnn.options(fallback=False), pytest.raises(error, match=message):
        call()


def test_an_operation_that_kernels_lack():
    """It is named, with where it stands; and runs after the kernel where that is allowed."""

    def epilogue(acc):
        return jnp.sort(acc, axis=-1)

    a = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    call = functools.partial(jaxdnn.matmul, epilogue=epilogue, precision="highest")
    with jaxdnn.options(fallback=False), pytest.raises(jaxdnn.UnsupportedOperation, match=r"`sort` at .*\.py:\d+"):
        call(a, B)
    np.testing.assert_allclose(call(a, B), np.sort(a @ np.asarray(B), axis=-1), rtol=1e-5)
    text = str(jaxdnn.explain(call, a, B))
    assert "Not fused" in text
    assert "sort" in text
