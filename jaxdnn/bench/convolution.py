"""The convolution family's cases."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxdnn
from jaxdnn.bench.timing import Case, Implementation
from jaxdnn.bench.untuned import Class, Sizes

Direction = Literal["fprop", "dgrad", "wgrad"]
_DIRECTIONS: tuple[Direction, ...] = ("fprop", "dgrad", "wgrad")
_STATISTICS = "statistics"  # an epilogue


@dataclass(frozen=True)
class Call:
    """One convolution, channels last.

    Attributes:
      image: batch, spatial dimensions, channels.
      window: spatial dimensions of the filter.
      features: of the result.
      dtype: of both arrays, and of the result.
      kind: in a word or two, before "convolution".
      stride, dilation: the same along each spatial dimension.
      spread: zeros are put between the image's places, so that they lie so far apart.
      groups: of channels.
      padding: as jax.lax takes it.
      epilogue: what follows: nothing; a bias and relu, or a residual as well; or the sums of the result and of its
        squares by feature, which a batch norm wants.
    """

    image: tuple[int, ...]
    window: tuple[int, ...]
    features: int
    dtype: str = "bfloat16"
    kind: str = ""
    stride: int = 1
    dilation: int = 1
    spread: int = 1
    groups: int = 1
    padding: str | tuple[tuple[int, int], ...] = "SAME"
    epilogue: str = ""

    @property
    def shape(self) -> str:
        """For people: "256 x 56x56 x 64, 3x3/2 to 128"."""
        batch, *places, channels = self.image
        stride = f"/{self.stride}" if self.stride > 1 else ""
        spatial, window = ("x".join(map(str, lengths)) for lengths in (places, self.window))
        return f"{batch} x {spatial} x {channels}, {window}{stride} to {self.features}"

    @property
    def filter(self) -> tuple[int, ...]:
        return *self.window, self.image[-1] // self.groups, self.features

    @property
    def result(self) -> jax.ShapeDtypeStruct:
        arrays = (jax.ShapeDtypeStruct(shape, self.dtype) for shape in (self.image, self.filter))
        return jax.eval_shape(partial(lax.conv_general_dilated, **self.arguments()), *arrays)

    def arguments(self) -> dict[str, Any]:
        """Of `conv_general_dilated`, beside the arrays."""
        rank = len(self.window)
        spatial = "DHW"[3 - rank :]
        return {
            "window_strides": (self.stride,) * rank,
            "padding": self.padding,
            "lhs_dilation": (self.spread,) * rank,
            "rhs_dilation": (self.dilation,) * rank,
            "dimension_numbers": (f"N{spatial}C", f"{spatial}IO", f"N{spatial}C"),
            "feature_group_count": self.groups,
        }

    def plain(self, image: jax.Array, filter_: jax.Array, *operands: jax.Array) -> Any:
        """XLA's."""
        return self.followed(lax.conv_general_dilated(image, filter_, **self.arguments()), *operands)

    def fused(self, image: jax.Array, filter_: jax.Array, *operands: jax.Array) -> Any:
        """Ours."""
        if not self.epilogue:
            return jaxdnn.conv_general_dilated(image, filter_, **self.arguments())
        return jaxdnn.conv_general_dilated(
            image, filter_, **self.arguments(), operands=operands, epilogue=self.followed
        )

    def followed(self, y: jax.Array, *operands: jax.Array) -> Any:
        """The epilogue of a convolution."""
        if self.epilogue == _STATISTICS:
            wide, places = y.astype("float32"), tuple(range(y.ndim - 1))
            return y.astype(self.dtype), wide.sum(places), (wide * wide).sum(places)
        return jax.nn.relu(sum(operands, y)).astype(self.dtype) if operands else y


def _square(batch: int, size: int, channels: int, window: int, features: int, **fields: Any) -> Call:
    return Call((batch, size, size, channels), (window, window), features, **fields)


def _depthwise(image: tuple[int, ...], window: tuple[int, ...], **fields: Any) -> Call:
    return Call(image, window, image[-1], groups=image[-1], kind="depthwise", **fields)


# ResNet-50's, then the layers of others by the class that they stand for.
_RESNET = (
    _square(256, 56, 64, 3, 64),
    _square(256, 28, 128, 3, 128),
    _square(256, 14, 256, 3, 256),
    _square(256, 7, 512, 3, 512),
)
_NETWORKS = (
    *_RESNET,
    _square(256, 56, 64, 1, 256),
    _square(256, 56, 256, 1, 512, stride=2),
    _square(64, 56, 128, 3, 256, stride=2),
    _square(16, 64, 320, 3, 320),
    _square(1, 512, 128, 3, 128),
    _square(256, 224, 3, 7, 64, stride=2, padding=((3, 3), (3, 3)), kind="stem"),
    _square(128, 224, 3, 4, 96, stride=4, padding="VALID", kind="stem"),
    _square(64, 224, 3, 3, 64, kind="stem"),
    _square(128, 224, 3, 16, 768, stride=16, padding="VALID", kind="patch"),
    _square(128, 14, 1024, 3, 1024, groups=32, kind="grouped"),
    _square(32, 56, 256, 3, 256, groups=16, dilation=2, kind="grouped, dilated"),
    _square(16, 65, 256, 3, 256, dilation=12, kind="dilated"),
    _depthwise((128, 56, 56, 96), (7, 7)),
    _depthwise((256, 56, 56, 144), (3, 3)),
    _depthwise((8, 4096, 4096), (4,), padding=((3, 0),)),
    Call((4, 16, 56, 56, 64), (3, 3, 3), 64, kind="3-D"),
    Call((1, 128, 128, 128, 32), (3, 3, 3), 32, kind="3-D"),
    Call((1, 64, 64, 64, 64), (2, 2, 2), 32, spread=2, padding=((1, 1),) * 3, kind="3-D transposed"),
    Call((64, 3000, 80), (3,), 512, kind="1-D"),
)
_CPU = (_square(8, 56, 64, 3, 64), _depthwise((8, 56, 56, 96), (7, 7)))


def cases(shapes: Sequence[tuple[int, int, int, int, int]] = (), dtypes: Sequence[str] = ()) -> Iterator[Case]:
    """The result and both gradients, for each shape (batch, size of a square image, channels, size of a square window,
    features) and dtype; by default of layers of networks, some with what follows them.
    """
    gpu = jax.default_backend() == "gpu"
    calls = [_square(*shape) for shape in shapes] or list(_NETWORKS if gpu else _CPU)
    for call, dtype in product(calls, dtypes or (("bfloat16",) if gpu else ("float32", "bfloat16"))):
        for direction in _DIRECTIONS:
            yield case(replace(call, dtype=dtype), direction)
    if gpu and not shapes and not dtypes:
        for call, epilogue in product(_RESNET, ("bias + relu", "bias + residual + relu", _STATISTICS)):
            yield case(replace(call, epilogue=epilogue), "fprop")


def _of_windows(draw: Callable[[Sizes], Call]) -> Class:
    """In one of the directions."""
    return lambda sizes: case(draw(sizes), sizes.one(*_DIRECTIONS))


def _image(sizes: Sizes, channels: int, *, least: int = 7, most: int = 224) -> tuple[int, ...]:
    return sizes.size(1, 256), sizes.size(least, most), sizes.size(least, most), channels


def _dense(sizes: Sizes) -> Call:
    window = sizes.one((3, 3), (3, 3), (1, 1), (5, 5), (1, 7))
    return Call(_image(sizes, sizes.size(16, 1024)), window, sizes.size(16, 1024), stride=sizes.one(1, 1, 2))


def _dilated(sizes: Sizes) -> Call:
    image, features = _image(sizes, 8 * sizes.size(4, 64), least=14, most=128), 8 * sizes.size(4, 64)
    return Call(image, (3, 3), features, dilation=sizes.size(2, 16), kind="dilated")


def _grouped(sizes: Sizes) -> Call:
    groups, channels = sizes.one(2, 4, 8, 16, 32), sizes.one(4, 8, 16, 32, 64)
    image = _image(sizes, groups * channels, most=56)
    return Call(image, (3, 3), groups * channels, groups=groups, stride=sizes.one(1, 1, 2), kind="grouped")


def _any_depthwise(sizes: Sizes) -> Call:
    channels, size = sizes.size(16, 1024), sizes.one(3, 5, 7)
    window = sizes.one((size, size), (size, size), (size, size, size), (4,))
    image = (sizes.size(1, 64), *(sizes.size(7, 112 if len(window) < 3 else 32) for _ in window), channels)
    return replace(_depthwise(image, window), stride=sizes.one(1, 1, 2))


def _stem(sizes: Sizes) -> Call:
    size, stride = sizes.one((3, 1), (3, 2), (7, 2), (4, 4), (14, 14), (16, 16))
    image, padding = _image(sizes, sizes.one(1, 3, 3, 4), least=64, most=320), "VALID" if size == stride else "SAME"
    return Call(image, (size, size), sizes.size(32, 1024), stride=stride, padding=padding, kind="stem")


def _of_rank(sizes: Sizes) -> Call:
    channels, features = sizes.size(16, 512), sizes.size(16, 512)
    if sizes.one(True, False):
        image = (sizes.size(1, 8), *(sizes.size(8, 128) for _ in range(3)), channels)
        return Call(image, (3, 3, 3), features, stride=sizes.one(1, 1, 2), kind="3-D")
    image = (sizes.size(1, 128), sizes.size(64, 8192), channels)
    return Call(image, (sizes.one(3, 5, 9),), features, stride=sizes.one(1, 1, 2), kind="1-D")


CLASSES = tuple(map(_of_windows, (_dense, _dilated, _grouped, _any_depthwise, _stem, _of_rank)))


def case(call: Call, direction: Direction) -> Case:
    """One direction of the call."""
    result = call.result.shape
    sizes = [math.prod(shape) for shape in (call.image, call.filter, result)]
    # Each result is the sum of its window's products, of which zeros between an image's places are none.
    taps = math.prod(call.window) / call.spread ** len(call.window)
    flops = 2 * sizes[2] * taps * call.filter[-2]
    residual = "residual" in call.epilogue
    bound_by_memory = call.groups == call.image[-1]
    return Case(
        call=f"{call.kind} convolution {direction}".strip() + (f" + {call.epilogue}" if call.epilogue else ""),
        shape=call.shape,
        dtype=call.dtype,
        bytes=(sum(sizes) + residual * sizes[2]) * jnp.dtype(call.dtype).itemsize,
        flops=0 if bound_by_memory else round(flops),
        operands=partial(_operands, call, direction),
        jaxdnn=_implementation(call, direction, call.fused),
        xla=_implementation(call, direction, call.plain),
        sample=partial(_sample, call, direction),
    )


def _operands(call: Call, direction: Direction, key: jax.Array) -> list[jax.Array]:
    """What the direction reads: two of image, filter and result, and then the epilogue's."""
    result = call.result.shape
    of = {"fprop": (call.image, call.filter), "dgrad": (call.filter, result), "wgrad": (call.image, result)}
    shapes = [*of[direction]]
    shapes += [(call.features,)] * ("bias" in call.epilogue) + [result] * ("residual" in call.epilogue)
    keys = jax.random.split(key, len(shapes))
    return [jax.random.normal(one, shape, call.dtype) for one, shape in zip(keys, shapes, strict=True)]


def _implementation(call: Call, direction: Direction, convolution: Callable[..., jax.Array]) -> Implementation:
    run = {"fprop": convolution, "dgrad": _dgrad, "wgrad": _wgrad}[direction]
    gradient = partial(run, call, convolution)
    return Implementation(lambda *arrays: arrays, convolution if direction == "fprop" else gradient)


def _dgrad(call: Call, convolution: Callable[..., jax.Array], filter_: jax.Array, d_out: jax.Array) -> jax.Array:
    _, vjp = jax.vjp(lambda image: convolution(image, filter_), jnp.zeros(call.image, filter_.dtype))
    (gradient,) = vjp(d_out)
    return gradient


def _wgrad(call: Call, convolution: Callable[..., jax.Array], image: jax.Array, d_out: jax.Array) -> jax.Array:
    _, vjp = jax.vjp(lambda filter_: convolution(image, filter_), jnp.zeros(call.filter, image.dtype))
    (gradient,) = vjp(d_out)
    return gradient


def _sample(
    call: Call, direction: Direction, operands: Sequence[jax.Array], results: Any
) -> list[tuple[np.ndarray, np.ndarray]]:
    """The first image of a batch; of the filter's gradient, the first feature of the result; each with what it is in
    float64.
    """
    with jax.enable_x64(True):
        first, second, *others = (array.astype("float64") for array in operands)
        if direction == "wgrad":
            # It sees the channels of one group.
            channels = call.filter[-2]
            one = replace(call, image=(*call.image[:-1], channels), features=1, groups=1)
            exact = _wgrad(one, one.plain, first[..., :channels], second[..., :1])
            return [(np.asarray(results[..., :1], np.float64), np.asarray(exact))]
        one = replace(call, image=(1, *call.image[1:]), dtype="float64")
        if direction == "dgrad":
            exact = _dgrad(one, one.plain, first, second[:1])
        else:
            exact = one.plain(first[:1], second, *(array[:1] if array.ndim > 1 else array for array in others))
        found, exact = (jax.tree.leaves(one)[0] for one in (results, exact))
        return [(np.asarray(found[:1], np.float64), np.asarray(exact))]
