"""Norms under sharded jit: mapped axes, rows that can't be shared evenly, and shardings that flow through."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from checking.cases import F32, NormCase
from checking.compare import as_tuple, assert_close
from checking.sharding import collectives, make_mesh, native_calls
from checking.transforms import vjp, with_cotangents

CASE = NormCase("layer_norm", (8, 12, 16), scale=F32, bias=F32, residual=F32, statistics=True)


def vmapped(function, primals, cotangents):
    """vmap over the first axis of x, with parameters that are not mapped, as data parallelism by vmap has it."""
    x, *parameters = primals

    def gradient(x, cotangent):
        return jax.vjp(function, x, *parameters)[1]((cotangent,))

    return jax.vmap(gradient)(x, cotangents[0])


def test_vmap(cpus):
    case = NormCase("layer_norm", (6, 16), scale=F32, bias=F32)

    def stacked(case):
        several = [case.replace(seed=seed) for seed in range(4)]
        x = np.stack([one.primals()[0] for one in several])
        return (x, *case.primals()[1:]), (np.stack([one.cotangents()[0] for one in several]),)

    mesh = make_mesh(cpus, AxisType.Auto)
    primals, cotangents = stacked(case)
    sharded, whole = NamedSharding(mesh, P("a", "b")), NamedSharding(mesh, P())
    primals = tuple(jax.device_put(a, sharded if i == 0 else whole) for i, a in enumerate(primals))
    cotangents = (jax.device_put(cotangents[0], sharded),)
    with jax.set_mesh(mesh):
        compiled = jax.jit(functools.partial(vmapped, as_tuple(case.call))).lower(primals, cotangents).compile()
        assert_close(compiled(primals, cotangents), vmapped, case, stacked)
    assert set(collectives(compiled.as_text())) == {"all-reduce"}
    assert len(native_calls(compiled.as_text())) == 2


def test_spmd_axis_name(cpus):
    """vmap that is told which mesh axis its own axis lies on."""
    mesh = make_mesh(cpus, AxisType.Auto)
    case = NormCase("rms_norm", (6, 16), scale=F32)
    x = np.stack([case.replace(seed=seed).primals()[0] for seed in range(4)])
    scale = case.primals()[1]

    def gradient(x, scale):
        return jax.grad(lambda x, scale: jnp.sum(jnp.sin(case.call(x, scale))), (0, 1))(x, scale)

    with jax.set_mesh(mesh):
        placed = jax.device_put(x, NamedSharding(mesh, P("a")))
        got = jax.jit(jax.vmap(gradient, (0, None), spmd_axis_name="a"))(placed, scale)
    for one, other in zip(got, jax.vmap(gradient, (0, None))(x, scale), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_uneven_shards(cpus):
    """Sharding by constraint, with rows that four devices can't share evenly."""
    mesh = jax.make_mesh((4,), ("a",), axis_types=(AxisType.Auto,), devices=cpus)
    case = NormCase("layer_norm", (6, 16), scale=F32, bias=F32)
    primals, cotangents = with_cotangents(case)

    def constrained(function, primals, cotangents):
        x = jax.lax.with_sharding_constraint(primals[0], NamedSharding(mesh, P("a")))
        return vjp(function, (x, *primals[1:]), cotangents)

    with jax.set_mesh(mesh):
        actual = jax.jit(functools.partial(constrained, as_tuple(case.call)))(primals, cotangents)
    assert_close(actual, vjp, case, with_cotangents)


def test_a_step_of_training_keeps_its_shardings(cpus):
    """Sharding flows through the call in both directions without being asked for at its results."""
    mesh = make_mesh(cpus, AxisType.Auto)
    primals, cotangents = with_cotangents(CASE)
    with jax.set_mesh(mesh):
        x = jax.device_put(primals[0], NamedSharding(mesh, P("a", "b")))
        outputs, gradients = jax.jit(functools.partial(vjp, as_tuple(CASE.call)))((x, *primals[1:]), cotangents)
    assert outputs[0].sharding.spec == P("a", "b")
    assert gradients[0].sharding.spec == P("a", "b")
    assert gradients[2].sharding.is_fully_replicated
