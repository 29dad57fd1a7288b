"""jaxdnn: convolution, matmul, attention and normalization kernels as ordinary JAX functions."""

from importlib.metadata import version as _version
from importlib.util import find_spec as _find_spec
from pathlib import Path as _Path

from jax.extend import source_info_util as _source_info_util

if _find_spec("jaxdnn._native") is None:
    raise ImportError(
        "jaxdnn: this is the source folder, which holds no compiled module; run Python in another folder, or as "
        "`python -P`, or install with `pip install --no-build-isolation --editable .`"
    )

from jaxdnn.config import configure_logging as _configure_logging
from jaxdnn.config import options
from jaxdnn.custom_call import export_checks
from jaxdnn.custom_call import register as _register
from jaxdnn.planning.autotune import autotune
from jaxdnn.planning.explain import explain
from jaxdnn.planning.select import NoEngineError
from jaxdnn.pointwise import UnsupportedOperation
from jaxdnn.primitives.attention.api import dot_product_attention
from jaxdnn.primitives.attention.combine import combine_attention
from jaxdnn.primitives.convolution.api import conv_general_dilated, conv_transpose
from jaxdnn.primitives.convolution.causal import causal_conv1d, causal_conv1d_update
from jaxdnn.primitives.matmul.api import dot_general, gated_linear_unit, matmul
from jaxdnn.primitives.norm.api import layer_norm, rms_norm

__all__ = [
    "NoEngineError",
    "UnsupportedOperation",
    "autotune",
    "causal_conv1d",
    "causal_conv1d_update",
    "combine_attention",
    "conv_general_dilated",
    "conv_transpose",
    "dot_general",
    "dot_product_attention",
    "explain",
    "export_checks",
    "gated_linear_unit",
    "layer_norm",
    "matmul",
    "options",
    "rms_norm",
]
__version__ = _version("jaxdnn")

# The place of an operation is where the user's code calls the package.
_source_info_util.register_exclusion(str(_Path(__file__).parent))
_configure_logging()
_register()
