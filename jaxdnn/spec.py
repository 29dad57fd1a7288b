"""`Spec`, the one static parameter of every primitive, and `Signature`, the arrays it is applied to."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import prod
from typing import Any, ClassVar, Literal, Self

import jax
import jax.numpy as jnp

from jaxdnn.config import Options

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
        arrays = (*self.operands.values(), *self.results.values())
        return sum(prod(array.shape) * array.dtype.itemsize for array in arrays)


@dataclass(frozen=True, repr=False)
class Spec:
    """What a call means, apart from the shapes and dtypes of its arrays.

    Every op has three primitives, one for each direction:

    forward:  inputs -> outputs
    tangent:  inputs, saved outputs, tangents of the active inputs -> tangents of the outputs
    backward: inputs, saved outputs, cotangents of the seeded outputs -> cotangents of the active inputs

    Arrays go by name: a tangent or cotangent of "x" is "d_x". A subclass says what the op is; nothing outside its own
    file and its engines names the fields it adds.

    Attributes:
      direction: which of the three primitives.
      active: the inputs that are differentiated.
      seeded: the outputs whose cotangent is not identically zero.
      batch: one entry for each mapped axis, outermost first: for each operand, whether it carries that axis (in front).
        Every result carries all of them.
      options: how the engine is chosen.
    """

    op: ClassVar[str]
    primitives: ClassVar[Mapping[Direction, Callable[..., Any]]]  # how each direction's is bound; set by its definition

    direction: Direction = "forward"
    active: tuple[str, ...] = ()
    seeded: tuple[str, ...] = ()
    batch: tuple[tuple[bool, ...], ...] = ()
    options: Options = Options()

    @property
    def title(self) -> str:
        """The call's name in tables, logs and messages: "rms_norm backward"."""
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
        raise NotImplementedError

    def reference(self, inputs: Mapping[str, Any]) -> tuple[Any, ...]:
        """The op's definition in plain jax.numpy: the arrays of `inputs` to those of `outputs`."""
        raise NotImplementedError

    def evaluate(self, *operands: Any) -> tuple[Any, ...]:
        """The definition of the call, in this direction and under `batch`, in plain JAX:

        forward:  reference(inputs)
        tangent:  jvp(reference)(inputs)(tangents)       what is saved is a hint, which the reference does without
        backward: vjp(reference)(inputs)(cotangents)
        """
        function = self._evaluate_unbatched
        for flags in reversed(self.batch):
            function = jax.vmap(function, in_axes=tuple(0 if carried else None for carried in flags))
        return tuple(function(*operands))

    def _evaluate_unbatched(self, *operands: Any) -> tuple[Any, ...]:
        inputs, rest = operands[: len(self.inputs)], operands[len(self.inputs) + len(self.saved) :]

        def reference(*active: Any) -> tuple[Any, ...]:
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
        raise NotImplementedError

    def derivative_form(
        self, inputs: Mapping[str, Any], outputs: Mapping[str, Any], tangents: Mapping[str, Any]
    ) -> tuple[Self, Mapping[str, Any], Mapping[str, Any]]:
        """A call with the same derivative that needs less to be kept, its inputs, and their tangents.

        An op overrides this when its derivative is simpler in terms of its outputs.
        """
        del outputs
        return self, inputs, tangents

    def mapped(
        self, operands: Mapping[str, Any], axes: Mapping[str, int | None]
    ) -> tuple[Self, Mapping[str, int], Sequence[int]]:
        """The call for every element of one more mapped axis, of which `axes` is the place in each of `operands`.

        Returns:
          The spec; for each operand that is to carry the axis, the place at which the spec wants it; the place at which
          each result has it.
        """
        del operands
        levels = (tuple(axis is not None for axis in axes.values()), *self.batch)
        places = {name: 0 for name, axis in axes.items() if axis is not None}
        return self.replace(batch=levels), places, (0,) * len(self.results)

    def factors(self, signature: Signature) -> tuple[Mapping[str, tuple[str, ...]], frozenset[str]]:
        """How dimensions correspond: for each array a name for each of its (unbatched) dimensions, and the names of
        those that can't be split over devices. A result that lacks a name which the operands have is summed over it.
        """
        raise NotImplementedError

    @property
    def on_one_device(self) -> Self:
        """The call for one device's share of the arrays."""
        return self

    def flops(self, signature: Signature) -> int:
        """The floating-point operations that the call must do."""
        raise NotImplementedError

    @property
    def aliases(self) -> Mapping[int, int]:
        """Positions of operands, and of the results, alike in shape and dtype, that take their place in memory."""
        return {}

    @property
    def unaliased(self) -> Self:
        """The same call with memory of their own for all results."""
        return self

    @property
    def fused(self) -> tuple[str, ...]:
        """What an engine does in the same pass, as words for the user."""
        return ()

    @property
    def operands(self) -> tuple[str, ...]:
        """Names of the operands of this direction's primitive."""
        match self.direction:
            case "forward":
                return self.inputs
            case "tangent":
                return (*self.inputs, *self.saved, *(f"d_{name}" for name in self.active))
            case "backward":
                return (*self.inputs, *self.saved, *(f"d_{name}" for name in self.seeded))

    @property
    def results(self) -> tuple[str, ...]:
        """Names of the results of this direction's primitive."""
        match self.direction:
            case "forward":
                return self.outputs
            case "tangent":
                return tuple(f"d_{name}" for name in self.outputs)
            case "backward":
                return tuple(f"d_{name}" for name in self.active)

    @property
    def carries(self) -> Mapping[str, tuple[bool, ...]]:
        """For each operand, which of the mapped axes it carries."""
        return {name: tuple(flags[i] for flags in self.batch) for i, name in enumerate(self.operands)}

    def carrying(self, carries: Mapping[str, tuple[bool, ...]]) -> Self:
        """This spec with `carries`, given for each of its operands."""
        return self.replace(batch=tuple(zip(*(carries[name] for name in self.operands), strict=True)))

    def aligned(self, name: str, array: Any) -> Any:
        """The operand `name`, or its tangent, with an axis of size one for each mapped axis that it does not carry."""
        missing = [level for level, carried in enumerate(self.carries[name]) if not carried]
        return jnp.expand_dims(array, missing)

    def signature(self, operands: Any, results: Any) -> Signature:
        """The shapes and dtypes of a call's abstract values, by name."""

        def named(names: tuple[str, ...], avals: Any) -> dict[str, jax.ShapeDtypeStruct]:
            pairs = zip(names, avals, strict=True)
            return {name: jax.ShapeDtypeStruct(aval.shape, aval.dtype) for name, aval in pairs}

        return Signature(named(self.operands, operands), named(self.results, results))

    def bind(self, *operands: Any) -> tuple[Any, ...]:
        """Applies the primitive of the spec's direction."""
        return tuple(self.primitives[self.direction](*operands, spec=self))

    def replace(self, **changes: Any) -> Self:
        return replace(self, **changes)

    def __repr__(self) -> str:
        # Only what is not at its default: this stands in every printed jaxpr.
        shown = [f for f in fields(self) if getattr(self, f.name) != f.default]
        return f"{type(self).__name__}({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in shown)})"
