"""The engine table: its order is the dispatch. The first engine that supports a call, under its options, serves it."""

from jaxdnn.engines.base import Engine
from jaxdnn.engines.direct_norm import DirectNorm
from jaxdnn.engines.host_matmul import Host
from jaxdnn.engines.host_norm import HostNorm
from jaxdnn.engines.pointwise import Pointwise
from jaxdnn.engines.simt_matmul import Simt
from jaxdnn.engines.skinny_matmul import Skinny
from jaxdnn.engines.sm90_matmul import Sm90
from jaxdnn.engines.xla import Xla

ENGINES: tuple[Engine, ...] = (
    DirectNorm(),
    HostNorm(),
    Skinny(),
    Sm90(),
    Simt(),
    Pointwise(),
    Host(),
    Xla(),
)
