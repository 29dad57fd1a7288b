"""Pointwise JAX functions in kernels: traced to a `Program`, emitted as CUDA source or as bytecode for the host."""

from jaxdnn.pointwise.bytecode import bytecode as bytecode
from jaxdnn.pointwise.cuda import Field as Field
from jaxdnn.pointwise.cuda import Functor as Functor
from jaxdnn.pointwise.cuda import functor as functor
from jaxdnn.pointwise.evaluate import evaluate as evaluate
from jaxdnn.pointwise.evaluate import loaded as loaded
from jaxdnn.pointwise.graph import UnsupportedOperation as UnsupportedOperation
from jaxdnn.pointwise.meaning import Meaning as Meaning
from jaxdnn.pointwise.program import AffineLoad as AffineLoad
from jaxdnn.pointwise.program import Gathered as Gathered
from jaxdnn.pointwise.program import Index as Index
from jaxdnn.pointwise.program import Load as Load
from jaxdnn.pointwise.program import Output as Output
from jaxdnn.pointwise.program import Program as Program
from jaxdnn.pointwise.program import Term as Term
from jaxdnn.pointwise.program import Terms as Terms
from jaxdnn.pointwise.program import collapse as collapse
from jaxdnn.pointwise.program import merged_terms as merged_terms
from jaxdnn.pointwise.trace import Captured as Captured
from jaxdnn.pointwise.trace import capture as capture
from jaxdnn.pointwise.trace import trace as trace
