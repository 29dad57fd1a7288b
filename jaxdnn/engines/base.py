"""What an engine is: one family of kernels, and how to configure it for a call."""

import math
from collections.abc import Iterable
from typing import Any, Protocol

from jaxdnn.device import Target
from jaxdnn.plan import Plan
from jaxdnn.spec import Signature

# What a launch may have at most: `kMaxArguments` and `kMaxTensorMaps` in cpp/launch_limits.h.
MAX_ARGUMENTS = 128
MAX_TENSOR_MAPS = 16


class Engine(Protocol):
    """One kernel family.

    An engine never raises for a call it can't serve: it returns the reason. `Config` is a frozen dataclass of named,
    validated knobs; `options(knobs=...)` replaces its fields by name.
    """

    name: str
    platform: str  # "cuda" or "cpu"; "any" for every platform
    op: str  # the `Spec.op` it serves; "any" for every op

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user: "tensor cores", or "deterministic", which `options(deterministic=True)` asks for."""
        ...

    def supports(self, spec: Any, signature: Signature, target: Target) -> str | None:
        """None if the engine serves this call, else the reason why it does not, as a sentence for the user."""
        ...

    def candidates(self, spec: Any, signature: Signature, target: Target) -> Iterable[Any]:
        """Configurations that work for this call, the heuristic's choice first."""
        ...

    def plan(self, config: Any, spec: Any, signature: Signature, target: Target) -> Plan | None:
        """What one call does under `config`; None for "lower the reference"."""
        ...


def sizes_reason(signature: Signature) -> str | None:
    """Why no kernel can be configured for arrays of such sizes, or None."""
    shapes = [array.shape for array in (*signature.operands.values(), *signature.results.values())]
    if not all(isinstance(size, int) for shape in shapes for size in shape):
        return "the shapes are symbolic, and kernels are configured for known sizes"
    if any(math.prod(shape) == 0 for shape in shapes):
        return "the arrays have no elements"
    return None
