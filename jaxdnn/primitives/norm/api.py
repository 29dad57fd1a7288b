"""Normalization over axes of an array: `layer_norm` and `rms_norm`.

Layer normalization is Ba, Kiros and Hinton, "Layer Normalization", arXiv:1607.06450; root-mean-square normalization is
Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv:1910.07467.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp

from jaxdnn.api_boundary import api_boundary
from jaxdnn.config import current_options
from jaxdnn.primitives.arguments import as_array, number
from jaxdnn.primitives.norm.spec import DTYPES, NormSpec, norm


@overload
def layer_norm(
    x: jax.typing.ArrayLike,
    scale: jax.typing.ArrayLike | None = None,
    bias: jax.typing.ArrayLike | None = None,
    *,
    axis: int | Sequence[int] = -1,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    residual: None = None,
    return_statistics: Literal[False] = False,
) -> jax.Array: ...


@overload
def layer_norm(
    x: jax.typing.ArrayLike,
    scale: jax.typing.ArrayLike | None = None,
    bias: jax.typing.ArrayLike | None = None,
    *,
    axis: int | Sequence[int] = -1,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    residual: jax.typing.ArrayLike,
    return_statistics: Literal[False] = False,
) -> tuple[jax.Array, jax.Array]: ...


@overload
def layer_norm(
    x: jax.typing.ArrayLike,
    scale: jax.typing.ArrayLike | None = None,
    bias: jax.typing.ArrayLike | None = None,
    *,
    axis: int | Sequence[int] = -1,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    residual: None = None,
    return_statistics: Literal[True],
) -> tuple[jax.Array, jax.Array, jax.Array]: ...


@overload
def layer_norm(
    x: jax.typing.ArrayLike,
    scale: jax.typing.ArrayLike | None = None,
    bias: jax.typing.ArrayLike | None = None,
    *,
    axis: int | Sequence[int] = -1,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    residual: jax.typing.ArrayLike,
    return_statistics: Literal[True],
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]: ...


@api_boundary(
    "layer_norm",
    eps="did you mean epsilon=?",
    weight="did you mean scale=?",
    gamma="did you mean scale=?",
    beta="did you mean bias=?",
    normalized_shape="axis= names the axes that are normalized",
)
def layer_norm(
    x: jax.typing.ArrayLike,
    scale: jax.typing.ArrayLike | None = None,
    bias: jax.typing.ArrayLike | None = None,
    *,
    axis: int | Sequence[int] = -1,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    residual: jax.typing.ArrayLike | None = None,
    return_statistics: bool = False,
) -> Any:
    """Layer normalization: `(x - mean) / sqrt(variance + epsilon) * (scale + scale_offset) + bias`.

    Mean and (biased) variance are taken over `axis`. Arithmetic is in float32, or in float64 when an operand is; y is
    rounded once, to x's dtype.

    Args:
      x: array of bfloat16, float16, float32 or float64 and of any shape.
      scale: floating-point array whose shape is that of x's normalized axes, in the order they have in x; None for 1.
      bias: likewise; None for 0.
      axis: the axis or axes to normalize over.
      epsilon: added to the variance; at least 0.
      scale_offset: added to scale, for parameters that are stored around zero.
      residual: array of x's shape. `x + residual` is formed first (in the promoted dtype), then normalized, and
        returned too, in the same pass.
      return_statistics: whether to return the mean and the reciprocal standard deviation.

    Returns:
      y, of x's shape and dtype. With residual or return_statistics a tuple of y, the sum `x + residual` if there is a
      residual, then mean and reciprocal standard deviation, of x's shape without the normalized axes, in float32 (or
      float64). All of them are differentiable.

    Raises:
      TypeError: an array is not floating point, or a static argument is an array being traced.
      ValueError: an axis, a shape or epsilon is not allowed.

    Example:
      >>> import jax.numpy as jnp, jaxdnn
      >>> x = jnp.arange(8.0).reshape(2, 4)
      >>> y, total = jaxdnn.layer_norm(x, jnp.ones(4), jnp.zeros(4), residual=x)
      >>> total.shape
      (2, 4)
    """
    return _normalize(
        "layer_norm", x, scale, bias, axis, epsilon, scale_offset, residual, return_statistics=return_statistics
    )


@overload
def rms_norm(
    x: jax.typing.ArrayLike,
    scale: jax.typing.ArrayLike | None = None,
    *,
    axis: int | Sequence[int] = -1,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    residual: None = None,
    return_statistics: Literal[False] = False,
) -> jax.Array: ...


@overload
def rms_norm(
    x: jax.typing.ArrayLike,
    scale: jax.typing.ArrayLike | None = None,
    *,
    axis: int | Sequence[int] = -1,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    residual: jax.typing.ArrayLike,
    return_statistics: Literal[False] = False,
) -> tuple[jax.Array, jax.Array]: ...


@overload
def rms_norm(
    x: jax.typing.ArrayLike,
    scale: jax.typing.ArrayLike | None = None,
    *,
    axis: int | Sequence[int] = -1,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    residual: None = None,
    return_statistics: Literal[True],
) -> tuple[jax.Array, jax.Array]: ...


@overload
def rms_norm(
    x: jax.typing.ArrayLike,
    scale: jax.typing.ArrayLike | None = None,
    *,
    axis: int | Sequence[int] = -1,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    residual: jax.typing.ArrayLike,
    return_statistics: Literal[True],
) -> tuple[jax.Array, jax.Array, jax.Array]: ...


@api_boundary(
    "rms_norm",
    eps="did you mean epsilon=?",
    weight="did you mean scale=?",
    gamma="did you mean scale=?",
    bias="rms_norm adds none; layer_norm does",
)
def rms_norm(
    x: jax.typing.ArrayLike,
    scale: jax.typing.ArrayLike | None = None,
    *,
    axis: int | Sequence[int] = -1,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    residual: jax.typing.ArrayLike | None = None,
    return_statistics: bool = False,
) -> Any:
    """Root-mean-square normalization: `x / sqrt(mean(x ** 2) + epsilon) * (scale + scale_offset)`.

    The mean is taken over `axis`. Arithmetic is in float32, or in float64 when an operand is; y is rounded once, to x's
    dtype.

    Args:
      x: array of bfloat16, float16, float32 or float64 and of any shape.
      scale: floating-point array whose shape is that of x's normalized axes, in the order they have in x; None for 1.
      axis: the axis or axes to normalize over.
      epsilon: added to the mean square; at least 0.
      scale_offset: added to scale, for parameters that are stored around zero.
      residual: array of x's shape. `x + residual` is formed first (in the promoted dtype), then normalized, and
        returned too, in the same pass.
      return_statistics: whether to return the reciprocal root mean square.

    Returns:
      y, of x's shape and dtype. With residual or return_statistics a tuple of y, the sum `x + residual` if there is a
      residual, then the reciprocal root mean square, of x's shape without the normalized axes, in float32 (or float64).
      All of them are differentiable.

    Raises:
      TypeError: an array is not floating point, or a static argument is an array being traced.
      ValueError: an axis, a shape or epsilon is not allowed.

    Example:
      >>> import jax.numpy as jnp, jaxdnn
      >>> jaxdnn.rms_norm(jnp.array([3.0, -3.0]), jnp.ones(2)).round()
      Array([ 1., -1.], dtype=float32)
    """
    return _normalize(
        "rms_norm", x, scale, None, axis, epsilon, scale_offset, residual, return_statistics=return_statistics
    )


def _normalize(
    kind: Literal["layer_norm", "rms_norm"],
    x: jax.typing.ArrayLike,
    scale: jax.typing.ArrayLike | None,
    bias: jax.typing.ArrayLike | None,
    axis: int | Sequence[int],
    epsilon: float,
    scale_offset: float,
    residual: jax.typing.ArrayLike | None,
    *,
    return_statistics: bool,
) -> Any:
    """Checks and canonicalises the arguments: normalized axes go last, absent arrays are left out."""
    named = {"x": x, "residual": residual, "scale": scale, "bias": bias}
    arrays = {name: _floating(kind, name, array) for name, array in named.items() if array is not None}
    if "x" not in arrays:
        raise TypeError(f"{kind}: x must be an array; got None")
    x = arrays["x"]
    axes = _axes(kind, axis, x)
    normalized = tuple(x.shape[a] for a in axes)
    for name, array in arrays.items():
        expected, what = (x.shape, "x's shape") if name in ("x", "residual") else (normalized, "the normalized shape")
        if array.shape != expected:
            raise ValueError(f"{kind}: {name} must have {what} {expected}; got {array.shape}")
    epsilon = number(kind, "epsilon", epsilon)
    if not epsilon >= 0:
        raise ValueError(f"{kind}: epsilon must be at least 0; got {epsilon}")
    scale_offset = number(kind, "scale_offset", scale_offset)
    if scale_offset and scale is None:
        raise ValueError(f"{kind}: scale_offset={scale_offset} is added to scale, and there is no scale; pass one")
    if not isinstance(return_statistics, bool):
        raise TypeError(f"{kind}: return_statistics must be True or False; got {return_statistics!r}")

    last = tuple(range(x.ndim - len(axes), x.ndim))
    spec = NormSpec(
        kind=kind,
        ndim=len(axes),
        epsilon=epsilon,
        scale_offset=scale_offset,
        has_scale="scale" in arrays,
        has_bias="bias" in arrays,
        residual="add" if "residual" in arrays else "absent",
        statistics=return_statistics,
        dtype=x.dtype.name,
        options=current_options(),
    )
    moved = {name: jnp.moveaxis(a, axes, last) if name in ("x", "residual") else a for name, a in arrays.items()}
    outputs = norm(spec, moved)
    y, *others = (jnp.moveaxis(outputs[n], last, axes) if n in ("y", "sum") else outputs[n] for n in spec.outputs)
    return (y, *others) if others else y


def _floating(kind: str, name: str, array: jax.typing.ArrayLike) -> jax.Array:
    given, array = array, as_array(f"{kind}: {name}", array)
    if array.dtype.name not in DTYPES:
        shape = f"; the axes of a shape {given} are named with axis=" if isinstance(given, tuple) else ""
        raise TypeError(
            f"{kind}: {name} must have one of the dtypes {', '.join(DTYPES)}; got {array.dtype.name}{shape}"
        )
    return array


def _axes(kind: str, axis: int | Sequence[int], x: jax.Array) -> tuple[int, ...]:
    try:
        given = tuple(map(operator.index, axis if isinstance(axis, Sequence) else [axis]))
    except TypeError:
        raise TypeError(f"{kind}: axis must be an int or a sequence of ints; got {axis!r}") from None
    for a in given:
        if not -x.ndim <= a < x.ndim:
            raise ValueError(f"{kind}: axis {a} is out of range for x of shape {x.shape}")
    axes = tuple(sorted({a % x.ndim for a in given}))
    if not axes or len(axes) != len(given):
        raise ValueError(f"{kind}: axis must name at least one axis, and none twice; got {axis!r}")
    return axes
