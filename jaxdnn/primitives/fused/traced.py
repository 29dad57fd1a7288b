"""`Traced`: a user's function as it was when it was called. What is stored, differentiated and lowered is its jaxpr.

Nothing calls the function again: variables that it closes over may have moved on by then.

Maxima and minima in it have derivatives that survive XLA's fusion. JAX finds the place of a maximum by comparing the
array with it. Fusion may compute that array twice, for the maximum and for the comparison, and round it in two ways;
then no element is equal, and the derivative is lost or NaN. On an H200, JAX 0.11.2, that happened to
max(erf(expm1(x)), axis=0), and to maxima of a product whose K XLA had split.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.custom_derivatives import SymbolicZero
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var
from jax.extend.linear_util import WrappedFun, wrap_init
from jax.sharding import PartitionSpec, reshard

from jaxdnn.pointwise import Captured, Program
from jaxdnn.pointwise import evaluate as evaluate_program
from jaxdnn.primitives._define import vary_alike

_EXTREMA = ("reduce_max", "reduce_min")
_CALLS = ("jit", "pjit")
_REMAT = ("checkpoint", "remat2")
_ALIKE = ("select_n",)  # the type of whose result is that of every operand
_RULED = ("custom_jvp_call", "custom_vjp_call")  # functions with derivatives of their own


@dataclass(frozen=True, eq=False)
class Traced:
    """A function of accumulators and operands that returns the leaves of what the user's function returned.

    Attributes:
      captured: the function's jaxpr.
      program: what it computes for one element, for arrays of other shapes: the shares of one device.
    """

    captured: Captured
    program: Program | None = None

    def __call__(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        jaxpr, count = self.captured.jaxpr, self.captured.accumulators
        if self.program is None:
            return tuple(evaluate(jaxpr, arrays))
        if [jnp.shape(array) for array in arrays] != [aval.shape for aval in jaxpr.in_avals]:
            return evaluate_program(self.program, jnp.shape(arrays[0]), arrays[:count], arrays[count:])
        return tuple(evaluate(jaxpr, arrays))


def located(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, called once, with derivatives for which the operands of its maxima and minima are computed once."""

    def evaluated(*arrays: jax.Array) -> Any:
        jaxpr, types = jax.make_jaxpr(lambda *arrays: function(*arrays), return_shape=True)(*arrays)
        return jax.tree.unflatten(jax.tree.structure(types), evaluate(jaxpr, arrays))

    return evaluated


@jax.custom_jvp
def _once(x: jax.Array) -> jax.Array:
    return x


@_once.defjvp
def _once_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    return lax.optimization_barrier(*primals), *tangents


def evaluate(jaxpr: ClosedJaxpr, arrays: Sequence[jax.Array]) -> list[jax.Array]:
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
            results = _apply(equation, inputs)
        values |= zip(equation.outvars, results, strict=True)
    return [read(atom) for atom in jaxpr.jaxpr.outvars]


def _apply(equation: JaxprEqn, inputs: Sequence[jax.Array]) -> Sequence[jax.Array]:
    primitive = equation.primitive
    if primitive.name in _CALLS:
        return evaluate(equation.params["jaxpr"], inputs)
    if primitive.name in _REMAT:
        saved = {name: equation.params[name] for name in ("policy", "prevent_cse")}
        called = ClosedJaxpr(equation.params["jaxpr"], ())
        return jax.checkpoint(lambda *arrays: evaluate(called, arrays), **saved)(*inputs)
    if primitive.name in _EXTREMA:
        inputs = [_once(x) for x in inputs]
    if primitive.name in _ALIKE:
        inputs = _split_alike(inputs)
    parameters = primitive.get_bind_params(equation.params)
    if primitive.name in _RULED:
        called, (_, rule, *rest) = equation.params["call_jaxpr"], parameters["subfuns"]
        function = wrap_init(lambda *arrays: evaluate(called, arrays), debug_info=called.jaxpr.debug_info)
        parameters["subfuns"] = (function, _evaluated(rule, called.in_avals), *rest)
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


def _evaluated(rule: WrappedFun, types: Sequence[ShapedArray]) -> WrappedFun:
    """A rule of derivatives, whose jaxpr is of the same trace as the function's, evaluated as that one is.

    `types` are of the function's operands. A forward rule is given each of them with whether it is differentiated, a
    JVP rule all of them and then their tangents.
    """

    def evaluated(*given: Any) -> list[Any]:
        forward = any(isinstance(x, bool) for x in given)
        known = [isinstance(x, (bool, SymbolicZero)) for x in given]
        traced = [types[i // 2 if forward else i % len(types)] for i, is_known in enumerate(known) if not is_known]
        arrays = [x for x, is_known in zip(given, known, strict=True) if not is_known]
        results: list[Any] = []

        def of_arrays(*arrays: jax.Array) -> list[jax.Array]:
            left = iter(arrays)
            merged = [x if is_known else next(left) for x, is_known in zip(given, known, strict=True)]
            results.extend(rule.call_wrapped(*merged))
            return [result for result in results if not isinstance(result, SymbolicZero)]

        computed = iter(evaluate(jax.make_jaxpr(of_arrays)(*traced), arrays))
        return [result if isinstance(result, SymbolicZero) else next(computed) for result in results]

    return wrap_init(evaluated, debug_info=rule.debug_info)
