"""Language models as people write them, of ops that are jaxdnn's, or what one writes without it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

import jaxdnn
from jaxdnn.bench.matmul import plain_swiglu
from jaxdnn.bench.norm import plain_layer_norm, plain_rms_norm

Kind = Literal["GPT", "Llama"]
HEAD_SIZE: dict[Kind, int] = {"GPT": 64, "Llama": 128}
_QUERIES_OF_A_KEY: dict[Kind, int] = {"GPT": 1, "Llama": 4}
_ROTATION = 10_000.0  # the longest wave, in positions over two pi


@dataclass(frozen=True)
class Model:
    """A transformer that predicts the next token.

    Attributes:
      kind: GPT: layer_norm, biases, gelu, positions that are learned, and one array for tokens in and out. Llama:
        rms_norm, gated layers, positions by rotation, and a key for several queries.
      length: how many tokens a sequence has.
      layers: how many.
      width: features of a token; a multiple of 64 (GPT) or 128 (Llama).
      vocabulary: how many tokens there are.
    """

    kind: Kind
    length: int
    layers: int
    width: int
    vocabulary: int

    def __post_init__(self) -> None:
        if self.width < self.head_size or self.width % self.head_size:
            raise ValueError(
                f"a {self.kind} has heads of {self.head_size} features; expected a multiple of that as width, got "
                f"{self.width}"
            )

    @property
    def head_size(self) -> int:
        return HEAD_SIZE[self.kind]

    @property
    def heads(self) -> int:
        return self.width // self.head_size

    @property
    def key_heads(self) -> int:
        return max(1, self.heads // _QUERIES_OF_A_KEY[self.kind])

    @property
    def hidden(self) -> int:
        """Features between the two products of a layer: with a gate, which is a third one, two thirds of four."""
        return 4 * self.width if self.kind == "GPT" else 128 * round(8 * self.width / 3 / 128)

    def shapes(self) -> dict[str, Any]:
        """Of the parameters: a list of arrays' shapes for each op."""
        gpt = self.kind == "GPT"

        def linear(rows: int, columns: int) -> list[tuple[int, ...]]:
            return [(rows, columns), *[(columns,)] * gpt]

        norm = [(self.width,)] * (1 + gpt)
        layer = {
            "attention_norm": norm,
            "heads": linear(self.width, (self.heads + 2 * self.key_heads) * self.head_size),
            "out": linear(self.width, self.width),
            "feed_norm": norm,
            "up": linear(self.width, self.hidden) if gpt else [(self.width, self.hidden)] * 2,
            "down": linear(self.hidden, self.width),
        }
        ends = {"positions": [(self.length, self.width)]} if gpt else {"head": [(self.vocabulary, self.width)]}
        return {"tokens": [(self.vocabulary, self.width)], "layers": [layer] * self.layers, "norm": norm, **ends}


@dataclass(frozen=True)
class Ops:
    """What a model is made of; parameters follow the arrays.

    Attributes:
      embed: a row for each token (and its position), normalized, and as it was.
      norm_of_sum: of two, and the sum.
      linear: a product, and a bias where there is one.
      up: the product before the activation, and that.
      attention: causal, of query, key and value.
      logits: the product with each token's row.
    """

    embed: Callable[..., tuple[jax.Array, jax.Array]]
    norm_of_sum: Callable[..., tuple[jax.Array, jax.Array]]
    linear: Callable[..., jax.Array]
    up: Callable[..., jax.Array]
    attention: Callable[..., jax.Array]
    logits: Callable[..., jax.Array]


def loss(model: Model, ops: Ops, parameters: dict[str, Any], tokens: jax.Array) -> jax.Array:
    """Minus the mean logarithm of the probability of each token but the first, given those before it.

    Args:
      model: what is computed.
      ops: with what.
      parameters: of `model.shapes()`.
      tokens: numbers, of shape (batch, length + 1).
    """
    layers = parameters["layers"]
    tables = [*parameters["tokens"], *parameters.get("positions", ())]
    norms_after = [layer["attention_norm"] for layer in layers[1:]] + [parameters["norm"]]
    y, stream = ops.embed(tokens[:, :-1], tables, layers[0]["attention_norm"])
    for layer, norm_after in zip(layers, norms_after, strict=True):
        update = ops.linear(_attention(model, ops, y, *layer["heads"]), *layer["out"])
        y, stream = ops.norm_of_sum(update, stream, *layer["feed_norm"])
        update = ops.linear(ops.up(y, *layer["up"]), *layer["down"])
        y, stream = ops.norm_of_sum(update, stream, *norm_after)
    logits = ops.logits(y, *parameters["tokens" if model.kind == "GPT" else "head"])
    found = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
    return (jax.nn.logsumexp(logits, axis=-1) - found).mean()


def _embedded(
    norm: Callable[..., jax.Array], tokens: jax.Array, tables: list[jax.Array], parameters: list[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    rows, *positions = tables
    stream = sum(positions, rows[tokens])
    return norm(stream, *parameters), stream


def _all_but_rows(primitive: Any, *_: Any, **__: Any) -> bool:
    return primitive not in (jax.lax.gather_p, jax.lax.add_p)


def _attention(model: Model, ops: Ops, y: jax.Array, *parameters: jax.Array) -> jax.Array:
    heads = ops.linear(y, *parameters).reshape(*y.shape[:2], -1, model.head_size)
    query, key, value = jnp.split(heads, (model.heads, model.heads + model.key_heads), axis=2)
    if model.kind == "Llama":
        query, key = _rotated(query), _rotated(key)
    return ops.attention(query, key, value).reshape(y.shape)


def _rotated(x: jax.Array) -> jax.Array:
    """Pairs of features, turned by angles that grow with the position."""
    half = x.shape[-1] // 2
    frequencies = _ROTATION ** (-jnp.arange(half) / half)
    angles = (jnp.arange(x.shape[1])[:, None] * frequencies)[:, None]
    first, second = x[..., :half], x[..., half:]
    turned = first * jnp.cos(angles) - second * jnp.sin(angles), second * jnp.cos(angles) + first * jnp.sin(angles)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def _logits(dot_general: Callable[..., jax.Array], x: jax.Array, rows: jax.Array) -> jax.Array:
    """In x's dtype, as their gradients are then, and at least in float32 for what follows."""
    logits = dot_general(x, rows, (((2,), (1,)), ((), ())))
    return logits.astype(jnp.promote_types(x.dtype, jnp.float32))


def _biased(accumulator: jax.Array, *bias: jax.Array) -> jax.Array:
    return sum(bias, accumulator)


def _gelu(accumulator: jax.Array, bias: jax.Array) -> jax.Array:
    return jax.nn.gelu(accumulator + bias)


def fused(kind: Kind) -> Ops:
    """jaxdnn's."""
    norm = jaxdnn.layer_norm if kind == "GPT" else jaxdnn.rms_norm
    return Ops(
        # A norm keeps its operand for its gradient. These rows are looked up again, as XLA's own fusions do unasked.
        embed=jax.checkpoint(partial(_embedded, norm), policy=_all_but_rows),
        norm_of_sum=lambda update, stream, *parameters: norm(update, *parameters, residual=stream),
        linear=lambda x, w, *bias: jaxdnn.matmul(x, w, *bias, epilogue=_biased) if bias else jaxdnn.matmul(x, w),
        up=lambda x, *parameters: (
            jaxdnn.matmul(x, *parameters, epilogue=_gelu) if kind == "GPT" else jaxdnn.gated_linear_unit(x, *parameters)
        ),
        attention=lambda *arrays: jaxdnn.dot_product_attention(*arrays, is_causal=True),
        logits=partial(_logits, jaxdnn.dot_general),
    )


def plain(kind: Kind) -> Ops:
    """JAX's; attention by cuDNN where there is a GPU."""
    norm = plain_layer_norm if kind == "GPT" else plain_rms_norm

    def norm_of_sum(update: jax.Array, stream: jax.Array, *parameters: jax.Array) -> tuple[jax.Array, jax.Array]:
        return norm(update + stream, *parameters), update + stream

    def attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        cudnn = jax.default_backend() == "gpu" and query.dtype.itemsize == 2
        implementation = "cudnn" if cudnn else "xla"
        return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation=implementation)

    return Ops(
        embed=partial(_embedded, norm),
        norm_of_sum=norm_of_sum,
        linear=lambda x, w, *bias: _biased(x @ w, *bias),
        up=lambda x, w, other: _gelu(x @ w, other) if kind == "GPT" else plain_swiglu(x, w, other),
        attention=attention,
        logits=partial(_logits, jax.lax.dot_general),
    )
