"""The matmul family's cases."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxdnn
from jaxdnn.bench.timing import Case, Implementation
from jaxdnn.bench.untuned import Class, Sizes

BF16, F32, E4M3 = (jnp.dtype(dtype) for dtype in (jnp.bfloat16, jnp.float32, jnp.float8_e4m3fn))

# m, n, k: square, the two halves of a feed-forward layer, and decoding 16 and 128 tokens.
_SHAPES: dict[str, tuple[tuple[int, int, int], ...]] = {
    "gpu": (
        (4096, 4096, 4096),
        (8192, 8192, 8192),
        (8192, 28_672, 4096),
        (8192, 4096, 14_336),
        (16, 28_672, 4096),
        (128, 28_672, 4096),
    ),
    "cpu": ((1024, 1024, 1024), (64, 4096, 4096)),
}
_DTYPES = {"gpu": ("bfloat16", "float8_e4m3fn"), "cpu": ("float32", "bfloat16")}


def cases(shapes: Sequence[tuple[int, int, int]] = (), dtypes: Sequence[str] = ()) -> Iterator[Case]:
    """Plain, with a bias and an activation, and gated, for each shape (m, n, k) and dtype; by default for those that
    networks use, and then a batch, a layer's gradient and float32 on a GPU too.
    """
    backend = jax.default_backend()
    for name, shape in product(dtypes or _DTYPES[backend], shapes or _SHAPES[backend]):
        yield from _with_epilogues(shape, jnp.dtype(name))
    if shapes or dtypes or backend != "gpu":
        return
    for shape in _SHAPES["gpu"][:2]:
        fused, plain = (partial(matmul, precision="highest") for matmul in (jaxdnn.matmul, jnp.matmul))
        yield _case("matmul, HIGHEST", shape, F32, [shape], fused, plain)
        yield _case("matmul", shape, F32, [shape], jaxdnn.matmul, jnp.matmul)
    for count, shape in ((4096, (128, 128, 64)), (4096, (128, 64, 128)), (8192, (64, 64, 64))):
        yield _case(f"matmul, {count} times", shape, BF16, [shape], jaxdnn.matmul, jnp.matmul, batch=(count,))
    yield _gradient((8192, 14_336, 4096), BF16)


def _with_epilogues(shape: tuple[int, int, int], dtype: np.dtype) -> Iterator[Case]:
    if dtype == E4M3:
        yield _case("matmul", shape, dtype, [shape], _fused_dot, _plain_dot, columns=0)
        fused, plain = (partial(dot, precision=_FAST) for dot in (_fused_dot, _plain_dot))
        yield _case("matmul, fast accumulation", shape, dtype, [shape], fused, plain, columns=0)
        return
    yield _case("matmul", shape, dtype, [shape], jaxdnn.matmul, jnp.matmul)
    yield _case("matmul + bias + gelu", shape, dtype, [shape], _fused_gelu, _plain_gelu, bias=True)
    half = (shape[0], shape[1] // 2, shape[2])
    yield _case("swiglu", shape, dtype, [half] * 2, jaxdnn.gated_linear_unit, plain_swiglu)


def _of_shapes(shape: Callable[[Sizes], tuple[int, int, int]], dtypes: Sequence[str] = ("bfloat16",)) -> Class:
    """With one of the epilogues."""
    return lambda sizes: sizes.one(*_with_epilogues(shape(sizes), jnp.dtype(sizes.one(*dtypes))))


def _batch(sizes: Sizes) -> Case:
    count, shape = sizes.size(2, 4096), (sizes.size(16, 1024), sizes.size(16, 1024), sizes.size(16, 1024))
    return _case(f"matmul, {count} times", shape, BF16, [shape], jaxdnn.matmul, jnp.matmul, batch=(count,))


# Layers of models, with many tokens and with few; any sizes, small ones; a vocabulary; a short sum; and batches.
CLASSES: tuple[Class, ...] = (
    _of_shapes(lambda sizes: (sizes.size(512, 32_768), sizes.one(1, 3, 4) * sizes.width(), sizes.width())),
    _of_shapes(lambda sizes: (sizes.size(1, 128), sizes.one(1, 3, 4) * sizes.width(), sizes.width())),
    _of_shapes(lambda sizes: (sizes.size(256, 16_384), sizes.size(256, 16_384), sizes.size(256, 16_384))),
    _of_shapes(lambda sizes: (sizes.size(16, 1024), sizes.size(16, 1024), sizes.size(16, 1024))),
    _of_shapes(lambda sizes: (sizes.size(64, 8192), sizes.size(30_000, 160_000), sizes.width())),
    _of_shapes(lambda sizes: (sizes.size(1024, 65_536), sizes.size(64, 4096), sizes.size(16, 512))),
    _of_shapes(
        lambda sizes: (16 * sizes.size(8, 1024), sizes.one(1, 4) * sizes.width(), sizes.width()), ("float8_e4m3fn",)
    ),
    _of_shapes(lambda sizes: (sizes.size(64, 4096), sizes.width(), sizes.width()), ("float32",)),
    _batch,
)


def _fused_gelu(x: jax.Array, w: jax.Array, bias: jax.Array) -> jax.Array:
    return jaxdnn.matmul(x, w, bias, epilogue=lambda acc, bias: jax.nn.gelu(acc + bias))


def _plain_gelu(x: jax.Array, w: jax.Array, bias: jax.Array) -> jax.Array:
    return jax.nn.gelu(x @ w + bias)


def plain_swiglu(x: jax.Array, gate: jax.Array, up: jax.Array) -> jax.Array:
    """Without jaxdnn."""
    return jax.nn.silu(x @ gate) * (x @ up)


# Tensor cores take float8 with the contracted dimension innermost: weights are kept as (n, k).
_NUMBERS = (((1,), (1,)), ((), ()))


# As few bits of a sum as tensor cores keep: XLA's default, and not ours.
_FAST = jax.lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32_FAST_ACCUM


def _fused_dot(x: jax.Array, w: jax.Array, precision: jax.lax.PrecisionLike = None) -> jax.Array:
    return jaxdnn.dot_general(x, w, _NUMBERS, precision, out_dtype=BF16)


def _plain_dot(x: jax.Array, w: jax.Array, precision: jax.lax.PrecisionLike = None) -> jax.Array:
    return jax.lax.dot_general(x, w, _NUMBERS, precision, preferred_element_type=BF16)


def _operands(
    shapes: list[tuple[int, int, int]],
    dtype: np.dtype,
    bias: bool,
    columns: int,
    batch: tuple[int, ...],
    key: jax.Array,
) -> list[jax.Array]:
    """x, each of the weights, and the bias."""
    (m, n, k), keys = shapes[0], jax.random.split(key, len(shapes) + 2)
    weight = (n, k) if columns == 0 else (k, n)
    x = jax.random.normal(keys[0], (*batch, m, k), F32).astype(dtype)
    # Weights are scaled as networks initialise them; those of float8 to its range.
    scale = 1 if dtype.itemsize == 1 else 1 / math.sqrt(k)
    weights = [scale * jax.random.normal(one, (*batch, *weight), F32) for one in keys[2:]]
    biases = [jax.random.normal(keys[1], (n,), F32).astype(dtype)] * bias
    return [x, *(w.astype(dtype) for w in weights), *biases]


def _case(
    call: str,
    shape: tuple[int, int, int],
    dtype: np.dtype,
    products: list[tuple[int, int, int]],
    fused: Callable[..., Any],
    plain: Callable[..., Any],
    *,
    bias: bool = False,
    columns: int = 1,
    batch: tuple[int, ...] = (),
) -> Case:
    """A case of one product or two; `columns` is the dimension of the weights that they have in common with y."""
    m, n, k = products[0]
    times, stored = math.prod(batch), max(2, dtype.itemsize)
    moved = times * (dtype.itemsize * (m * k + len(products) * n * k) + stored * m * n)
    return Case(
        call=call,
        shape=" x ".join(map(str, shape)),
        dtype=dtype.name,
        bytes=moved,
        flops=2 * m * n * k * len(products) * times,
        operands=partial(_operands, products, dtype, bias, columns, batch),
        jaxdnn=Implementation(lambda *arrays: arrays, fused),
        xla=Implementation(lambda *arrays: arrays, plain),
    )


def _gradient(shape: tuple[int, int, int], dtype: np.dtype) -> Case:
    """A layer's output and the gradients of all that it takes: three products."""
    m, n, k = shape

    def operands(key: jax.Array) -> list[jax.Array]:
        dy = jax.random.normal(jax.random.fold_in(key, 1), (m, n), dtype)
        return [dy, *_operands([shape], dtype, True, 1, (), key)]

    def implementation(layer: Callable[..., jax.Array]) -> Implementation:
        def run(dy: jax.Array, *inputs: jax.Array) -> Any:
            y, vjp = jax.vjp(layer, *inputs)
            # In a network dy comes from y, so that no program can work on both passes at once.
            dy, _ = jax.lax.optimization_barrier((dy, y))
            return y, vjp(dy)

        return Implementation(lambda *arrays: arrays, run)

    return Case(
        call="matmul + bias + gelu, with its gradient",
        shape=" x ".join(map(str, shape)),
        dtype=dtype.name,
        bytes=dtype.itemsize * (2 * (m * k + n * k) + 3 * m * n),
        flops=6 * m * n * k,
        operands=operands,
        jaxdnn=implementation(_fused_gelu),
        xla=implementation(_plain_gelu),
    )
