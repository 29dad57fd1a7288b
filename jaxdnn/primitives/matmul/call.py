"""How a product is called: its type, its spec, and `apply`, which binds the primitive with an epilogue."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import unwrap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdnn.config import current_options
from jaxdnn.pointwise import UnsupportedOperation, capture
from jaxdnn.primitives.fused.aliases import check_places
from jaxdnn.primitives.fused.dtypes import accumulator, algorithm, checked_dtype
from jaxdnn.primitives.fused.epilogue import Epilogue, apply_after, checked_operands, strongly_typed
from jaxdnn.primitives.fused.messages import described, described_type
from jaxdnn.primitives.fused.traced import Traced
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
    dtype = checked_dtype(f"{caller}: out_dtype", out_dtype) or spec.dtype
    operands = checked_operands(caller, epilogue, operands, len(rhs))
    dimensions, arrays = arrange(left, rhs, result, batch)
    spec = spec.replace(dimensions=dimensions, dual=len(rhs) == 2)
    if epilogue is None:
        return _matmul(spec.replace(dtype=dtype), dict(zip(spec.operands, arrays, strict=True)))["y"]
    epilogue, operands = strongly_typed(epilogue, len(rhs), operands)
    spec = spec.replace(dtype=spec.accumulator)
    fused = spec.replace(operand_count=len(operands))
    inputs = dict(zip(fused.operands, [*arrays, *operands], strict=True))
    shape = fused.shape(inputs)
    captured = capture(epilogue, shape, [spec.accumulator] * len(rhs), operands)
    try:
        program = captured.program(shape)
    except UnsupportedOperation as error:
        if not spec.options.fallback:
            error.add_note(f"Apply it to what {caller} returns, or let XLA do so: options(fallback=True)")
            raise
        accumulators = _matmul(spec.replace(unfused=str(error)), inputs)
        traced = Traced(captured)

        def returned(*arrays: jax.Array) -> Any:
            return jax.tree.unflatten(captured.tree, traced(*arrays))

        return apply_after([*accumulators.values()], operands, returned, dtype)

    stored = program.with_output_dtype(dtype)
    check_places(caller, aliases, stored, shape, operands)

    traced = Traced(captured, program)
    # Results that the epilogue leaves in the accumulator's dtype have the call's.
    rounds = [output.reduction is None and output.dtype == spec.accumulator for output in program.outputs]

    def rounding(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        leaves = zip(traced(*arrays), rounds, strict=True)
        return tuple(leaf.astype(dtype) if own else leaf for leaf, own in leaves)

    fused = fused.replace(epilogue=Epilogue(rounding, stored, in_place=tuple(sorted(aliases.items()))))
    outputs = _matmul(fused, inputs)
    return jax.tree.unflatten(program.tree, [outputs[name] for name in fused.results])
