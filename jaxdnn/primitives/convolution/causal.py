"""The short causal convolution of state-space models: `causal_conv1d`, and `causal_conv1d_update`, a step of it."""

from collections.abc import Callable
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp

from jaxdnn.api_boundary import api_boundary
from jaxdnn.primitives.arguments import as_array
from jaxdnn.primitives.convolution.api import conv_general_dilated
from jaxdnn.primitives.fused.dtypes import accumulator

Activation = Callable[[jax.Array], jax.Array]


@overload
def causal_conv1d(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    *,
    activation: Activation | None = None,
    initial_state: jax.Array | None = None,
    return_final_state: Literal[False] = False,
    segment_ids: jax.Array | None = None,
) -> jax.Array: ...


@overload
def causal_conv1d(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    *,
    activation: Activation | None = None,
    initial_state: jax.Array | None = None,
    return_final_state: Literal[True],
    segment_ids: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]: ...


@overload
def causal_conv1d(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    *,
    activation: Activation | None = None,
    initial_state: jax.Array | None = None,
    return_final_state: bool = False,
    segment_ids: jax.Array | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]: ...


@api_boundary(
    "causal_conv1d",
    initial_states="did you mean initial_state=?",
    return_final_states="did you mean return_final_state=?",
    seq_idx="did you mean segment_ids=?",
)
def causal_conv1d(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    *,
    activation: Activation | None = None,
    initial_state: jax.Array | None = None,
    return_final_state: bool = False,
    segment_ids: jax.Array | None = None,
) -> Any:
    """A convolution of each channel by itself, over a position and those before it.

        y[b, t, c] = activation(bias[c] + sum over w of weight[w, c] * x[b, t - (width - 1) + w, c])

    It is that of Mamba's blocks: Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces",
    arXiv:2312.00752.

    Args:
      x: array of shape (batch, length, channels).
      weight: array of shape (width, channels), of x's dtype; its last row is for the position itself.
      bias: array of shape (channels,), or None.
      activation: an elementwise function, or None.
      initial_state: what comes before x: array of shape (batch, width - 1, channels); None for zeros.
      return_final_state: whether to return what comes before the next x, too.
      segment_ids: integers of shape (batch, length): a position sees none of another segment.

    Returns:
      y, of x's shape and dtype; with `return_final_state` a pair of it and the state, of shape
      (batch, width - 1, channels) and x's dtype.

    Raises:
      TypeError, ValueError: shapes or dtypes do not fit, or there is an initial state with segments.

    Example:
      >>> import jax, jax.numpy as jnp, jaxdnn
      >>> x, weight = jnp.ones((2, 16, 8)), jnp.ones((4, 8))
      >>> y, state = jaxdnn.causal_conv1d(x, weight, activation=jax.nn.silu, return_final_state=True)
      >>> y.shape, state.shape
      ((2, 16, 8), (2, 3, 8))
    """
    caller = "causal_conv1d"
    x = as_array(f"{caller}: x", x)
    if x.ndim != 3:
        raise ValueError(f"{caller}: x must have shape (batch, length, channels); got {x.shape}")
    weight, bias = _checked(caller, x, weight, bias, activation)
    before = weight.shape[0] - 1
    if initial_state is not None and segment_ids is not None:
        raise ValueError(f"{caller}: initial_state and segment_ids exclude each other: segments start from nothing")
    if initial_state is not None:
        initial_state = _floating(caller, "initial_state", initial_state, (x.shape[0], before, x.shape[2]))
    if segment_ids is not None:
        segment_ids = _of_shape(caller, "segment_ids", segment_ids, x.shape[:2])
        if not jnp.issubdtype(segment_ids.dtype, jnp.integer):
            raise TypeError(f"{caller}: segment_ids must have an integer dtype; got {segment_ids.dtype.name}")
    if not isinstance(return_final_state, bool):
        raise TypeError(f"{caller}: return_final_state must be True or False; got {return_final_state!r}")

    def whole() -> jax.Array:
        """What comes before x, and x."""
        if initial_state is None:  # zeros that lie as x does, where axes of a mesh are explicit
            return jnp.pad(x, ((0, 0), (before, 0), (0, 0)))
        return jnp.concatenate([initial_state.astype(x.dtype), x], 1)

    if segment_ids is None:
        if not x.shape[2]:  # a convolution has one group of channels at least
            return (x, whole()[:, x.shape[1] :]) if return_final_state else x
        seen, low = (x, before) if initial_state is None else (whole(), 0)
        y = conv_general_dilated(
            seen,
            weight[:, None],
            (1,),
            ((low, 0),),
            dimension_numbers=("NWC", "WIO", "NWC"),
            feature_group_count=x.shape[2],
            operands=[] if bias is None else [bias],
            epilogue=None if bias is activation is None else _epilogue(caller, activation),
        )
        return (y, whole()[:, x.shape[1] :]) if return_final_state else y

    state = whole()
    ids = jnp.pad(segment_ids, ((0, 0), (before, 0)))
    there = jnp.pad(jnp.ones_like(segment_ids, bool), ((0, 0), (before, 0)))

    def alike(w: int, last: jax.Array, values: jax.Array) -> jax.Array:
        """The values, and zeros where they are of another segment."""
        at = slice(w, w + last.shape[1])
        same = ((ids[:, at] == last) & there[:, at])[..., None]
        return jnp.where(same & jnp.ones_like(values, bool), values, 0)

    wide, length = accumulator(x.dtype, x.dtype), x.shape[1]
    seen, weight = state.astype(wide), weight[:, None, None].astype(wide)
    taps = (alike(w, segment_ids, seen[:, w : w + length] * weight[w]) for w in range(before + 1))
    y = _epilogue(caller, activation)(sum(taps, jnp.zeros_like(x, wide)), *(() if bias is None else (bias,)))
    y = y.astype(x.dtype)
    if return_final_state:
        last = jnp.broadcast_to(ids[:, -1:], (x.shape[0], before))
        return y, alike(length, last, state[:, length:])
    return y


@api_boundary("causal_conv1d_update")
def causal_conv1d_update(
    x: jax.Array,
    state: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    *,
    activation: Activation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """One position of `causal_conv1d`, as decoding has it.

    Args:
      x: array of shape (batch, channels).
      state: what comes before it: array of shape (batch, width - 1, channels).
      weight: as in `causal_conv1d`.
      bias: likewise.
      activation: likewise.

    Returns:
      y, of x's shape and dtype, and what comes before the next position, of the state's dtype, to which x is rounded
      there and not for y.

    Raises:
      TypeError, ValueError: shapes or dtypes do not fit.

    Example:
      >>> import jax.numpy as jnp, jaxdnn
      >>> y, state = jaxdnn.causal_conv1d_update(jnp.ones((2, 8)), jnp.zeros((2, 3, 8)), jnp.ones((4, 8)))
      >>> y.shape, state.shape
      ((2, 8), (2, 3, 8))
    """
    caller = "causal_conv1d_update"
    x = as_array(f"{caller}: x", x)
    if x.ndim != 2:
        raise ValueError(f"{caller}: x must have shape (batch, channels); got {x.shape}")
    weight, bias = _checked(caller, x, weight, bias, activation)
    state = _floating(caller, "state", state, (x.shape[0], weight.shape[0] - 1, x.shape[1]))
    wide = accumulator(x.dtype, x.dtype)
    seen = jnp.concatenate([state.astype(wide), x[:, None].astype(wide)], 1)
    y = _epilogue(caller, activation)(jnp.sum(seen * weight[None].astype(wide), 1), *(() if bias is None else (bias,)))
    return y.astype(x.dtype), jnp.concatenate([state, x[:, None].astype(state.dtype)], 1)[:, 1:]


def _epilogue(caller: str, activation: Activation | None) -> Callable[..., jax.Array]:
    def biased(acc: jax.Array, bias: jax.Array | None = None) -> jax.Array:
        acc = acc if bias is None else acc + jnp.expand_dims(bias.astype(acc.dtype), range(acc.ndim - 1))
        if activation is None:
            return acc
        y = activation(acc)
        if getattr(y, "shape", None) != acc.shape:
            raise ValueError(
                f"{caller}: activation must return an array of the shape that it is given, {acc.shape}; got {y!r}"
            )
        if jnp.issubdtype(y.dtype, jnp.complexfloating):
            raise TypeError(f"{caller}: activation must return real numbers; got {y.dtype.name}")
        return y.astype(acc.dtype)

    return biased


def _checked(caller: str, x: jax.Array, weight: Any, bias: Any, activation: Any) -> tuple[jax.Array, jax.Array | None]:
    """The weight and the bias as arrays that fit x."""
    weight = as_array(f"{caller}: weight", weight)
    if weight.ndim != 2 or weight.shape[0] < 1 or weight.shape[1] != x.shape[-1]:
        raise ValueError(
            f"{caller}: weight must have shape (width, channels), with the {x.shape[-1]} channels of x; got "
            f"{weight.shape}"
        )
    if not jnp.issubdtype(x.dtype, jnp.floating) or weight.dtype != x.dtype:
        raise TypeError(
            f"{caller}: x and weight must have one floating dtype; got {x.dtype.name} and {weight.dtype.name}"
        )
    if activation is not None and not callable(activation):
        raise TypeError(f"{caller}: activation must be a function of an array, as jax.nn.silu; got {activation!r}")
    return weight, None if bias is None else _floating(caller, "bias", bias, weight.shape[1:])


def _floating(caller: str, name: str, value: Any, shape: tuple[int, ...]) -> jax.Array:
    array = _of_shape(caller, name, value, shape)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"{caller}: {name} must have a floating dtype; got {array.dtype.name}")
    return array


def _of_shape(caller: str, name: str, value: Any, shape: tuple[int, ...]) -> jax.Array:
    array = as_array(f"{caller}: {name}", value)
    if array.shape != shape:
        raise ValueError(f"{caller}: {name} must have shape {shape}; got {array.shape}")
    return array
