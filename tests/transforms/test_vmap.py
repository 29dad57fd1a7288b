"""Mapped axes: every subset of the operands, nested, and together with derivatives."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checking.calls import native_calls
from checking.cases import BF16, F32, F64, SMALL, NormCase
from checking.compare import as_tuple, check, engines, platform, runs
from checking.transforms import MAPPED, stacked, stacked_by, vmapped, weighted

LAYER = NormCase("layer_norm", (2, 5), scale=F32, bias=F32, residual=F32, statistics=True)
RMS = NormCase("rms_norm", (2, 5), x=BF16, scale=F32)
AXIS = NormCase("layer_norm", (3, 2, 4), axis=(0, 2), scale=F32)


def subsets(case):
    """All in_axes that map something."""
    every = itertools.product((0, None), repeat=len(case.operands))
    return [axes for axes in every if any(axis is not None for axis in axes)]


# The rules are the same for every engine; rms_norm, which is quicker to compile, shows it.
@pytest.mark.parametrize("engine", engines()[:1])
@pytest.mark.parametrize("axes", subsets(LAYER), ids=str)
def test_every_subset_of_layer_norm(axes, engine):
    check(vmapped(axes), LAYER, stacked_by(axes), engine, surroundings=True)


@pytest.mark.parametrize("engine", engines())
@pytest.mark.parametrize("axes", subsets(RMS), ids=str)
def test_every_subset_of_rms_norm(axes, engine):
    # The gradient of a parameter in bfloat16 would be summed over the mapped axis in bfloat16: that is JAX's own rule.
    check(vmapped(axes), RMS.replace(x=F32), stacked_by(axes), engine, surroundings=True)


@pytest.mark.parametrize("engine", engines())
@pytest.mark.parametrize("axes", [(1, None), (3, 0), (-1, 1)], ids=str)
def test_mapped_axis_anywhere(axes, engine):
    check(vmapped(axes), AXIS, stacked_by(axes), engine, surroundings=True)


@functools.cache
def out_of_the_last(axes):
    return lambda function, arrays: jax.vmap(function, axes, out_axes=-1)(*arrays)


@pytest.mark.parametrize("engine", engines())
def test_bfloat16(engine):
    check(out_of_the_last((0, None)), RMS, stacked_by((0, None)), engine, surroundings=True)


def nested_arguments(case):
    """x has both mapped axes, scale the inner one, bias the outer one, the residual none."""
    x = np.stack([np.stack([case.replace(seed=2 * i + j).primals()[0] for j in range(2)]) for i in range(MAPPED)])
    _, residual, scale, bias = case.primals()
    return ((x, residual, np.stack([scale, 2 * scale]), np.stack([bias, -bias, 3 * bias])),)


def nested(function, arrays):
    inner, outer = (0, None, 0, None), (0, None, None, 0)
    gradient = jax.grad(weighted(function), (0, 1, 2, 3))
    twice = jax.vmap(jax.vmap(function, inner), outer)
    return {
        "vmap of vmap": twice(*arrays),
        "vmap of vmap of grad": jax.vmap(jax.vmap(gradient, inner), outer)(*arrays),
        "vmap of grad of vmap": jax.vmap(jax.grad(weighted(jax.vmap(function, inner)), (0, 1, 2, 3)), outer)(*arrays),
        "grad of vmap of vmap": jax.grad(weighted(twice), (0, 1, 2, 3))(*arrays),
    }


@pytest.mark.parametrize("engine", engines())
@pytest.mark.parametrize("dtype", [F32, F64])
def test_nested(dtype, engine):
    case = NormCase("layer_norm", (2, 5), x=dtype, residual=dtype, scale=dtype, bias=dtype)
    check(nested, case, nested_arguments, engine, surroundings=True)


def jacobians(function, arrays):
    every = tuple(range(len(arrays)))
    return jax.jacrev(function, every)(*arrays), jax.jacfwd(function, every)(*arrays)


@pytest.mark.parametrize(("case", "engine"), runs(SMALL))
def test_jacobians(case, engine):
    check(jacobians, case, lambda case: (case.primals(),), engine, surroundings=True)


def hessian_of_mapped(function, arrays):
    def loss(x, scale):
        return weighted(jax.vmap(function, (0, None)))(x, scale)

    return jax.hessian(loss, (0, 1))(*arrays)


@pytest.mark.parametrize("engine", engines())
def test_hessian_of_vmap(engine):
    check(hessian_of_mapped, NormCase("rms_norm", (2, 3), scale=F32), stacked_by((0, None)), engine, surroundings=True)


def test_zero_mapped():
    case = NormCase("layer_norm", (2, 5), scale=F32)
    x = np.zeros((0, 2, 5), np.float32)
    gradient = jax.grad(lambda x, scale: jnp.sum(case.call(x, scale)), (0, 1))
    d_x, d_scale = jax.vmap(gradient, (0, None))(x, np.ones(5, np.float32))
    assert (d_x.shape, d_scale.shape) == ((0, 2, 5), (0, 5))


@pytest.mark.skipif(platform() not in ("cpu", "cuda"), reason="no native engine runs on this platform")
@pytest.mark.parametrize("axes", [(0, None, None), (0, 0, None), (0, 0, 0), (None, 0, 0)], ids=str)
def test_mapped_calls_run_natively(axes):
    case = NormCase("layer_norm", (4, 24), scale=F32, bias=F32)
    gradient = jax.value_and_grad(weighted(as_tuple(case.call)), (0, 1, 2))
    text = jax.jit(jax.vmap(gradient, axes)).lower(*stacked(case, axes)).compile().as_text()
    assert native_calls(text) == 2


def test_rows_are_absorbed():
    """An axis that only x carries is but more rows: nothing is mapped, and scale is not copied."""
    case = NormCase("rms_norm", (4, 8), scale=F32)
    x, scale = stacked(case, (0, None))
    jaxpr = jax.make_jaxpr(jax.vmap(case.call, (0, None)))(x, scale)
    (equation,) = jaxpr.eqns
    assert equation.params["spec"].batch == ()
    assert [v.aval.shape for v in equation.invars] == [(3, 4, 8), (8,)]
