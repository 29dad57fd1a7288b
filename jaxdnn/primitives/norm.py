"""Normalization over the trailing axes of an array: `layer_norm` and `rms_norm`.

Layer normalization is Ba, Kiros and Hinton, "Layer Normalization", arXiv:1607.06450; root-mean-square normalization is
Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv:1910.07467.
"""

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
from jax import lax

from jaxdnn.config import current_options
from jaxdnn.engines.norm.problem import Rows, row_arrays
from jaxdnn.primitives._define import Op
from jaxdnn.spec import Arrays, DirectedSpec, Signature

_DTYPES = ("bfloat16", "float16", "float32", "float64")
_PARAMETERS = frozenset({"scale", "bias", "d_scale", "d_bias"})


@dataclass(frozen=True, repr=False)
class NormSpec(DirectedSpec):
    """A normalization over the last `ndim` axes of x.

    Attributes:
      kind: the public function.
      ndim: how many trailing axes are normalized.
      epsilon: added to the variance, or to the mean square.
      scale_offset: added to the scale.
      has_scale: whether there is a scale.
      has_bias: whether there is a bias.
      residual: "add" forms the sum x + residual and normalizes that; in "added" x already is that sum, and is returned
        as such: the form in which the derivatives see it, so that neither addend has to be kept.
      statistics: whether the mean (of layer_norm) and the reciprocal standard deviation are among the outputs.
      dtype: the dtype of y.
    """

    op = "norm"
    problems = (Rows,)

    kind: Literal["layer_norm", "rms_norm"] = "layer_norm"
    ndim: int = 1
    epsilon: float = 1e-6
    scale_offset: float = 0.0
    has_scale: bool = False
    has_bias: bool = False
    residual: Literal["absent", "add", "added"] = "absent"
    statistics: bool = False
    dtype: str = "float32"

    @property
    def title(self) -> str:
        return f"{self.kind} {self.direction}"

    @property
    def inputs(self) -> tuple[str, ...]:
        names = ("x", "residual" * (self.residual == "add"), "scale" * self.has_scale, "bias" * self.has_bias)
        return tuple(name for name in names if name)

    @property
    def outputs(self) -> tuple[str, ...]:
        return ("y", *(() if self.residual == "absent" else ("sum",)), *self.saved)

    @property
    def saved(self) -> tuple[str, ...]:
        if not self.statistics:
            return ()
        return ("mean", "rstd") if self.kind == "layer_norm" else ("rstd",)

    def saving(self) -> Self:
        return self.replace(statistics=True)

    def reference(self, inputs: Arrays) -> tuple[jax.Array, ...]:
        compute = jnp.float64 if any(array.dtype == jnp.float64 for array in inputs.values()) else jnp.float32
        total = inputs["x"]
        if self.residual == "add":
            total = total + inputs["residual"]
            # What is normalized is the sum as it is returned; XLA would otherwise skip this rounding on the way there.
            kind = jnp.finfo(total.dtype)
            total = lax.reduce_precision(total, kind.nexp, kind.nmant)
        axes = tuple(range(total.ndim - self.ndim, total.ndim))
        centered = total.astype(compute)
        outputs = []
        if self.kind == "layer_norm":
            mean = jnp.mean(centered, axes, keepdims=True)
            centered = centered - mean
            outputs.append(jnp.squeeze(mean, axes))
        rstd = lax.rsqrt(jnp.mean(jnp.square(centered), axes, keepdims=True) + self.epsilon)
        outputs.append(jnp.squeeze(rstd, axes))
        y = centered * rstd
        if self.has_scale:
            y = y * jnp.broadcast_to(inputs["scale"].astype(compute) + self.scale_offset, y.shape)
        if self.has_bias:
            y = y + jnp.broadcast_to(inputs["bias"].astype(compute), y.shape)
        sums = () if self.residual == "absent" else (total,)
        return (y.astype(self.dtype), *sums, *(outputs if self.statistics else ()))

    def derivative_form(self, inputs: Arrays, outputs: Arrays, tangents: Arrays) -> tuple[Self, Arrays, Arrays]:
        if self.residual != "add":
            return self, inputs, tangents
        # y is a function of the sum alone, and the sum's tangent is the sum of the tangents.
        total = outputs["sum"]
        addends = [
            jnp.broadcast_to(self.aligned(name, tangents[name]), total.shape).astype(total.dtype)
            for name in ("x", "residual")
            if name in tangents
        ]
        parameters = {name: tangent for name, tangent in tangents.items() if name in _PARAMETERS}
        moving = {"x": sum(addends[1:], addends[0])} if addends else {}
        kept = {name: array for name, array in inputs.items() if name in _PARAMETERS}
        return self.replace(residual="added"), {"x": total, **kept}, {**moving, **parameters}

    def mapped(self, operands: Arrays, axes: Mapping[str, int | None]) -> tuple[Self, Mapping[str, int], Sequence[int]]:
        # Rows of x mapped and the parameters not: more rows. A gradient of a parameter, however, is wanted for each
        # element of the mapped axis by itself.
        per_element = self.direction == "backward" and not _PARAMETERS.isdisjoint(self.results)
        if per_element or any((axis is None) != (name in _PARAMETERS) for name, axis in axes.items()):
            return super().mapped(operands, axes)
        places = {name: sum(self.carries[name]) for name, axis in axes.items() if axis is not None}
        return self, places, (len(self.batch),) * len(self.results)

    def factors(self, signature: Signature) -> tuple[Mapping[str, tuple[str, ...]], frozenset[str]]:
        x = signature.operands["x"]
        rows = tuple(f"r{i}" for i in range(len(x.shape) - sum(self.carries["x"]) - self.ndim))
        columns = tuple(f"c{i}" for i in range(self.ndim))

        def dimensions(name: str) -> tuple[str, ...]:
            if name in _PARAMETERS:
                return columns
            return rows if name.removeprefix("d_") in ("mean", "rstd") else (*rows, *columns)

        return {name: dimensions(name) for name in (*self.operands, *self.results)}, frozenset(columns)

    def problem(self, signature: Signature) -> Rows | str:
        if self.direction == "tangent":
            return "it has no kernel for the tangent"
        if self.direction == "backward" and "y" not in self.seeded:
            return "its backward kernel starts from the cotangent of y, which is zero here"
        found = row_arrays(signature, self.carries, self.ndim)
        if isinstance(found, str):
            return found
        sizes, operands, results = found
        centered, backward = self.kind == "layer_norm", self.direction == "backward"
        factors = () if backward else (("epsilon", self.epsilon),)
        return Rows(*sizes, centered, backward, (*factors, ("scale_offset", self.scale_offset)), operands, results)

    @property
    def fused(self) -> tuple[str, ...]:
        if self.direction == "forward":
            return ("residual add",) * (self.residual == "add") + self.inputs[self.inputs.index("x") + 1 :]
        return tuple(f"gradient of {name}" for name in self.active) + ("residual gradient",) * ("sum" in self.seeded)

    def flops(self, signature: Signature) -> int:
        per_element = {"forward": 5, "tangent": 12, "backward": 12}[self.direction]
        wide = (*signature.operands.values(), *signature.results.values())
        return per_element * max((math.prod(array.shape) for array in wide), default=0)


_norm = Op(NormSpec)


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
    epsilon = _number(kind, "epsilon", epsilon)
    if not epsilon >= 0:
        raise ValueError(f"{kind}: epsilon must be at least 0; got {epsilon}")
    scale_offset = _number(kind, "scale_offset", scale_offset)
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
    outputs = _norm(spec, moved)
    y, *others = (jnp.moveaxis(outputs[n], last, axes) if n in ("y", "sum") else outputs[n] for n in spec.outputs)
    return (y, *others) if others else y


def _floating(kind: str, name: str, array: jax.typing.ArrayLike) -> jax.Array:
    array = jnp.asarray(array)
    if array.dtype.name not in _DTYPES:
        raise TypeError(f"{kind}: {name} must have one of the dtypes {', '.join(_DTYPES)}; got {array.dtype.name}")
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


def _number(kind: str, name: str, value: object) -> float:
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{kind}: {name} must be a real number, known when tracing; got {value!r}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{kind}: {name} must be a number that a float can hold; got one that is larger") from None
