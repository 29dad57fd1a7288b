"""`attend`: the arguments of `dot_product_attention`, checked and brought into canonical form, and the call."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxdnn.config import Options, current_options
from jaxdnn.primitives.arguments import as_array, number
from jaxdnn.primitives.attention import mask as masks
from jaxdnn.primitives.attention.mask import Sizes
from jaxdnn.primitives.attention.modifier import Modifier, mask_modifier, score_modifier
from jaxdnn.primitives.attention.scores import accumulator
from jaxdnn.primitives.attention.spec import AttentionSpec, attention
from jaxdnn.primitives.fused.dtypes import algorithm
from jaxdnn.primitives.fused.epilogue import strongly_typed
from jaxdnn.primitives.fused.messages import check_sequence, described_type
from jaxdnn.primitives.fused.sharding import explicit_sharding

CALLER = "dot_product_attention"
DTYPES = ("bfloat16", "float16", "float32", "float64")


def attend(
    *,
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    mask: Any,
    scale: Any,
    is_causal: bool,
    query_seq_lengths: Any,
    key_value_seq_lengths: Any,
    local_window_size: Any,
    implementation: Any,
    return_residual: bool,
    segment_ids: Any,
    positions: Any,
    causal_alignment: Any,
    logits_soft_cap: Any,
    sinks: Any,
    score_mod: Callable[..., Any] | None,
    score_mod_operands: Sequence[Any],
    mask_mod: Callable[..., Any] | None,
    mask_mod_operands: Sequence[Any],
    dropout_rate: Any,
    dropout_rng: Any,
    precision: Any,
) -> Any:
    """The arguments are those of `dot_product_attention`."""
    for name, flag in (("is_causal", is_causal), ("return_residual", return_residual)):
        if not isinstance(flag, bool):
            raise TypeError(f"{CALLER}: {name} must be True or False, known when tracing; got {flag!r}")
    has_batch, (query, key, value) = _heads({"query": query, "key": key, "value": value})
    sizes = Sizes(query.shape[0], query.shape[2], query.shape[1], key.shape[1])
    if scale is None:
        # The mean of no products is whatever one likes.
        scale = 1.0 if query.shape[-1] == 0 else query.shape[-1] ** -0.5
    soft_cap = None if logits_soft_cap is None else number(CALLER, "logits_soft_cap", logits_soft_cap)
    if soft_cap is not None and not 2**-126 <= soft_cap <= 2**126:  # kernels multiply by it and by its reciprocal
        raise ValueError(
            f"{CALLER}: logits_soft_cap must be positive and finite, as it and its reciprocal are in float32, or None "
            f"for none; got {soft_cap}"
        )

    given = {"query_seq_lengths": query_seq_lengths, "key_value_seq_lengths": key_value_seq_lengths}
    arrays = masks.lengths(CALLER, sizes, given)
    arrays |= masks.pair(CALLER, "positions", positions, sizes, ("query_positions", "key_positions"))
    band, offset = masks.band(CALLER, is_causal, local_window_size, causal_alignment, sizes, arrays)
    arrays |= offset | masks.segments(CALLER, segment_ids, sizes)
    for name, array in (("bias", bias), ("mask", mask)):
        if array is not None:
            arrays[name] = masks.broadcastable(CALLER, name, _typed(name, array), sizes)
    if sinks is not None:
        arrays["sinks"] = _typed("sinks", sinks)
        if arrays["sinks"].shape != (sizes.heads,):
            raise ValueError(f"{CALLER}: sinks must have shape {(sizes.heads,)}; got {arrays['sinks'].shape}")

    dtype = accumulator(query).name
    modify_score, score_operands = _modifier("score_mod", score_mod, score_mod_operands, dtype)
    modify_mask, mask_operands = _modifier("mask_mod", mask_mod, mask_mod_operands, dtype)
    used = {name for modifier in (modify_score, modify_mask) if modifier is not None for name in modifier.used}
    if band == masks.Band():
        for name in ("query", "key"):
            if name not in used:
                arrays.pop(f"{name}_positions", None)

    key_heads = key.shape[2]
    group = 1 if key_heads == 0 else sizes.heads // key_heads

    def grouped(array: jax.Array, axis: int) -> jax.Array:
        return _grouped(array, axis, key_heads, group)

    if "batch" in used:
        arrays["batch_index"] = jnp.arange(sizes.batch, dtype="int32")
    if "head" in used:
        arrays["head_index"] = grouped(jnp.arange(sizes.heads, dtype="int32"), 0)
    dropped = _dropped(dropout_rate, dropout_rng)
    if dropped:
        arrays["seeds"] = _seeds(dropout_rng, (sizes.batch, key_heads, group, 2))
    for name, axis in (("bias", 1), ("mask", 1), ("sinks", 0)):
        if name in arrays:
            arrays[name] = grouped(arrays[name], axis)

    spec = AttentionSpec(
        optional=tuple(sorted(arrays)),
        scale=number(CALLER, "scale", scale, "; multiply query by what is an array, and pass scale=1"),
        soft_cap=soft_cap,
        score_mod=modify_score,
        band=band,
        mask_mod=modify_mask,
        dropped=dropped,
        algorithm=algorithm(query.dtype, query.dtype, precision),
        statistics=return_residual,
        options=_options(implementation),
    )
    arrays |= {"query": grouped(query, 2), "key": key, "value": value}
    arrays |= dict(zip(spec.score_operands, score_operands, strict=True))
    arrays |= dict(zip(spec.mask_operands, mask_operands, strict=True))
    results = attention(spec, arrays)
    out = results["out"].reshape(*query.shape[:-1], value.shape[-1])
    if not return_residual:
        return out if has_batch else out[0]
    log_sum_exp = jnp.transpose(results["log_sum_exp"], (0, 3, 1, 2)).reshape(query.shape[:-1])
    return (out, log_sum_exp) if has_batch else (out[0], log_sum_exp[0])


def _heads(given: Mapping[str, Any]) -> tuple[bool, list[jax.Array]]:
    """Whether the query has a batch; query, key and value with all four dimensions. Raises unless they fit."""
    arrays = {name: _typed(name, array) for name, array in given.items()}
    types = ", ".join(f"{name} {described_type(array)}" for name, array in arrays.items())
    for name, array in arrays.items():
        if array.ndim not in (3, 4):
            raise ValueError(
                f"{CALLER}: {name} must have shape (batch, length, heads, head_size), or that without the batch; got "
                f"{described_type(array)}"
            )
    if len({array.dtype for array in arrays.values()}) > 1:
        raise TypeError(f"{CALLER}: query, key and value must have one dtype; got {types}")
    query, key, value = (array if array.ndim == 4 else array[None] for array in arrays.values())
    if len({array.shape[0] for array in (query, key, value)}) > 1:
        raise ValueError(f"{CALLER}: query, key and value must have the same batch size; got {types}")
    if query.shape[3] != key.shape[3]:
        raise ValueError(f"{CALLER}: query and key must have the same head size, their last dimension; got {types}")
    if key.shape[1:3] != value.shape[1:3]:
        raise ValueError(f"{CALLER}: key and value must have the same length and the same heads; got {types}")
    heads, key_heads = query.shape[2], key.shape[2]
    if heads != key_heads and (key_heads == 0 or heads % key_heads):
        raise ValueError(
            f"{CALLER}: query has {heads} heads and key {key_heads}; query heads must be a multiple of key heads"
        )
    return arrays["query"].ndim == 4, [query, key, value]


def _typed(name: str, given: Any) -> jax.Array:
    """An array of the dtype that its name asks for."""
    array = as_array(f"{CALLER}: {name}", given)
    if name == "mask":
        if array.dtype != jnp.bool_:
            raise TypeError(
                f"{CALLER}: mask must be boolean, True where a key is visible; got {described_type(array)}; what is "
                "added to scores is bias="
            )
        return array
    if array.dtype.name not in DTYPES:
        hint = "; what says which keys are visible is mask=" if name == "bias" and array.dtype == jnp.bool_ else ""
        raise TypeError(
            f"{CALLER}: {name} must have one of the dtypes {', '.join(DTYPES)}; got {described_type(array)}{hint}"
        )
    return lax.convert_element_type(array, array.dtype)  # a Python number's dtype gives way to others


def _modifier(
    name: str, function: Callable[..., Any] | None, given: Sequence[Any], dtype: str
) -> tuple[Modifier | None, list[jax.Array]]:
    """The modifier of a caller's function, and the operands that it is given."""
    check_sequence(f"{CALLER}: {name}_operands", given)
    if function is None:
        if given:
            raise ValueError(f"{CALLER}: got {len(given)} {name}_operands, and no {name}; pass one")
        return None, []
    operands = [as_array(f"{CALLER}: {name}_operands[{i}]", array) for i, array in enumerate(given)]
    before = 5 if name == "score_mod" else 4
    if callable(function):
        function, operands = strongly_typed(function, before, operands)
    if name == "score_mod":
        return score_modifier(CALLER, function, dtype, operands), operands
    return mask_modifier(CALLER, function, operands), operands


def _grouped(array: jax.Array, axis: int, key_heads: Any, group: Any) -> jax.Array:
    """The array with the dimension of its query heads as one of key heads and one of those that share them."""
    pair = (1, 1) if array.shape[axis] == 1 else (key_heads, group)
    shape = (*array.shape[:axis], *pair, *array.shape[axis + 1 :])
    sharding = explicit_sharding(jax.typeof(array))
    if sharding is not None:
        before, names, after = sharding.spec[:axis], sharding.spec[axis], sharding.spec[axis + 1 :]
        sizes = dict(sharding.mesh.shape_tuple)
        count = prod(sizes[name] for name in (names if isinstance(names, tuple) else (names,)) if name)
        split = (names, None) if pair[0] % count == 0 else (None, names) if pair[0] == 1 else (None, None)
        sharding = sharding.update(spec=PartitionSpec(*before, *split, *after))
    return lax.reshape(array, shape, out_sharding=sharding)


def _dropped(rate: Any, key: Any) -> int:
    """Of 2^32 probabilities, how many are dropped."""
    rate = number(CALLER, "dropout_rate", rate)
    if not 0 <= rate < 1:
        raise ValueError(f"{CALLER}: dropout_rate must be at least 0 and less than 1; got {rate}")
    if rate and key is None:
        raise ValueError(f"{CALLER}: dropout_rate={rate} needs dropout_rng=, a key such as jax.random.key(0)")
    return min(round(rate * 2**32), 2**32 - 1)


def _seeds(key: Any, shape: tuple[int, ...]) -> jax.Array:
    try:
        return jax.random.bits(key, shape, "uint32")
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"{CALLER}: dropout_rng must be one key, such as jax.random.key(0); got {described_type(key)}"
        ) from error


def _options(implementation: Any) -> Options:
    """The options in force; `jax.nn` has a name for one of our engines."""
    if implementation not in (None, "xla", "cudnn"):
        raise ValueError(f'{CALLER}: implementation must be None, "xla" or "cudnn"; got {implementation!r}')
    options = current_options()
    return replace(options, engine="xla", knobs=()) if implementation == "xla" else options
