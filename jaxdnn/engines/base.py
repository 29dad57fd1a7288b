"""What an engine is: one family of kernels, and how to configure it for a problem."""

from collections.abc import Iterable
from typing import Any, ClassVar, Generic, Literal, TypeVar

from jaxdnn.device import Target
from jaxdnn.plan import Plan

# What a launch may have at most: `kMaxArguments` and `kMaxTensorMaps` in cpp/launch_limits.h.
MAX_ARGUMENTS = 128
MAX_TENSOR_MAPS = 17


class Problem:
    """The canonical form of a call: sizes, strides and programs, whichever op states it."""

    family: ClassVar[str]  # the folder of the engines that serve it


P = TypeVar("P", bound=Problem)  # the problem
K = TypeVar("K")  # the knobs: a frozen dataclass, of which `options(knobs=...)` replaces fields by name


class ProblemEngine(Generic[P, K]):
    """One kernel family. It sees problems, never a spec, and never raises for one that it can't serve.

    Attributes:
      name: for `options(engine=...)`.
      platform: the one that it runs on; "any" for all.
      problem: what it serves; None for every call, whatever problem that states.
      notes: for the user: "tensor cores", or "deterministic", which `options(deterministic=True)` asks for.
    """

    name: ClassVar[str]
    platform: ClassVar[Literal["cuda", "cpu", "any"]]
    problem: ClassVar[type[Problem] | None]
    notes: ClassVar[tuple[str, ...]]

    @property
    def family(self) -> str:
        """The engine's folder."""
        return "any" if self.problem is None else self.problem.family

    def reason(self, problem: P, target: Target) -> str | None:
        """None if the engine can serve this problem, else the reason why it can't, as a sentence for the user."""
        raise NotImplementedError

    def outdone(self, problem: P, target: Target) -> str | None:  # noqa: ARG002
        """Why others serve a problem in less time that this engine can serve, or None. Nobody asks where the options
        leave no other.
        """
        return None

    def configurations(self, problem: P, target: Target) -> Iterable[K]:
        """Knobs that work for a problem that is served, the heuristic's choice first; at least one."""
        raise NotImplementedError

    def build(self, config: K, problem: P, target: Target) -> Plan | None:
        """What one call does under `config`; None for "lower the reference". Planning names it."""
        raise NotImplementedError


Engine = ProblemEngine[Any, Any]


def check_least(knobs: object, least: int, *names: str) -> None:
    """Raises ValueError unless these fields of an engine's knobs are integers of at least `least`."""
    for name in names:
        value = getattr(knobs, name)
        if not isinstance(value, int) or value < least:
            raise ValueError(f"{type(knobs).__name__}: {name} must be an int of at least {least}; got {value!r}")


def check_powers_of_two(knobs: object, *names: str) -> None:
    """Raises ValueError unless these fields of an engine's knobs are powers of two."""
    for name in names:
        value = getattr(knobs, name)
        if not isinstance(value, int) or value < 1 or value & (value - 1):
            raise ValueError(f"{type(knobs).__name__}: {name} must be a power of two; got {value!r}")
