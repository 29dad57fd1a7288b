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
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var
from jax.extend.linear_util import wrap_init
from jax.sharding import NamedSharding, PartitionSpec, auto_axes, get_abstract_mesh

from jaxdnn.pointwise import Captured, Program
from jaxdnn.pointwise import evaluate as evaluate_program
from jaxdnn.primitives._define import vary_alike

_EXTREMA = ("reduce_max", "reduce_min")
_CALLS = ("jit", "pjit")
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
        mesh = get_abstract_mesh()
        # JAX 0.10 does not transpose a change of the axes' types inside a `shard_map`.
        if not mesh.explicit_axes or mesh.manual_axes:
            return tuple(evaluate(jaxpr, arrays))
        # The jaxpr says nothing of shardings, which on explicit axes every array has.
        shardings = tuple(NamedSharding(mesh, spec) for spec in self._specs(arrays))

        def nowhere(*arrays: jax.Array) -> tuple[jax.Array, ...]:
            return tuple(evaluate(jaxpr, arrays))

        split: Callable[..., Any] = auto_axes(nowhere, axes=mesh.explicit_axes, out_sharding=shardings)
        return split(*arrays)

    def _specs(self, arrays: Sequence[jax.Array]) -> list[PartitionSpec]:
        """How results lie on explicit axes: as the accumulators do, or where those are whole, as operands do."""
        assert self.program is not None
        split = [jax.typeof(array).sharding.spec for array in arrays]
        whole = list(split[0])
        for load in self.program.loads:
            for place, d in enumerate(load.dimensions):
                if d is not None:
                    whole[place] = whole[place] or split[self.captured.accumulators + load.operand][d]
        kept = [output.dimensions for output in self.program.outputs]
        return [PartitionSpec(*(None if d is None else whole[d] for d in dimensions)) for dimensions in kept]


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
    if primitive.name in _EXTREMA:
        inputs = [_once(x) for x in inputs]
    parameters = primitive.get_bind_params(equation.params)
    if primitive.name in _RULED:
        called, (_, *rules) = equation.params["call_jaxpr"], parameters["subfuns"]
        function = wrap_init(lambda *arrays: evaluate(called, arrays), debug_info=called.jaxpr.debug_info)
        parameters["subfuns"] = (function, *rules)
    results = primitive.bind(*inputs, **parameters)
    return results if primitive.multiple_results else [results]
