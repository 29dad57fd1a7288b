"""What a user asks for: a call of JAX's function, in the parameters of the primitive that JAX would bind."""

import operator
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
    settings = _checked(caller, lhs, rhs, settings)
    if not isinstance(flip, bool):
        raise TypeError(f"{caller}: whether the filter is reversed must be True or False; got {flip!r}")
    with described(caller, {"lhs": lhs, "rhs": rhs}):
        given, padding = dict(settings), settings["padding"]
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


def _checked(caller: str, lhs: Any, rhs: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as JAX's cache takes them, which can't tell 1.0 from 1. Raises for arguments that JAX has no clear
    words for.
    """
    for name, array in {"lhs": lhs, "rhs": rhs}.items():
        if not hasattr(array, "shape") or not hasattr(array, "dtype") or isinstance(array, jax.ShapeDtypeStruct):
            raise TypeError(f"{caller}: {name} must be an array; got {described_type(array)}")
    if lhs.ndim < 2 or lhs.ndim != rhs.ndim:
        raise ValueError(
            f"{caller} lhs and rhs must have the same number of dimensions, two for batch and features and one for "
            f"each spatial one; got lhs {described_type(lhs)} and rhs {described_type(rhs)}"
        )
    of_lhs, of_rhs = (jax.typeof(array).dtype for array in (lhs, rhs))
    if of_lhs != of_rhs:
        raise TypeError(
            f"{caller}: lhs and rhs must have one dtype; got {of_lhs.name} and {of_rhs.name}: cast one of them"
        )
    for name, value in settings.items():
        if any(isinstance(one, Tracer) for one in jax.tree.leaves(value)):
            raise TypeError(f"{caller}: {name} must be known when tracing; got {value!r}")
    spatial = lhs.ndim - 2
    checked = {name: _hashable(value) for name, value in settings.items()}
    for name in _STEPS & settings.keys():
        if settings[name] is not None or name not in _OPTIONAL:
            checked[name] = _steps(caller, name, settings[name], spatial)
    for name in _COUNTS & settings.keys():
        checked[name] = _count(caller, name, settings[name])
    steps = checked.get("strides") or (1,)  # of a transposed convolution, whose names are about these
    checked["padding"] = _padding(caller, settings["padding"], spatial, _PADDINGS if max(steps) == 1 else _PADDINGS[:2])
    return checked


_PADDINGS = ("SAME", "VALID", "SAME_LOWER", "CAUSAL")
_STEPS = {"window_strides", "strides", "lhs_dilation", "rhs_dilation"}
_OPTIONAL = {"lhs_dilation", "rhs_dilation"}
_COUNTS = {"feature_group_count", "batch_group_count"}


def _steps(caller: str, name: str, value: Any, spatial: int) -> tuple[int, ...]:
    """Positive integers, one for each spatial dimension."""
    expected = f"{caller}: {name} must have a positive number for each of {spatial} dimensions; got {value!r}"
    entries = _entries(value)
    if not entries and spatial:
        raise ValueError(expected)
    if len(entries) != spatial:
        raise ValueError(
            f"{caller} window and {name} must have the same number of dimensions, {spatial}; got {value!r}"
        )
    try:
        steps = tuple(map(operator.index, entries))
    except TypeError:
        raise TypeError(expected) from None
    if any(step < 1 for step in steps):
        raise ValueError(expected)
    return steps


def _count(caller: str, name: str, value: Any) -> int:
    """An integer, which JAX compares with the channels."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{caller}: {name} must be a positive integer; got {value!r}") from None


def _padding(caller: str, value: Any, spatial: int, names: Sequence[str]) -> str | tuple[tuple[int, int], ...]:
    """The name of a padding, or a pair of integers for each spatial dimension."""
    if isinstance(value, str):
        if value.upper() in names:
            return value
        raise ValueError(
            f"{caller}: padding must be one of {', '.join(names)}, or a pair (low, high) for each spatial "
            f"dimension; got {value!r}"
        )
    try:
        pairs = tuple((operator.index(low), operator.index(high)) for low, high in map(_entries, _entries(value)))
    except (TypeError, ValueError):
        pairs = None
    if pairs is None or len(pairs) != spatial:
        raise ValueError(
            f"{caller}: padding must have a pair (low, high) for each of {spatial} dimensions; got {value!r}"
        )
    return pairs


def _entries(value: Any) -> tuple[Any, ...]:
    """Those of a sequence or an array; none of anything else."""
    array = isinstance(value, np.ndarray | jax.Array) and value.ndim
    return tuple(value) if array or (isinstance(value, Sequence) and not isinstance(value, str)) else ()


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
