"""How a kernel on a GPU is told where operands' elements lie, besides what strides say (cpp/kernels/core/affine.cuh).

Numbers are arguments of the launch. A division by one of them is a multiplication:

  Let l be the least with d <= 2^l, m = ceil(2^(31+l) / d) and e = m d - 2^(31+l), so that 0 <= e < d <= 2^l. Then

    x m / 2^(31+l)  =  x / d  +  x e / (d 2^(31+l)),

  where for x < 2^31 the second term is less than 1 / d. x / d is a multiple of 1 / d: the floor of both is the same.

As 2^(l-1) < d, or d = 1, m <= 2^32; and it has 32 bits, for 2^(31+l) / d <= 2^32 - 1 if 2^(l-1) + 1 <= d and l <= 31.
"""

from collections.abc import Sequence

from jaxdnn.engines.product.problem import EpilogueOperand
from jaxdnn.engines.unit import Parameter
from jaxdnn.plan import Scalar
from jaxdnn.pointwise import Term

MAX_TERMS = 3  # of a coordinate; `AffineTerms::kMost`
MAX_INDICES = 3  # of a table; `kMostIndices` in core/table.cuh
_LARGEST = 2**31 - 1
_AXES = ("batch", "row", "column")


def divisor_magic(divisor: int) -> int:
    """The multiplier and the shift of a division, as a `Divisor` holds them."""
    if not 1 <= divisor <= _LARGEST:
        raise ValueError(f"divisor_magic: expected 1 .. {_LARGEST}; got {divisor}")
    shift = 31 + (divisor - 1).bit_length()
    return -(-(2**shift) // divisor) | shift << 32


def affine_reason(operands: Sequence[EpilogueOperand], extents: tuple[int, int, int]) -> str | None:
    """Why a kernel can't say where an operand's elements lie, or None. `extents` are batches, rows and columns."""
    for operand in operands:
        for axis, terms, extent in zip(_AXES, operand.terms, extents, strict=True):
            if len(terms) > MAX_TERMS:
                return (
                    f"an operand of its epilogue has {len(terms)} parts of a {axis}'s dimensions, and {MAX_TERMS} fit"
                )
            if terms and extent > _LARGEST:
                return f"an operand of its epilogue is a part of a {axis}, which is longer than its 31-bit index"
        if len(operand.gathered) > MAX_INDICES:
            return f"its epilogue looks an operand up by more than {MAX_INDICES} integers at once"
    return None


def term_parameters(name: str, field: str, operand: EpilogueOperand) -> list[Parameter]:
    """What an operand's terms, and the indices of a table, add to a kernel's parameters."""
    found = []
    for axis, terms in zip(_AXES, operand.terms, strict=True):
        for i, term in enumerate(terms):
            found += _term(f"{name}_{axis}{i}", f"{field}.{axis}_terms.terms[{i}]", term)
    for i, index in enumerate(operand.gathered):
        for kind, number in (("stride", index.stride), ("bound", index.bound)):
            found.append(_number(f"{name}_index{i}_{kind}", f"{field}.indices[{i}].{kind}", number))
    return found


def _number(name: str, field: str, value: int) -> Parameter:
    return Parameter("long long", name, field, Scalar("int64", value))


def _term(name: str, field: str, term: Term) -> list[Parameter]:
    # A stride of one is part of the code, as those of rows and columns are.
    found = [Parameter("long long", f"{name}_stride", f"{field}.stride", 1)]
    if term.stride != 1:
        found = [_number(f"{name}_stride", f"{field}.stride", term.stride)]
    if term.divisor != 1:
        found.append(Parameter("bool", "", f"{field}.divides", 1))
        found.append(_number(f"{name}_divisor", f"{field}.divisor.magic", divisor_magic(term.divisor)))
    if term.modulus:
        found.append(Parameter("bool", "", f"{field}.wraps", 1))
        found.append(Parameter("int", f"{name}_modulus", f"{field}.modulus", Scalar("int32", term.modulus)))
        found.append(_number(f"{name}_modulus_divisor", f"{field}.modulus_divisor.magic", divisor_magic(term.modulus)))
    return found
