"""Attention, its tangent and its backward pass in plain JAX, block by block: their definition, in linear memory.

Blocks of a softmax are joined as in Milakov and Gimelshein, "Online normalizer calculation for softmax",
arXiv:1805.02867, and Dao, Fu, Ermon, Rudra and Ré, "FlashAttention: Fast and Memory-Efficient Exact Attention with
IO-Awareness", arXiv:2205.14135. With s the scores, m the log-sum-exp, p = exp(s - m), and z dropout's factors,

  out = sum over keys of z p v,     d out = sum of z p (ds v + dv) - dm out,     dm = sum of p ds (+ p_sink d_sink),

and for cotangents o of out and n of m, with delta = out . o - n, those of v, s and the sink are

  z p o,     p (z (o . v) - delta),     -p_sink delta.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxdnn.primitives._define import as_type
from jaxdnn.primitives.attention.arrays import over_scores
from jaxdnn.primitives.attention.blocks import Block, Spans, add, fold, part, put, spans_of
from jaxdnn.primitives.attention.scores import (
    accumulator,
    after_dropout,
    block_scores,
    dot,
    in_band,
    masked,
    modifying,
    of_modifying,
    tangent_scores,
)
from jaxdnn.spec import Arrays

if TYPE_CHECKING:
    from jaxdnn.primitives.attention.spec import AttentionSpec


def forward(spec: AttentionSpec, arrays: Arrays) -> tuple[jax.Array, jax.Array]:
    """The results and the log-sum-exps."""
    query, value = arrays["query"], arrays["value"]
    dtype = accumulator(query)
    rows, columns = _spans(arrays)
    needed = in_band(spec, arrays, rows, columns)

    def of_rows(i: Any, results: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        block = {"t": rows[i]}
        per_row = (*(query.shape[d] for d in (0, 2, 3)), rows[i].size)

        def of_columns(j: Any, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            largest, total, weighted = carry
            _, scores, _ = block_scores(spec, arrays, {**block, "s": columns[j]})
            found = jnp.maximum(largest, jnp.max(scores, -1, initial=-jnp.inf))
            base = _finite(found)
            p = jnp.exp(scores - base[..., None])
            shrunk = jnp.exp(largest - base)
            total = total * shrunk + jnp.sum(p, -1)
            kept = after_dropout(spec, arrays, {**block, "s": columns[j]}, p)
            values = part("value", value, {"s": columns[j]})
            weighted = weighted * shrunk[..., None] + dot(spec, "bkgts,bskd->bkgtd", kept.astype(value.dtype), values)
            return found, total, weighted

        if "sinks" in arrays:
            largest = jnp.broadcast_to(over_scores("sinks", arrays["sinks"])[..., 0].astype(dtype), per_row)
        else:
            largest = jnp.full(per_row, -jnp.inf, dtype)
        total = jnp.full(per_row, 1.0 if "sinks" in arrays else 0.0, dtype)
        weighted = jnp.zeros((*per_row, value.shape[-1]), dtype)
        largest, total, weighted = fold(
            columns.count, of_columns, (largest, total, weighted), needed and partial(needed, i)
        )
        out = _as_out(weighted / jnp.where(total == 0, 1, total)[..., None], query.dtype)
        found = {"out": out, "log_sum_exp": largest + jnp.log(total)}
        return _put(results, block, found)

    return fold(rows.count, of_rows, _results(arrays, dtype))


def tangent(spec: AttentionSpec, arrays: Arrays, tangents: Arrays) -> tuple[jax.Array, jax.Array]:
    """The tangents of both, of which `arrays` holds the values as well."""
    query, value = arrays["query"], arrays["value"]
    dtype = accumulator(query)
    rows, columns = _spans(arrays)
    needed = in_band(spec, arrays, rows, columns)

    def of_rows(i: Any, results: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        block = {"t": rows[i]}
        per_row = (*(query.shape[d] for d in (0, 2, 3)), rows[i].size)
        log_sum_exp = part("log_sum_exp", arrays["log_sum_exp"], block)

        def of_columns(j: Any, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            d_total, d_weighted = carry
            here = {**block, "s": columns[j]}
            product, scores, visible = block_scores(spec, arrays, here)
            p = _probabilities(scores, log_sum_exp)
            d_scores = tangent_scores(spec, arrays, tangents, here, product)
            if d_scores is not None:
                weights = p * masked(visible, d_scores, 0)
                d_total = d_total + jnp.sum(weights, -1)
                values = part("value", value, here)
                kept = after_dropout(spec, arrays, here, weights).astype(value.dtype)
                d_weighted = d_weighted + dot(spec, "bkgts,bskd->bkgtd", kept, values)
            if "value" in tangents:
                d_values = part("value", tangents["value"], here)
                kept = after_dropout(spec, arrays, here, p).astype(value.dtype)
                d_weighted = d_weighted + dot(spec, "bkgts,bskd->bkgtd", kept, d_values)
            return d_total, d_weighted

        carry = (jnp.zeros(per_row, dtype), jnp.zeros((*per_row, value.shape[-1]), dtype))
        d_total, d_weighted = fold(columns.count, of_columns, carry, needed and partial(needed, i))
        if "sinks" in tangents:
            d_sinks = over_scores("sinks", tangents["sinks"])[..., 0].astype(dtype)
            d_total = d_total + _of_sinks(arrays, log_sum_exp) * d_sinks
        out = part("out", arrays["out"], block).astype(dtype)
        d_out = _as_out(d_weighted, dtype) - jnp.transpose(d_total, (0, 3, 1, 2))[..., None] * out
        found = {"out": d_out.astype(query.dtype), "log_sum_exp": d_total}
        return _put(results, block, found)

    return fold(rows.count, of_rows, _results(arrays, dtype))


def backward(spec: AttentionSpec, arrays: Arrays, cotangents: Arrays, active: Sequence[str]) -> tuple[jax.Array, ...]:
    """The cotangents of the active inputs; `arrays` holds the results and the log-sum-exps as well."""
    query, key, value = (arrays[name] for name in ("query", "key", "value"))
    dtype = accumulator(query)
    rows, columns = _spans(arrays)
    log_sum_exp = arrays["log_sum_exp"]
    delta = jnp.zeros_like(log_sum_exp)
    if "out" in cotangents:
        both = (arrays["out"].astype(dtype), cotangents["out"].astype(dtype))
        delta = delta + jnp.transpose(jnp.sum(both[0] * both[1], -1), (0, 2, 3, 1))
    if "log_sum_exp" in cotangents:
        delta = delta - cotangents["log_sum_exp"]
    delta = jnp.where(log_sum_exp == -jnp.inf, 0, delta)  # of rows that see nothing, whatever their cotangent is

    def of_block(j: Any, i: Any, totals: Arrays) -> Arrays:
        block = {"t": rows[i], "s": columns[j]}
        product, scores, visible = block_scores(spec, arrays, block, once=True)
        p = _probabilities(scores, part("log_sum_exp", log_sum_exp, block))
        d_p = jnp.zeros_like(p)
        found: dict[str, jax.Array] = {}
        if "out" in cotangents:
            d_out = part("out", cotangents["out"], block).astype(value.dtype)
            d_p = after_dropout(spec, arrays, block, dot(spec, "btkgd,bskd->bkgts", d_out, part("value", value, block)))
            if "value" in active:
                kept = after_dropout(spec, arrays, block, p).astype(value.dtype)
                found["value"] = dot(spec, "bkgts,btkgd->bskd", kept, d_out)
        d_scores = p * (d_p - part("delta", delta, block)[..., None])
        names = modifying(spec, active)
        modify, arguments = of_modifying(spec, arrays, block, names)
        _, pull_back = jax.vjp(modify, product, *arguments)
        d_product, *of_arguments = pull_back(masked(visible, d_scores, 0))
        found |= dict(zip(names, of_arguments, strict=True))
        d_product = d_product.astype(query.dtype)
        if "query" in active:
            found["query"] = spec.scale * dot(spec, "bkgts,bskh->btkgh", d_product, part("key", key, block))
        if "key" in active:
            found["key"] = spec.scale * dot(spec, "bkgts,btkgh->bskh", d_product, part("query", query, block))
        return {
            name: add(name, total, block, found[name]) if name in found else total for name, total in totals.items()
        }

    totals = {name: jnp.zeros(arrays[name].shape, dtype) for name in active}
    needed = in_band(spec, arrays, rows, columns)

    def of_columns(j: Any, totals: Arrays) -> Arrays:
        return fold(rows.count, partial(of_block, j), totals, needed and partial(needed, j=j))

    totals = fold(columns.count, of_columns, totals)
    if "sinks" in active:
        totals["sinks"] = -jnp.sum(_of_sinks(arrays, log_sum_exp) * delta, (0, 3))
    return tuple(as_type(totals[name].astype(arrays[name].dtype), jax.typeof(arrays[name])) for name in active)


def _spans(arrays: Arrays) -> tuple[Spans, Spans]:
    batch, queries, key_heads, group, _ = arrays["query"].shape
    return spans_of(batch * key_heads * group, queries, arrays["key"].shape[1])


def _results(arrays: Arrays, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Room for the results and the log-sum-exps."""
    batch, queries, key_heads, group, _ = arrays["query"].shape
    out = jnp.zeros((batch, queries, key_heads, group, arrays["value"].shape[-1]), arrays["query"].dtype)
    return out, jnp.zeros((batch, key_heads, group, queries), dtype)


def _put(results: tuple[jax.Array, jax.Array], block: Block, found: Arrays) -> tuple[jax.Array, jax.Array]:
    """The results and the log-sum-exps with those of a block."""
    out, log_sum_exp = results
    return put("out", out, block, found["out"]), put("log_sum_exp", log_sum_exp, block, found["log_sum_exp"])


def _as_out(weighted: jax.Array, dtype: Any) -> jax.Array:
    return jnp.transpose(weighted, (0, 3, 1, 2, 4)).astype(dtype)


def _finite(log_sum_exp: jax.Array) -> jax.Array:
    """Zero for rows that see nothing, so that no infinity is subtracted from another."""
    return jnp.where(log_sum_exp == -jnp.inf, 0, log_sum_exp)


def _probabilities(scores: jax.Array, log_sum_exp: jax.Array) -> jax.Array:
    """Zero where a score is hidden, even in a row that is NaN."""
    return jnp.where(scores == -jnp.inf, 0, jnp.exp(scores - _finite(log_sum_exp)[..., None]))


def _of_sinks(arrays: Arrays, log_sum_exp: jax.Array) -> jax.Array:
    """Their probabilities."""
    sinks = over_scores("sinks", arrays["sinks"])[..., 0].astype(log_sum_exp.dtype)
    return jnp.exp(sinks - _finite(log_sum_exp))
