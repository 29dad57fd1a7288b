"""Mapped axes: of every operand, anywhere, nested, and together with derivatives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checking.calls import expected_native_calls, native_calls
from checking.cases import TABLE
from checking.compare import as_tuple, check, needs_native, runs
from checking.transforms import MAPPED, as_one, stacked, stacked_by, vmapped, weighted


@pytest.mark.parametrize(("case", "axes", "engine"), runs(TABLE.mapped))
def test_vmap(case, axes, engine):
    check(vmapped(axes), case, stacked_by(axes), engine, surroundings=True)


@functools.cache
def out_of_the_last(axes):
    return lambda function, arrays: jax.vmap(function, axes, out_axes=-1)(*arrays)


@pytest.mark.parametrize(("case", "axes", "engine"), runs(TABLE.narrow))
def test_out_of_the_last_axis(case, axes, engine):
    check(out_of_the_last(axes), case, stacked_by(axes), engine, surroundings=True)


@functools.cache
def nested_by(inner, outer):
    def arguments(case):
        """Different arrays along each axis that is mapped."""

        def array(i, *seeds):
            return case.replace(seed=sum(seeds)).primals()[i]

        def along(i, *seeds):
            return array(i, *seeds) if inner[i] is None else np.stack([array(i, *seeds, j) for j in range(2)])

        def all_of(i):
            return along(i) if outer[i] is None else np.stack([along(i, 2 * j) for j in range(MAPPED)])

        return (tuple(map(all_of, range(len(case.operands)))),)

    return arguments


@functools.cache
def nested(inner, outer):
    def transform(function, arrays):
        every = tuple(range(len(arrays)))
        gradient = jax.grad(weighted(function), every)
        twice = jax.vmap(jax.vmap(function, inner), outer)
        return {
            "vmap of vmap": twice(*arrays),
            "vmap of vmap of grad": jax.vmap(jax.vmap(gradient, inner), outer)(*arrays),
            "vmap of grad of vmap": jax.vmap(jax.grad(weighted(jax.vmap(function, inner)), every), outer)(*arrays),
            "grad of vmap of vmap": jax.grad(weighted(twice), every)(*arrays),
        }

    return transform


@pytest.mark.parametrize(("case", "inner", "outer", "engine"), runs(TABLE.nested))
def test_nested(case, inner, outer, engine):
    check(nested(inner, outer), case, nested_by(inner, outer), engine, surroundings=True)


def jacobians(function, arrays):
    every = tuple(range(len(arrays)))
    return jax.jacrev(function, every)(*arrays), jax.jacfwd(function, every)(*arrays)


@pytest.mark.parametrize(("case", "engine"), runs(TABLE.small))
def test_jacobians(case, engine):
    check(jacobians, case, as_one, engine, surroundings=True)


def hessian_of_mapped(function, arrays):
    def loss(one, other):
        return weighted(jax.vmap(function, (0, None)))(one, other)

    return jax.hessian(loss, (0, 1))(*arrays)


@pytest.mark.parametrize(("case", "engine"), runs(TABLE.tiny))
def test_hessian_of_vmap(case, engine):
    check(hessian_of_mapped, case, stacked_by((0, None)), engine, surroundings=True)


@pytest.mark.parametrize("case", TABLE.tiny, ids=str)
def test_zero_mapped(case):
    one, other = case.primals()
    nothing = np.zeros((0, *one.shape), one.dtype)
    gradient = jax.grad(lambda one, other: jnp.sum(case.call(one, other)), (0, 1))
    d_one, d_other = jax.vmap(gradient, (0, None))(nothing, other)
    assert (d_one.shape, d_other.shape) == (nothing.shape, (0, *other.shape))


@needs_native
@pytest.mark.parametrize("axes", [(0, None, None), (0, 0, None), (0, 0, 0), (None, 0, 0)], ids=str)
@pytest.mark.parametrize("case", TABLE.plain, ids=str)
def test_mapped_calls_run_natively(case, axes):
    gradient = jax.value_and_grad(weighted(as_tuple(case.call)), (0, 1, 2))
    text = jax.jit(jax.vmap(gradient, axes)).lower(*stacked(case, axes)).compile().as_text()
    assert native_calls(text) == expected_native_calls(case, None, differentiated=True)
