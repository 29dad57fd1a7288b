"""What tracing a pointwise function refuses, and what it says."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from checking.pointwise.programs import ROW, SHAPE, traced
from jaxdnn.pointwise import UnsupportedOperation


def widened_sum(dtype: str, to: str) -> Any:
    return lambda acc: lax.reduce_sum(acc.astype(dtype), (0, 1)).astype(to)


def refusals() -> dict[str, tuple[Any, str, str]]:
    return {
        "sort": (lambda acc: jnp.sort(acc), "sort", "can't be part of a kernel. These can: abs, acos"),
        "cumsum": (lambda acc: jnp.cumsum(acc, 0), "cumsum", "can't be part of a kernel"),
        "product of matrices": (lambda acc: acc @ jnp.ones((6, 6)), "dot_general", "can't be part of a kernel"),
        "slice": (lambda acc: acc[:, ::-1], "rev", "can't be part of a kernel"),
        "loop": (lambda acc: lax.fori_loop(0, 3, lambda _, x: x * 2, acc), "scan", "can't be part of a kernel"),
        "softmax": (lambda acc: jax.nn.softmax(acc), "reduce_sum", "only be the last step"),
        "mean": (lambda acc: jnp.mean(acc, 0), "div", "follows `reduce_sum`; a reduction can only be the last step"),
        "broadcast": (lambda acc: jnp.broadcast_to(acc.sum(0), SHAPE), "broadcast_in_dim", "only be the last step"),
        "reshape": (lambda acc: acc.reshape(6, 4).T, "reshape", r"reshapes \(4, 6\) to \(6, 4\)"),
        "sum that wraps": (widened_sum("int8", "int32"), "convert_element_type", "follows `reduce_sum`"),
        "sum that overflows": (widened_sum("float16", "float32"), "convert_element_type", "follows `reduce_sum`"),
        "count": (lambda acc: (acc > 0).sum(0) * 1.5, "mul", "follows `reduce_sum`"),
        "random": (
            lambda acc: acc + jax.random.normal(jax.random.key(0), SHAPE),
            "random_bits",
            "kernels draw no random numbers",
        ),
        "complex": (lambda acc: jnp.abs(acc * 1j), "abs", "not supported for complex"),
    }


@pytest.mark.parametrize("name", refusals())
def test_unsupported_operation(name):
    function, primitive, message = refusals()[name]
    with pytest.raises(UnsupportedOperation, match=message) as caught:
        traced(function)
    assert caught.value.primitive == primitive
    assert "test_refused.py:" in caught.value.where
    assert f"`{primitive}` at " in str(caught.value)


def test_transposed_accumulator():
    with pytest.raises(UnsupportedOperation, match="elements of the accumulator from other places"):
        traced(lambda acc: acc + acc.T, shape=(4, 4))


def test_traced_closure():
    @jax.jit
    def caller(b):
        traced(lambda acc: acc + b)
        return b

    with pytest.raises(TypeError, match=r"lambda acc: acc \+ b: .*closes over a traced array, float32\[6\].*operand"):
        caller(jnp.ones(6, "float32"))


def test_captured_array():
    b = jnp.ones(6, "float32")
    with pytest.raises(ValueError, match=r"holds an array, float32\[6\]; only scalars.*pass it as an operand"):
        traced(lambda acc: acc + b)
    with pytest.raises(ValueError, match=r"holds an array, float32\[6\]"):
        traced(lambda acc: acc + np.ones(6, "float32"))


def test_side_effects():
    def function(acc):
        jax.debug.print("{}", acc)
        return acc

    with pytest.raises(ValueError, match="function: it has side effects"):
        traced(function)


@pytest.mark.parametrize("result", [None, (), {}])
def test_no_array(result):
    with pytest.raises(TypeError, match="expected it to return one array or more"):
        traced(lambda _: result)


def test_wrong_shape():
    with pytest.raises(
        ValueError, match=r"it returns float32\[6\]; expected the output's shape \[4, 6\], or as the last"
    ):
        traced(lambda _, b: b, ROW)
    with pytest.raises(ValueError, match=r"it returns float32\[1,4,6\]|it returns float32\[1, 4, 6\]"):
        traced(lambda acc: acc[None])
    with pytest.raises(ValueError, match=r"it returns float32\[\]"):
        traced(lambda _, b: jnp.sum(b), ROW)


def test_operand_that_does_not_broadcast():
    with pytest.raises(ValueError, match=r"tracing it on acc: float32\[4, 6\], b: float32\[5\] failed: Incompatible"):
        traced(lambda acc, b: acc + b, jax.ShapeDtypeStruct((5,), "float32"))


def test_what_jax_says_names_the_function_and_its_arguments():
    with pytest.raises(TypeError, match=f"(?s)the function <lambda> at {__file__}.* argument acc"):
        traced(lambda acc: acc if acc[0, 0] > 0 else -acc)


def test_wrong_dtype():
    with pytest.raises(UnsupportedOperation, match=r"`acc` at .*it is complex64; kernels take float32"):
        traced(lambda acc: acc, accumulators=("complex64",))
