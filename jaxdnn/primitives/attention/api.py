"""`dot_product_attention`, of Vaswani et al., "Attention Is All You Need", arXiv:1706.03762."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

import jax

from jaxdnn.api_boundary import api_boundary
from jaxdnn.primitives.attention.call import attend
from jaxdnn.primitives.attention.mask import Alignment, Pair

Mod = Callable[..., Any] | None
Operands = Sequence[jax.typing.ArrayLike]


@overload
def dot_product_attention(
    query: jax.typing.ArrayLike,
    key: jax.typing.ArrayLike,
    value: jax.typing.ArrayLike,
    bias: jax.typing.ArrayLike | None = None,
    mask: jax.typing.ArrayLike | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: jax.typing.ArrayLike | None = None,
    key_value_seq_lengths: jax.typing.ArrayLike | None = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    implementation: Literal["xla", "cudnn"] | None = None,
    return_residual: Literal[False] = False,
    segment_ids: Pair = None,
    positions: Pair = None,
    causal_alignment: Alignment = "top_left",
    logits_soft_cap: float | None = None,
    sinks: jax.typing.ArrayLike | None = None,
    score_mod: Mod = None,
    score_mod_operands: Operands = (),
    mask_mod: Mod = None,
    mask_mod_operands: Operands = (),
    dropout_rate: float = 0.0,
    dropout_rng: jax.typing.ArrayLike | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> jax.Array: ...


@overload
def dot_product_attention(
    query: jax.typing.ArrayLike,
    key: jax.typing.ArrayLike,
    value: jax.typing.ArrayLike,
    bias: jax.typing.ArrayLike | None = None,
    mask: jax.typing.ArrayLike | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: jax.typing.ArrayLike | None = None,
    key_value_seq_lengths: jax.typing.ArrayLike | None = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    implementation: Literal["xla", "cudnn"] | None = None,
    return_residual: Literal[True],
    segment_ids: Pair = None,
    positions: Pair = None,
    causal_alignment: Alignment = "top_left",
    logits_soft_cap: float | None = None,
    sinks: jax.typing.ArrayLike | None = None,
    score_mod: Mod = None,
    score_mod_operands: Operands = (),
    mask_mod: Mod = None,
    mask_mod_operands: Operands = (),
    dropout_rate: float = 0.0,
    dropout_rng: jax.typing.ArrayLike | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> tuple[jax.Array, jax.Array]: ...


@api_boundary(
    "dot_product_attention",
    attn_mask="did you mean mask=? It is boolean; what is added to scores is bias=",
    causal="did you mean is_causal=?",
    dropout_p="did you mean dropout_rate=?",
    dropout_key="did you mean dropout_rng=?",
    sliding_window="did you mean local_window_size=(left, right)?",
    softcap="did you mean logits_soft_cap=?",
    enable_gqa="key heads are shared wherever query has a multiple of them",
)
def dot_product_attention(
    query: jax.typing.ArrayLike,
    key: jax.typing.ArrayLike,
    value: jax.typing.ArrayLike,
    bias: jax.typing.ArrayLike | None = None,
    mask: jax.typing.ArrayLike | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: jax.typing.ArrayLike | None = None,
    key_value_seq_lengths: jax.typing.ArrayLike | None = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    implementation: Literal["xla", "cudnn"] | None = None,
    return_residual: bool = False,
    segment_ids: Pair = None,
    positions: Pair = None,
    causal_alignment: Alignment = "top_left",
    logits_soft_cap: float | None = None,
    sinks: jax.typing.ArrayLike | None = None,
    score_mod: Mod = None,
    score_mod_operands: Operands = (),
    mask_mod: Mod = None,
    mask_mod_operands: Operands = (),
    dropout_rate: float = 0.0,
    dropout_rng: jax.typing.ArrayLike | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> Any:
    """Scaled dot-product attention, `softmax(scale * query @ key.T + bias) @ value` for each head (arXiv:1706.03762).

    What `jax.nn.dot_product_attention` takes has the same meaning here; what follows `return_residual` is added. All
    masks apply together, and a key is visible if every one of them allows it. Where a query sees no key, the result and
    all gradients are zero and the log-sum-exp is -infinity (jax.nn returns the mean of all values there).

    Scores and sums are in float32, or float64 for float64 arrays. They are never all in memory: it grows with the
    lengths, not with their product, forward and backward (arXiv:2205.14135). Everything that is floating point is
    differentiable, to any order: query, key, value, bias, sinks, and the operands of score_mod.

    With queries, keys and values of more positions than one device holds, call it on parts: `combine_attention`.

    Args:
      query: array (batch, queries, heads, head_size) or (queries, heads, head_size), of bfloat16, float16, float32 or
        float64.
      key: array (batch, keys, key_heads, head_size) or without the batch; `heads` is a multiple of `key_heads`, and
        neighbouring query heads share a key head (grouped-query attention, arXiv:2305.13245). Of query's dtype.
      value: array (batch, keys, key_heads, value_head_size), likewise.
      bias: floating-point array that broadcasts to (batch, heads, queries, keys), added to scaled scores.
      mask: boolean array that broadcasts likewise; True where the key is visible.
      scale: of the scores, a Python number; None for 1 / sqrt(head_size). Multiply query by one that is learnt.
      is_causal: whether a query sees no key that is after it.
      query_seq_lengths: integers (batch,): how many of the queries there are; results of the others are zero. Longer
        than the axis is as long as that.
      key_value_seq_lengths: likewise of keys and values.
      local_window_size: (left, right): how many keys before and after its own position a query sees; of one int both,
        and None, or 2^31 - 1 and more, for no bound.
      implementation: None or "cudnn" for what `options` choose, or "xla" for the engine of that name.
      return_residual: whether to return the log-sum-exp of the scores too.
      segment_ids: integers (batch, length) or (length,) of queries and keys alike, or a pair of such: of several
        sequences in one array, which sees which. Queries see keys of their own segment; an id below zero is padding,
        which sees nothing and is not seen. Ids fit 32-bit integers.
      positions: likewise, where queries and keys stand, which otherwise is their index: the causal mask, the window,
        score_mod and mask_mod count by them. Of a pair one may be None.
      causal_alignment: "top_left" if the first query stands at the first key, "bottom_right" if the last one stands at
        the last key, as after a prefix (by the lengths, where they are given).
      logits_soft_cap: scores become cap * tanh(score / cap), after the bias (Gemma 2, arXiv:2408.00118). With 16-bit
        operands a tanh, here and in score_mod, is the hardware's on Hopper: off by a part in 2,048 at most.
      sinks: floating-point array (heads,): for each head a score that takes part in the softmax and has no value, after
        bias, cap and score_mod (gpt-oss, arXiv:2508.10925).
      score_mod: function of (score, batch, head, query, key, *operands), all scalars but the operands, to the score
        that takes its place, after bias and cap. It may look up operands by the indices, `slopes[head]`. It is traced
        once, when this is called.
      score_mod_operands: arrays that it is given whole.
      mask_mod: function of (batch, head, query, key, *operands) to whether that key is visible.
      mask_mod_operands: arrays that it is given whole.
      dropout_rate: the part of the probabilities that become zero; the others are divided by what is left. At least 0
        and less than 1.
      dropout_rng: a key of `jax.random`; an array like others, which may be mapped or scanned over. Derivatives have
        the same probabilities dropped.
      precision: as `jax.lax.dot_general` takes it, for float32.

    Returns:
      Array of query's dtype and shape, with value_head_size in place of head_size. With return_residual a pair of it
      and the log-sum-exp: the natural logarithm of the sum of exp(score) over visible keys, and the sink, of query's
      shape without the last dimension, in float32 (or float64).

    Raises:
      TypeError: an array has another dtype than is asked for, a static argument is an array being traced, or a function
        takes other arguments than it is given.
      ValueError: sizes do not fit one another, masks contradict each other, or a function returns no scalar, or closes
        over an array being traced.
      NoEngineError: under `options(fallback=False)`, no kernel of ours serves the call.

    Example:
      >>> import jax.numpy as jnp, jaxdnn
      >>> query, key = jnp.ones((2, 16, 8, 64)), jnp.ones((2, 16, 2, 64))
      >>> jaxdnn.dot_product_attention(query, key, key, is_causal=True).shape
      (2, 16, 8, 64)
      >>> documents = jnp.repeat(jnp.arange(2), 8)
      >>> out, log_sum_exp = jaxdnn.dot_product_attention(
      ...     query, key, key, is_causal=True, segment_ids=documents, return_residual=True
      ... )
      >>> log_sum_exp.shape
      (2, 16, 8)
      >>> slopes = 2.0 ** -jnp.arange(1, 9)  # ALiBi, arXiv:2108.12409
      >>> out = jaxdnn.dot_product_attention(
      ...     query, key, key, is_causal=True, score_mod_operands=[slopes],
      ...     score_mod=lambda score, batch, head, query, key, slopes: score + slopes[head] * (key - query),
      ... )
    """
    return attend(**locals())
