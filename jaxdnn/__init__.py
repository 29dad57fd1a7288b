"""jaxdnn: matmul and normalization kernels as ordinary JAX functions."""

from importlib.metadata import version as _version
from importlib.util import find_spec as _find_spec

if _find_spec("jaxdnn._native") is None:
    raise ImportError(
        "jaxdnn: this is the source folder, which holds no compiled module; run Python in another folder, or as "
        "`python -P`, or install with `pip install --no-build-isolation --editable .`"
    )

from jaxdnn.config import configure_logging as _configure_logging
from jaxdnn.config import options as options
from jaxdnn.custom_call import export_checks as export_checks
from jaxdnn.custom_call import register as _register
from jaxdnn.planning.autotune import autotune as autotune
from jaxdnn.planning.explain import explain as explain
from jaxdnn.planning.select import NoEngineError as NoEngineError
from jaxdnn.pointwise import UnsupportedOperation as UnsupportedOperation
from jaxdnn.primitives.matmul.api import dot_general as dot_general
from jaxdnn.primitives.matmul.api import gated_linear_unit as gated_linear_unit
from jaxdnn.primitives.matmul.api import matmul as matmul
from jaxdnn.primitives.norm import layer_norm as layer_norm
from jaxdnn.primitives.norm import rms_norm as rms_norm

__version__ = _version("jaxdnn")

_configure_logging()
_register()
