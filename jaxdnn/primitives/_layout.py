"""How operands lie: what a lowering rule sees of the transposes that made them. Results may lie likewise."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
from jax import lax
from jax._src.interpreters.mlir import lower_with_sharding_in_types
from jax._src.lib.mlir.dialects import hlo
from jax.interpreters import mlir

from jaxdnn.planning.transposes import Order, composed, inverse, split, turned_results
from jaxdnn.spec import Spec


def untransposed(
    ctx: mlir.LoweringRuleContext, operands: Sequence[mlir.ir.Value], spec: Spec
) -> tuple[mlir.LoweringRuleContext, Sequence[mlir.ir.Value], Spec]:
    """The call of the arrays whose transposes its operands are. XLA would copy them for a custom call."""
    types = dict(zip(spec.operands, ctx.avals_in, strict=True))
    values = dict(zip(spec.operands, operands, strict=True))
    found = {name: made for name in types if (made := _transpose_of(values[name], types[name]))}
    turned, names = spec.untransposed({name: order for name, (_, order) in found.items()})
    for name in names:
        source, order = found[name]
        types[name] = _lying(types[name], order)
        values[name] = lower_with_sharding_in_types(ctx, source, types[name])
    results = dict(zip(spec.results, ctx.avals_out, strict=True))
    results |= {name: _lying(results[name], order) for name, order in turned_results(spec, turned).items()}
    ctx = ctx.replace(avals_in=tuple(types.values()), avals_out=list(results.values()))
    return ctx, tuple(values.values()), turned


def transposed(
    ctx: mlir.LoweringRuleContext, results: Sequence[mlir.ir.Value], spec: Spec, turned: Spec
) -> Sequence[mlir.ir.Value]:
    """The results of a call, from those of the call that `untransposed` has made of it."""
    values = dict(zip(spec.results, results, strict=True))
    types = dict(zip(spec.results, ctx.avals_out, strict=True))
    for name, order in turned_results(spec, turned).items():
        value = hlo.transpose(values[name], mlir.dense_int_array(order))
        values[name] = lower_with_sharding_in_types(ctx, value, types[name])
    return tuple(values.values())


def _lying(aval: Any, order: Order) -> Any:
    """The type of an array of whose transpose that is the type."""
    return jax.make_jaxpr(partial(lax.transpose, permutation=inverse(order)))(aval).out_avals[0]


def _transpose_of(value: mlir.ir.Value, aval: Any) -> tuple[mlir.ir.Value, Order] | None:
    """The array whose transpose a value is, and the order of its dimensions."""
    made = value.owner
    if isinstance(made, mlir.ir.Block):
        return None
    if made.name == "sdy.sharding_constraint" and aval.sharding.mesh.are_all_axes_explicit:  # what the type states
        return _transpose_of(made.operands[0], aval)
    if made.name not in ("stablehlo.transpose", "stablehlo.reshape"):
        return None
    (array,) = made.operands
    before = _transpose_of(array, aval)
    if made.name == "stablehlo.reshape":
        found = before and split(before[1], array.type.shape, value.type.shape)
        if before is None or found is None:
            return None
        shape, order = found
        return hlo.reshape(mlir.ir.RankedTensorType.get(shape, value.type.element_type), before[0]), order
    order = list(mlir.ir.DenseI64ArrayAttr(made.attributes["permutation"]))
    return (array, order) if before is None else (before[0], composed(order, before[1]))
