"""Maxima and minima whose derivatives survive XLA's fusion.

JAX finds the place of a maximum by comparing the array with it. Fusion may compute that array twice, for the maximum
and for the comparison, and round it in two ways; then no element is equal, and the derivative is lost or NaN. On an
H200, JAX 0.11.2, that happened to max(erf(expm1(x)), axis=0), and to maxima of a product whose K XLA had split.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal

_EXTREMA = ("reduce_max", "reduce_min")
_CALLS = ("jit", "pjit")  # other functions that are called have derivatives of their own


def located(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with derivatives for which the operands of its maxima and minima are computed once."""

    @wraps(function)
    def evaluated(*arrays: Any) -> Any:
        jaxpr, types = jax.make_jaxpr(function, return_shape=True)(*arrays)
        if not _has_extremum(jaxpr):
            return function(*arrays)
        return jax.tree.unflatten(jax.tree.structure(types), _evaluate(jaxpr, arrays))

    return evaluated


@jax.custom_jvp
def _once(x: jax.Array) -> jax.Array:
    return x


@_once.defjvp
def _once_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    return lax.optimization_barrier(*primals), *tangents


def _has_extremum(jaxpr: ClosedJaxpr) -> bool:
    return any(
        equation.primitive.name in _EXTREMA
        or (equation.primitive.name in _CALLS and _has_extremum(equation.params["jaxpr"]))
        for equation in jaxpr.jaxpr.eqns
    )


def _evaluate(jaxpr: ClosedJaxpr, arrays: Sequence[Any]) -> list[Any]:
    values = dict(zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True))
    values |= zip(jaxpr.jaxpr.invars, arrays, strict=True)

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for equation in jaxpr.jaxpr.eqns:
        inputs = [read(atom) for atom in equation.invars]
        if equation.primitive.name in _CALLS and _has_extremum(equation.params["jaxpr"]):
            results = _evaluate(equation.params["jaxpr"], inputs)
        else:
            if equation.primitive.name in _EXTREMA:
                inputs = [_once(x) for x in inputs]
            results = equation.primitive.bind(*inputs, **equation.primitive.get_bind_params(equation.params))
            results = results if equation.primitive.multiple_results else [results]
        values |= zip(equation.outvars, results, strict=True)
    return [read(atom) for atom in jaxpr.jaxpr.outvars]
