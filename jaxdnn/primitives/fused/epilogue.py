"""`Epilogue`: a function of a kernel's accumulators, as part of a spec; `apply_after`: the same function on its own."""

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray

from jaxdnn.pointwise import Index, Program
from jaxdnn.primitives._define import weakly_typed
from jaxdnn.primitives.arguments import as_array
from jaxdnn.primitives.fused.messages import check_sequence, counted


@dataclass(frozen=True, repr=False)
class Epilogue:
    """What becomes of the accumulators before they are stored. Two are equal that compute the same, in the same places.

    Attributes:
      function: of the accumulator and the epilogue's operands; returns a tuple of arrays. It is what is differentiated,
        and made of a `Traced`: it calls no function of the user's.
      program: what the function computes.
      saved: numbers of the outputs that are the accumulators, for the derivative's sake.
      in_place: pairs of numbers: an operand, and the output that takes its place in memory. Each has the accumulator's
        shape.
    """

    function: Callable[..., tuple[jax.Array, ...]] = field(compare=False)
    program: Program
    saved: tuple[int, ...] = ()
    in_place: tuple[tuple[int, int], ...] = ()

    @property
    def words(self) -> tuple[str, ...]:
        """What it does, for the user."""
        in_place = ("in place",) if self.in_place else ()
        return (self.program.title, *self.program.operations, *in_place)

    @property
    def others(self) -> tuple[int, ...]:
        """Numbers of the outputs that are no accumulators."""
        return tuple(i for i in range(len(self.program.outputs)) if i not in self.saved)

    @property
    def unsaved(self) -> "Epilogue":
        """The same function without the accumulators among its outputs."""
        numbers = self.others
        program = replace(self.program, outputs=tuple(self.program.outputs[i] for i in numbers))

        def function(*arrays: jax.Array) -> tuple[jax.Array, ...]:
            results = self.function(*arrays)
            return tuple(results[i] for i in numbers)

        return Epilogue(function, program)

    def mapped(self, program: Program, function: Callable[..., Any], axes: Sequence[int | None]) -> "Epilogue":
        """The epilogue with one more mapped axis, of which `axes` is the place in each operand.

        Outputs carry it, so an operand that does not has no room for one.
        """
        in_place = tuple((operand, output) for operand, output in self.in_place if axes[operand] is not None)
        return Epilogue(function, replace(program, title=self.program.title), self.saved, in_place)

    def __repr__(self) -> str:
        meaning = repr((self.program.instructions, self.program.outputs, self.program.operands))
        return f"Epilogue({self.program.title!r}, {hashlib.sha256(meaning.encode()).hexdigest()[:8]})"


def checked_operands(
    caller: str,
    epilogue: Callable[..., Any] | None,
    operands: Sequence[jax.typing.ArrayLike],
    accumulator_count: int,
) -> list[jax.Array]:
    """The epilogue's operands as arrays. Raises unless there is a function that has room for them, or nothing that one
    would be for.

    `caller` is the public function, for messages.
    """
    check_sequence(f"{caller}: operands", operands)
    if epilogue is None and operands:
        raise ValueError(f"{caller}: got {counted(len(operands), 'operand')} for an epilogue, and none; pass epilogue=")
    if epilogue is not None and not callable(epilogue):
        raise TypeError(f"{caller}: epilogue must be a function of the accumulator and the operands; got {epilogue!r}")
    if epilogue is not None:
        _check_parameters(caller, epilogue, operands, accumulator_count)
    return [as_array(f"{caller}: operand {i} of the epilogue", operand) for i, operand in enumerate(operands)]


def _check_parameters(
    caller: str, epilogue: Callable[..., Any], operands: Sequence[object], accumulator_count: int
) -> None:
    """Raises TypeError if the function takes more arrays or fewer, or if an operand would be taken for a setting: a
    parameter with a default that is not None.
    """
    try:
        parameters = inspect.signature(epilogue).parameters.values()
    except (TypeError, ValueError):  # a builtin
        return
    name = getattr(epilogue, "__name__", type(epilogue).__name__)
    written = f"epilogue=lambda acc, bias: {'f' if name == '<lambda>' else name}(acc + bias)"
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in positional if p.default is p.empty]
    given = accumulator_count + len(operands)
    open_ended = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if given < len(required) or (given > len(positional) and not open_ended):
        accumulators = "the accumulator" if accumulator_count == 1 else f"{accumulator_count} accumulators"
        taken = required if given < len(required) else positional
        raise TypeError(
            f"{caller}: the epilogue {name} takes {counted(len(taken), 'array')}, and is given {accumulators} and "
            f"{counted(len(operands), 'operand')}. Write what each is for, as in {written}"
        )
    for i, parameter in enumerate(positional[accumulator_count : accumulator_count + len(operands)]):
        if parameter.default is not parameter.empty and parameter.default is not None:
            raise TypeError(
                f"{caller}: an epilogue's operands must be parameters without a default; got operand {i} for "
                f"{parameter.name}={parameter.default!r} of {name}. Write what it is for, as in {written}"
            )


def strongly_typed(
    epilogue: Callable[..., Any], accumulator_count: int, operands: Sequence[jax.Array]
) -> tuple[Callable[..., Any], list[jax.Array]]:
    """The same function of operands that have dtypes of their own, as those of a kernel have.

    In the function, what the caller gave as a Python number is one again, whose dtype gives way to an array's.
    """
    weak = [jax.typeof(operand).weak_type for operand in operands]
    if not any(weak):
        return epilogue, list(operands)

    @wraps(epilogue)
    def of_strong(*arrays: jax.Array) -> Any:
        given = zip(arrays[accumulator_count:], weak, strict=True)
        return epilogue(*arrays[:accumulator_count], *(weakly_typed(x) if is_weak else x for x, is_weak in given))

    return of_strong, [lax.convert_element_type(operand, operand.dtype) for operand in operands]


def apply_after(
    accumulators: Sequence[jax.Array], operands: Sequence[jax.Array], epilogue: Callable[..., Any] | None, dtype: str
) -> Any:
    """The epilogue as a JAX function of its own. What it leaves in the accumulator's shape and dtype is rounded to
    `dtype`.
    """
    first = accumulators[0]
    leaves, tree = jax.tree.flatten(first if epilogue is None else epilogue(*accumulators, *operands))
    types = rounded_types(leaves, first.shape, first.dtype, dtype)
    return jax.tree.unflatten(tree, [leaf.astype(of.dtype) for leaf, of in zip(leaves, types, strict=True)])


def rounded_types(
    leaves: Sequence[jax.Array | ShapedArray], shape: Sequence[int], accumulator: jax.typing.DTypeLike, dtype: str
) -> list[jax.ShapeDtypeStruct]:
    """Of what such an epilogue returns: what has the accumulator's shape and dtype is rounded to `dtype`."""
    own = (tuple(shape), jnp.dtype(accumulator))
    types = [(leaf.shape, leaf.dtype) for leaf in leaves]
    return [jax.ShapeDtypeStruct(of, dtype if (of, stored) == own else stored) for of, stored in types]


def program_factors(
    program: Program,
    accumulators: Sequence[str],
    operands: Mapping[str, int],
    outputs: Mapping[str, int],
    in_place: Sequence[tuple[int, int]] = (),
) -> tuple[dict[str, tuple[str, ...]], frozenset[str]]:
    """How the dimensions of a program's operands and outputs correspond to those of its accumulators, named
    `accumulators`: for each a name for each of its dimensions, and the names of those that can't be split over devices.

    `operands` and `outputs` are names and numbers of dimensions, `in_place` as in `Epilogue`.
    """
    dimensions: dict[str, tuple[str, ...]] = {}
    # A coordinate is one in the whole.
    whole = {accumulators[i.immediate.dimension] for i in program.instructions if isinstance(i.immediate, Index)}
    for number, (name, count) in enumerate(operands.items()):
        # What a result takes the place of lies as that does, even if nothing is read of it.
        along = [{accumulators[d]} if number in dict(in_place) else set[str]() for d in range(count)]
        for load in program.loads:
            if load.operand == number:
                for o, d in enumerate(load.dimensions):
                    if d is not None:
                        along[d].add(accumulators[o])
        alone = [f"{name}_{d}" for d in range(count)]
        dimensions[name] = tuple(min(one) if len(one) == 1 else own for one, own in zip(along, alone, strict=True))
        # Of an array that is read along with its transpose, a share is not enough.
        whole |= set(alone) & set(dimensions[name]) | {factor for one in along if len(one) > 1 for factor in one}
    for (name, count), output in zip(outputs.items(), program.outputs, strict=True):
        alone = [f"{name}_{d}" for d in range(count)]
        dimensions[name] = tuple(alone[i] if d is None else accumulators[d] for i, d in enumerate(output.dimensions))
        whole |= set(alone) & set(dimensions[name])
        if output.reduction in ("max", "min"):
            whole |= {accumulators[axis] for axis in output.axes}
    return dimensions, frozenset(whole)
