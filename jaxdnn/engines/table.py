"""The engine table: its order is the dispatch. The first engine that supports a call, under its options, serves it."""

from jaxdnn.engines.attention.host import HostAttention
from jaxdnn.engines.attention.simt.engine import AttentionSimt
from jaxdnn.engines.attention.sm90.engine import AttentionSm90
from jaxdnn.engines.base import Engine
from jaxdnn.engines.convolution.depthwise.engine import ConvolutionDepthwise
from jaxdnn.engines.convolution.direct.engine import ConvolutionDirect
from jaxdnn.engines.convolution.host.engine import HostConvolution
from jaxdnn.engines.convolution.lines.engine import ConvolutionLines
from jaxdnn.engines.convolution.simt.engine import ConvolutionSimt
from jaxdnn.engines.convolution.sm90.engine import ConvolutionSm90
from jaxdnn.engines.norm.direct.engine import DirectNorm
from jaxdnn.engines.norm.host import HostNorm
from jaxdnn.engines.pointwise.pointwise import PointwiseEngine
from jaxdnn.engines.product.host.engine import Host
from jaxdnn.engines.product.simt.engine import Simt
from jaxdnn.engines.product.skinny.engine import Skinny
from jaxdnn.engines.product.sm90.engine import Sm90
from jaxdnn.engines.xla import Xla

ENGINES: tuple[Engine, ...] = (
    DirectNorm(),
    HostNorm(),
    Skinny(),
    Sm90(),
    Simt(),
    ConvolutionLines(),
    ConvolutionDepthwise(),
    ConvolutionDirect(),
    ConvolutionSm90(),
    ConvolutionSimt(),
    AttentionSm90(),
    AttentionSimt(),
    PointwiseEngine(),
    Host(),
    HostConvolution(),
    HostAttention(),
    Xla(),
)
