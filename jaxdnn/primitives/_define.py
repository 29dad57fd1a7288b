"""Makes JAX primitives of a `Spec`. This file and `_layout` alone know JAX's interpreters, and what differs between its
versions.

`Spec.evaluate` defines every primitive: abstract evaluation is the type of its trace, and the portable lowering is that
function. An op's derivatives come in one of two ways:

Op            is three primitives (see `Spec`): `forward`, whose JVP rule binds `tangent`, which is linear in the
              tangents, and whose transpose is `backward`. The derivatives of tangent and backward are those of the
              function that defines them. So derivatives of any order are right, and the first reverse-mode one is
              fused.
MultilinearOp is one primitive, whose derivatives the spec writes in terms of the same primitive.
"""

from collections.abc import Hashable, Mapping, Sequence
from contextlib import nullcontext
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax._src import dispatch
from jax._src.config import trace_context
from jax._src.interpreters.mlir import lower_per_platform
from jax._src.lax.lax import _convert_element_type
from jax.core import AbstractValue, ShapedArray
from jax.custom_derivatives import SymbolicZero
from jax.experimental import jet
from jax.extend.core import ClosedJaxpr, Primitive, no_effects
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, reshard, use_abstract_mesh

from jaxdnn.custom_call import custom_call
from jaxdnn.planning.select import select
from jaxdnn.primitives._checkpoint import checkpointed
from jaxdnn.primitives._layout import transposed, untransposed
from jaxdnn.primitives._partition import partitioned_call
from jaxdnn.spec import DirectedSpec, Direction, MultilinearSpec, Spec

Tangent = jax.Array | ad.Zero  # or a cotangent
Pushed = tuple[Sequence[jax.Array], Sequence[Tangent]]  # results and their tangents
Transposed = list[Tangent | None]  # a cotangent for each operand that is not known

ZEROS = (ad.Zero, SymbolicZero)  # what a rule of derivatives has in the place of an array

_DIRECTIONS: tuple[Direction, ...] = ("forward", "tangent", "backward")
_PLATFORMS = ("cpu", "cuda")


class Op:
    """The primitives of one op, and the function that binds the forward one."""

    def __init__(self, spec_type: type[DirectedSpec]) -> None:
        forward, tangent, backward = (_define(spec_type, f"{spec_type.op}_{direction}") for direction in _DIRECTIONS)
        ad.primitive_jvps[forward] = self._forward_jvp
        ad.primitive_jvps[tangent] = partial(_reference_jvp, tangent)
        ad.primitive_jvps[backward] = partial(_reference_jvp, backward)
        ad.primitive_transposes[tangent] = self._tangent_transpose
        for primitive in (forward, tangent, backward):
            jet.jet_rules[primitive] = self._jet
        bound = (forward.bind, tangent.bind, backward.bind)
        spec_type.primitives = dict(zip(_DIRECTIONS, bound, strict=True))

    def __call__(self, spec: DirectedSpec, arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Binds the primitive of the spec's direction: operands by name to results by name."""
        return bind(spec, arrays)

    def _jet(self, primals: Sequence[jax.Array], series: Sequence[Any], *, spec: DirectedSpec) -> tuple[Any, Any]:
        return jet.jet(spec.evaluate, primals, series, factorial_scaled=False)

    def _forward_jvp(self, primals: Sequence[jax.Array], tangents: Sequence[Tangent], *, spec: DirectedSpec) -> Pushed:
        spec_saving = spec.saving()
        inputs = dict(zip(spec.inputs, primals, strict=True))
        outputs = self(spec_saving, inputs)
        moving = {name: t for name, t in zip(spec.inputs, tangents, strict=True) if not isinstance(t, ad.Zero)}
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

    def _tangent_transpose(self, cotangents: Sequence[Tangent], *operands: Any, spec: DirectedSpec) -> Transposed:
        seeds = {name: ct for name, ct in zip(spec.results, cotangents, strict=True) if not isinstance(ct, ad.Zero)}
        arrays = dict(zip(spec.operands, operands, strict=True))
        if not seeds:
            return [ad.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in operands]
        seeded = tuple(name for name in spec.outputs if f"d_{name}" in seeds)
        backward = spec.replace(direction="backward", seeded=seeded)
        carries = {**spec.carries, **dict.fromkeys(seeds, (True,) * len(spec.batch))}
        gradients = self(backward.carrying(carries), {**arrays, **seeds})

        def reduced(name: str) -> jax.Array:
            # A tangent that did not carry a mapped axis was the same all along it.
            missing = tuple(level for level, carried in enumerate(spec.carries[name]) if not carried)
            gradient = jnp.sum(gradients[name], missing) if missing else gradients[name]
            return gradient.astype(arrays[name].aval.dtype)

        return [reduced(name) if ad.is_undefined_primal(arrays[name]) else None for name in spec.operands]


class MultilinearOp:
    """The primitive of an op that is linear in some of its operands, and the function that binds it."""

    def __init__(self, spec_type: type[MultilinearSpec]) -> None:
        primitive = _define(spec_type, spec_type.op)
        ad.primitive_jvps[primitive] = self._jvp
        ad.primitive_transposes[primitive] = self._transpose
        pe.partial_eval_jaxpr_custom_rules[primitive] = checkpointed
        jet.jet_rules[primitive] = self._jet
        spec_type.primitive = staticmethod(primitive.bind)

    def __call__(self, spec: MultilinearSpec, arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Binds the primitive: operands by name to results by name."""
        return bind(spec, arrays)

    def _jet(self, primals: Sequence[jax.Array], series: Sequence[Any], *, spec: MultilinearSpec) -> tuple[Any, Any]:
        terms = zip(spec.operands, primals, series, strict=True)
        results = spec.taylor({name: (primal, *rest) for name, primal, rest in terms})
        return [first for first, *_ in results], [rest for _, *rest in results]

    def _jvp(self, primals: Sequence[jax.Array], tangents: Sequence[Tangent], *, spec: MultilinearSpec) -> Pushed:
        moving = {name: t for name, t in zip(spec.operands, tangents, strict=True) if not isinstance(t, ad.Zero)}
        results, d_results = spec.differentiate(dict(zip(spec.operands, primals, strict=True)), moving)

        def tangent(name: str) -> Tangent:
            result, given = results[name], d_results.get(name)
            if given is None or jax.dtypes.result_type(given) == jax.dtypes.float0:
                return ad.Zero(jax.typeof(result).to_tangent_aval())
            return given

        return [results[name] for name in spec.results], [tangent(name) for name in spec.results]

    def _transpose(self, cotangents: Sequence[Tangent], *operands: Any, spec: MultilinearSpec) -> Transposed:
        arrays = dict(zip(spec.operands, operands, strict=True))
        wanted = {name: x.aval for name, x in arrays.items() if ad.is_undefined_primal(x)}
        seeds = {name: ct for name, ct in zip(spec.results, cotangents, strict=True) if not isinstance(ct, ad.Zero)}
        given = {name: None if name in wanted else array for name, array in arrays.items()}
        gradients = spec.transpose(seeds, given, wanted) if seeds else {}
        return [gradients.get(name, ad.Zero(wanted[name])) if name in wanted else None for name in spec.operands]


def live(jaxpr: ClosedJaxpr) -> tuple[ClosedJaxpr, tuple[bool, ...]]:
    """What outputs depend on: the equations, and of each input whether they do. The jaxpr has these inputs alone."""
    kept, used = pe.dce_jaxpr(jaxpr.jaxpr, [True] * len(jaxpr.jaxpr.outvars))
    return ClosedJaxpr(kept, jaxpr.consts), tuple(used)


def weakly_typed(array: jax.Array) -> Any:
    """The array with a dtype that gives way to another's, as that of a Python number; JAX has no public name for it."""
    return _convert_element_type(array, weak_type=True)


def _define(spec_type: type[Spec], op: str) -> Primitive:
    primitive = Primitive(f"jaxdnn_{op}")
    primitive.multiple_results = True
    primitive.def_impl(partial(dispatch.apply_primitive, primitive))
    primitive.def_abstract_eval(_abstract_evaluation)
    batching.primitive_batchers[primitive] = partial(_batch, primitive)
    # A rule that is cached is given the arguments of a function, and can't see which are transposes, or the program's.
    looks = spec_type.untransposed is not Spec.untransposed or _offers_memory(spec_type)
    mlir.register_lowering(primitive, partial(_lower_everywhere, op), cacheable=not looks)
    # `custom_partitioning` decodes shardings with the devices at hand; JAX has no public name for saying so.
    dispatch.prim_requires_devices_during_lowering.add(primitive)
    return primitive


def bind(spec: Spec, arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Binds the primitive of a spec: operands by name to results by name."""
    operands = vary_alike([arrays[name] for name in spec.operands])
    return dict(zip(spec.results, spec.bind(*operands), strict=True))


def _abstract_evaluation(*avals: AbstractValue, spec: Spec) -> Sequence[AbstractValue]:
    return _types(spec, avals, trace_context())


@lru_cache(maxsize=4096)
def _types(spec: Spec, avals: Sequence[AbstractValue], context: Hashable) -> Sequence[AbstractValue]:
    # The trace's own types, since shape and dtype alone would drop shardings and the manual axes that vary.
    del context  # what JAX's own traces depend on
    meshes = (aval.sharding.mesh for aval in avals if isinstance(aval, ShapedArray))
    mesh = next((mesh for mesh in meshes if not mesh.empty), None)
    # JAX 0.12 maps what it jits, a sum or a mean, on this mesh alone.
    with nullcontext() if mesh is None else use_abstract_mesh(mesh):
        return jax.make_jaxpr(spec.evaluate)(*avals).out_avals


# JAX has no rule for it. It is linear to `jax.jvp` too.
jet.jet_rules.setdefault(lax.reduce_precision_p, partial(jet.linear_prop, lax.reduce_precision_p))


def _reference_jvp(
    primitive: Primitive, primals: Sequence[jax.Array], tangents: Sequence[Tangent], *, spec: Spec
) -> Pushed:
    moving = [position for position, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]

    def function(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        merged = list(primals)
        for position, array in zip(moving, arrays, strict=True):
            merged[position] = array
        return spec.evaluate(*merged)

    results = primitive.bind(*primals, spec=spec)
    _, d_results = jax.jvp(function, [primals[i] for i in moving], [tangents[i] for i in moving])
    return results, d_results


def _batch(
    primitive: Primitive, operands: Sequence[jax.Array], axes: Sequence[int | None], *, spec: Spec
) -> tuple[Sequence[jax.Array], Sequence[int]]:
    names = spec.operands
    size = next(array.shape[axis] for array, axis in zip(operands, axes, strict=True) if axis is not None)
    arrays = dict(zip(names, operands, strict=True))
    places_of_axis = dict(zip(names, axes, strict=True))
    spec_mapped, places, of_results = spec.mapped(arrays, places_of_axis)
    split = split_of_mapped(arrays, places_of_axis)

    def moved(name: str, axis: int | None) -> jax.Array:
        array = arrays[name]
        if name not in places:
            return array
        if axis is None:
            own = jax.typeof(array).sharding.spec
            sharding = None if split is None else split.update(spec=PartitionSpec(*split.spec, *own))
            return jnp.moveaxis(jnp.broadcast_to(array, (size, *array.shape), out_sharding=sharding), 0, places[name])
        return jnp.moveaxis(array, axis, places[name])

    results = primitive.bind(*(moved(name, axis) for name, axis in zip(names, axes, strict=True)), spec=spec_mapped)
    return results, of_results


def split_of_mapped(arrays: Mapping[str, jax.Array], axes: Mapping[str, int | None]) -> NamedSharding | None:
    """How a mapped axis, of which `axes` is the place in each array, lies on explicit axes of a mesh, if on any."""
    placed = [(jax.typeof(arrays[name]).sharding, axis) for name, axis in axes.items() if axis is not None]
    split = (sharding.update(spec=PartitionSpec(sharding.spec[axis])) for sharding, axis in placed)
    return next((sharding for sharding in split if sharding.spec[0] is not None), None)


def vary_alike(operands: Sequence[jax.Array]) -> list[jax.Array]:
    """Makes the operands vary over the same manual axes of `shard_map`, as JAX's own functions do before they bind."""
    everywhere = frozenset[Hashable]().union(*(_varying(jax.typeof(array)) for array in operands))
    return [_vary(array, everywhere) for array in operands]


def as_type(array: jax.Array, aval: Any) -> jax.Array:
    """An array that varies over the manual axes, and lies on the explicit ones, that a type of its shape says."""
    array = _vary(array, _varying(aval))
    return array if jax.typeof(array).sharding == aval.sharding else reshard(array, aval.sharding)


def _varying(aval: Any) -> frozenset[Hashable]:
    return aval.mat.varying if hasattr(aval, "mat") else aval.vma


def _vary(array: jax.Array, axes: frozenset[Hashable]) -> jax.Array:
    missing = tuple(axes - _varying(jax.typeof(array)))
    return lax.pcast(array, missing, to="varying") if missing else array


def _lower_everywhere(
    op: str, ctx: mlir.LoweringRuleContext, *operands: mlir.ir.Value, spec: Spec
) -> Sequence[mlir.ir.Value]:
    lying, values, turned = untransposed(ctx, operands, spec)
    rules: dict[str, mlir.LoweringRule] = {platform: partial(_lower, platform) for platform in _PLATFORMS}
    # What was traced in a block of `enable_x64` may be lowered after it.
    signature = turned.signature(lying.avals_in, lying.avals_out)
    wide = any(array.dtype.itemsize > 4 for array in signature.arrays.values())
    with jax.enable_x64(True) if wide else nullcontext():
        results = lower_per_platform(lying, op, rules, _lower_reference, no_effects, *values, spec=turned)
    return transposed(ctx, results, spec, turned)


def _lower(
    platform: str, ctx: mlir.LoweringRuleContext, *operands: mlir.ir.Value, spec: Spec
) -> Sequence[mlir.ir.Value]:
    over_devices = _over_devices(ctx.module_context.axis_context, [*ctx.avals_in, *ctx.avals_out])
    if over_devices is not None:
        context, mesh = over_devices
        if context.abstract_mesh is None or ctx.module_context.lowering_parameters.for_export:
            # The partitioner calls back into this process, which an exported program has left.
            return _lower_reference(ctx, *operands, spec=spec)
        ctx = ctx.replace(module_context=ctx.module_context.replace(axis_context=context))
        return mlir.lower_fun(partitioned_call(spec, mesh))(ctx, *operands)
    # Like calls of a module are planned once.
    planned, call = ctx.module_context.cached_primitive_lowerings, (spec, platform, *ctx.avals_in, *ctx.avals_out)
    if call not in planned:
        signature = spec.signature(ctx.avals_in, ctx.avals_out)
        selection = select(spec, signature, platform)
        planned[call] = selection, {} if selection.plan is None else spec.aliases(signature)
    selection, aliases = planned[call]
    if selection.plan is None:
        return _lower_reference(ctx, *operands, spec=spec)
    # The partitioner's arguments are made by the program around them.
    if _offers_memory(type(spec)) and not isinstance(ctx.module_context.axis_context, mlir.SPMDAxisContext):
        aliases = {i: result for i, result in aliases.items() if not _is_given(operands[i])}
    return custom_call(ctx, selection.plan, operands, aliases)


def _offers_memory(spec_type: type[Spec]) -> bool:
    """Whether a spec has aliases that no caller asked for: not of what may live on, for XLA would copy that."""
    return issubclass(spec_type, DirectedSpec) and spec_type.aliases is not Spec.aliases


def _is_given(value: mlir.ir.Value) -> bool:
    """Whether a value is an argument of the whole program."""
    if not isinstance(value.owner, mlir.ir.Block):
        return False
    around = value.owner.owner.operation
    return around.name == "func.func" and str(around.attributes.get("sym_visibility")) == '"public"'


def _over_devices(context: Any, avals: Sequence[Any]) -> tuple[mlir.ShardingContext, Mesh | None] | None:
    """If a call is the partitioner's to split over devices: the context in which `custom_partitioning` finds their
    mesh, or no mesh if it can't be split after all; and the mesh that collectives name, if it is another one.
    """
    match context:
        case mlir.ShardingContext():
            if context.num_devices == 1:
                return None
            # `jit` knows the mesh of its arguments alone; where the placed arrays are closed over, types tell.
            typed = (aval.sharding.mesh for aval in avals if not aval.sharding.mesh.empty)
            mesh = context.abstract_mesh or next(typed, None)
            return mlir.ShardingContext(context.num_devices, context.device_assignment, mesh), None
        case mlir.SPMDAxisContext():
            mesh = context.mesh
            free = [name for name in mesh.axis_names if name not in context.manual_axes and mesh.shape[name] > 1]
            if not free:
                return None
            # In a partially manual region XLA hands out, and takes, shardings within one group of devices, those of
            # equal manual coordinates. In which order of several axes it numbers them is not told.
            devices = tuple(mesh.devices.flat)[: mesh.shape[free[0]]]
            group = AbstractMesh((len(devices),), (free[0],)) if len(free) == 1 else None
            return mlir.ShardingContext(len(devices), devices, group), mesh
        case _:
            return None


def _lower_reference(ctx: mlir.LoweringRuleContext, *operands: mlir.ir.Value, spec: Spec) -> Sequence[mlir.ir.Value]:
    return mlir.lower_fun(spec.evaluate)(ctx, *operands)
