"""What a user asks for: a call of JAX's function, in the parameters of the primitive that JAX would bind."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.core import ShapedArray, Tracer
from jax.lax import ConvDimensionNumbers

from jaxdnn.engines.convolution.problem import Window
from jaxdnn.primitives.fused.messages import described, described_type

_SETTINGS = (
    *("window_strides", "strides", "padding", "lhs_dilation", "rhs_dilation", "dimension_numbers"),
    *("feature_group_count", "batch_group_count", "precision", "preferred_element_type"),
    *("transpose_kernel", "use_consistent_padding"),
)
# JAX keeps what it has traced of functions that it jits, so that calls of the same types take no time to check.
_CALLED = {
    name: jax.jit(function, static_argnames=[one for one in _SETTINGS if one in function.__code__.co_varnames])
    for name, function in (
        ("conv_general_dilated", lax.conv_general_dilated),
        ("conv_transpose", lax.conv_transpose),
    )
}


@dataclass(frozen=True)
class Arguments:
    """A convolution of an array lhs with a filter rhs.

    Attributes:
      strides, low, lhs_dilation, rhs_dilation: one for each spatial dimension; `low` is the padding in front.
      numbers: which dimensions are which.
      feature_groups, batch_groups: how many.
      precision: in JAX's canonical form.
      flip: whether the places of rhs are in reverse.
      result: the type of what JAX returns.
    """

    strides: tuple[int, ...]
    low: tuple[int, ...]
    lhs_dilation: tuple[int, ...]
    rhs_dilation: tuple[int, ...]
    numbers: ConvDimensionNumbers
    feature_groups: int
    batch_groups: int
    precision: Any
    flip: bool
    result: ShapedArray

    def windows(self, lhs: Sequence[int], rhs: Sequence[int]) -> tuple[Window, ...]:
        """Those of arrays of these shapes."""
        arrays = zip((lhs, rhs, self.result.shape), self.numbers, strict=True)
        image, filter_, output = ([shape[d] for d in dimensions[2:]] for shape, dimensions in arrays)
        steps = zip(self.strides, self.rhs_dilation, self.lhs_dilation, self.low, strict=True)
        sizes = zip(image, filter_, output, strict=True)
        return tuple(Window(*size, *step, self.flip) for size, step in zip(sizes, steps, strict=True))


def arguments(caller: str, lhs: Any, rhs: Any, flip: bool, settings: Mapping[str, Any]) -> Arguments:
    """What JAX's function of the name `caller` makes of its arguments. Raises what that does, and says of what."""
    _check(caller, lhs, rhs, settings)
    if not isinstance(flip, bool):
        raise TypeError(f"{caller}: whether the filter is reversed must be True or False; got {flip!r}")
    with described(caller, {"lhs": lhs, "rhs": rhs}):
        given = {name: _hashable(value) for name, value in settings.items()}
        padding = settings["padding"]
        if isinstance(padding, str) and padding.upper() == "CAUSAL":
            given["padding"] = _causal(caller, lhs, rhs, settings)
        # Types alone: JAX knows how a result lies on explicit axes of a mesh for images that are split and no more.
        types = [jax.typeof(array) for array in (lhs, rhs)]
        bare = [jax.ShapeDtypeStruct(one.shape, one.dtype, weak_type=one.weak_type) for one in types]
        traced = _CALLED[caller].trace(*bare, **given).jaxpr
    equation = next(e for e in traced.eqns if e.primitive is lax.conv_general_dilated_p)
    found, numbers = equation.params, equation.params["dimension_numbers"]
    if settings.get("transpose_kernel"):
        # JAX reverses the filter, and exchanges its channels, before it convolves.
        out, in_, *window = numbers.rhs_spec
        numbers, flip = numbers._replace(rhs_spec=(in_, out, *window)), not flip
    return Arguments(
        strides=found["window_strides"],
        low=tuple(low for low, _ in found["padding"]),
        lhs_dilation=found["lhs_dilation"],
        rhs_dilation=found["rhs_dilation"],
        numbers=numbers,
        feature_groups=found["feature_group_count"],
        batch_groups=found["batch_group_count"],
        precision=found["precision"],
        flip=flip,
        result=traced.out_avals[0],
    )


def _check(caller: str, lhs: Any, rhs: Any, settings: Mapping[str, Any]) -> None:
    """Raises for arguments that JAX has no clear words for."""
    for name, array in {"lhs": lhs, "rhs": rhs}.items():
        if not hasattr(array, "shape") or not hasattr(array, "dtype"):
            raise TypeError(f"{caller}: {name} must be an array; got {described_type(array)}")
    if lhs.ndim < 2 or lhs.ndim != rhs.ndim:
        raise ValueError(
            f"{caller}: lhs and rhs must have one rank, of two for batch and features and one for each spatial "
            f"dimension; got lhs {described_type(lhs)} and rhs {described_type(rhs)}"
        )
    of_lhs, of_rhs = (jax.typeof(array).dtype for array in (lhs, rhs))
    if of_lhs != of_rhs:
        raise TypeError(
            f"{caller}: lhs and rhs must have one dtype; got {of_lhs.name} and {of_rhs.name}: cast one of them"
        )
    for name, value in settings.items():
        if any(isinstance(one, Tracer) for one in jax.tree.leaves(value)):
            raise TypeError(f"{caller}: {name} must be known when tracing; got {value!r}")
    padding, spatial = settings["padding"], lhs.ndim - 2
    if isinstance(padding, str) and padding.upper() not in _PADDINGS:
        raise ValueError(
            f"{caller}: padding must be one of {', '.join(_PADDINGS)}, or a pair (low, high) for each spatial "
            f"dimension; got {padding!r}"
        )
    for name in ("window_strides", "strides", "lhs_dilation", "rhs_dilation", "padding"):
        value = settings.get(name)
        if value is None or isinstance(value, str):
            continue
        entry = "pair (low, high)" if name == "padding" else "positive number"
        well_formed = isinstance(value, Sequence | np.ndarray) and len(value) == spatial
        if not well_formed or (name != "padding" and any(isinstance(one, int) and one < 1 for one in value)):
            raise ValueError(f"{caller}: {name} must have a {entry} for each of {spatial} dimensions; got {value!r}")


_PADDINGS = ("SAME", "SAME_LOWER", "VALID", "CAUSAL")


def _causal(caller: str, lhs: Any, rhs: Any, settings: Mapping[str, Any]) -> tuple[tuple[int, int]]:
    """The padding with which no result depends on what comes later."""
    if caller != "conv_general_dilated" or lhs.ndim != 3:
        raise ValueError(
            f'{caller}: padding "CAUSAL" is for one spatial dimension, in conv_general_dilated; got lhs '
            f"{described_type(lhs)}: write a pair (low, high) for each"
        )
    numbers = lax.conv_dimension_numbers(lhs.shape, rhs.shape, settings["dimension_numbers"])
    (dilation,) = settings["rhs_dilation"] or (1,)
    return ((dilation * (rhs.shape[numbers.rhs_spec[2]] - 1), 0),)


def _hashable(value: Any) -> Any:
    """Settings as JAX's cache takes them."""
    if isinstance(value, list | np.ndarray):
        return tuple(map(_hashable, value))
    if isinstance(value, tuple) and type(value) is tuple:
        return tuple(map(_hashable, value))
    return value
