"""Transformations of a case's function, as `check` takes them, and the arguments that they get."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

# The size of a mapped axis.
MAPPED = 3


def primals(case):
    return case.primals()


def as_one(case):
    return (case.primals(),)


def with_tangents(case):
    return case.primals(), case.tangents()


def with_cotangents(case):
    return case.primals(), case.cotangents()


def forward(function, *arrays):
    return function(*arrays)


def jvp(function, primals, tangents):
    return jax.jvp(function, primals, tangents)


def vjp(function, primals, cotangents):
    outputs, pull_back = jax.vjp(function, *primals)
    return outputs, pull_back(cotangents)


def stacked(case, axes, mapped=MAPPED):
    """Primals; where `axes` has a number, as many different ones as are mapped, along that axis."""
    several = [case.replace(seed=seed).primals() for seed in range(mapped)]
    pairs = zip(axes, zip(*several, strict=True), strict=True)
    return tuple(arrays[0] if axis is None else np.stack(arrays, axis) for axis, arrays in pairs)


def weighted(function):
    """A scalar of all the outputs, with cotangents that differ everywhere."""

    def loss(*arrays):
        outputs = function(*arrays)
        return sum(jnp.sum(jnp.sin(output * (i + 1)).astype(jnp.float32)) for i, output in enumerate(outputs))

    return loss


def every(axes):
    return tuple(range(len(axes)))


@functools.cache
def vmapped(axes):
    """Forward, tangent and gradient under vmap, and the gradient of vmap, in one program."""

    def transform(function, arrays):
        gradient = jax.grad(weighted(function), every(axes))

        def tangent(*arrays):
            return jax.jvp(function, arrays, tuple(jnp.cos(array) for array in arrays))[1]

        return {
            "vmap": jax.vmap(function, axes)(*arrays),
            "vmap of jvp": jax.vmap(tangent, axes)(*arrays),
            "vmap of grad": jax.vmap(gradient, axes)(*arrays),
            "grad of vmap": jax.grad(weighted(jax.vmap(function, axes)), every(axes))(*arrays),
        }

    return transform


@functools.cache
def stacked_by(axes):
    return lambda case: (stacked(case, axes),)
