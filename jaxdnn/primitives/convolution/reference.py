"""A convolution in plain JAX: any direction of it as one `lax.conv_general_dilated`, or of single places as a product.

Whichever array is computed, the windows say it as a forward pass (`Window.transposed`, `Window.exchanged`); mapped axes
are joined with the axes of their letter.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.lax import ConvDimensionNumbers

from jaxdnn.engines.convolution.problem import Role, Window
from jaxdnn.primitives.convolution import axes as of
from jaxdnn.primitives.convolution.taps import by_taps
from jaxdnn.primitives.fused.sharding import explicit_sharding

if TYPE_CHECKING:
    from jaxdnn.primitives.convolution.spec import ConvolutionSpec


def forward(window: Window, result: Role) -> Window:
    """The window of the forward pass that computes `result`, of a filter that may have to be reversed."""
    match result:
        case "output":
            return window
        case "image":
            return window.transposed
        case "filter":
            return window.exchanged


def lax_parameters(spec: "ConvolutionSpec") -> dict[str, Any]:
    """Those of `lax.conv_general_dilated` that the windows determine."""
    windows = [forward(window, spec.result) for window in spec.windows]

    def high(window: Window) -> Any:
        spread = _dilated(window.filter, window.dilation) - _dilated(window.image, window.base_dilation)
        return (window.output - 1) * window.stride + spread - window.low

    return {
        "window_strides": tuple(window.stride for window in windows),
        "padding": tuple((window.low, high(window)) for window in windows),
        "lhs_dilation": tuple(window.base_dilation for window in windows),
        "rhs_dilation": tuple(window.dilation for window in windows),
    }


def convolved(spec: "ConvolutionSpec", arrays: Mapping[Role, jax.Array], dtype: str) -> jax.Array:
    """The array `spec.result` of the two others, none of them empty."""
    sizes = spec.sizes(dict(zip("ab", arrays.values(), strict=True)))
    groups = prod(size for (letter, _), size in sizes.items() if letter == "g")
    # Of lhs, of rhs and of the result: its role, and the letters of its dimensions. The last one comes in groups.
    lhs, rhs, y = _FORMS[spec.result]

    def dimensions(form: tuple[Role, str]) -> list[tuple[of.Axis, ...]]:
        return of.joined(*form, spec.mapped_axes, len(spec.windows))

    def all_sizes(role: Role) -> dict[of.Axis, int]:
        return {**sizes, **{("s", i): getattr(window, role) for i, window in enumerate(spec.windows)}}

    def joined(form: tuple[Role, str]) -> jax.Array:
        role, _ = form
        return of.join(arrays[role], spec.axes(role), dimensions(form), all_sizes(role))

    flips = [i for i, window in enumerate(spec.windows) if window.flipped != (spec.result == "image")]
    right = joined(rhs) if spec.result == "filter" or not flips else lax.rev(joined(rhs), flips)
    found = _summed(spec, joined(lhs), right, groups, dtype)
    found = lax.rev(found, flips) if spec.result == "filter" and flips else found
    shape = spec.shape_of(spec.result, sizes)
    return of.disjoin(found, spec.axes(spec.result), dimensions(y), all_sizes(spec.result), shape)


_FORMS: Mapping[Role, tuple[tuple[Role, str], tuple[Role, str], tuple[Role, str]]] = {
    "output": (("image", "nsc"), ("filter", "sck"), ("output", "nsk")),
    "image": (("output", "nsk"), ("filter", "skc"), ("image", "nsc")),
    "filter": (("image", "nsc"), ("output", "nsk"), ("filter", "sck")),
}


def _numbers(result: Role, spatial: int) -> ConvDimensionNumbers:
    """Of lhs (batch, feature), rhs (out, in) and the result (batch, feature), then their spatial dimensions."""
    last, places = spatial + 1, range(1, spatial + 1)
    if result == "filter":  # channels take the place of the batch, and n that of the features
        return ConvDimensionNumbers((last, 0, *places), (last, 0, *places), (spatial, last, *range(spatial)))
    return ConvDimensionNumbers((0, last, *places), (last, spatial, *range(spatial)), (0, last, *places))


def _summed(spec: "ConvolutionSpec", lhs: jax.Array, rhs: jax.Array, groups: int, dtype: str) -> jax.Array:
    """`lax.conv_general_dilated`, summed in the accumulator's dtype."""
    wide, narrow = jnp.dtype(spec.accumulator), jnp.dtype(dtype)
    count = "batch_group_count" if spec.result == "filter" else "feature_group_count"
    parameters: dict[str, Any] = {**lax_parameters(spec), count: groups}
    lhs, parameters["padding"] = _cut(lhs, parameters["padding"], parameters["lhs_dilation"])

    def multiply(lhs: jax.Array, rhs: jax.Array, preferred: Any) -> jax.Array:
        settings = {"precision": spec.precision, "preferred_element_type": preferred}
        if groups == 1 and all(window.pointwise for window in spec.windows):
            return _product(lhs, rhs, spec.result, **settings).astype(dtype)
        numbers = _numbers(spec.result, len(spec.windows))
        return _general(lhs, rhs, dimension_numbers=numbers, **parameters, **settings).astype(dtype)

    def multiply_wide(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return multiply(lhs.astype(wide), rhs.astype(wide), wide)

    def multiply_narrow(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        # What is stored in the operands' dtype is summed in float32 all the same.
        return multiply(lhs, rhs, narrow if lhs.dtype == narrow else wide)

    def multiply_float8(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        # XLA takes casts of float8 into cuDNN's and cuBLAS's calls, and finds none for groups, or gets NaN for a few
        # rows: a barrier keeps them apart. bfloat16 holds every float8.
        lhs, rhs = lax.optimization_barrier((lhs.astype(jnp.bfloat16), rhs.astype(jnp.bfloat16)))
        return multiply(lhs, rhs, wide)

    def multiply_integers(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        # XLA has no convolutions of integers for GPUs.
        numbers = _numbers(spec.result, len(spec.windows))
        return by_taps(lhs.astype(wide), rhs.astype(wide), numbers, **parameters).astype(dtype)

    def multiply_bytes(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        # XLA's loops over int32 are slow: on a CPU 8 x 56x56, 3x3, 64 to 64 channels took 485 ms, and this takes 6.
        return multiply(lhs, rhs, wide)

    known = all(isinstance(size, int) for size in (*lhs.shape, *rhs.shape))
    elsewhere = multiply_bytes if lhs.dtype == rhs.dtype == jnp.int8 and wide == jnp.int32 else multiply_wide
    if jnp.issubdtype(wide, jnp.integer) and known and explicit_sharding(jax.typeof(lhs)) is None:
        return lax.platform_dependent(lhs, rhs, cuda=multiply_integers, default=elsewhere)
    if lhs.dtype == rhs.dtype == wide:
        return multiply_wide(lhs, rhs)
    on_gpu = multiply_wide
    if wide == jnp.float32 and lhs.dtype.itemsize == rhs.dtype.itemsize == 1:
        on_gpu = multiply_float8
    elif wide == jnp.float32 and lhs.dtype == rhs.dtype and lhs.dtype in (jnp.bfloat16, jnp.float16):
        on_gpu = multiply_narrow
    return lax.platform_dependent(lhs, rhs, cuda=on_gpu, default=elsewhere)


def _product(lhs: jax.Array, rhs: jax.Array, result: Role, **settings: Any) -> jax.Array:
    """Of windows that are single places: what planning compares engines with is XLA's product of matrices, and its
    convolution takes longer: patches of 14 x 14 of 128 images, copied and then 196 to 117 channels, 18 us and 9.
    """
    places = range(lhs.ndim - 2)
    if result == "filter":
        summed = tuple(range(lhs.ndim - 1))
        return lax.expand_dims(lax.dot_general(lhs, rhs, ((summed, summed), ((), ())), **settings), places)
    return lax.dot_general(lhs, lax.squeeze(rhs, places), (((lhs.ndim - 1,), (0,)), ((), ())), **settings)


def _general(lhs: jax.Array, rhs: jax.Array, *, padding: Sequence[tuple[Any, Any]], **settings: Any) -> jax.Array:
    """`lax.conv_general_dilated`, whose function takes no symbolic padding, and whose primitive does."""
    if all(isinstance(one, int) for pair in padding for one in pair):
        return lax.conv_general_dilated(lhs, rhs, padding=padding, **settings)

    def unpadded(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(lhs, rhs, padding=[(0, 0)] * len(padding), **settings)

    equations = jax.make_jaxpr(unpadded)(lhs, rhs).eqns
    equation = next(one for one in equations if one.primitive is lax.conv_general_dilated_p)
    return lax.conv_general_dilated_p.bind(lhs, rhs, **{**equation.params, "padding": tuple(padding)})


def _cut(
    lhs: jax.Array, padding: Sequence[tuple[Any, Any]], dilation: Sequence[int]
) -> tuple[jax.Array, tuple[tuple[Any, Any], ...]]:
    """Without the places that negative padding cuts off, and the padding that is left.

    XLA's convolutions on CPUs (of JAX before 0.12) read outside of an image that is cut off at its start by at least
    what is added at its end.
    """
    left = []
    for axis, ((low, high), spread) in enumerate(zip(padding, dilation, strict=True), 1):
        size = lhs.shape[axis]
        if spread == 1 and all(isinstance(one, int) for one in (low, high, size)) and min(low, high) < 0:
            start, stop = max(0, -low), size - max(0, -high)
            if start < stop:
                lhs, low, high = lax.slice_in_dim(lhs, start, stop, axis=axis), max(0, low), max(0, high)
            else:  # only zeros are left
                lhs, low, high = jnp.zeros_like(lax.slice_in_dim(lhs, 0, 1, axis=axis)), 0, size + low + high - 1
        elif spread == 1 and isinstance(low, int) and low < 0:  # of a size that is known when the program runs
            lhs, low = lax.slice_in_dim(lhs, -low, None, axis=axis), 0
        left.append((low, high))
    return lhs, tuple(left)


def _dilated(size: Any, dilation: int) -> Any:
    """The length of so many places, `dilation` apart."""
    return 0 if isinstance(size, int) and size == 0 else (size - 1) * dilation + 1
