"""Finds the calls of jaxdnn's primitives in a function, by tracing it on abstract values."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr

from jaxdnn.config import Options
from jaxdnn.engines.base import Problem
from jaxdnn.spec import Signature, Spec

Types = tuple[tuple[tuple[int, ...], np.dtype], ...]  # shapes and dtypes


@dataclass(frozen=True)
class Call:
    """One primitive applied to arrays of some types, and how often it occurs."""

    spec: Spec
    signature: Signature
    count: int

    @property
    def problem(self) -> Problem | str:
        """What engines see of it, or the reason why there is nothing for them."""
        return self.spec.problem(self.signature)

    @property
    def arrays(self) -> str:
        """The operands, one a line."""
        operands = self.signature.operands.items()
        return "\n".join(f"{name} {array.dtype.name}{list(array.shape)}" for name, array in operands)

    @property
    def identity(self) -> Hashable:
        """What tells it from other calls, but for the options."""
        arrays = (*self.signature.operands.items(), *self.signature.results.items())
        return self.spec.replace(options=Options()), arrays


def find_calls(fn: Callable[..., Any], *args: Any) -> list[Call]:
    """The distinct calls in `fn(*args)`, in order. A loop's body counts once for each iteration that is known."""
    return _collect(jax.make_jaxpr(fn)(*args))


class NoDerivative(Exception):
    """A function has no reverse-mode derivative."""


def find_differentiated_calls(fn: Callable[..., Any], *args: Any) -> list[Call]:
    """The distinct calls in `fn(*args)` and its reverse-mode derivative with respect to all floating-point arrays.

    Raises:
      NoDerivative: there are no such arrays, or JAX can't differentiate the function.
    """
    floating = [jnp.issubdtype(jnp.result_type(leaf), jnp.inexact) for leaf in jax.tree.leaves(args)]
    if not any(floating):
        raise NoDerivative("no argument is floating point")

    def both(*args: Any) -> Any:
        outputs, pull_back = jax.vjp(fn, *args)
        return pull_back(jax.tree.map(_seed, outputs))

    try:
        return _collect(jax.make_jaxpr(both)(*args))
    except (NotImplementedError, TypeError, ValueError) as error:  # of a loop of unknown length, or a callback
        raise NoDerivative(str(error).splitlines()[0]) from error


def _seed(output: Any) -> Any:
    if jnp.issubdtype(jnp.result_type(output), jnp.inexact):
        return jnp.ones_like(output)
    return np.zeros(jnp.shape(output), jax.dtypes.float0)


def _collect(jaxpr: ClosedJaxpr) -> list[Call]:
    counts: Counter[tuple[Spec, Types, Types]] = Counter()
    for eqn, times in _equations(jaxpr.jaxpr, 1):
        operands, results = (tuple((v.aval.shape, v.aval.dtype) for v in side) for side in (eqn.invars, eqn.outvars))
        counts[eqn.params["spec"], operands, results] += times

    def call(spec: Spec, operands: Types, results: Types, count: int) -> Call:
        avals = [[jax.ShapeDtypeStruct(*one) for one in side] for side in (operands, results)]
        return Call(spec, spec.signature(*avals), count)

    return [call(*key, count) for key, count in counts.items()]


def _equations(jaxpr: Jaxpr, times: int) -> Iterator[tuple[Any, int]]:
    for eqn in jaxpr.eqns:
        if isinstance(eqn.params.get("spec"), Spec):
            yield eqn, times
            continue
        inner = times * eqn.params["length"] if eqn.primitive.name == "scan" else times
        for value in eqn.params.values():
            for part in value if isinstance(value, tuple | list) else (value,):
                if isinstance(part, ClosedJaxpr):
                    yield from _equations(part.jaxpr, inner)
                elif isinstance(part, Jaxpr):
                    yield from _equations(part, inner)
