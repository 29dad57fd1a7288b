"""Products over several devices that need more than the table says: a sum in a `shard_map`, and `out_sharding`."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxdnn
from checking.cases import BF16, F32
from checking.pointwise.cases import ACTIVATIONS
from checking.sharding import collectives, native_calls


def test_contraction_inside_shard_map(cpus):
    """A column-parallel layer and a row-parallel one, with the sum over the devices in between them and the result."""
    mesh = jax.make_mesh((4,), ("k",), axis_types=(AxisType.Auto,), devices=cpus)
    random = np.random.default_rng(0)
    x, first, second = (random.standard_normal(shape).astype(np.float32) for shape in ((6, 8), (8, 12), (12, 5)))

    def mlp(x, first, second):
        hidden = jaxdnn.matmul(x, first, epilogue=jax.nn.silu, precision="highest")
        return jaxdnn.matmul(hidden, second, precision="highest")

    def parallel(x, first, second):
        return jax.lax.psum(mlp(x, first, second), "k")

    specs = (P(), P(None, "k"), P("k", None))
    sharded = jax.shard_map(parallel, mesh=mesh, in_specs=specs, out_specs=P())

    def gradient(function):
        return jax.jit(jax.grad(lambda *arrays: jnp.sum(jnp.sin(function(*arrays))), (0, 1, 2)))(x, first, second)

    for one, other in zip(gradient(sharded), gradient(mlp), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


EPILOGUES = {
    **ACTIVATIONS,
    "mask": lambda acc: jnp.where(jnp.tri(*acc.shape, dtype=bool), acc, 0),
    "choice": lambda acc, bias: jnp.where(acc > 0, acc, bias),
    "positions": lambda acc: acc * jax.lax.broadcasted_iota(acc.dtype, acc.shape, 0),
    "sum of rows": lambda acc, bias: jnp.sum(jnp.where(acc > bias, acc, 0), axis=0),
    "largest of each row": lambda acc: jnp.max(jax.nn.relu(acc), axis=1),
    "transposed": lambda acc, bias: jax.nn.elu(acc + bias[None].T.T),
    "two results": lambda acc, bias: (acc + bias, jnp.min(acc)),
}


@pytest.mark.parametrize("columns", ["b", None])
@pytest.mark.parametrize("name", EPILOGUES)
def test_explicit_types_are_those_of_the_same_function(cpus, name, columns):
    """Of results and gradients; where b is whole, the bias alone says how columns are split."""
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2, devices=cpus)
    epilogue = EPILOGUES[name]
    operands = [((16,), P("b"))] if "bias" in inspect.signature(epilogue).parameters else []

    def types(function):
        def loss(*arrays):
            return sum(jnp.sum(y) for y in jax.tree.leaves(function(*arrays)))

        found = jax.make_jaxpr(lambda *arrays: (function(*arrays), jax.grad(loss, (0, 1))(*arrays)))(*arrays)
        return [str(aval) for aval in found.out_avals]

    with jax.set_mesh(mesh):
        arrays = [((8, 12), P("a")), ((12, 16), P(None, columns)), *operands]
        arrays = [jax.ShapeDtypeStruct(shape, F32, sharding=NamedSharding(mesh, spec)) for shape, spec in arrays]
        expected = types(lambda a, b, *operands: epilogue(a @ b, *operands))
        assert types(functools.partial(jaxdnn.matmul, epilogue=epilogue)) == expected


# ------------------------------------------------------------ out_sharding


def with_out_sharding(cpus, call):
    """`call` of a and b whose contracted dimension is split over two devices."""
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2, devices=cpus)
    with jax.set_mesh(mesh):
        a = jax.device_put(jnp.ones((4, 8), BF16), NamedSharding(mesh, P("a", "b")))
        b = jnp.ones((8, 6), BF16).at[0].set(1.0078125)
        b = jax.device_put(b, NamedSharding(mesh, P("b", None)))
        return jax.jit(functools.partial(call, out_sharding=P("a", None)))(a, b)


def of_vectors(a, b, **given):
    return jaxdnn.dot_general(a, b, (((1,), (0,)), ((), ())), **given)


@pytest.mark.parametrize("call", [jaxdnn.matmul, of_vectors])
def test_the_epilogue_follows_the_sum_over_devices(cpus, call):
    """And nothing has rounded that, or its parts: bfloat16 has no number between 4 and 4.03125."""
    y = with_out_sharding(cpus, functools.partial(call, epilogue=lambda acc: (acc - 8) * 128))
    assert (y.dtype, y.sharding.spec) == (BF16, P("a", None))
    np.testing.assert_array_equal(y.astype(F32), np.ones((4, 6)))
    wide = with_out_sharding(cpus, functools.partial(call, epilogue=lambda acc: acc / 64, out_dtype=F32))
    np.testing.assert_array_equal(wide, np.full((4, 6), 8.0078125 / 64, F32))
    assert with_out_sharding(cpus, call).dtype == BF16


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"epilogue": 3}, TypeError),
        ({"operands": (1.0,)}, ValueError),
        ({"operands": (1.0,), "epilogue": jnp.add, "input_output_aliases": {0: 0}}, ValueError),
    ],
)
def test_out_sharding_with_bad_input(cpus, given, expected):
    with pytest.raises(expected, match=r"^dot_general: "):
        with_out_sharding(cpus, functools.partial(of_vectors, **given))


def test_out_sharding_without_fallback(cpus):
    with jaxdnn.options(fallback=False):
        assert with_out_sharding(cpus, jaxdnn.matmul).shape == (4, 6)
        with pytest.raises(jaxdnn.NoEngineError, match="out_sharding"):
            with_out_sharding(cpus, functools.partial(jaxdnn.matmul, epilogue=jnp.sin))


@pytest.mark.parametrize(
    "of_result", [P("a", None), P("a", "b"), P(("a", "b"), None), P(None, None), P(None, "a")], ids=str
)
@pytest.mark.parametrize("mapped", [False, True])
def test_out_sharding_is_the_kernels(cpus, of_result, mapped):
    """With its gradients, and no more collectives than XLA's product has."""
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2, devices=cpus)
    random = np.random.default_rng(0)

    def gradients(matmul):
        def function(a, b):
            each = functools.partial(matmul, out_sharding=of_result)
            return (jax.vmap(each, (0, None)) if mapped else each)(a, b)

        def both(a, b):
            y, pull_back = jax.vjp(function, a, b)
            return y, pull_back(jnp.cos(y))

        return both

    with jax.set_mesh(mesh):
        a = random.standard_normal((3, 16, 32) if mapped else (16, 32)).astype(F32)
        a = jax.device_put(a, NamedSharding(mesh, P(*[None] * mapped, "a", "b")))
        b = jax.device_put(random.standard_normal((32, 24)).astype(F32), NamedSharding(mesh, P("b", None)))
        ours, plain = (jax.jit(gradients(f)).lower(a, b).compile() for f in (jaxdnn.matmul, jnp.matmul))
        assert len(native_calls(ours.as_text())) == 3
        if of_result != P(None, None):  # of which XLA gathers the operands first
            assert sum(collectives(ours.as_text()).values()) <= sum(collectives(plain.as_text()).values())
        for got, want in zip(jax.tree.leaves(ours(a, b)), jax.tree.leaves(plain(a, b)), strict=True):
            assert jax.typeof(got) == jax.typeof(want)
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("collective", ["psum", "pcast"])
def test_a_collective_in_an_epilogue_is_no_kernels(cpus, collective):
    mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,), devices=cpus[:2])
    keywords = {"to": "varying"} if collective == "pcast" else {}

    def product(a, b):
        return jaxdnn.matmul(a, b, epilogue=lambda acc: getattr(jax.lax, collective)(acc, "i", **keywords))

    sharded = jax.shard_map(product, mesh=mesh, in_specs=(P(), P()), out_specs=P("i"))
    with pytest.raises(ValueError, match=r"no collectives, as .*; apply them to what the kernel returns"):
        sharded(jnp.ones((2, 4)), jnp.ones((4, 6)))


def test_what_an_epilogue_asserts_is_its_own_in_shard_map(cpus):
    mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,), devices=cpus[:2])

    def refusing(acc):
        assert acc.ndim > 2, "the user's own words"
        return acc

    def product(a, b):
        return jaxdnn.matmul(a, b, epilogue=refusing)

    with pytest.raises(AssertionError, match="the user's own words"):
        jax.shard_map(product, mesh=mesh, in_specs=(P(), P()), out_specs=P("i"))(jnp.ones((2, 4)), jnp.ones((4, 6)))
