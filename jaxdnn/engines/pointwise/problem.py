"""A pointwise function of whole arrays, as engines see it."""

from dataclasses import dataclass

from jaxdnn.engines.base import Problem
from jaxdnn.engines.product.problem import EpilogueOperand, Matrix, Reduced
from jaxdnn.plan import Operand
from jaxdnn.pointwise import Program


@dataclass(frozen=True)
class Pointwise(Problem):
    """results = program(operands), over `batch` matrices of `rows` x `columns`.

    Attributes:
      program: over (batch, row, column), without accumulators; its loads are `operands` and its outputs are
        `results`, in order. A result may be the same memory as an operand of its shape and `own_places`: so an engine
        writes an element when all that takes the operand's element there has it.
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

    def own_places(self, operand: int) -> bool:
        """Whether each element of a result of the operand's shape takes, of that operand, the same element alone."""
        sizes, dense = (self.batch, self.rows, self.columns), (self.rows * self.columns, self.columns, 1)
        long = [axis for axis, size in enumerate(sizes) if size > 1]
        reads = [one for one in self.operands if one.buffer == Operand(operand)]
        strides = [(one.batch_stride, one.row_stride, one.column_stride) for one in reads]
        return all(one[axis] == dense[axis] for one in strides for axis in long) and not any(r.gathered for r in reads)
