"""The kernels that a FULL build compiles ahead of time: what ordinary models call.

Kernels do not depend on how many rows there are, so a handful of widths and dtypes covers most of a model. What is not
here is compiled at run time, as in a build without a library.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import jax

from jaxdnn.config import options
from jaxdnn.planning.calls import find_calls, find_differentiated_calls
from jaxdnn.planning.select import select
from jaxdnn.primitives.norm.api import layer_norm, rms_norm

TARGETS = ("sm_80", "sm_90")
_ROWS = 8192
_COLUMNS = (768, 1024, 2048, 4096, 8192)
_DTYPES = (("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float32", "float32"))


def units() -> list[tuple[str, str]]:
    """Every translation unit of the library with the architecture that it is compiled for, each once."""
    found: dict[tuple[str, str], None] = {}
    for target in TARGETS:
        with options(target=target):
            for function, arguments in _norms():
                for call in (*find_calls(function, *arguments), *find_differentiated_calls(function, *arguments)):
                    plan = select(call.spec, call.signature, "cuda").plan
                    if plan is not None:
                        found[plan.unit, plan.arch] = None
    return list(found)


def _norms() -> Iterator[tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]]:
    for columns, (dtype, parameter_dtype) in product(_COLUMNS, _DTYPES):
        x = jax.ShapeDtypeStruct((_ROWS, columns), dtype)
        parameter = jax.ShapeDtypeStruct((columns,), parameter_dtype)
        yield layer_norm, [x, parameter, parameter]
        yield rms_norm, [x, parameter]
        yield partial(_with_residual, layer_norm), [x, x, parameter, parameter]
        yield partial(_with_residual, rms_norm), [x, x, parameter]


def _with_residual(norm: Callable[..., Any], x: jax.Array, residual: jax.Array, *parameters: jax.Array) -> Any:
    return norm(x, *parameters, residual=residual)
