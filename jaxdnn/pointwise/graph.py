"""A jaxpr as a graph of arrays: nested calls inlined, every node with its place in the user's source."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.core import AbstractValue
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var

# Primitives that call a jaxpr, which one of the parameters of `_CALLED` holds.
CALLS = frozenset(
    (
        *("jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint"),
        *("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"),
    )
)
_CALLED = ("jaxpr", "call_jaxpr", "fun_jaxpr")

# Primitives whose results are their arguments.
IDENTITIES = frozenset(("copy", "copy_p", "name", "optimization_barrier", "pvary", "stop_gradient"))

# Primitives that draw random bits, and what users are told of these.
RANDOM = frozenset(("random_bits", "random_unwrap", "random_wrap", "threefry2x32", "rng_bit_generator"))
DRAWN = (
    "kernels draw no random numbers; draw them before, and pass them as an operand: "
    "matmul(x, w, mask, epilogue=lambda acc, mask: acc * mask)"
)

UNKNOWN = "an unknown place"


class UnsupportedOperation(NotImplementedError):
    """A pointwise program can't have this operation.

    Attributes:
      primitive: JAX's name for the operation.
      where: the place in the user's source.
      reason: why not, as a sentence.
    """

    def __init__(self, primitive: str, where: str, reason: str) -> None:
        self.primitive, self.where, self.reason = primitive, where, reason
        super().__init__(f"`{primitive}` at {where}: {reason}")

    def __reduce__(self) -> tuple[type, tuple[str, ...]]:
        return type(self), (self.primitive, self.where, self.reason)


@dataclass(eq=False)
class Node:
    """One array: what a primitive returns, or a leaf.

    A leaf is an "accumulator" or "operand" (`params["number"]`), or a "constant" (`params["value"]`).
    """

    primitive: str
    shape: tuple[int, ...]
    dtype: str
    inputs: tuple["Node", ...] = ()
    params: dict[str, Any] = field(default_factory=dict)
    where: str = UNKNOWN

    def unsupported(self, reason: str) -> UnsupportedOperation:
        return UnsupportedOperation(self.primitive, self.where, reason)


def ancestors(node: Node) -> Iterator[Node]:
    """What a node is computed from, each once."""
    seen: set[Node] = set()
    waiting = list(node.inputs)
    while waiting:
        one = waiting.pop()
        if one not in seen:
            seen.add(one)
            yield one
            waiting += one.inputs


class Graph:
    """Nodes in order, each after its inputs."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def add(self, *arguments: Any, **fields: Any) -> Node:
        self.nodes.append(Node(*arguments, **fields))
        return self.nodes[-1]

    def inline(
        self, jaxpr: Jaxpr, constants: Iterable[jax.typing.ArrayLike], inputs: Sequence[Node], where: str = UNKNOWN
    ) -> list[Node]:
        """Adds what `jaxpr` computes from `inputs`, and returns its outputs; `where` is the place that calls it."""
        environment: dict[Var, Node] = dict(zip(jaxpr.invars, inputs, strict=True))
        for variable, value in zip(jaxpr.constvars, constants, strict=True):
            environment[variable] = self._constant(variable.aval, value)

        def read(atom: Var | Literal) -> Node:
            return self._constant(atom.aval, atom.val) if isinstance(atom, Literal) else environment[atom]

        for equation in jaxpr.eqns:
            arguments = [read(atom) for atom in equation.invars]
            name = equation.primitive.name
            # JAX's own code is left out of the summary, which may leave nothing.
            here = source_info_util.summarize(equation.source_info) or where
            if name in IDENTITIES:
                results = arguments
            elif name in CALLS:
                called = next(equation.params[key] for key in _CALLED if key in equation.params)
                body, consts = (called.jaxpr, called.consts) if isinstance(called, ClosedJaxpr) else (called, ())
                results = self.inline(body, consts, arguments, here)
            else:
                results = [
                    self.add(name, *_type(out.aval), tuple(arguments), equation.params, here)
                    for out in equation.outvars
                ]
            environment.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _constant(self, aval: AbstractValue, value: jax.typing.ArrayLike) -> Node:
        return self.add("constant", *_type(aval), params={"value": value})


def _type(aval: Any) -> tuple[tuple[int, ...], str]:
    return tuple(aval.shape), aval.dtype.name
