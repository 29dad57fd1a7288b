"""Finds the calls of jaxdnn's primitives in a function, by tracing it on abstract values."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr

from jaxdnn.config import Options
from jaxdnn.engines.base import Problem
from jaxdnn.planning.transposes import Order, composed, inverse, split, turned_results
from jaxdnn.spec import Signature, Spec

Types = tuple[tuple[tuple[int, ...], np.dtype], ...]  # shapes and dtypes


@dataclass(frozen=True)
class Call:
    """One primitive applied to arrays of some types.

    Attributes:
      spec: its parameter.
      signature: the types.
      count: how often it occurs.
      backward: whether it runs in the backward pass of a derivative.
    """

    spec: Spec
    signature: Signature
    count: int
    backward: bool = False

    @property
    def problem(self) -> Problem | str:
        """What engines see of it, or the reason why there is nothing for them."""
        return self.spec.problem(self.signature)

    @property
    def arrays(self) -> list[str]:
        """The operands, for people, as JAX writes types."""
        operands = self.signature.operands.items()
        return [f"{name} {array.dtype.name}[{','.join(map(str, array.shape))}]" for name, array in operands]

    @property
    def identity(self) -> Hashable:
        """What tells it from other calls, but for the options."""
        arrays = (*self.signature.operands.items(), *self.signature.results.items())
        return self.spec.replace(options=Options()), arrays


def default_platform() -> str:
    """Of JAX's default device, as engines name it."""
    backend = jax.default_backend()
    return "cuda" if backend == "gpu" else backend


def find_calls(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Call]:
    """The distinct calls in `fn(*args, **kwargs)`, in order. A loop's body counts for each iteration that is known.

    Keyword arguments without arrays are settings, which the function sees as they are.
    """
    function, arrays = _of_arrays(fn, args, kwargs)
    return _collect(jax.make_jaxpr(function)(*arrays))


class NoDerivative(Exception):
    """A function has no reverse-mode derivative."""


def find_differentiated_calls(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Call]:
    """The distinct calls in `fn(*args, **kwargs)` and its derivative with respect to all floating-point arrays.

    Raises:
      NoDerivative: there are no such arrays, or JAX can't differentiate the function in reverse mode.
    """
    function, arrays = _of_arrays(fn, args, kwargs)
    floating = [jnp.issubdtype(jnp.result_type(leaf), jnp.inexact) for leaf in jax.tree.leaves(arrays)]
    if not any(floating):
        raise NoDerivative("no argument is floating point")

    def both(*arrays: Any) -> Any:
        outputs, pull_back = jax.vjp(function, *arrays)
        return pull_back(jax.tree.map(_seed, outputs))

    try:
        return _collect(jax.make_jaxpr(both)(*arrays))
    except (NotImplementedError, TypeError, ValueError) as error:  # of a loop of unknown length, or a callback
        raise NoDerivative(str(error).splitlines()[0]) from error


def _of_arrays(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The function of positional arrays alone, and these: the keyword arguments' come last, in a dict.

    Raises:
      TypeError: it is no function.
    """
    if not callable(fn):
        given = type(fn).__name__
        raise TypeError(f"explain and autotune take a function, and then its arguments: explain(fn, x, w); got {given}")
    arrays = {name: value for name, value in kwargs.items() if any(map(_is_array, jax.tree.leaves(value)))}
    settings = {name: value for name, value in kwargs.items() if name not in arrays}
    return lambda *given: fn(*given[:-1], **given[-1], **settings), (*args, arrays)


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _seed(output: Any) -> Any:
    if jnp.issubdtype(jnp.result_type(output), jnp.inexact):
        return jnp.ones_like(output)
    return np.zeros(jnp.shape(output), jax.dtypes.float0)


def _collect(jaxpr: ClosedJaxpr) -> list[Call]:
    counts: Counter[tuple[Spec, Types, Types, bool]] = Counter()
    for eqn, sources, times, backward in _equations(jaxpr.jaxpr, 1, False):
        counts[*_as_lowered(eqn, sources), backward] += times

    def call(spec: Spec, operands: Types, results: Types, backward: bool, count: int) -> Call:
        avals = [[jax.ShapeDtypeStruct(*one) for one in side] for side in (operands, results)]
        return Call(spec, spec.signature(*avals), count, backward)

    return [call(*key, count) for key, count in counts.items()]


def _as_lowered(eqn: Any, sources: dict[int, Any]) -> tuple[Spec, Types, Types]:
    """The call as lowering has it: operands that are transposes are read where the arrays lie, and results may lie
    likewise, as `sources` then says.
    """
    asked = eqn.params["spec"]
    operands = dict(zip(asked.operands, eqn.invars, strict=True))
    results = dict(zip(asked.results, eqn.outvars, strict=True))
    found = {name: made for name, one in operands.items() if (made := _transpose_of(one, sources))}
    spec, names = asked.untransposed({name: order for name, (_, order) in found.items()})
    lying = {}
    for name, order in turned_results(asked, spec).items():
        shape = results[name].aval.shape
        lying[name] = [shape[place] for place in inverse(order)]
        sources[id(results[name])] = lying[name], order

    def types(variables: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> Types:
        return tuple((tuple(shapes.get(name, one.aval.shape)), one.aval.dtype) for name, one in variables.items())

    return spec, types(operands, {name: found[name][0] for name in names}), types(results, lying)


def _transpose_of(variable: Any, sources: Mapping[int, Any]) -> tuple[Sequence[int], Order] | None:
    """The shape of the array whose transpose a variable is, and the order of its dimensions."""
    made = sources.get(id(variable))
    if made is None or isinstance(made, tuple):
        return made
    array = made.invars[0]
    before = _transpose_of(array, sources)
    if made.primitive.name == "reshape":
        return before and split(before[1], array.aval.shape, variable.aval.shape)
    shape, order = array.aval.shape, made.params["permutation"]
    return (shape, order) if before is None else (before[0], composed(order, before[1]))


def _equations(jaxpr: Jaxpr, times: int, backward: bool) -> Iterator[tuple[Any, dict[int, Any], int, bool]]:
    """The equations of our primitives: the transposes and reshapes beside each by the variable that they make, how
    often it runs, and whether JAX transposed it, or a loop around it.
    """
    sources = {id(eqn.outvars[0]): eqn for eqn in jaxpr.eqns if eqn.primitive.name in ("transpose", "reshape")}
    for eqn in jaxpr.eqns:
        transposed = backward or "transpose(" in str(eqn.source_info.name_stack)
        if isinstance(eqn.params.get("spec"), Spec):
            yield eqn, sources, times, transposed
            continue
        inner = times * eqn.params["length"] if eqn.primitive.name == "scan" else times
        for value in eqn.params.values():
            for part in value if isinstance(value, tuple | list) else (value,):
                if isinstance(part, ClosedJaxpr):
                    yield from _equations(part.jaxpr, inner, transposed)
                elif isinstance(part, Jaxpr):
                    yield from _equations(part, inner, transposed)
