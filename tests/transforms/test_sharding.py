"""Sharded jit: the partitioner splits calls along the dimensions that an op allows, and gathers nothing else."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from checking.cases import BF16, F32, NormCase
from checking.compare import as_tuple, assert_close
from checking.sharding import collectives
from checking.transforms import vjp, with_cotangents

CASE = NormCase("layer_norm", (8, 12, 16), scale=F32, bias=F32, residual=F32, statistics=True)


def make_mesh(cpus, kind):
    return jax.make_mesh((2, 2), ("a", "b"), axis_types=(kind, kind), devices=cpus)


def compile_and_check(mesh, spec, case, transform=vjp):
    """`transform` of the case with x and everything of its shape sharded by `spec`; the compiled program's text."""

    def placed(name, array):
        array_spec = P() if name in ("scale", "bias") else P(*spec[: array.ndim])
        return jax.device_put(array, NamedSharding(mesh, array_spec))

    primals, cotangents = with_cotangents(case)
    primals = tuple(map(placed, case.operands, primals))
    cotangents = tuple(map(placed, case.outputs, cotangents))
    with jax.set_mesh(mesh):
        compiled = jax.jit(functools.partial(transform, as_tuple(case.call))).lower(primals, cotangents).compile()
        assert_close(compiled(primals, cotangents), transform, case, with_cotangents)
    return compiled.as_text()


def native_calls(text):
    return re.findall(r'custom_call_target="jaxdnn_host"', text)


ROWS = [P("a"), P(("a", "b")), P("a", "b"), P(None, "b"), P(None, ("a", "b"))]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("spec", ROWS, ids=str)
def test_rows_are_split_without_communication(cpus, spec, kind):
    text = compile_and_check(make_mesh(cpus, kind), spec, CASE)
    # The gradients of scale and bias are summed over the devices, and nothing else is sent.
    assert set(collectives(text)) == {"all-reduce"}
    assert len(native_calls(text)) == 2, "each device runs its share forward and backward natively"
    shares = 2 if len(jax.tree.leaves(tuple(spec))) == 1 else 4
    rows = 8 * 12 // shares
    forward = next(line for line in text.splitlines() if "jaxdnn_host" in line)
    sizes = [int(np.prod(list(map(int, dims.split(","))))) for dims in re.findall(r"f32\[([\d,]+)\]", forward)]
    assert rows * 16 in sizes
    assert max(sizes) == rows * 16, "the custom call works on one device's share"


@pytest.mark.parametrize("spec", [P("a"), P("a", "b")], ids=str)
def test_forward_sends_nothing(cpus, spec):
    def forward(function, primals, cotangents):
        del cotangents
        return function(*primals)

    text = compile_and_check(make_mesh(cpus, AxisType.Auto), spec, CASE, forward)
    assert collectives(text) == {}
    assert len(native_calls(text)) == 1


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("spec", [P(None, None, "a"), P("a", None, "b")], ids=str)
def test_split_columns_are_right(cpus, spec, kind):
    """A row that lies on several devices is gathered: slower, but right."""
    compile_and_check(make_mesh(cpus, kind), spec, CASE)


@pytest.mark.parametrize("spec", [P(None, "a"), P(("b", "a")), P("b", "a")], ids=str)
def test_a_residual_that_asks_for_the_same_axis(cpus, spec):
    mesh = make_mesh(cpus, AxisType.Auto)
    case = NormCase("rms_norm", (8, 12, 16), residual=F32)
    x, residual = (
        jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(case.primals(), (P("a"), spec), strict=True)
    )
    with jax.set_mesh(mesh):
        actual = jax.jit(case.call)(x, residual)
    for one, other in zip(actual, case.call(*case.primals()), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


def test_normalized_axis_in_front(cpus):
    """Here the axis that is normalized comes first, and the one that is sharded last."""
    case = NormCase("rms_norm", (6, 8), axis=0, x=BF16, scale=F32)
    compile_and_check(make_mesh(cpus, AxisType.Auto), P(None, "a"), case)


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
