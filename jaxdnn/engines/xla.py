"""The engine that is last in the table and serves every call on every platform: the reference, compiled by XLA."""

from collections.abc import Iterable
from dataclasses import dataclass

from jaxdnn.device import Target
from jaxdnn.plan import Plan
from jaxdnn.spec import Signature, Spec


@dataclass(frozen=True)
class XlaConfig:
    """XLA has no knobs of ours."""


class Xla:
    """The op's reference."""

    name = "xla"
    platform = "any"
    op = "any"
    notes = ("portable",)

    def supports(self, spec: Spec, signature: Signature, target: Target) -> str | None:
        del spec, signature, target
        return None

    def candidates(self, spec: Spec, signature: Signature, target: Target) -> Iterable[XlaConfig]:
        del spec, signature, target
        yield XlaConfig()

    def plan(self, config: XlaConfig, spec: Spec, signature: Signature, target: Target) -> Plan | None:
        del config, spec, signature, target
        return None
