"""The table of cases that every transformation is tested on.

A case is a frozen dataclass of one op; adding an op adds a class with the same methods, and its rows to the table:

  operands                     names of the arrays, in the order in which `call` takes them
  active                       the operands that are differentiated
  outputs                      name and dtype of each result
  primals(), tangents(), cotangents()    arrays, each exactly representable in its dtype; a function of the case alone
  call(*arrays)                jaxdnn's function
  reference(rounding, *arrays) the independent definition on float64 arrays (see reference.py)
  unit                         the unit roundoff of the op's arithmetic
"""

from checking.cases.dtypes import BF16 as BF16
from checking.cases.dtypes import F16 as F16
from checking.cases.dtypes import F32 as F32
from checking.cases.dtypes import F64 as F64
from checking.cases.matmul import EMPTY_MATMULS, MATMULS, NOT_FINITE_MATMULS, SMALL_MATMULS
from checking.cases.matmul import MatmulCase as MatmulCase
from checking.cases.norm import EMPTY_NORMS, NORMS, NOT_FINITE_NORMS, SMALL_NORMS
from checking.cases.norm import NormCase as NormCase

# Every op's rows.
CASES = [*NORMS, *MATMULS]
EMPTY = [*EMPTY_NORMS, *EMPTY_MATMULS]
NOT_FINITE = [*NOT_FINITE_NORMS, *NOT_FINITE_MATMULS]
SMALL = [*SMALL_NORMS, *SMALL_MATMULS]
# Those that derivatives are taken of.
DIFFERENTIABLE = [case for case in CASES if case.differentiable]
