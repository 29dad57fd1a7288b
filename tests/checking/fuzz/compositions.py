"""Transformations of functions of several arrays, each again such a function."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Function = Callable[..., Any]


def _total(function: Function) -> Function:
    return lambda *arrays: sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(function(*arrays)))


def _every(arrays: Sequence[Any]) -> tuple[int, ...]:
    return tuple(range(len(arrays)))


def _cosines(arrays: Any) -> Any:
    return jax.tree.map(jnp.cos, arrays)


def _vmapped(function: Function, axes: tuple[int | None, ...]) -> Function:
    def stacked(array: Any, axis: int | None) -> Any:
        return array if axis is None else jnp.stack([array, -array / 2], min(axis, array.ndim))

    def mapped(*arrays: Any) -> Any:
        own = [None if axis is None else min(axis, array.ndim) for array, axis in zip(arrays, axes, strict=True)]
        return jax.vmap(function, own)(*map(stacked, arrays, axes))

    return mapped


def _pulled_back(function: Function) -> Function:
    def pulled_back(*arrays: Any) -> Any:
        y, pull_back = jax.vjp(function, *arrays)
        return y, pull_back(_cosines(y))

    return pulled_back


def _linearized(function: Function) -> Function:
    def linearized(*arrays: Any) -> Any:
        y, push_forward = jax.linearize(function, *arrays)
        return y, push_forward(*_cosines(arrays)), push_forward(*arrays)

    return linearized


def _over(transform: Function) -> Function:
    """With respect to the bias, the smallest of the arrays."""
    return lambda function: lambda *arrays: transform(lambda bias: function(*arrays[:-1], bias))(arrays[-1])


def _scanned(function: Function) -> Function:
    """Over weights, with the rest closed over."""

    def scanned(x: Any, *rest: Any) -> Any:
        def step(carry: Any, weights: Any) -> Any:
            return carry / 2, function(carry, *weights)

        return lax.scan(step, x, [jnp.stack([array, array / 2]) for array in rest])

    return scanned


def _looped(function: Function) -> Function:
    def looped(*arrays: Any) -> Any:
        def step(i: Any, total: Any) -> Any:
            return jax.tree.map(jnp.add, total, function(arrays[0] / jnp.asarray(i + 1, arrays[0].dtype), *arrays[1:]))

        return lax.fori_loop(0, 2, step, jax.tree.map(jnp.zeros_like, function(*arrays)))

    return looped


def _while(function: Function) -> Function:
    def looped(*arrays: Any) -> Any:
        def step(state: Any) -> Any:
            i, x, _ = state
            return i + 1, x / 2, function(x, *arrays[1:])

        return lax.while_loop(lambda state: state[0] < 2, step, (0, arrays[0], function(*arrays)))[1:]

    return looped


def _branched(function: Function) -> Function:
    def branched(*arrays: Any) -> Any:
        branches = [function, lambda *arrays: jax.tree.map(lambda y: y / 2, function(*(a / 2 for a in arrays)))]
        return lax.switch((jnp.sum(arrays[-1]) > 0).astype("int32"), branches, *arrays)

    return branched


def _own_vjp(function: Function) -> Function:
    @jax.custom_vjp
    def ruled(*arrays: Any) -> Any:
        return function(*arrays)

    def backward(pull_back: Any, dy: Any) -> Any:
        return jax.tree.map(lambda d: 2 * d, pull_back(dy))

    ruled.defvjp(lambda *arrays: jax.vjp(function, *arrays), backward)
    return ruled


def _own_jvp(function: Function) -> Function:
    @jax.custom_jvp
    def ruled(*arrays: Any) -> Any:
        return function(*arrays)

    ruled.defjvp(lambda primals, tangents: jax.jvp(function, primals, tangents))
    return ruled


def _rematerialized(policy: Any) -> Function:
    return lambda function: jax.checkpoint(function, policy=policy)


POLICIES = {
    "all": None,
    "dots": jax.checkpoint_policies.dots_saveable,
    "dots without batches": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
}


@dataclass(frozen=True)
class Transform:
    """A transformation of functions of arrays.

    Attributes:
      apply: the transformation.
      mode: the derivative that it takes, "forward", "reverse", or "forward reverse"; else empty.
      ends: the derivatives that can't be taken of what it returns, likewise.
      larger: whether results have more dimensions than the function's.
    """

    apply: Function
    mode: str = ""
    ends: str = ""
    larger: bool = False


TRANSFORMS = {
    "jit": Transform(jax.jit),
    "grad": Transform(lambda f: lambda *arrays: jax.grad(_total(f), _every(arrays))(*arrays), "reverse"),
    "value_and_grad": Transform(lambda f: lambda *arrays: jax.value_and_grad(_total(f), (0, 3))(*arrays), "reverse"),
    "vjp": Transform(_pulled_back, "reverse"),
    "jvp": Transform(lambda f: lambda *arrays: jax.jvp(f, arrays, _cosines(arrays)), "forward"),
    "linearize": Transform(_linearized, "forward"),
    "jacrev": Transform(_over(jax.jacrev), "reverse", larger=True),
    "jacfwd": Transform(_over(jax.jacfwd), "forward", larger=True),
    "hessian": Transform(lambda f: _over(jax.hessian)(_total(f)), "forward reverse"),
    "scan": Transform(_scanned),
    "fori_loop": Transform(_looped),
    "while_loop": Transform(_while, ends="reverse"),
    "switch": Transform(_branched),
    "custom_vjp": Transform(_own_vjp, "reverse", ends="forward"),
    "custom_jvp": Transform(_own_jvp, "forward"),
    **{f"checkpoint saving {name}": Transform(_rematerialized(policy)) for name, policy in POLICIES.items()},
}
LOOPS = {"scan", "fori_loop", "while_loop", "switch"}
OTHERS = tuple(TRANSFORMS)
_AXES = tuple((a, b, b if c else None, c) for a in (0, 1, None) for b in (0, 2, None) for c in (0, None))
TRANSFORMS |= {
    f"vmap over {axes}": Transform(lambda f, axes=axes: _vmapped(f, axes))
    for axes in _AXES
    if any(axis is not None for axis in axes)
}
MAPPED = tuple(TRANSFORMS)[len(OTHERS) :]
