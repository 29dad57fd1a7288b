"""Makes JAX primitives of a `Spec`: the only file that knows JAX's interpreters, and what differs between its versions.

An op is three primitives (see `Spec`): `forward`, whose JVP rule binds `tangent`, which is linear in the tangents, and
whose transpose is `backward`. `Spec.evaluate` defines all three: abstract evaluation is the type of its trace, the
portable lowering is that function, and the derivatives of tangent and backward are its derivatives. So derivatives of
any order are right, and the first reverse-mode one is fused.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax._src import dispatch
from jax.experimental.custom_partitioning import SdyShardingRule, custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec, use_abstract_mesh

from jaxdnn import lowering
from jaxdnn.planning.select import select
from jaxdnn.spec import Direction, Spec

_DIRECTIONS: tuple[Direction, ...] = ("forward", "tangent", "backward")
_PLATFORMS = ("cpu", "cuda")


class Op:
    """The primitives of one op, and the function that binds the forward one."""

    def __init__(self, spec_type: type[Spec]) -> None:
        defined: dict[Direction, Primitive] = {
            direction: self._define(spec_type.op, direction) for direction in _DIRECTIONS
        }
        spec_type.primitives = {direction: primitive.bind for direction, primitive in defined.items()}

    def __call__(self, spec: Spec, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Binds the primitive of the spec's direction: operands by name to results by name."""
        operands = _vary_alike([arrays[name] for name in spec.operands])
        return dict(zip(spec.results, spec.bind(*operands), strict=True))

    def _define(self, op: str, direction: Direction) -> Primitive:
        primitive = Primitive(f"jaxdnn_{op}_{direction}")
        primitive.multiple_results = True
        primitive.def_impl(jax.jit(primitive.bind, static_argnames="spec"))
        primitive.def_abstract_eval(_abstract_evaluation)
        batching.primitive_batchers[primitive] = partial(_batch, primitive)
        if direction == "forward":
            ad.primitive_jvps[primitive] = self._forward_jvp
        else:
            ad.primitive_jvps[primitive] = partial(_reference_jvp, primitive)
        if direction == "tangent":
            ad.primitive_transposes[primitive] = self._tangent_transpose
        for platform in _PLATFORMS:
            mlir.register_lowering(primitive, partial(_lower, primitive, platform), platform=platform)
        mlir.register_lowering(primitive, _lower_reference)
        # `custom_partitioning` decodes shardings with the devices at hand; JAX has no public name for saying so.
        dispatch.prim_requires_devices_during_lowering.add(primitive)
        return primitive

    def _forward_jvp(self, primals: Sequence[Any], tangents: Sequence[Any], *, spec: Spec) -> tuple[Any, Any]:
        spec_saving = spec.saving()
        inputs = dict(zip(spec.inputs, primals, strict=True))
        outputs = self(spec_saving, inputs)
        moving = {name: t for name, t in zip(spec.inputs, tangents, strict=True) if type(t) is not ad.Zero}
        form, form_inputs, form_tangents = spec_saving.derivative_form(inputs, outputs, moving)

        everywhere = (True,) * len(spec.batch)
        unchanged = {name for name in form.inputs if form_inputs[name] is inputs.get(name)}
        kept = {name: spec.carries[name] if name in unchanged else everywhere for name in form.inputs}
        saved = dict.fromkeys(form.saved, everywhere)
        moved = {f"d_{name}": kept[name] for name in form_tangents}
        tangent = form.replace(direction="tangent", active=tuple(n for n in form.inputs if n in form_tangents))
        d_outputs = self(
            tangent.carrying({**kept, **saved, **moved}),
            {**form_inputs, **outputs, **{f"d_{name}": t for name, t in form_tangents.items()}},
        )
        return [outputs[name] for name in spec.outputs], [d_outputs[f"d_{name}"] for name in spec.outputs]

    def _tangent_transpose(self, cotangents: Sequence[Any], *operands: Any, spec: Spec) -> list[Any]:
        seeds = {name: ct for name, ct in zip(spec.results, cotangents, strict=True) if type(ct) is not ad.Zero}
        arrays = dict(zip(spec.operands, operands, strict=True))
        if not seeds:
            return [ad.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in operands]
        seeded = tuple(name for name in spec.outputs if f"d_{name}" in seeds)
        backward = spec.replace(direction="backward", seeded=seeded)
        carries = {**spec.carries, **dict.fromkeys(seeds, (True,) * len(spec.batch))}
        gradients = self(backward.carrying(carries), {**arrays, **seeds})

        def reduced(name: str) -> Any:
            # A tangent that did not carry a mapped axis was the same all along it.
            missing = tuple(level for level, carried in enumerate(spec.carries[name]) if not carried)
            return jnp.sum(gradients[name], missing) if missing else gradients[name]

        return [reduced(name) if ad.is_undefined_primal(arrays[name]) else None for name in spec.operands]


def _abstract_evaluation(*avals: Any, spec: Spec) -> Any:
    # The trace's own types, since shape and dtype alone would drop shardings and the manual axes that vary.
    return jax.make_jaxpr(spec.evaluate)(*avals).out_avals


def _reference_jvp(primitive: Primitive, primals: Sequence[Any], tangents: Sequence[Any], *, spec: Spec) -> Any:
    moving = [position for position, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]

    def function(*arrays: Any) -> tuple[Any, ...]:
        merged = list(primals)
        for position, array in zip(moving, arrays, strict=True):
            merged[position] = array
        return spec.evaluate(*merged)

    results = primitive.bind(*primals, spec=spec)
    _, d_results = jax.jvp(function, [primals[i] for i in moving], [tangents[i] for i in moving])
    return results, d_results


def _batch(primitive: Primitive, operands: Sequence[Any], axes: Sequence[int | None], *, spec: Spec) -> Any:
    mapped = {name: axis is not None for name, axis in zip(spec.operands, axes, strict=True)}
    levels = len(spec.batch)
    absorbed = spec.absorbs(mapped)

    def placed(name: str, array: Any, axis: int | None) -> Any:
        return array if axis is None else jnp.moveaxis(array, axis, sum(spec.carries[name]) if absorbed else 0)

    moved = [placed(*triple) for triple in zip(spec.operands, operands, axes, strict=True)]
    if not absorbed:
        spec = spec.replace(batch=(tuple(mapped.values()), *spec.batch))
    results = primitive.bind(*moved, spec=spec)
    return results, (levels if absorbed else 0,) * len(results)


def _vary_alike(operands: Sequence[Any]) -> list[Any]:
    """Makes the operands vary over the same manual axes of `shard_map`, as JAX's own functions do before they bind."""

    def varying(array: Any) -> frozenset[Any]:
        aval = jax.typeof(array)
        return aval.mat.varying if hasattr(aval, "mat") else aval.vma

    everywhere = frozenset[Any]().union(*map(varying, operands))

    def vary(array: Any) -> Any:
        missing = tuple(everywhere - varying(array))
        return lax.pcast(array, missing, to="varying") if missing else array

    return [vary(array) for array in operands]


def _lower(primitive: Primitive, platform: str, ctx: Any, *operands: Any, spec: Spec) -> Any:
    context = ctx.module_context.axis_context
    match context:
        case mlir.ShardingContext():
            partitioned = context.num_devices > 1
        case mlir.SPMDAxisContext():
            partitioned = context.manual_axes != frozenset(context.mesh.axis_names)
        case _:
            partitioned = False
    if partitioned:
        if ctx.module_context.lowering_parameters.for_export:
            # The partitioner calls back into this process, which an exported program has left.
            return _lower_reference(ctx, *operands, spec=spec)
        if isinstance(context, mlir.SPMDAxisContext):
            # `custom_partitioning` finds the mesh of a partially manual region in this kind of context only.
            devices = tuple(context.mesh.devices.flat)
            sharding = mlir.ShardingContext(len(devices), devices, context.mesh.abstract_mesh)
            ctx = ctx.replace(module_context=ctx.module_context.replace(axis_context=sharding))
        return mlir.lower_fun(_partitioned(primitive, spec))(ctx, *operands)
    selection = select(spec, spec.signature(ctx.avals_in, ctx.avals_out), platform)
    if selection.plan is None:
        return _lower_reference(ctx, *operands, spec=spec)
    return lowering.custom_call(ctx, selection.plan, operands)


def _lower_reference(ctx: Any, *operands: Any, spec: Spec) -> Any:
    return mlir.lower_fun(spec.evaluate)(ctx, *operands)


def _partitioned(primitive: Primitive, spec: Spec) -> Any:
    """The call as a function that the partitioner may split over devices, along the dimensions that the op allows."""

    def call(*operands: Any) -> tuple[Any, ...]:
        return tuple(primitive.bind(*operands, spec=spec))

    def factors(operands: Sequence[Any], results: Sequence[Any]) -> tuple[list[Any], list[Any], frozenset[str]]:
        named, whole = spec.factors(spec.signature(operands, results))
        levels = range(len(spec.batch))
        carries = spec.carries
        of_operands = [(*(f"b{i}" for i in levels if carries[name][i]), *named[name]) for name in spec.operands]
        return of_operands, [(*(f"b{i}" for i in levels), *named[name]) for name in spec.results], whole

    def rule(mesh: Any, operand_types: Sequence[Any], result_types: Sequence[Any]) -> SdyShardingRule:
        del mesh
        of_operands, of_results, whole = factors(*map(_typed, (operand_types, result_types)))
        return SdyShardingRule(tuple(of_operands), tuple(of_results), need_replication_factors=tuple(sorted(whole)))

    def partition(mesh: Any, operand_shapes: Sequence[Any], result_shapes: Sequence[Any]) -> Any:
        of_operands, of_results, whole = factors(operand_shapes, result_shapes)
        axes = {}
        for dimensions, array in zip((*of_operands, *of_results), (*operand_shapes, *result_shapes), strict=True):
            for factor, split in zip(dimensions, array.sharding.spec, strict=False):
                if split is not None and factor not in whole:
                    axes.setdefault(factor, split)

        def sharding(dimensions: Sequence[str]) -> NamedSharding:
            return NamedSharding(mesh, PartitionSpec(*(axes.get(factor) for factor in dimensions)))

        def summed(dimensions: Sequence[str]) -> tuple[str, ...]:
            split = [axes[factor] for factor in axes if factor not in dimensions]
            return tuple(name for names in split for name in (names if isinstance(names, tuple) else (names,)))

        def shard(*operands: Any) -> tuple[Any, ...]:
            # A mesh of explicit axes around the call is none of a shard's business; JAX 0.11 would constrain the
            # shardings of the sum's own computation.
            with use_abstract_mesh(AbstractMesh((), ())):
                results = call(*operands)
                over = [summed(dimensions) for dimensions in of_results]
                return tuple(lax.psum(r, names) if names else r for r, names in zip(results, over, strict=True))

        return mesh, shard, tuple(map(sharding, of_results)), tuple(map(sharding, of_operands))

    function = custom_partitioning(call)
    function.def_partition(partition, sharding_rule=rule)
    return function


def _typed(types: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    """Shapes of MLIR tensor types. A sharding rule needs no dtype."""
    return [jax.ShapeDtypeStruct(tuple(t.shape), jnp.float32) for t in types]
