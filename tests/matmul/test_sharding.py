"""Products and their gradients over several devices, by the partitioner, by `shard_map` and by `out_sharding`."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxdnn
from checking.cases import BF16, F32
from checking.cases.matmul import product
from checking.compare import as_tuple, assert_close
from checking.sharding import collectives
from checking.transforms import vjp, with_cotangents

MLP = product((8, 12), (12, 16), epilogue="bias gelu", extras=(((16,), F32),))


def placed(mesh, specs, arrays):
    return tuple(jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(arrays, specs, strict=True))


def compiled_for(cpus, case, specs, transform, *, kind=AxisType.Auto):
    """The program of `transform` with the operands placed by `specs`, after its results are checked."""
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(kind, kind), devices=cpus)
    given = with_cotangents(case)
    with jax.set_mesh(mesh):
        operands = placed(mesh, specs, given[0])
        compiled = jax.jit(functools.partial(transform, as_tuple(case.call))).lower(operands, given[1]).compile()
        assert_close(compiled(operands, given[1]), transform, case, with_cotangents)
    return compiled.as_text()


def only_forward(function, primals, cotangents):
    del cotangents
    return function(*primals)


@pytest.mark.parametrize(
    ("specs", "expected"),
    [
        ((P("a"), P(), P()), set()),
        ((P(), P(None, "b"), P("b")), set()),
        ((P("a"), P(None, "b"), P("b")), set()),
        ((P(("a", "b")), P(), P()), set()),
    ],
    ids=str,
)
def test_rows_and_columns_are_split_without_communication(cpus, specs, expected):
    text = compiled_for(cpus, MLP, specs, only_forward)
    assert set(collectives(text)) == expected
    assert len(re.findall('custom_call_target="jaxdnn_host"', text)) == 1


@pytest.mark.parametrize("transform", [only_forward, vjp])
@pytest.mark.parametrize(
    "specs",
    [
        (P("a"), P("a"), P()),
        (P("a"), P(None, "a"), P("a")),
        (P(None, "a"), P(None, "a"), P()),
        (P(("a", "b")), P(None, "b"), P("b")),
        (P("b", "a"), P("a", "b"), P("a")),
    ],
    ids=str,
)
def test_operands_that_ask_for_one_axis_of_the_mesh(cpus, specs, transform):
    """As weights do that are split like the data (FSDP): one has it, and the others are gathered."""
    compiled_for(cpus, MLP, specs, transform)


def test_a_split_contraction_is_summed_over_the_devices(cpus):
    case = product((8, 12), (12, 16))
    text = compiled_for(cpus, case, (P(None, "a"), P("a", None)), only_forward)
    assert set(collectives(text)) == {"all-reduce"}
    assert len(re.findall('custom_call_target="jaxdnn_host"', text)) == 1


def test_an_epilogue_is_of_whole_sums(cpus):
    """gelu(x + y) is not gelu(x) + gelu(y): what is split is gathered, and the result is right."""
    compiled_for(cpus, MLP, (P(None, "a"), P("a", None), P()), only_forward)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_gradients_of_data_parallel_rows(cpus, kind):
    text = compiled_for(cpus, MLP, (P("a"), P(), P()), vjp, kind=kind)
    assert set(collectives(text)) <= {"all-reduce", "all-gather"}
    assert "all-reduce" in collectives(text)


@pytest.mark.parametrize("reduction", ["largest", "least of each row", "sum alone"])
def test_reductions_over_split_rows(cpus, reduction):
    compiled_for(cpus, product((8, 12), (12, 16), epilogue=reduction), (P("a"), P(None, "b")), only_forward)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_shard_map(cpus, kind):
    """With its check of replication: rows are split, and the gradients of what every device has are summed."""
    mesh = jax.make_mesh((4,), ("rows",), axis_types=(kind,), devices=cpus)
    rows, whole = P("rows"), P()
    given = with_cotangents(MLP)
    function = jax.shard_map(as_tuple(MLP.call), in_specs=(rows, whole, whole), out_specs=rows)
    with jax.set_mesh(mesh):
        operands = placed(mesh, (rows, whole, whole), given[0])
        actual = jax.jit(functools.partial(vjp, function))(operands, placed(mesh, (rows,), given[1]))
    assert_close(actual, vjp, MLP, with_cotangents)


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


# ------------------------------------------------------------ out_sharding


def with_out_sharding(cpus, call):
    """`call` of a and b whose contracted dimension is split over two devices."""
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2, devices=cpus)
    with jax.set_mesh(mesh):
        a = jax.device_put(jnp.ones((4, 8), BF16), NamedSharding(mesh, P("a", "b")))
        b = jax.device_put(jnp.full((8, 6), 1.0078125, BF16), NamedSharding(mesh, P("b", None)))
        return jax.jit(functools.partial(call, out_sharding=P("a", None)))(a, b)


def of_vectors(a, b, **given):
    return jaxdnn.dot_general(a, b, (((1,), (0,)), ((), ())), **given)


@pytest.mark.parametrize("call", [jaxdnn.matmul, of_vectors])
def test_out_sharding_is_xlas(cpus, call):
    """The epilogue is of sums that nothing has rounded: bfloat16 has no number between 8 and 8.0625."""
    y = with_out_sharding(cpus, functools.partial(call, epilogue=lambda sums: (sums - 8) * 16))
    assert (y.dtype, y.sharding.spec) == (BF16, P("a", None))
    np.testing.assert_array_equal(y.astype(F32), np.ones((4, 6)))
    wide = with_out_sharding(cpus, functools.partial(call, epilogue=lambda sums: sums / 64, out_dtype=F32))
    np.testing.assert_array_equal(wide, np.full((4, 6), 8.0625 / 64, F32))
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
    with pytest.raises(expected, match="matmul: "):
        with_out_sharding(cpus, functools.partial(of_vectors, **given))


def test_out_sharding_without_fallback(cpus):
    with jaxdnn.options(fallback=False), pytest.raises(jaxdnn.NoEngineError, match="out_sharding"):
        with_out_sharding(cpus, jaxdnn.matmul)
