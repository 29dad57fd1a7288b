"""`Spec`, the one static parameter of every primitive, and `Signature`, the arrays it is applied to.

An op is a `DirectedSpec`, which has kernels of its own for its derivative (norms, attention), or a `MultilinearSpec`,
whose derivatives are calls of the op itself (products, convolutions).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import prod
from typing import Any, ClassVar, Literal, Self

import jax
import jax.numpy as jnp
from jax.core import ShapedArray

from jaxdnn.config import Options

Typed = jax.Array | jax.ShapeDtypeStruct | ShapedArray  # what has a shape and a dtype
Arrays = Mapping[str, jax.Array]  # by name
Types = Mapping[str, ShapedArray]  # likewise

Direction = Literal["forward", "tangent", "backward"]


@dataclass(frozen=True)
class Signature:
    """Shapes and dtypes of a call's operands and results, by name and in order."""

    operands: Mapping[str, jax.ShapeDtypeStruct]
    results: Mapping[str, jax.ShapeDtypeStruct]

    def operand_index(self, name: str) -> int:
        return list(self.operands).index(name)

    def result_index(self, name: str) -> int:
        return list(self.results).index(name)

    @property
    def bytes(self) -> int:
        """What reading every operand and writing every result once moves."""
        return sum(prod(array.shape) * array.dtype.itemsize for array in self.arrays.values())

    @property
    def arrays(self) -> Mapping[str, jax.ShapeDtypeStruct]:
        return {**self.operands, **self.results}

    @property
    def reason(self) -> str | None:
        """Why no kernel can be configured for arrays of such sizes, or None."""
        shapes = [array.shape for array in self.arrays.values()]
        if not all(isinstance(size, int) for shape in shapes for size in shape):
            return "the shapes are symbolic, and kernels are configured for known sizes"
        if any(prod(shape) == 0 for shape in shapes):
            return "the arrays have no elements"
        return None


def changed(data: Any) -> str:
    """A dataclass with what is not at its default alone: it stands in every printed jaxpr."""
    shown = [f for f in fields(data) if getattr(data, f.name) != f.default]
    return f"{type(data).__name__}({', '.join(f'{f.name}={getattr(data, f.name)!r}' for f in shown)})"


@dataclass(frozen=True, repr=False)
class Spec:
    """What a call means, apart from the shapes and dtypes of its arrays.

    Arrays go by name. A subclass says what the op is; nothing outside its own file names the fields it adds: engines
    see the `problem` that it states.

    Attributes:
      batch: one entry for each mapped axis, outermost first: for each operand, whether it carries that axis (in front).
        Every result carries all of them.
      options: how the engine is chosen.
      unfused: why the user's function runs after this call instead of in it; else empty.
    """

    op: ClassVar[str]
    problems: ClassVar[tuple[type, ...]] = ()  # of which `problem` states one

    batch: tuple[tuple[bool, ...], ...] = ()
    options: Options = Options()
    unfused: str = ""

    # ------------------------------------------------------------ meaning

    @property
    def title(self) -> str:
        """The call's name in tables, logs and messages."""
        return self.op

    @property
    def operands(self) -> tuple[str, ...]:
        """Names of the primitive's operands."""
        raise NotImplementedError

    @property
    def results(self) -> tuple[str, ...]:
        """Names of the primitive's results."""
        raise NotImplementedError

    def evaluate_unbatched(self, *operands: jax.Array) -> tuple[jax.Array, ...]:
        """The definition of the call without its mapped axes, in plain JAX."""
        raise NotImplementedError

    def evaluate(self, *operands: jax.Array) -> tuple[jax.Array, ...]:
        """The definition of the call, in plain JAX."""
        function = self.evaluate_unbatched
        for flags in reversed(self.batch):
            function = jax.vmap(function, in_axes=tuple(0 if carried else None for carried in flags))
        return tuple(function(*operands))

    def bind(self, *operands: jax.Array) -> tuple[jax.Array, ...]:
        """Applies the primitive."""
        raise NotImplementedError

    # ------------------------------------------------------------ planning

    def problem(self, signature: Signature) -> Any:
        """The call as engines see it, one of `problems`; or, as a string, the reason why it is none."""
        raise NotImplementedError

    def factors(self, signature: Signature) -> tuple[Mapping[str, tuple[str, ...]], frozenset[str]]:
        """How dimensions correspond: for each array a name for each of its (unbatched) dimensions, and the names of
        those that can't be split over devices. A result that lacks a name which the operands have is summed over it.
        """
        raise NotImplementedError

    def share(self, signature: Signature) -> Self | None:
        """The call for one device's share of arrays of this signature; None if nothing can be shared out."""
        del signature
        return self

    def flops(self, signature: Signature) -> int:
        """The floating-point operations that the call must do."""
        raise NotImplementedError

    def aliases(self, signature: Signature) -> Mapping[int, int]:
        """Positions of operands, and of the results, alike in shape and dtype, that take their place in memory."""
        del signature
        return {}

    @property
    def unaliased(self) -> Self:
        """The same call with memory of their own for all results."""
        return self

    @property
    def fused(self) -> tuple[str, ...]:
        """What an engine does in the same pass, as words for the user."""
        return ()

    # ------------------------------------------------------------ mapped axes

    def mapped(self, operands: Arrays, axes: Mapping[str, int | None]) -> tuple[Self, Mapping[str, int], Sequence[int]]:
        """The call for every element of one more mapped axis, of which `axes` is the place in each of `operands`.

        Returns:
          The spec; for each operand that is to carry the axis, the place at which the spec wants it; the place at which
          each result has it.
        """
        del operands
        levels = (tuple(axis is not None for axis in axes.values()), *self.batch)
        places = {name: 0 for name, axis in axes.items() if axis is not None}
        return self.replace(batch=levels), places, (0,) * len(self.results)

    @property
    def carries(self) -> Mapping[str, tuple[bool, ...]]:
        """For each operand, which of the mapped axes it carries."""
        return {name: tuple(flags[i] for flags in self.batch) for i, name in enumerate(self.operands)}

    def untransposed(self, orders: Mapping[str, Sequence[int]]) -> tuple[Self, tuple[str, ...]]:
        """This call with the arrays whose transposes some operands are, where it reads them as they lie; and for which.

        `orders`: of such operands, the number of the array's dimension for each of theirs.
        """
        del orders
        return self, ()

    @property
    def result_orders(self) -> Mapping[str, Sequence[int]]:
        """Of results that then lie otherwise than they are named: the number of the array's dimension for each."""
        return {}

    def carrying(self, carries: Mapping[str, tuple[bool, ...]]) -> Self:
        """This spec with `carries`, given for each of its operands."""
        return self.replace(batch=tuple(zip(*(carries[name] for name in self.operands), strict=True)))

    def aligned(self, name: str, array: jax.Array) -> jax.Array:
        """The operand `name`, or its tangent, with an axis of size one for each mapped axis that it does not carry."""
        return jnp.expand_dims(array, [level for level, carried in enumerate(self.carries[name]) if not carried])

    # ------------------------------------------------------------ data

    def signature(self, operands: Sequence[Any], results: Sequence[Any]) -> Signature:
        """The shapes and dtypes of a call's abstract values, by name."""

        def named(names: tuple[str, ...], avals: Sequence[Any]) -> dict[str, jax.ShapeDtypeStruct]:
            return {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in zip(names, avals, strict=True)}

        return Signature(named(self.operands, operands), named(self.results, results))

    def replace(self, **changes: Any) -> Self:
        return replace(self, **changes)

    def __repr__(self) -> str:
        return changed(self)


@dataclass(frozen=True, repr=False)
class DirectedSpec(Spec):
    """A call of an op that has three primitives, one for each direction:

    forward:  inputs -> outputs
    tangent:  inputs, saved outputs, tangents of the active inputs -> tangents of the outputs
    backward: inputs, saved outputs, cotangents of the seeded outputs -> cotangents of the active inputs

    A tangent or cotangent of "x" is "d_x".

    Attributes:
      direction: which of the three primitives.
      active: the inputs that are differentiated.
      seeded: the outputs whose cotangent is not identically zero.
    """

    primitives: ClassVar[Mapping[Direction, Callable[..., Any]]]  # how each direction's is bound; set by its definition

    direction: Direction = "forward"
    active: tuple[str, ...] = ()
    seeded: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        return f"{self.op} {self.direction}"

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the arrays that the op takes."""
        raise NotImplementedError

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the arrays that the op returns."""
        raise NotImplementedError

    @property
    def saved(self) -> tuple[str, ...]:
        """The outputs that the derivatives take besides the inputs."""
        return ()

    def reference(self, inputs: Arrays) -> tuple[jax.Array, ...]:
        """The op's definition in plain jax.numpy: the arrays of `inputs` to those of `outputs`."""
        raise NotImplementedError

    def evaluate_unbatched(self, *operands: jax.Array) -> tuple[jax.Array, ...]:
        """By direction:

        forward:  reference(inputs)
        tangent:  jvp(reference)(inputs)(tangents)       what is saved is a hint, which the reference does without
        backward: vjp(reference)(inputs)(cotangents)
        """
        inputs, rest = operands[: len(self.inputs)], operands[len(self.inputs) + len(self.saved) :]

        def reference(*active: jax.Array) -> tuple[jax.Array, ...]:
            moving = dict(zip(self.active, active, strict=True))
            fixed = dict(zip(self.inputs, inputs, strict=True))
            return tuple(self.reference({**fixed, **moving}))

        primals = [inputs[self.inputs.index(name)] for name in self.active]
        match self.direction:
            case "forward":
                return reference()
            case "tangent":
                return jax.jvp(reference, primals, list(rest))[1]
            case "backward":
                outputs, pull_back = jax.vjp(reference, *primals)
                seeds = dict(zip(self.seeded, rest, strict=True))
                pairs = zip(self.outputs, outputs, strict=True)
                return pull_back(tuple(seeds.get(name, jnp.zeros_like(output)) for name, output in pairs))

    def saving(self) -> Self:
        """The same call, with everything among its outputs that the derivatives want saved."""
        return self

    def derivative_form(self, inputs: Arrays, outputs: Arrays, tangents: Arrays) -> tuple[Self, Arrays, Arrays]:
        """A call with the same derivative, simpler in terms of outputs, its inputs and their tangents: less is kept."""
        del outputs
        return self, inputs, tangents

    @property
    def operands(self) -> tuple[str, ...]:
        match self.direction:
            case "forward":
                return self.inputs
            case "tangent":
                return (*self.inputs, *self.saved, *(f"d_{name}" for name in self.active))
            case "backward":
                return (*self.inputs, *self.saved, *(f"d_{name}" for name in self.seeded))

    @property
    def results(self) -> tuple[str, ...]:
        match self.direction:
            case "forward":
                return self.outputs
            case "tangent":
                return tuple(f"d_{name}" for name in self.outputs)
            case "backward":
                return tuple(f"d_{name}" for name in self.active)

    def bind(self, *operands: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(self.primitives[self.direction](*operands, spec=self))


@dataclass(frozen=True, repr=False)
class MultilinearSpec(Spec):
    """A call of an op with one primitive, whose derivatives are written in terms of the same primitive."""

    primitive: ClassVar[Callable[..., Any]]  # how it is bound; set by its definition

    def reference(self, operands: Arrays) -> tuple[jax.Array, ...]:
        """The op's definition in plain jax.numpy: the arrays of `operands` to those of `results`."""
        raise NotImplementedError

    def evaluate_unbatched(self, *operands: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(self.reference(dict(zip(self.operands, operands, strict=True))))

    def differentiate(self, operands: Arrays, tangents: Arrays) -> tuple[Arrays, Arrays]:
        """The results, and the tangents of those that have one."""
        raise NotImplementedError

    def transpose(self, cotangents: Arrays, operands: Mapping[str, jax.Array | None], wanted: Types) -> Arrays:
        """The cotangents of the operands that are None, whose types are `wanted`."""
        raise NotImplementedError

    def taylor(self, terms: Mapping[str, Sequence[jax.Array]]) -> list[list[jax.Array]]:
        """The terms of each result's Taylor series, without factorials, from those of the operands."""
        raise NotImplementedError

    @property
    def seen(self) -> tuple[Any, Mapping[str, Any]]:
        """What policies of `jax.checkpoint` see of it: JAX's primitive of the first two operands, and parameters."""
        raise NotImplementedError

    @property
    def remade(self) -> tuple[Spec, tuple[str, ...], tuple[str, ...]] | None:
        """A call that makes results from others and operands: with the names of what it takes, and of what it makes."""
        return None

    def bind(self, *operands: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(type(self).primitive(*operands, spec=self))
