"""Attention to keys that lie apart, as rings of devices have them: partial results are joined by their log-sum-exps."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxdnn.api_boundary import api_boundary
from jaxdnn.primitives.fused.messages import described_type

Partial = tuple[jax.typing.ArrayLike, jax.typing.ArrayLike]


@api_boundary("combine_attention")
def combine_attention(first: Partial, second: Partial) -> tuple[jax.Array, jax.Array]:
    """Joins attention to some keys with attention of the same queries to other keys.

    Each is what `dot_product_attention(..., return_residual=True)` returns. What `sinks` add to a sum is to be in one
    of them alone. A row that saw no key in one of them is the other's; in that case too all derivatives are right.

    See Dao et al., "FlashAttention", arXiv:2205.14135, and Liu, Zaharia and Abbeel, "Ring Attention with Blockwise
    Transformers for Near-Infinite Context", arXiv:2310.01889.

    Args:
      first: out, of shape (..., queries, heads, value_head_size), and log-sum-exp, of shape (..., queries, heads).
      second: likewise, of the same shapes.

    Returns:
      out and log-sum-exp of attention to all the keys, in the promoted dtypes. In a loop over many parts, pass out in
      float32, which is then rounded once, at the end.

    Raises:
      ValueError: shapes differ.
      TypeError: an argument is no pair, or not of floating-point arrays.

    Example:
      >>> import jax, jax.numpy as jnp, jaxdnn
      >>> q, k, v = jnp.ones((3, 1, 4, 2, 8))
      >>> parts = [jaxdnn.dot_product_attention(q, k[:, i], v[:, i], return_residual=True)
      ...          for i in (slice(0, 1), slice(1, 4))]
      >>> out, log_sum_exp = jaxdnn.combine_attention(*parts)
      >>> out.shape, log_sum_exp.shape
      ((1, 4, 2, 8), (1, 4, 2))
    """
    caller, arrays = "combine_attention", {}
    for name, given in {"first": first, "second": second}.items():
        if not isinstance(given, (tuple, list)) or len(given) != 2:
            raise TypeError(f"{caller}: {name} must be a pair of out and log-sum-exp; got {described_type(given)}")
        arrays[name] = tuple(map(jnp.asarray, given))
        if not arrays[name][0].ndim or not all(jnp.issubdtype(one.dtype, jnp.floating) for one in arrays[name]):
            types = " and ".join(map(described_type, arrays[name]))
            raise TypeError(f"{caller}: {name} must be floating-point arrays out and log-sum-exp; got {types}")
    shapes = {out.shape for out, _ in arrays.values()} | {(*m.shape, *out.shape[-1:]) for out, m in arrays.values()}
    if len(shapes) > 1:
        types = " and ".join(f"{described_type(out)} with {described_type(m)}" for out, m in arrays.values())
        raise ValueError(
            f"{caller}: both outs must have one shape, and log-sum-exps that shape without the last dimension; got "
            f"{types}"
        )
    outs, sums = zip(*arrays.values(), strict=True)
    largest = lax.stop_gradient(jnp.maximum(*sums))
    base = jnp.where(largest == -jnp.inf, 0, largest)
    weights = [jnp.exp(m - base) for m in sums]
    total = weights[0] + weights[1]
    nothing = total == 0
    total = jnp.where(nothing, 1, total)
    dtype = jnp.promote_types(outs[0].dtype, outs[1].dtype)
    out = sum(out.astype(base.dtype) * (weight / total)[..., None] for out, weight in zip(outs, weights, strict=True))
    return jnp.asarray(out, dtype), jnp.where(nothing, -jnp.inf, base + jnp.log(total))
