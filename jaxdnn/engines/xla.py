"""The engine that is last in the table and serves every call on every platform: the reference, compiled by XLA."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from jaxdnn.device import Target
from jaxdnn.engines.base import ProblemEngine


@dataclass(frozen=True)
class XlaKnobs:
    """XLA has no knobs of ours."""


class Xla(ProblemEngine[Any, XlaKnobs]):
    """The op's reference."""

    name = "xla"
    platform = "any"
    problem = None
    notes = ("portable",)

    def reason(self, problem: Any, target: Target) -> str | None:
        del problem, target
        return None

    def configurations(self, problem: Any, target: Target) -> Iterable[XlaKnobs]:
        del problem, target
        yield XlaKnobs()

    def build(self, config: XlaKnobs, problem: Any, target: Target) -> None:
        del config, problem, target
