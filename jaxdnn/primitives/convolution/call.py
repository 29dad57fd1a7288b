"""How a convolution is called: its arguments in canonical form, and `apply`, which binds the primitive.

Three rewritings leave one way to say a thing:

- An image that is dilated, with strides of one, is the input gradient of a strided convolution.
- With groups of the batch the result is a weight gradient: they are groups of the image's channels.
- Windows that tile the image are places of a smaller one with more channels, and what remains is pointwise. Or their
  lines are, if these can be read without a copy; and small windows stay what they are.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from math import ceil, prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jaxdnn.config import current_options
from jaxdnn.engines.convolution.problem import Window
from jaxdnn.primitives.convolution.arguments import Arguments
from jaxdnn.primitives.convolution.spec import ConvolutionSpec, convolution
from jaxdnn.primitives.fused.call import apply_fused
from jaxdnn.primitives.fused.dtypes import accumulator, as_weak
from jaxdnn.primitives.fused.epilogue import checked_operands
from jaxdnn.primitives.fused.sharding import explicit_sharding

# An image of fewer channels is copied, if need be, so that its windows are places with more of them: tensor cores, and
# copies of 16 bytes, want as many.
_FEW_CHANNELS = 16
# Without a copy (jaxdnn/engines/convolution/window_lines.py): elements of a line of 16 windows, and of a window whose
# lines are filled up to groups of 8.
_MOST_ELEMENTS, _SEGMENT, _GROUP = 256, 16, 8

Order = tuple[int, ...]  # of an array's dimensions: as `jnp.transpose` takes it


def apply(
    caller: str,
    given: Arguments,
    lhs: jax.Array,
    rhs: jax.Array,
    operands: Sequence[jax.typing.ArrayLike],
    epilogue: Callable[..., Any] | None,
    out_dtype: jax.typing.DTypeLike | None,
    aliases: Mapping[int, int],
) -> Any:
    """Binds the primitive, for the public function `caller`."""
    spec, arrays, order = canonical(given, lhs, rhs)
    spec = spec.replace(sharding=spec.told(arrays))
    turned = _Turned(epilogue, checked_operands(caller, epilogue, operands, 1), given.result.shape, order)
    y = apply_fused(caller, convolution, spec, arrays, turned.operands, turned.epilogue, out_dtype, aliases)
    return as_weak(turned.back(y), given.result, epilogue, out_dtype)


def canonical(given: Arguments, lhs: jax.Array, rhs: jax.Array) -> tuple[ConvolutionSpec, tuple[jax.Array, ...], Order]:
    """The spec, the primitive's arrays, and the order in which the user's result has the dimensions of its own."""
    windows = given.windows(lhs.shape, rhs.shape)
    (batch, feature, *spatial), (out, in_, *window), (y_batch, y_feature, *y_spatial) = given.numbers
    groups, batch_groups = given.feature_groups, given.batch_groups
    spec = ConvolutionSpec(
        windows=windows,
        accumulator=accumulator(lhs.dtype, given.result.dtype).name,
        dtype=given.result.dtype.name,
        precision=given.precision,
        options=current_options(),
    )
    images = jnp.transpose(lhs, (batch, *spatial, feature))
    filters = jnp.transpose(rhs, (*window, in_, out))
    order = (y_batch, *y_spatial, y_feature)
    if batch_groups > 1:
        exchanged = tuple(one.exchanged for one in windows)
        images, group = _grouped(jnp.transpose(lhs, (feature, *spatial, batch)), rhs.shape[out], batch_groups)
        spec = spec.replace(result="filter", windows=exchanged, group=group)
        outputs = jnp.transpose(rhs, (in_, *window, out))
        outputs = jnp.flip(outputs, range(1, outputs.ndim - 1)) if given.flip else outputs
        return spec, (images, outputs), (*y_spatial, y_batch, y_feature)
    images, group = _grouped(images, rhs.shape[out], groups)
    groups = groups if group else 1
    if all(one.stride == 1 for one in windows) and any(one.base_dilation != 1 for one in windows):
        *places, k, c = filters.shape
        split = jnp.reshape(filters, (*places, k, groups, c // groups))
        exchanged = jnp.reshape(jnp.swapaxes(split, -1, -3), (*places, c // groups, groups * k))
        spec = spec.replace(
            result="image", windows=tuple(one.transposed for one in windows), group=group and group[::-1]
        )
        return spec, (exchanged, images), order
    spec = spec.replace(group=group)
    whole = _are_whole(images, slice(1, None)) and _are_whole(filters, slice(-1))
    if whole and _tile(windows, spec) and not _is_small(images, windows):
        if _have_lines(images, windows):
            images, filters = _by_lines(images, windows[-1]), _lines_of(filters, flipped=given.flip)
            spec = spec.replace(windows=(*windows[:-1], _one_place(windows[-1])))
        elif images.shape[-1] < _FEW_CHANNELS or _are_lines(windows):
            images, filters = _patches(images, windows), _as_one_place(filters, flipped=given.flip)
            spec = spec.replace(windows=tuple(map(_one_place, windows)))
    return spec, (images, filters), order


def _grouped(images: jax.Array, k: int, groups: int) -> tuple[jax.Array, tuple[int, int] | None]:
    """An image, whose channels have so many groups, and the channels of one of them and of the `k` that they become.

    Where one of the two is none, all groups are alike, and stand as one.
    """
    c = images.shape[-1] // groups
    if groups == 1 or 0 in (c, k):
        return images[..., :c], None
    return images, (c, k // groups)


def _tile(windows: Sequence[Window], spec: ConvolutionSpec) -> bool:
    """Whether the windows tile the image, from its first place on."""
    sizes = [size for one in windows for size in (one.image, one.filter, one.output)]
    if spec.group is not None or not all(isinstance(size, int) and size > 0 for size in sizes):
        return False
    tiled = all(
        one.filter == one.stride and (one.filter == 1 or one.dilation == 1) and (one.base_dilation, one.low) == (1, 0)
        and one.filter * one.output <= one.image
        for one in windows
    )  # fmt: skip
    return tiled and any(one.filter > 1 for one in windows)


def _are_lines(windows: Sequence[Window]) -> bool:
    """Whether windows that tile the image are parts of its lines, of which patches are no copy."""
    return all(one.filter == 1 for one in windows[:-1]) and all(one.tiles for one in windows)


def _are_whole(array: jax.Array, dimensions: slice) -> bool:
    """Whether no axis of an explicit mesh splits these dimensions, so that they can be joined."""
    sharding = explicit_sharding(jax.typeof(array))
    return sharding is None or not any(sharding.spec[dimensions])


def _is_small(images: jax.Array, windows: Sequence[Window]) -> bool:
    """Whether windows are so few elements that tensor cores take them from lines of the image as they lie, and store
    them there in whole words: us of 4 x 4 of 3 channels, 45, 48 and 40, and with a copy 70, 72 and 68.
    """
    c, line = images.shape[-1], windows[-1].filter * images.shape[-1]
    size = prod(one.filter for one in windows[:-1]) * ceil(line / _GROUP) * _GROUP
    whole = line % 2 == 0 and prod(one.filter for one in windows) * c % _GROUP == 0
    few = max(_SEGMENT * line, size) <= _MOST_ELEMENTS and c < _GROUP
    return images.dtype.itemsize == 2 and few and whole and all(one.tiles for one in windows)


def _have_lines(images: jax.Array, windows: Sequence[Window]) -> bool:
    """Whether the windows' lines are to be read where they lie: tensor cores take 16 bits, and copies 16 bytes. Windows
    of three dimensions and few channels have too many of them.
    """
    line = windows[-1].filter * images.shape[-1] * images.dtype.itemsize
    aligned = images.dtype.itemsize == 2 and line % 16 == 0
    few = len(windows) == 2 or (len(windows) > 2 and images.shape[-1] >= _FEW_CHANNELS)
    return few and aligned and all(one.tiles for one in windows)


def _by_lines(images: jax.Array, window: Window) -> jax.Array:
    """[n, ..., places, c] as [n, ..., places of the output, window * c]."""
    return _reshaped(images, (*images.shape[:-2], window.output, window.filter * images.shape[-1]))


def _lines_of(filters: jax.Array, *, flipped: bool) -> jax.Array:
    """[..., window, c, k] as [..., 1, window * c, k]."""
    *outer, window, c, k = filters.shape
    filters = jnp.flip(filters, -3) if flipped else filters
    return _reshaped(filters, (*outer, 1, window * c, k))


def _one_place(window: Window) -> Window:
    return Window(window.output, 1, window.output)


def _patches(images: jax.Array, windows: Sequence[Window]) -> jax.Array:
    """[n, places, c] as [n, places of the output, window * c]."""
    n, *_, c = images.shape
    inside = images[(slice(None), *(slice(one.filter * one.output) for one in windows))]
    split = _reshaped(inside, (n, *(size for one in windows for size in (one.output, one.filter)), c))
    places = range(1, split.ndim - 1)
    turned = jnp.transpose(split, (0, *places[::2], *places[1::2], split.ndim - 1))
    outputs = [one.output for one in windows]
    return _reshaped(turned, (n, *outputs, prod(one.filter for one in windows) * c))


def _as_one_place(filters: jax.Array, *, flipped: bool) -> jax.Array:
    """[window, c, k] as [1, ..., window * c, k]."""
    *window, c, k = filters.shape
    filters = jnp.flip(filters, range(len(window))) if flipped else filters
    return _reshaped(filters, (*(1 for _ in window), prod(window) * c, k))


def _reshaped(array: jax.Array, shape: Sequence[int]) -> jax.Array:
    """The array with dimensions between the first and the last one split or joined: only these two may be sharded."""
    sharding = explicit_sharding(jax.typeof(array))
    if sharding is not None:
        first, *_, last = sharding.spec
        sharding = sharding.update(spec=PartitionSpec(first, *(len(shape) - 2) * (None,), last))
    return lax.reshape(array, shape, out_sharding=sharding)


class _Turned:
    """An epilogue of the user's arrays as one of arrays whose channels come last: its operands too, and its results.

    Only arrays of the whole result's shape lie otherwise: transposes of others cost nothing in a kernel.
    """

    def __init__(
        self, epilogue: Callable[..., Any] | None, operands: Sequence[jax.Array], shape: tuple[int, ...], order: Order
    ) -> None:
        self._shape, self._order = shape, order
        self._inverse = tuple(int(place) for place in np.argsort(order))
        self._straight = order == tuple(range(len(order)))
        self._of_operands = [self._is_whole(operand) for operand in operands]
        self._of_results = [True]  # of no epilogue
        self.operands = [self._turn(x, whole, order) for x, whole in zip(operands, self._of_operands, strict=True)]
        self.epilogue = epilogue and (epilogue if self._straight else self._of_channels_last(epilogue))

    def back(self, results: Any) -> Any:
        """What the epilogue returned, as the user wants it."""
        if self._straight:
            return results
        leaves, structure = jax.tree.flatten(results)
        pairs = zip(leaves, self._of_results, strict=True)
        return jax.tree.unflatten(structure, [self._turn(leaf, whole, self._inverse) for leaf, whole in pairs])

    def _of_channels_last(self, epilogue: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(epilogue)
        def turned(acc: jax.Array, *operands: jax.Array) -> Any:
            own = [self._turn(x, whole, self._inverse) for x, whole in zip(operands, self._of_operands, strict=True)]
            leaves, structure = jax.tree.flatten(epilogue(jnp.transpose(acc, self._inverse), *own))
            self._of_results = [self._is_whole(leaf) for leaf in leaves]
            pairs = zip(leaves, self._of_results, strict=True)
            return jax.tree.unflatten(structure, [self._turn(leaf, whole, self._order) for leaf, whole in pairs])

        return turned

    def _turn(self, array: Any, whole: bool, order: Order) -> Any:
        return jnp.transpose(array, order) if whole and not self._straight else array

    def _is_whole(self, array: Any) -> bool:
        return getattr(array, "shape", None) == self._shape
