"""How a product is called: its type, its spec, and `apply`, which binds the primitive with an epilogue."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import unwrap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdnn.config import current_options
from jaxdnn.primitives.fused.call import apply_fused
from jaxdnn.primitives.fused.dtypes import accumulator, algorithm
from jaxdnn.primitives.fused.messages import described, described_type
from jaxdnn.primitives.matmul.dimensions import Labels, arrange
from jaxdnn.primitives.matmul.spec import MatmulSpec
from jaxdnn.primitives.matmul.spec import matmul as _matmul

# JAX keeps what it has traced of functions that it jits, so that calls of the same types take no time to check.
_jit = partial(jax.jit, static_argnames=("precision", "preferred_element_type"))
_product = _jit(unwrap(jnp.matmul))


def product_type(
    caller: str,
    arrays: Mapping[str, jax.typing.ArrayLike],
    precision: jax.lax.PrecisionLike,
    preferred: jax.typing.DTypeLike | None,
) -> Any:
    """The type of `jax.numpy.matmul` of two arrays, given by their names in the function `caller`."""
    (left, of_left), (right, of_right) = ((name, described_type(array)) for name, array in arrays.items())
    shapes: list[tuple[int, ...]] = [getattr(array, "shape", ()) for array in arrays.values()]
    clearer = ""
    if all(shapes) and shapes[0][-1] != (shapes[1][-2:])[0]:
        clearer = (
            f"{caller}: the last dimension of {left} must be the last but one of {right}, or its only one; got "
            f"{left} {of_left} and {right} {of_right}"
        )
    with described(caller, arrays, clearer):
        return _product.eval_shape(*arrays.values(), precision=precision, preferred_element_type=preferred)


def wrong_form(numbers: Any) -> str:
    """What to say of `dimension_numbers` that don't have the form which `jax.lax.dot_general` unpacks; else nothing."""
    try:
        (_, _), (_, _) = numbers
        if all(isinstance(one, (Sequence, np.ndarray)) for pair in numbers for one in pair):
            return ""
    except (TypeError, ValueError):
        pass
    return (
        "dot_general: dimension_numbers must be ((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch)), each a "
        f"sequence of dimensions, as (((1,), (0,)), ((), ())) for matrices; got {numbers!r}"
    )


def product_spec(a: np.dtype, b: np.dtype, dtype: np.dtype, precision: jax.lax.PrecisionLike) -> MatmulSpec:
    """What is known of a call before its dimensions: the dtypes and the algorithm."""
    return MatmulSpec(
        accumulator=accumulator(a, jnp.dtype(dtype)).name,
        dtype=jnp.dtype(dtype).name,
        algorithm=algorithm(a, b, precision),
        options=current_options(),
    )


def apply(
    caller: str,
    spec: MatmulSpec,
    left: tuple[jax.Array, Labels],
    rhs: Sequence[tuple[jax.Array, Labels]],
    result: Labels,
    batch: Labels,
    operands: Sequence[jax.typing.ArrayLike],
    epilogue: Callable[..., Any] | None,
    out_dtype: jax.typing.DTypeLike | None,
    aliases: Mapping[int, int],
) -> Any:
    """Binds the primitive, for the public function `caller`, to arrays with labels: see `arrange`."""
    dimensions, arrays = arrange(left, rhs, result, batch)
    spec = spec.replace(dimensions=dimensions, dual=len(rhs) == 2)
    return apply_fused(caller, _matmul, spec, arrays, operands, epilogue, out_dtype, aliases)
