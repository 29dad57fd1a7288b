"""`Modifier`: a caller's function of one score, or of where one is, as part of a spec.

It is traced once, on scalars, so that its jaxpr fits blocks of scores of any size.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import PartitionSpec

from jaxdnn.pointwise import Captured, Meaning, capture
from jaxdnn.primitives._define import live
from jaxdnn.primitives.attention.arrays import SCORES
from jaxdnn.primitives.fused.sharding import explicit_sharding, partitioned
from jaxdnn.primitives.fused.traced import Rules, evaluate

COORDINATES = ("batch", "head", "query", "key")


@dataclass(frozen=True, repr=False)
class Modifier:
    """A function of scalars: the score (unless it is a mask), the coordinates, and the elements that it looks up.

    Attributes:
      captured: the function's jaxpr.
      meanings: of it and of its tangent: where they are equal, functions are.
      rules: the rules of its derivatives, as far as they have been called.
      used: the coordinates that it depends on.
      operands: how many arrays it takes besides.
    """

    captured: Captured = field(compare=False)
    meanings: tuple[Meaning, ...]
    used: tuple[str, ...]
    operands: int
    rules: Rules = field(default_factory=dict, compare=False)

    @property
    def title(self) -> str:
        """The function in a few words, for people."""
        return self.captured.title

    def __call__(
        self, score: jax.Array | None, coordinates: Sequence[jax.Array], operands: Sequence[jax.Array]
    ) -> jax.Array:
        """Of scores, and of coordinates with the same number of dimensions, some of size one, an array of the largest.

        Operands are whole.
        """
        given = [*([] if score is None else [score]), *coordinates, *operands]
        sharding = next(filter(None, (explicit_sharding(jax.typeof(array)) for array in given)), None)
        if sharding is None:
            return self._of_blocks(*given)
        # Looking up has no type where axes of a mesh are explicit: the partitioner finds out how.
        lies = sharding.spec if score is not None else ()
        out_sharding = sharding.update(spec=PartitionSpec(*lies))
        return partitioned(self._of_blocks, out_sharding)(*given)

    def _of_blocks(self, *given: jax.Array) -> jax.Array:
        split = len(given) - self.operands
        elements, operands = given[:split], given[split:]
        shape = jnp.broadcast_shapes(*(array.shape for array in elements))
        long = [axis for axis, size in enumerate(shape) if not (isinstance(size, int) and size == 1)]
        axes = [[axis for axis in long if array.shape[axis] == shape[axis]] for array in elements]
        arrays = [
            jax.lax.squeeze(array, [d for d in range(array.ndim) if d not in own])
            for array, own in zip(elements, axes, strict=True)
        ]

        def function(*arrays: jax.Array) -> jax.Array:
            return evaluate(self.captured.jaxpr, arrays, self.rules)[0]

        for axis in reversed(long):
            function = jax.vmap(function, [0 if axis in own else None for own in axes] + [None] * self.operands)
        return jnp.expand_dims(function(*arrays, *operands), [axis for axis in range(len(SCORES)) if axis not in long])

    def __repr__(self) -> str:
        return f"Modifier({self.title!r}, {self.meanings[-1]!r})"


def score_modifier(caller: str, function: Callable[..., Any], dtype: str, operands: Sequence[jax.Array]) -> Modifier:
    """The modifier of a `score_mod`, whose scores have this dtype. Raises for what is none."""
    captured = _captured(caller, "score_mod", function, [dtype], operands)
    out = _returned(captured)
    if out is None or out.shape or not jnp.issubdtype(out.dtype, jnp.floating):
        raise ValueError(
            f"{caller}: score_mod must return one score, a floating-point scalar, for the score that it is given; got "
            f"{_described(captured)}; it is called with scalars, and looks up what it needs: slopes[head]"
        )
    jaxpr = captured.jaxpr
    places = [place for place, type_ in enumerate(jaxpr.in_avals) if jnp.issubdtype(type_.dtype, jnp.floating)]

    def tangent(primals: Sequence[jax.Array], tangents: Sequence[jax.Array]) -> jax.Array:
        def moving(*active: jax.Array) -> jax.Array:
            merged = dict(enumerate(primals)) | dict(zip(places, active, strict=True))
            return evaluate(jaxpr, list(merged.values()), {})[0]

        return jax.jvp(moving, [primals[place] for place in places], tangents)[1]

    types = [jax.ShapeDtypeStruct(type_.shape, type_.dtype) for type_ in jaxpr.in_avals]
    derivative, _ = live(jax.make_jaxpr(tangent)(types, [types[place] for place in places]))
    return _modifier(captured, (Meaning(derivative),), 1)


def mask_modifier(caller: str, function: Callable[..., Any], operands: Sequence[jax.Array]) -> Modifier:
    """The modifier of a `mask_mod`. Raises for what is none."""
    captured = _captured(caller, "mask_mod", function, [], operands)
    out = _returned(captured)
    if out is None or out.shape or out.dtype != jnp.bool_:
        raise ValueError(
            f"{caller}: mask_mod must return whether one key is visible, a boolean scalar; got {_described(captured)}; "
            "it is called with scalars, and looks up what it needs: document[query] == document[key]"
        )
    return _modifier(captured, (), 0)


def _modifier(captured: Captured, derivatives: tuple[Meaning, ...], scores: int) -> Modifier:
    _, used = live(captured.jaxpr)
    coordinates = used[scores : scores + len(COORDINATES)]
    named = tuple(name for name, is_used in zip(COORDINATES, coordinates, strict=True) if is_used)
    return Modifier(captured, (Meaning(captured.jaxpr), *derivatives), named, len(used) - scores - len(COORDINATES))


def _returned(captured: Captured) -> Any:
    """The type of the one array that a function returns; None if it returns several."""
    types = captured.jaxpr.out_avals
    return types[0] if len(types) == 1 else None


def _described(captured: Captured) -> str:
    return " and ".join(f"{type_.dtype.name}{list(type_.shape)}" for type_ in captured.jaxpr.out_avals)


def _captured(
    caller: str, name: str, function: Callable[..., Any], scores: Sequence[str], operands: Sequence[jax.Array]
) -> Captured:
    if not callable(function):
        raise TypeError(f"{caller}: {name} must be a function; got {function!r}")
    expected = f"{name}({', '.join([*(['score'] * len(scores)), *COORDINATES, *(['*operands'] * bool(operands))])})"
    try:
        inspect.signature(function).bind(*scores, *COORDINATES, *operands)
    except TypeError as error:
        raise TypeError(f"{caller}: {name} is called as {expected}; {error}") from None
    except ValueError:  # a builtin
        pass
    indices = [jax.ShapeDtypeStruct((), "int32")] * len(COORDINATES)
    captured = capture(function, (), scores, [*indices, *operands])
    if any(isinstance(held, Tracer) for held in Meaning(captured.jaxpr).held):
        raise ValueError(
            f"{caller}: {name} closes over an array that is being traced, which no kernel and no derivative would see; "
            f"pass it in {name}_operands, so that {expected} is given it"
        )
    return captured
