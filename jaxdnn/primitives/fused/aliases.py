"""`input_output_aliases`: which results of an epilogue take the place of one of its operands, checked."""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxdnn.pointwise import Program
from jaxdnn.primitives.fused.messages import described_type


def checked_aliases(
    caller: str, given: object, operands: Sequence[object], epilogue: Callable[..., Any] | None
) -> dict[int, int]:
    """The user's `input_output_aliases`: numbers of operands to numbers of results, of which nothing is known yet.

    `caller` is the public function, for messages.
    """
    if not given:
        return {}
    if not isinstance(given, Mapping):
        raise TypeError(f"{caller}: input_output_aliases must be a mapping, as in {{0: 0}}; got {given!r}")
    title = f"{caller}: input_output_aliases={given!r}"
    try:
        aliases = {operator.index(operand): operator.index(result) for operand, result in given.items()}
    except TypeError:
        raise TypeError(f"{title} must map an operand's number to a result's, as {{0: 0}} does") from None
    if epilogue is None:
        raise ValueError(f"{title} is about an epilogue's operands and results, and there is none; pass epilogue=")
    if missing := [number for number in aliases if not 0 <= number < len(operands)]:
        raise ValueError(
            f"{title}: the epilogue has no operand {missing[0]}; its own, without those of the product, are numbered "
            f"from 0, and there are {len(operands)}"
        )
    if len(set(aliases.values())) < len(aliases):
        raise ValueError(f"{title}: a result can take the place of one operand only; name each result once")
    return aliases


def check_places(
    caller: str, aliases: Mapping[int, int], program: Program, shape: Sequence[int], operands: Sequence[jax.Array]
) -> None:
    """Raises ValueError unless each result can be stored where its operand is, and be computed in any order.

    Args:
      caller: the public function, for messages.
      aliases: numbers of operands to numbers of results.
      program: the epilogue's, whose outputs are the results.
      shape: of the accumulators.
      operands: the epilogue's.
    """
    title = f"{caller}: input_output_aliases={dict(aliases)}"
    for result in aliases.values():
        if 0 <= result < len(program.outputs) and (kind := program.outputs[result].reduction) is not None:
            raise ValueError(
                f"{title}: result {result} is a {kind}; only a result with an element for each sum can take the place "
                "of an operand"
            )
    check_types(caller, aliases, [jax.ShapeDtypeStruct(shape, output.dtype) for output in program.outputs], operands)
    for number, result in aliases.items():
        # Elsewhere there may be results already.
        for load in program.loads:
            if load.operand == number and not load.at_own_place(shape):
                raise ValueError(
                    f"{title}: the epilogue reads operand {number} transposed, or gathered, at other places than those "
                    f"where result {result} is written; pass what it reads there as one more operand"
                )


def check_types(
    caller: str, aliases: Mapping[int, int], results: Sequence[jax.ShapeDtypeStruct], operands: Sequence[jax.Array]
) -> None:
    """Raises ValueError unless each result is there, of the shape and dtype of the operand whose place it takes."""
    title = f"{caller}: input_output_aliases={dict(aliases)}"
    for number, result in aliases.items():
        if not 0 <= result < len(results):
            raise ValueError(
                f"{title}: there is no result {result}; the epilogue returns {len(results)}, numbered from 0"
            )
        output, operand = results[result], operands[number]
        if (operand.shape, operand.dtype) != (output.shape, output.dtype):
            raise ValueError(
                f"{title}: operand {number} is {described_type(operand)}, and result {result} is "
                f"{described_type(output)}; they must have one shape and dtype: cast the operand, or choose another "
                "out_dtype"
            )
