"""Attention to keys that lie apart: parts are joined by log-sum-exps, and gradients take those of the whole."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxdnn
from checking.cases import AttentionCase
from checking.cases.dtypes import BF16
from checking.compare import assert_close, engines
from checking.transforms import vjp, with_cotangents
from jaxdnn.config import Options
from jaxdnn.engines.attention.problem import Band
from jaxdnn.primitives.attention.spec import AttentionSpec

attention = jaxdnn.dot_product_attention
on_every_engine = pytest.mark.parametrize("engine", engines("attention", "cpu"))
LENGTH = 8
CASES = [
    AttentionCase(queries=LENGTH, keys=LENGTH, heads=4, key_heads=2, causal=True, residual=True),
    AttentionCase(queries=LENGTH, keys=LENGTH, window=(3, 1), residual=True, dtype=BF16),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@on_every_engine
def test_parts_are_joined_with_all_derivatives(engine, case):
    """In order of arrival; queries and keys of some parts see nothing of each other."""
    positions = jnp.arange(LENGTH)

    def by_parts(query, key, value):
        joined = None
        for part in (slice(5, 8), slice(0, 2), slice(2, 5)):
            out, log_sum_exp = attention(
                query,
                key[:, part],
                value[:, part],
                positions=(positions, positions[part]),
                is_causal=case.causal,
                local_window_size=case.window,
                return_residual=True,
            )
            one = out.astype(jnp.float32), log_sum_exp
            joined = one if joined is None else jaxdnn.combine_attention(joined, one)
        out, log_sum_exp = joined
        return out.astype(query.dtype), log_sum_exp

    with jaxdnn.options(engine=engine):
        found = jax.jit(functools.partial(vjp, by_parts))(*with_cotangents(case))
    assert_close(found, vjp, case, with_cotangents, surroundings=True)


def test_parts_that_saw_nothing_are_joined():
    out, sums = jnp.zeros((1, 2, 1, 4)), jnp.full((1, 2, 1), -jnp.inf)
    other = (jnp.ones((1, 2, 1, 4)), jnp.array([[[0.5], [-jnp.inf]]]))
    joined, pull_back = jax.vjp(jaxdnn.combine_attention, (out, sums), other)
    np.testing.assert_array_equal(joined[0], other[0] * jnp.array([1.0, 0.0])[None, :, None, None])
    np.testing.assert_array_equal(joined[1], other[1])
    gradients = pull_back(jax.tree.map(jnp.ones_like, joined))
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(gradients))


def test_sinks_are_in_one_part():
    """What they add to a sum is there once."""
    case = AttentionCase(sinks=True, residual=True)
    query, key, value, sinks = (jnp.asarray(array) for array in case.primals())
    parts = [
        attention(query, key[:, part], value[:, part], sinks=given, return_residual=True)
        for part, given in ((slice(0, 3), sinks), (slice(3, 7), None))
    ]
    found = jaxdnn.combine_attention(*parts)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), found, case.call(*case.primals()))


@pytest.mark.parametrize(("case", "kind"), [(CASES[0], AxisType.Auto), (CASES[1], AxisType.Explicit)], ids=str)
@on_every_engine
def test_a_ring_of_devices(cpus, engine, case, kind):
    """Keys and values travel from device to device, and so do, in the backward pass, their gradients: in float32."""
    ring = P(None, "ring")
    mesh = jax.make_mesh((4,), ("ring",), axis_types=(kind,), devices=cpus)
    onward = [(i, (i + 1) % 4) for i in range(4)]

    def of_device(query, key, value):
        positions = jax.lax.axis_index("ring") * query.shape[1] + jnp.arange(query.shape[1])
        travelling, joined = (key.astype("float32"), value.astype("float32"), positions), None
        for _ in onward:
            key, value, places = travelling
            out, log_sum_exp = attention(
                query,
                key.astype(query.dtype),
                value.astype(query.dtype),
                positions=(positions, places),
                is_causal=case.causal,
                local_window_size=case.window,
                return_residual=True,
            )
            one = out.astype("float32"), log_sum_exp
            joined = one if joined is None else jaxdnn.combine_attention(joined, one)
            travelling = jax.lax.ppermute(travelling, "ring", onward)
        out, log_sum_exp = joined
        return out.astype(query.dtype), log_sum_exp

    whole = jax.shard_map(of_device, in_specs=(ring, ring, ring), out_specs=ring)
    with jax.set_mesh(mesh), jaxdnn.options(engine=engine):
        given = jax.device_put(with_cotangents(case), jax.NamedSharding(mesh, ring))
        found = jax.jit(functools.partial(vjp, whole))(*given)
    assert_close(found, vjp, case, with_cotangents, surroundings=True)


@on_every_engine
def test_gradients_of_parts_take_what_was_computed_of_the_whole(engine):
    """Of some keys alone, the backward kernel gives their gradients, and their share of the query's: nothing is joined,
    where the log-sum-exp and the result are those of all keys.
    """
    case = CASES[0]
    (query, key, value), (d_out, d_sums) = jax.tree.map(jnp.asarray, with_cotangents(case))
    out, sums = case.call(query, key, value)
    spec = AttentionSpec(
        direction="backward",
        active=("query", "key", "value"),
        seeded=("out", "log_sum_exp"),
        optional=("key_positions", "query_positions"),
        scale=0.5,
        band=Band(None, 0),
        statistics=True,
        options=Options(engine=engine, fallback=False),
    )

    def grouped(array):
        return array.reshape(2, LENGTH, 2, 2, *array.shape[3:])

    whole = {"query": grouped(query), "out": grouped(out), "d_out": grouped(d_out)}
    whole |= {
        name: jnp.moveaxis(grouped(one), 1, -1) for name, one in (("log_sum_exp", sums), ("d_log_sum_exp", d_sums))
    }
    positions = jnp.arange(LENGTH, dtype="int32")[None]

    def gradients(part):
        arrays = {"key": key[:, part], "value": value[:, part], "key_positions": positions[:, part]}
        arrays |= whole | {"query_positions": positions}
        return spec.bind(*(arrays[name] for name in spec.operands))

    d_query, d_key, d_value = zip(*(gradients(part) for part in (slice(0, 3), slice(3, 4), slice(4, 8))), strict=True)
    found = sum(d_query).reshape(query.shape), jnp.concatenate(d_key, 1), jnp.concatenate(d_value, 1)
    assert_close(((out, sums), found), vjp, case, with_cotangents, surroundings=True)
