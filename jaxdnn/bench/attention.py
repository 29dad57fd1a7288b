"""The attention family's cases."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxdnn
from jaxdnn.bench.timing import Case, Implementation
from jaxdnn.bench.untuned import Class, Sizes

_SAMPLE = 16  # queries of the first batch element, whose results are compared with float64


@dataclass(frozen=True)
class Call:
    """One call of `dot_product_attention`.

    Attributes:
      kind: in a word or two, before "attention".
      batch, queries, keys, heads, key_heads, head_size, dtype: of the arrays.
      causal: whether queries see no key after them.
      window: how many keys before its own position a query sees.
      soft_cap: of the scores.
      bias: whether scores have one, the same for each batch element.
      documents: how many sequences lie in one array; the last is as many times as long as the first.
    """

    batch: int
    queries: int
    keys: int
    heads: int
    key_heads: int
    head_size: int
    dtype: str
    kind: str = ""
    causal: bool = False
    window: int | None = None
    soft_cap: float | None = None
    bias: bool = False
    documents: int = 0

    @property
    def shape(self) -> str:
        """For people: queries and keys, and their heads, where they differ, with a colon between them."""
        length = str(self.keys) if self.queries == self.keys else f"{self.queries}:{self.keys}"
        heads = str(self.heads) if self.heads == self.key_heads else f"{self.heads}:{self.key_heads}"
        return f"{self.batch} x {length} x {heads} x {self.head_size}"

    def segments(self) -> np.ndarray | None:
        """The document of each position, where there are several."""
        if not self.documents:
            return None
        lengths = np.arange(1, self.documents + 1)
        ends = np.cumsum(lengths) / lengths.sum()
        return np.searchsorted(ends, (np.arange(self.keys) + 0.5) / self.keys)

    def mask(self) -> jax.Array | None:
        """Which positions are of one document, as jax.nn takes it."""
        segments = self.segments()
        return None if segments is None else (segments[:, None] == jnp.asarray(segments))[None, None]

    def seen(self, queries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The first key that each of these queries sees, and the first after those."""
        first, end = np.zeros_like(queries), np.full_like(queries, self.keys)
        segments = self.segments()
        if segments is not None:
            first, end = (np.searchsorted(segments, segments[queries], side) for side in ("left", "right"))
        if self.window is not None:
            first = np.maximum(first, queries - self.window)
        if self.causal:
            end = np.minimum(end, queries + 1)
        return first, end

    @property
    def masked(self) -> bool:
        return self.causal or self.window is not None or self.documents > 0

    def visible(self, queries: np.ndarray) -> jax.Array:
        """Which keys each of these queries sees."""
        first, end = (edge[:, None] for edge in self.seen(queries))
        keys = jnp.arange(self.keys)
        return (jnp.asarray(first) <= keys) & (keys < end)

    def pairs(self) -> int:
        """How many keys all queries of a head see."""
        first, end = self.seen(np.arange(self.queries))
        return int((end - first).sum())


# The setting of the FlashAttention papers: 16,384 tokens of 2,048 features.
_TOKENS, _FEATURES = 16_384, 2048
_CPU_SHAPES = ((2, 1024, 8, 64),)
_CPU_DTYPES = ("float32", "bfloat16")


def cases(shapes: Sequence[tuple[int, int, int, int]] = (), dtypes: Sequence[str] = ()) -> Iterator[Case]:
    """Forward, and with the gradient, of every key and of causal masks, for each shape (batch, length, heads, head
    size) and dtype; by default on a GPU also of what networks make of attention besides, and of decoding.
    """
    if shapes or dtypes or jax.default_backend() != "gpu":
        calls = (_dense(*shape, dtype) for dtype, shape in product(dtypes or _CPU_DTYPES, shapes or _CPU_SHAPES))
        yield from _both(call for dense in calls for call in (dense, replace(dense, kind="causal", causal=True)))
        return
    yield from _both(_of_networks())
    yield case(Call(64, 1, 8192, 32, 8, 128, "bfloat16", kind="decoding"), gradient=False)


def _of_networks() -> Iterator[Call]:
    for head_size, length in product((64, 128, 256), (1024, 4096, 16_384)):
        dense = _dense(_TOKENS // length, length, _FEATURES // head_size, head_size)
        yield dense
        yield replace(dense, kind="causal", causal=True)
    yield Call(2, 8192, 8192, 32, 8, 128, "bfloat16", kind="causal", causal=True)
    long = _dense(1, 16_384, 16, 128)
    yield replace(long, kind="windowed", causal=True, window=1024)
    yield replace(long, kind="packed", causal=True, documents=16)
    yield replace(_dense(32, 512, 32, 64), kind="biased", bias=True)
    yield replace(_dense(4, 4096, 16, 128), kind="soft-capped", soft_cap=50.0)
    yield replace(_dense(4, 4096, 16, 128), dtype="float32")


def _dense(batch: int, length: int, heads: int, head_size: int, dtype: str = "bfloat16") -> Call:
    return Call(batch, length, length, heads, heads, head_size, dtype)


def _of_lengths(longest: int, *kinds: dict[str, Any]) -> Class:
    """Of one of these kinds, forward or with the gradient."""

    def one(sizes: Sizes) -> Case:
        length, key_heads = sizes.size(16, longest), sizes.one(1, 2, 4, 8)
        size, dtype = sizes.one(32, 64, 64, 80, 96, 128, 128, 256), sizes.one("bfloat16", "bfloat16", "float16")
        call = Call(sizes.size(1, 32), length, length, key_heads * sizes.one(1, 1, 2, 4, 8), key_heads, size, dtype)
        return case(replace(call, **sizes.one(*kinds)), gradient=sizes.one(False, True))

    return one


def _decoding(sizes: Sizes) -> Case:
    key_heads = sizes.one(1, 2, 4, 8)
    heads, size = key_heads * sizes.one(1, 2, 4, 8), sizes.one(64, 128, 256)
    call = Call(sizes.size(1, 128), 1, sizes.size(256, 65_536), heads, key_heads, size, "bfloat16", kind="decoding")
    return case(call, gradient=False)


_CAUSAL = {"kind": "causal", "causal": True}
# All keys and causal masks, of any lengths and of short ones; what networks make of attention besides; and decoding.
CLASSES: tuple[Class, ...] = (
    _of_lengths(16_384, {}, _CAUSAL),
    _of_lengths(512, {}, _CAUSAL),
    _of_lengths(16_384, {"kind": "windowed", "causal": True, "window": 512}),
    _of_lengths(16_384, {"kind": "packed", "causal": True, "documents": 7}),
    _of_lengths(2048, {"kind": "biased", "bias": True}),
    _of_lengths(8192, {"kind": "soft-capped", "soft_cap": 30.0}, {"kind": "causal", "causal": True, "soft_cap": 30.0}),
    _decoding,
)


def _both(calls: Iterable[Call]) -> Iterator[Case]:
    for call in calls:
        yield case(call, gradient=False)
        yield case(call, gradient=True)


def case(call: Call, *, gradient: bool) -> Case:
    """The call alone, or with the gradients of all that it takes."""
    query = call.batch * call.queries * call.heads * call.head_size
    key = call.batch * call.keys * call.key_heads * call.head_size
    bias = call.heads * call.queries * call.keys * call.bias
    # Read are query, key, value and bias, written is the result; then all are read again, with the result's cotangent,
    # and the gradients of what was read are written.
    moved = 2 * query + 2 * key + bias + gradient * (4 * query + 4 * key + 2 * bias)
    products = 7 if gradient else 2  # of them five backward
    decoding = call.queries == 1
    return Case(
        call=f"{call.kind} attention forward{' + backward' * gradient}".strip(),
        shape=call.shape,
        dtype=call.dtype,
        bytes=moved * jnp.dtype(call.dtype).itemsize,
        flops=0 if decoding else 2 * products * call.batch * call.heads * call.pairs() * call.head_size,
        operands=partial(_operands, call, gradient),
        jaxdnn=_implementation(partial(_fused, call), call.segments, gradient),
        xla=_implementation(partial(_plain, call, gradient), call.mask, gradient),
        sample=partial(_sample, call, gradient),
    )


def _operands(call: Call, gradient: bool, key: jax.Array) -> list[jax.Array]:
    """The result's cotangent, if there is a gradient, query, key, value, and the bias, if there is one."""
    query = (call.batch, call.queries, call.heads, call.head_size)
    keys = (call.batch, call.keys, call.key_heads, call.head_size)
    bias = (1, call.heads, call.queries, call.keys)
    shapes = [*[query] * gradient, query, keys, keys, *[bias] * call.bias]
    return [
        jax.random.normal(one, shape, call.dtype)
        for one, shape in zip(jax.random.split(key, len(shapes)), shapes, strict=True)
    ]


def _implementation(
    attention: Callable[..., jax.Array], documents: Callable[[], jax.typing.ArrayLike | None], gradient: bool
) -> Implementation:
    """Attention, and its gradient; what `documents` says of positions, a model computes once for all of its layers."""

    def forward(documents: Any, *inputs: jax.Array) -> jax.Array:
        return attention(documents, *inputs)

    def forward_backward(documents: Any, d_out: jax.Array, *inputs: jax.Array) -> Any:
        out, vjp = jax.vjp(partial(attention, documents), *inputs)
        # In a network d_out comes from out, so that no program can work on both passes at once.
        d_out, _ = jax.lax.optimization_barrier((d_out, out))
        return out, vjp(d_out)

    return Implementation(lambda *arrays: (documents(), *arrays), forward_backward if gradient else forward)


def _fused(call: Call, segments: np.ndarray | None, *inputs: jax.Array) -> jax.Array:
    return jaxdnn.dot_product_attention(
        *inputs,
        is_causal=call.causal,
        local_window_size=None if call.window is None else (call.window, 0),
        segment_ids=segments,
        logits_soft_cap=call.soft_cap,
    )


def _plain(call: Call, gradient: bool, mask: jax.Array | None, *inputs: jax.Array) -> jax.Array:
    """jax.nn's, by cuDNN where that takes the call. It has no soft cap, and no float16 on CPUs."""
    gpu = jax.default_backend() == "gpu"
    if call.soft_cap is not None or (call.dtype == "float16" and not gpu):
        return _by_hand(call, np.arange(call.queries), *inputs)
    cudnn = gpu and call.dtype != "float32"
    if cudnn and gradient and call.keys % 2:  # which it refuses: one is added, and masked
        inputs, mask = _even(*inputs), None if mask is None else jnp.pad(mask, ((0, 0), (0, 0), (0, 1), (0, 1)))
    result = jax.nn.dot_product_attention(
        *inputs,
        mask=mask,
        is_causal=call.causal,
        local_window_size=None if call.window is None else (call.window, 0),
        key_value_seq_lengths=jnp.full(call.batch, call.keys) if inputs[1].shape[1] > call.keys else None,
        implementation="cudnn" if cudnn else "xla",
    )
    return result[:, : call.queries]


def _even(query: jax.Array, key: jax.Array, value: jax.Array, *bias: jax.Array) -> tuple[jax.Array, ...]:
    """With one position more, of zeros."""
    longer = (jnp.pad(array, ((0, 0), (0, 1), (0, 0), (0, 0))) for array in (query, key, value))
    return *longer, *(jnp.pad(array, ((0, 0), (0, 0), (0, 1), (0, 1))) for array in bias)


def _by_hand(
    call: Call, rows: np.ndarray, query: jax.Array, key: jax.Array, value: jax.Array, bias: jax.Array | None = None
) -> jax.Array:
    """Of the queries in these rows, with all scores as an array, at least in float32."""
    batch, queries, heads, _ = query.shape
    grouped = query.reshape(batch, queries, call.key_heads, -1, call.head_size)
    accumulator = jnp.promote_types(query.dtype, "float32")
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, key, preferred_element_type=accumulator)
    scores = (scores * call.head_size**-0.5).reshape(batch, heads, queries, -1)
    if bias is not None:
        scores += bias
    if call.soft_cap is not None:
        scores = call.soft_cap * jnp.tanh(scores / call.soft_cap)
    if call.masked:
        scores = jnp.where(call.visible(rows), scores, -jnp.inf)
    weights = jax.nn.softmax(scores).astype(query.dtype).reshape(batch, call.key_heads, -1, queries, key.shape[1])
    return jnp.einsum("bkgts,bskh->btkgh", weights, value).reshape(query.shape)


def _sample(
    call: Call, gradient: bool, operands: Sequence[jax.Array], results: Any
) -> list[tuple[np.ndarray, np.ndarray]]:
    """The results of some queries of the first batch element, and the gradients of these queries; each with what it is
    in float64.
    """
    rows = np.unique(np.linspace(0, call.queries - 1, _SAMPLE).astype(int))
    with jax.enable_x64(True):

        def wide(array: jax.Array) -> jax.Array:
            return array[:1].astype("float64")

        *d_out, query, key, value = map(wide, operands[: 3 + gradient])
        bias = [wide(array)[:, :, rows] for array in operands[3 + gradient :]]
        exact, vjp = jax.vjp(lambda query: _by_hand(call, rows, query, key, value, *bias), query[:, rows])
        if not gradient:
            return [(_some(results, rows), np.asarray(exact))]
        out, (d_query, *_) = results
        pairs = (out, exact), (d_query, vjp(d_out[0][:, rows])[0])
        return [(_some(found, rows), np.asarray(exact)) for found, exact in pairs]


def _some(array: jax.Array, rows: np.ndarray) -> np.ndarray:
    return np.asarray(array[:1, rows], np.float64)
