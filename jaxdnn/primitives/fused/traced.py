"""`Traced`: a user's function as it was when it was called. What is stored, differentiated and lowered is its jaxpr.

Nothing calls the function again: variables that it closes over may have moved on by then.

Maxima and minima in it have derivatives that survive XLA's fusion: `extrema`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.custom_derivatives import SymbolicZero
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var
from jax.extend.linear_util import WrappedFun, wrap_init
from jax.sharding import PartitionSpec, reshard

from jaxdnn.pointwise import Captured, Program
from jaxdnn.pointwise import evaluate as evaluate_program
from jaxdnn.primitives._define import ZEROS, vary_alike
from jaxdnn.primitives.fused.extrema import EXTREMA, settled

_CALLS = ("jit", "pjit")
_REMAT = ("checkpoint", "remat2")
_ALIKE = ("select_n",)  # the type of whose result is that of every operand
RULED = ("custom_jvp_call", "custom_vjp_call")  # functions with derivatives of their own

# By the identity of an equation that has rules of derivatives: the equation, and its function and rules.
Rules = dict[int, tuple[JaxprEqn, tuple[WrappedFun, ...]]]


@dataclass(frozen=True, eq=False)
class Traced:
    """A function of accumulators and operands that returns the leaves of what the user's function returned.

    Attributes:
      captured: the function's jaxpr.
      program: what it computes for one element, for arrays of other shapes: the shares of one device.
      rules: the rules of its derivatives, as far as they have been called.
    """

    captured: Captured
    program: Program | None = None
    rules: Rules = field(default_factory=dict)

    def __call__(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        jaxpr, count = self.captured.jaxpr, self.captured.accumulators
        if self.program is None:
            return tuple(evaluate(jaxpr, arrays, self.rules))
        if [jnp.shape(array) for array in arrays] != [aval.shape for aval in jaxpr.in_avals]:
            return evaluate_program(self.program, jnp.shape(arrays[0]), arrays[:count], arrays[count:])
        return tuple(evaluate(jaxpr, arrays, self.rules))


def located(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, called once, whose maxima and minima have derivatives as `extrema` says."""

    def evaluated(*arrays: jax.Array) -> Any:
        jaxpr, types = jax.make_jaxpr(lambda *arrays: function(*arrays), return_shape=True)(*arrays)
        return jax.tree.unflatten(jax.tree.structure(types), evaluate(jaxpr, arrays, {}))

    return evaluated


def evaluate(jaxpr: ClosedJaxpr, arrays: Sequence[jax.Array], rules: Rules) -> list[jax.Array]:
    """What a jaxpr computes of arrays, whose shardings and manual axes may be other ones than it was traced with."""
    values = dict(zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True))
    values |= zip(jaxpr.jaxpr.invars, arrays, strict=True)

    def read(atom: Var | Literal) -> jax.Array:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for equation in jaxpr.jaxpr.eqns:
        inputs, source = vary_alike([read(atom) for atom in equation.invars]), equation.source_info
        names = source_info_util.current_name_stack() + source.name_stack
        # Not under `equation.ctx`, which would bring the mesh of the trace back into the share of one device.
        with source_info_util.user_context(source.traceback, name_stack=names):
            results = _apply(equation, inputs, rules)
        values |= zip(equation.outvars, results, strict=True)
    return [read(atom) for atom in jaxpr.jaxpr.outvars]


def _apply(equation: JaxprEqn, inputs: Sequence[jax.Array], rules: Rules) -> Sequence[jax.Array]:
    primitive = equation.primitive
    if primitive.name in _CALLS:
        return evaluate(equation.params["jaxpr"], inputs, rules)
    if primitive.name in _REMAT:
        saved = {name: equation.params[name] for name in ("policy", "prevent_cse")}
        called = ClosedJaxpr(equation.params["jaxpr"], ())
        return jax.checkpoint(lambda *arrays: evaluate(called, arrays, rules), **saved)(*inputs)
    if primitive.name in EXTREMA:
        inputs = [settled(inputs[0], equation.params["axes"], EXTREMA[primitive.name])]
    if primitive.name in _ALIKE:
        inputs = _split_alike(inputs)
    parameters = primitive.get_bind_params(equation.params)
    if primitive.name in RULED:
        if id(equation) not in rules:
            called, (_, forward, *backward) = equation.params["call_jaxpr"], parameters["subfuns"]
            function = wrap_init(lambda *arrays: evaluate(called, arrays, rules), debug_info=called.jaxpr.debug_info)
            rules[id(equation)] = (
                equation,
                (
                    function,
                    _evaluated(forward, called.in_avals, rules),
                    *(_evaluated(rule, None, rules) for rule in backward),
                ),
            )
        _, parameters["subfuns"] = rules[id(equation)]
    results = primitive.bind(*inputs, **parameters)
    return results if primitive.multiple_results else [results]


def _split_alike(inputs: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """Arrays of one shape (and scalars) that lie alike on explicit axes of a mesh.

    The trace knew no mesh, so what it made, of equal numbers or of a vector, may be whole where other arrays are split.
    """
    types = [jax.typeof(x).sharding for x in inputs if jnp.ndim(x)]
    types = [sharding for sharding in types if not sharding.mesh.empty]
    if len(set(types)) < 2:
        return inputs
    dimensions = zip(*(sharding.spec for sharding in types), strict=True)
    split = PartitionSpec(*(next((names for names in each if names is not None), None) for each in dimensions))
    return [reshard(x, types[0].update(spec=split)) if jnp.ndim(x) else x for x in inputs]


def _is_zero(value: object) -> bool:
    """Whether a rule of derivatives has it in the place of an array."""
    return isinstance(value, ZEROS)


def _evaluated(rule: WrappedFun, types: Sequence[ShapedArray] | None, rules: Rules) -> WrappedFun:
    """A rule of derivatives that is called once for arrays of the same types, and its jaxpr evaluated.

    The jaxpr of a rule that goes forward is of the same trace as the function's, whose operands have these `types`. A
    forward rule is given each of them with whether it is differentiated, a JVP rule all of them and then their
    tangents. A backward rule is given what the forward one saved, and cotangents; its types are those of these.
    """
    traced: dict[Any, tuple[ClosedJaxpr, list[Any], Any]] = {}

    def evaluated(*given: Any) -> Any:
        known = [isinstance(x, (bool, SymbolicZero)) for x in given]
        arrays = [x for x, is_known in zip(given, known, strict=True) if not is_known]
        if types is None:
            own = [*map(jax.typeof, arrays)]
        else:
            forward = any(isinstance(x, bool) for x in given)
            places = [i // 2 if forward else i % len(types) for i in range(len(given))]
            own = [types[place] for place, is_known in zip(places, known, strict=True) if not is_known]
        key = *own, *(x if isinstance(x, bool) else is_known for x, is_known in zip(given, known, strict=True))
        if key not in traced:
            leaves: list[Any] = []
            structures: list[Any] = []

            def of_arrays(*arrays: jax.Array) -> list[jax.Array]:
                left = iter(arrays)
                merged = [x if is_known else next(left) for x, is_known in zip(given, known, strict=True)]
                # A list of cotangents or, from JAX 0.11 on, that and what a backward rule logs.
                results, structure = jax.tree.flatten(rule.call_wrapped(*merged), is_leaf=_is_zero)
                structures.append(structure)
                leaves.extend(result if _is_zero(result) else None for result in results)
                return [result for result in results if not _is_zero(result)]

            traced[key] = jax.make_jaxpr(of_arrays)(*own), leaves, *structures
        jaxpr, leaves, structure = traced[key]
        computed = iter(evaluate(jaxpr, arrays, rules))
        return jax.tree.unflatten(structure, [next(computed) if zero is None else zero for zero in leaves])

    return wrap_init(evaluated, debug_info=rule.debug_info)
