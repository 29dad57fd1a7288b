"""`Epilogue`: a function of a kernel's sums, as part of a spec."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from jaxdnn.pointwise import Program


@dataclass(frozen=True, repr=False)
class Epilogue:
    """What becomes of the sums before they are stored. Two are equal that compute the same.

    Attributes:
      function: of the sums and the epilogue's operands; returns a tuple of arrays. It is what is differentiated.
      program: what the function computes.
      saved: how many outputs, the last ones, are the sums, for the derivative's sake.
    """

    function: Callable[..., tuple[Any, ...]] = field(compare=False)
    program: Program
    saved: int = 0

    def __repr__(self) -> str:
        meaning = repr((self.program.instructions, self.program.outputs, self.program.operands))
        return f"Epilogue({self.program.title!r}, {hashlib.sha256(meaning.encode()).hexdigest()[:8]})"
