"""The engine that is last in the table and serves every call on every platform: the reference, compiled by XLA."""

from collections.abc import Iterable
from dataclasses import dataclass

from jaxdnn.device import Target
from jaxdnn.engines.base import Problem, ProblemEngine


@dataclass(frozen=True)
class XlaKnobs:
    """XLA has no knobs of ours."""


class Xla(ProblemEngine[Problem, XlaKnobs]):
    """The op's reference."""

    name = "xla"
    platform = "any"
    problem = None
    notes = ("portable",)

    def reason(self, problem: Problem, target: Target) -> str | None:
        del problem, target
        return None

    def configurations(self, problem: Problem, target: Target) -> Iterable[XlaKnobs]:
        del problem, target
        yield XlaKnobs()

    def build(self, config: XlaKnobs, problem: Problem, target: Target) -> None:
        del config, problem, target
