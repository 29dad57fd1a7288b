"""The scores of one block of queries and keys, from the arrays of the whole call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxdnn.primitives.attention.arrays import over_scores
from jaxdnn.primitives.attention.blocks import Block, Spans, part
from jaxdnn.primitives.attention.dropout import random_bits
from jaxdnn.primitives.fused.dtypes import summed
from jaxdnn.primitives.fused.sharding import explicit_sharding
from jaxdnn.spec import Arrays, Typed

if TYPE_CHECKING:
    from jaxdnn.primitives.attention.spec import AttentionSpec


def accumulator(query: Typed) -> Any:
    """The dtype of scores and sums."""
    return jnp.dtype("float64" if query.dtype == jnp.float64 else "float32")


def block_scores(
    spec: AttentionSpec, arrays: Arrays, block: Block, *, once: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """The scaled products, the scores, -infinity where a key is not visible, and which are; None for all.

    No key is visible in two blocks of a query. If `once`, no query has keys in blocks with and without it.
    """
    query, key = (part(name, arrays[name], block) for name in ("query", "key"))
    product = spec.scale * dot(spec, "btkgh,bskh->bkgts", query, key)
    scores = modified(spec, _with_bias(arrays, block), block, product)
    visible = _visible(spec, arrays, block, once=once)
    return product, masked(visible, scores, -jnp.inf), visible


def modified(spec: AttentionSpec, arrays: Arrays, block: Block, product: jax.Array) -> jax.Array:
    """The scores, of the scaled products; `arrays` has the block's part of the bias, which is added as it is."""
    scores = product
    if "bias" in arrays:
        scores = scores + arrays["bias"]
    if spec.soft_cap is not None:
        scores = spec.soft_cap * jnp.tanh(scores * (1 / spec.soft_cap))
    if spec.score_mod is not None:
        operands = [arrays[name] for name in spec.score_operands]
        scores = spec.score_mod(scores, _coordinates(arrays, block), operands).astype(scores.dtype)
    return scores


def modifying(spec: AttentionSpec, names: Iterable[str]) -> list[str]:
    """Of the inputs, those that products become scores with."""
    return [name for name in names if name in ("bias", *spec.score_operands)]


def of_modifying(
    spec: AttentionSpec, arrays: Arrays, block: Block, names: Sequence[str]
) -> tuple[Callable[..., jax.Array], list[jax.Array]]:
    """The block's scores as a function of its products and of the inputs `names`; and what these are."""
    here = _with_bias(arrays, block)

    def scores(product: jax.Array, *arguments: jax.Array) -> jax.Array:
        return modified(spec, {**here, **dict(zip(names, arguments, strict=True))}, block, product)

    return scores, [here[name] for name in names]


def tangent_scores(
    spec: AttentionSpec, arrays: Arrays, tangents: Arrays, block: Block, product: jax.Array
) -> jax.Array | None:
    """The tangent of the scores; None if they are constant."""
    d_product = None
    for name, other, labels in (("query", "key", "btkgh,bskh->bkgts"), ("key", "query", "bskh,btkgh->bkgts")):
        if name in tangents:
            term = spec.scale * dot(spec, labels, part(name, tangents[name], block), part(other, arrays[other], block))
            d_product = term if d_product is None else d_product + term
    names = modifying(spec, tangents)
    if d_product is None and not names:
        return None
    scores, primals = of_modifying(spec, arrays, block, names)
    d_product = jnp.zeros_like(product) if d_product is None else d_product
    parts = [part(name, tangents[name], block) for name in names]
    directions = [one.astype(primal.dtype) for one, primal in zip(parts, primals, strict=True)]
    return jax.jvp(scores, (product, *primals), (d_product, *directions))[1]


def _with_bias(arrays: Arrays, block: Block) -> Arrays:
    """The arrays, with the block's part of the bias in the accumulator's dtype."""
    if "bias" not in arrays:
        return arrays
    return {**arrays, "bias": part("bias", arrays["bias"], block).astype(accumulator(arrays["query"]))}


def _coordinates(arrays: Arrays, block: Block) -> list[jax.Array]:
    """Of each score; what no function asks for is zero."""
    names = ("batch_index", "head_index", "query_positions", "key_positions")
    zero = jnp.zeros((1,) * 5, "int32")
    found = [over_scores(name, part(name, arrays[name], block)) if name in arrays else zero for name in names[:2]]
    return [*found, *_positions(arrays, block)]


def _positions(arrays: Arrays, block: Block) -> list[jax.Array]:
    """Of queries and keys: what the caller says, else the places."""
    return [
        over_scores(name, part(name, arrays[name], block) if name in arrays else block[label].places[None])
        for name, label in (("query_positions", "t"), ("key_positions", "s"))
    ]


def _visible(spec: AttentionSpec, arrays: Arrays, block: Block, *, once: bool) -> jax.Array | None:
    """Which keys each query sees; None for all."""
    query, key = _positions(arrays, block)
    if "query_offset" in arrays:
        query = query + over_scores("query_offset", arrays["query_offset"])
    allowed = []
    if spec.band.left is not None:
        allowed.append(key >= _moved(query, -spec.band.left))
    if spec.band.right is not None:
        allowed.append(key <= _moved(query, spec.band.right))
    for name, label in (("query", "t"), ("key", "s")):
        places = over_scores(f"{name}_positions", block[label].places[None])
        if f"{name}_lengths" in arrays:
            allowed.append(places < over_scores(f"{name}_lengths", arrays[f"{name}_lengths"]))
        if not block[label].whole and (once or name == "key"):
            allowed.append(places >= block[label].unseen)
    if "query_segments" in arrays:
        of_query, of_key = (
            over_scores(name, part(name, arrays[name], block)) for name in ("query_segments", "key_segments")
        )
        allowed.append((of_query == of_key) & (of_query >= 0))
    return _all((*allowed, programmed(spec, arrays, block)))


def _moved(positions: jax.Array, by: int) -> jax.Array:
    """The positions and a number, or the least or largest integer, which they would pass."""
    limits = jnp.iinfo(positions.dtype)
    return jnp.clip(positions, limits.min - min(by, 0), limits.max - max(by, 0)) + by


def in_band(spec: AttentionSpec, arrays: Arrays, rows: Spans, columns: Spans) -> Callable[..., jax.Array] | None:
    """Of the numbers of a block's rows and columns, whether any key is in the band of any query; None if there is no
    band, or if positions are known at run time alone.
    """
    left, right = spec.band.left, spec.band.right
    if (left, right) == (None, None) or {"query_positions", "key_positions", "query_offset"}.intersection(arrays):
        return None

    def reaches(i: Any, j: Any) -> jax.Array:
        row, column = rows[i].first, columns[j].first
        above = True if right is None else column - (row + rows.size - 1) <= right
        below = True if left is None else column + columns.size - 1 - row >= -left
        return jnp.logical_and(above, below)

    return reaches


def programmed(spec: AttentionSpec, arrays: Arrays, block: Block) -> jax.Array | None:
    """Which keys each query sees, by the caller's array and function; None for all."""
    by_array = part("mask", arrays["mask"], block) if "mask" in arrays else None
    if spec.mask_mod is None:
        return by_array
    operands = [arrays[name] for name in spec.mask_operands]
    return _all((by_array, spec.mask_mod(None, _coordinates(arrays, block), operands)))


def _all(conditions: Sequence[jax.Array | None]) -> jax.Array | None:
    """Their conjunction; None is one that always holds."""
    return functools.reduce(jnp.logical_and, given) if (given := [c for c in conditions if c is not None]) else None


def masked(visible: jax.Array | None, scores: jax.Array, other: float) -> jax.Array:
    """Scores, or their cotangents, with `other` where no key is visible."""
    if visible is None:
        return scores
    # A conjunction lies as the scores do, where axes of a mesh are explicit; `where` asks for it.
    return jnp.where(visible & jnp.ones_like(scores, bool), scores, other)


def after_dropout(spec: AttentionSpec, arrays: Arrays, block: Block, p: jax.Array) -> jax.Array:
    """Probabilities, or their cotangents, after dropout."""
    if not spec.dropped:
        return p
    bits = random_bits(arrays["seeds"], block["t"].places, block["s"].first, p.shape[-1])
    kept = (bits >= jnp.uint32(spec.dropped)).astype(p.dtype)
    return p * (kept / (1 - spec.dropped / 2**32))


def dot(spec: AttentionSpec, equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """The product of two arrays, summed in the accumulator's dtype over the labels that the result lacks."""
    of_a, of_b, of_y = equation.replace("->", ",").split(",")
    batch = [label for label in of_a if label in of_b and label in of_y]
    contracted = [label for label in of_a if label in of_b and label not in of_y]
    contracting, batching = ((list(map(of_a.index, ls)), list(map(of_b.index, ls))) for ls in (contracted, batch))
    got = [*batch, *(label for label in of_a + of_b if label in of_y and label not in batch)]
    sharding = explicit_sharding(jax.typeof(a))
    if sharding is not None:
        # Of what both have split and the sum is over, JAX asks how the sum lies: as the operands do.
        of_each = zip(of_a + of_b, (*sharding.spec, *jax.typeof(b).sharding.spec), strict=True)
        along = {label: names for label, names in of_each if names is not None}
        sharding = sharding.update(spec=PartitionSpec(*map(along.get, got)))
    wide = accumulator(a).name
    y = summed(a, b, (contracting, batching), spec.algorithm, wide, sharding, wide)
    return jnp.transpose(y, list(map(got.index, of_y)))
