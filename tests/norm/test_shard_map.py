"""Norms in a `shard_map`: columns that stay with the partitioner, parameters of each device, vmap on both sides."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxdnn
from checking.cases import F32, NormCase

ROWS, WHOLE = P("rows"), P()


def test_partially_manual_with_the_columns_sharded(cpus):
    mesh = jax.make_mesh((2, 2), ("rows", "model"), axis_types=(AxisType.Auto,) * 2, devices=cpus)
    case = NormCase("layer_norm", (8, 12), scale=F32, bias=F32)
    x, scale, bias = case.primals()
    function = jax.shard_map(
        case.call, in_specs=(P("rows"), P(), P()), out_specs=P("rows"), axis_names={"rows"}, mesh=mesh
    )
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, NamedSharding(mesh, P("rows", "model")))
        y = jax.jit(function)(placed, scale, bias)
    np.testing.assert_allclose(y, case.call(x, scale, bias), rtol=1e-5, atol=1e-5)


def test_a_parameter_of_each_device(cpus):
    """Experts: every device has its own scale, whose gradient stays on it."""
    mesh = jax.make_mesh((4,), ("rows",), axis_types=(AxisType.Auto,), devices=cpus)
    x = np.random.default_rng(0).standard_normal((8, 12)).astype(np.float32)
    scales = np.random.default_rng(1).standard_normal((4, 12)).astype(np.float32)

    def sharded(x, scales):
        return jax.shard_map(lambda x, s: jaxdnn.rms_norm(x, s[0]), in_specs=(ROWS, ROWS), out_specs=ROWS, mesh=mesh)(
            x, scales
        )

    def separate(x, scales):
        return jax.vmap(jaxdnn.rms_norm)(x.reshape(4, 2, 12), scales).reshape(8, 12)

    def gradient(function):
        return jax.jit(jax.grad(lambda *a: jnp.sum(jnp.sin(function(*a))), (0, 1)))(x, scales)

    for one, other in zip(gradient(sharded), gradient(separate), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_inside_vmap_and_outside(cpus):
    mesh = jax.make_mesh((4,), ("rows",), axis_types=(AxisType.Auto,), devices=cpus)
    x = np.random.default_rng(0).standard_normal((3, 8, 12)).astype(np.float32)
    scale = np.random.default_rng(1).standard_normal((3, 12)).astype(np.float32)
    expected = jax.vmap(jaxdnn.rms_norm)(x, scale)
    inside = jax.shard_map(
        jax.vmap(jaxdnn.rms_norm), in_specs=(P(None, "rows"), P()), out_specs=P(None, "rows"), mesh=mesh
    )
    outside = jax.vmap(jax.shard_map(jaxdnn.rms_norm, in_specs=(ROWS, WHOLE), out_specs=ROWS, mesh=mesh))
    for function in (inside, outside):
        np.testing.assert_allclose(jax.jit(function)(x, scale), expected, rtol=1e-5, atol=1e-5)


def test_replication_is_checked(cpus):
    """With the check on, a result that varies over an axis can't be declared replicated."""
    mesh = jax.make_mesh((4,), ("rows",), axis_types=(AxisType.Auto,), devices=cpus)
    function = jax.shard_map(jaxdnn.rms_norm, in_specs=(ROWS,), out_specs=WHOLE, mesh=mesh)
    with pytest.raises(ValueError, match="out_specs"):
        jax.jit(function)(np.ones((8, 12), np.float32))
