"""How a product with an epilogue is called: `apply_fused` binds its primitive."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxdnn.pointwise import UnsupportedOperation, capture
from jaxdnn.primitives._define import MultilinearOp
from jaxdnn.primitives.fused.aliases import check_places, check_types
from jaxdnn.primitives.fused.dtypes import checked_dtype
from jaxdnn.primitives.fused.epilogue import Epilogue, apply_after, checked_operands, rounded_types, strongly_typed
from jaxdnn.primitives.fused.spec import FusedSpec
from jaxdnn.primitives.fused.traced import Traced


def apply_fused(
    caller: str,
    op: MultilinearOp,
    spec: FusedSpec,
    arrays: Sequence[jax.Array],
    operands: Sequence[jax.typing.ArrayLike],
    epilogue: Callable[..., Any] | None,
    out_dtype: jax.typing.DTypeLike | None,
    aliases: Mapping[int, int],
) -> Any:
    """Binds the primitive `op`, for the public function `caller`, to the arrays that are multiplied, a and every b.

    `spec` is a plain one, whose dtype is that of results without an `out_dtype`.
    """
    count = len(spec.rhs)
    dtype = checked_dtype(f"{caller}: out_dtype", out_dtype) or spec.dtype
    operands = checked_operands(caller, epilogue, operands, count)
    if epilogue is None:
        return op(spec.replace(dtype=dtype), dict(zip(spec.operands, arrays, strict=True)))["y"]
    epilogue, operands = strongly_typed(epilogue, count, operands)
    spec = spec.replace(dtype=spec.accumulator)
    fused = spec.replace(operand_count=len(operands))
    inputs = dict(zip(fused.operands, [*arrays, *operands], strict=True))
    shape = fused.shape(inputs)
    captured = capture(epilogue, shape, [spec.accumulator] * count, operands)
    try:
        program = captured.program(shape)
    except UnsupportedOperation as error:
        if not spec.options.fallback:
            error.add_note(f"Apply it to what {caller} returns, or let XLA do so: options(fallback=True)")
            raise
        check_types(caller, aliases, rounded_types(captured.jaxpr.out_avals, shape, spec.accumulator, dtype), operands)
        accumulators = op(spec.replace(unfused=str(error)), inputs)
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
    outputs = op(fused, inputs)
    return jax.tree.unflatten(program.tree, [outputs[name] for name in fused.results])
