"""Which array a score function reads that TMA brings to shared memory, a tile for each block of scores."""

from dataclasses import dataclass, replace

from jaxdnn.engines.attention.function import ScoreFunction
from jaxdnn.engines.attention.problem import Attention
from jaxdnn.engines.attention.transposed import by_feature
from jaxdnn.engines.product.problem import EpilogueOperand
from jaxdnn.plan import Operand, Result, Scratch

DTYPES = ("bfloat16", "float16")


@dataclass(frozen=True)
class ScoreTile:
    """An array with a row of dense keys for each query. Strides count elements; one of 0 is of what all share.

    Attributes:
      number: of the function's operands.
    """

    number: int
    buffer: Operand | Result | Scratch
    dtype: str
    row_stride: int
    head_stride: int
    batch_stride: int


def score_tile(problem: Attention, function: ScoreFunction | None) -> ScoreTile | str:
    """The first array that a function reads and that lies as TMA wants it, or why there is none."""
    if by_feature(problem):
        return "vectors of float32 leave it no room in shared memory"
    operands = () if function is None else function.operands
    found = [_tile(problem, number, operand) for number, operand in enumerate(operands)]
    tiles = (one for one in found if isinstance(one, ScoreTile))
    return next(tiles, found[0] if found else "no function of scores reads an array")


def function_and_tile(
    problem: Attention, function: ScoreFunction | None, *, tiled: bool
) -> tuple[ScoreFunction | None, ScoreTile | None]:
    """The function, which reads an array in tiles if that is asked for."""
    tile = score_tile(problem, function) if tiled else None
    if function is None or not isinstance(tile, ScoreTile):
        return function, None
    return replace(function, tile=tile.number), tile


def _tile(problem: Attention, number: int, operand: EpilogueOperand) -> ScoreTile | str:
    name = f"array {number} of the score function"
    if operand.dtype not in DTYPES:
        return f"{name} is {operand.dtype}; tiles are of {' or '.join(DTYPES)}"
    if operand.gathered:
        return f"{name} is looked up"
    if operand.broadcast != "full":
        return f"{name} does not vary with both queries and keys, and consumers read it less often than a tile"
    if operand.column_stride != 1 or operand.terms[1] or operand.terms[2]:
        return f"queries and keys are no two axes of {name}, the latter dense, which TMA's box would be of"
    heads = problem.query_heads
    head_stride, batch_stride = operand.batch_stride, operand.batch_stride * heads
    for term in operand.terms[0]:
        match (term.divisor, term.modulus):
            case (1, modulus) if modulus == heads:
                head_stride += term.stride
            case (divisor, modulus) if divisor == heads and modulus in (0, problem.batch):
                batch_stride += term.stride
            case _:
                return f"{name} varies with heads other than one by one"
    strides = (operand.row_stride, head_stride, batch_stride)
    if operand.buffer.offset % 16 or any(2 * stride % 16 for stride in strides):
        return f"rows of {name} begin at other than multiples of 16 bytes, which TMA needs"
    if any(2 * stride >= 2**40 for stride in strides):
        return f"a stride of {name} has more than the 40 bits that TMA has for it"
    return ScoreTile(number, operand.buffer, operand.dtype, *strides)
