"""The engine table: its order is the dispatch. The first engine that supports a call, under its options, serves it."""

from jaxdnn.engines.base import Engine
from jaxdnn.engines.direct_norm import DirectNorm
from jaxdnn.engines.host_norm import HostNorm
from jaxdnn.engines.xla import Xla

ENGINES: tuple[Engine, ...] = (
    DirectNorm(),
    HostNorm(),
    Xla(),
)
