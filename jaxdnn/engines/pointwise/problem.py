"""A pointwise function of whole arrays, as engines see it."""

from dataclasses import dataclass

from jaxdnn.engines.base import Problem
from jaxdnn.engines.product.problem import EpilogueOperand, Matrix, Reduced
from jaxdnn.pointwise import Program


@dataclass(frozen=True)
class Pointwise(Problem):
    """results = program(operands), over `batch` matrices of `rows` x `columns`.

    Attributes:
      program: over (batch, row, column), without accumulators; its loads are `operands` and its outputs are
        `results`, in order. A result may be the same memory as an operand of its shape, of which each element is
        taken at its own place alone: so an engine writes an element when all that takes the operand's there has it.
      approximate: whether every value may be off by 2^-17, relative to the largest one on the way.
    """

    family = "pointwise"

    batch: int
    rows: int
    columns: int
    program: Program
    operands: tuple[EpilogueOperand, ...]
    results: tuple[Matrix | Reduced, ...]
    approximate: bool
