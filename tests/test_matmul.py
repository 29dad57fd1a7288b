"""What is particular to the matmul family under JAX's transformations: what is mapped, sharded, donated and fused."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import native_calls
from cases import BF16, F32, F64
from checking import as_tuple, assert_close, check, engines, platform
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from matmul_cases import MatmulCase, product
from test_forward import forward, primals
from test_sharding import collectives
from test_vjp import arguments, vjp
from test_vmap import stacked, stacked_by, vmapped

import jaxdnn

LAYER = product((3, 4), (4, 2), epilogue="bias gelu", extras=(((2,), F32),))
DOT = MatmulCase("dot_general", (4, 3, 2), (3, 5, 2), numbers=(((1,), (0,)), ((2,), (2,))))
GATED = product((3, 4), (4, 2)).replace(kind="gated_linear_unit")
REDUCED = product((3, 4), (4, 2), epilogue="summed over rows", extras=(((3, 2), F32),))
needs_native = pytest.mark.skipif(platform() not in ("cpu", "cuda"), reason="no native engine runs on this platform")
ENGINES = engines("matmul")

# ------------------------------------------------------------ mapped axes


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("case", "axes"),
    [
        *((LAYER, axes) for axes in [(0, None, None), (None, 1, None), (None, None, 0), (1, 2, None), (0, 0, 1)]),
        *((DOT, axes) for axes in [(0, None), (2, None), (None, 1), (3, 0)]),
        *((GATED, axes) for axes in [(1, None, None), (None, 0, None), (None, 0, 0)]),
        *((REDUCED, axes) for axes in [(0, None, None), (0, 0, 0)]),
    ],
    ids=str,
)
def test_vmap(case, axes, engine):
    check(vmapped(axes), case, stacked_by(axes), engine, surroundings=True)


def spec_of(function, *arrays):
    """The spec of the only call in a function."""
    (equation,) = (e for e in jax.make_jaxpr(function)(*arrays).eqns if e.primitive.name == "jaxdnn_matmul")
    return equation.params["spec"]


def test_a_mapped_axis_of_a_is_rows():
    """All the rows are multiplied by the one b, which is read once; nothing is copied."""
    a, b, bias = stacked(LAYER, (0, None, None))
    jaxpr = jax.make_jaxpr(jax.vmap(LAYER.call, (0, None, None)))(a, b, bias)
    (equation,) = jaxpr.eqns
    assert (equation.params["spec"].row_ndim, equation.params["spec"].batched) == (2, ())
    assert [v.aval.shape for v in equation.invars] == [(3, 3, 4), (4, 2), (2,)]


def test_a_mapped_axis_of_b_is_a_batch_that_a_lacks():
    spec = spec_of(jax.vmap(LAYER.call, (None, 0, None)), *stacked(LAYER, (None, 0, None)))
    assert spec.batched == ((False, True),)


def test_strides_and_no_copies():
    """A mapped axis that lies between an operand's rows and columns stays there."""
    a, b, bias = stacked(LAYER, (1, 1, None))
    jaxpr = jax.make_jaxpr(jax.vmap(LAYER.call, (1, 1, None)))(a, b, bias)
    assert [e.primitive.name for e in jaxpr.eqns] == ["jaxdnn_matmul"]
    assert (jaxpr.eqns[0].params["spec"].a_order, jaxpr.eqns[0].params["spec"].b_order) == ("mbk", "kbn")


@needs_native
def test_gradients_are_products_of_the_same_kind():
    """Forward, with what the derivative needs stored by the same kernel, then one product for each matrix."""
    case = product((64, 32), (32, 48), BF16, epilogue="bias gelu", extras=(((48,), BF16),))
    given, cotangents = arguments(case)
    jaxpr = jax.make_jaxpr(lambda *arrays: jax.vjp(case.call, *arrays)[1](*cotangents))(*given)
    specs = [e.params["spec"] for e in jaxpr.eqns if e.primitive.name == "jaxdnn_matmul"]
    assert [len(spec.outputs) for spec in specs] == [2, 1, 1]
    assert [spec.epilogue is None for spec in specs] == [False, True, True]
    assert not [e for e in jaxpr.eqns if e.primitive.name == "transpose"]


def test_relu_saves_nothing_it_can_do_without():
    """The derivative of a sum with an operand needs no sums."""
    jaxpr = jax.make_jaxpr(lambda *arrays: jax.vjp(BIAS.call, *arrays)[0])(*BIAS.primals())
    (spec,) = [e.params["spec"] for e in jaxpr.eqns if e.primitive.name == "jaxdnn_matmul"]
    assert len(spec.outputs) == 1


BIAS = product((3, 4), (4, 2), epilogue="bias", extras=(((2,), F32),))


# ------------------------------------------------------------ the function


def test_results_are_arranged_as_returned():
    def epilogue(sums, bias):
        return {"y": sums + bias, "statistics": [jnp.max(sums), jnp.sum(sums, axis=0)]}

    a, b, bias = LAYER.primals()
    got = jaxdnn.matmul(a, b, bias, epilogue=epilogue)
    expected = epilogue(jnp.matmul(a, b, precision="highest"), bias)
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-3 if platform() == "cuda" else 1e-5, atol=1e-3)


def test_dtypes_of_results():
    """What is left in the sums' dtype is rounded to the call's; a cast or a reduction keeps its own."""
    a, b = jnp.ones((3, 4), jnp.bfloat16), jnp.ones((4, 5), jnp.bfloat16)

    def epilogue(sums):
        return sums, sums.astype(jnp.float16), jnp.max(sums), sums > 2

    def dtypes(**keywords):
        return [y.dtype.name for y in jaxdnn.matmul(a, b, epilogue=epilogue, **keywords)]

    assert dtypes() == [BF16, "float16", F32, "bool"]
    assert dtypes(out_dtype=F32) == [F32, "float16", F32, "bool"]
    assert dtypes(preferred_element_type=F64) == [F64, "float16", F64, "bool"]
    assert jaxdnn.matmul(a, b, out_dtype="float8_e5m2").dtype == jnp.float8_e5m2


def test_programs_and_not_functions_are_compared():
    """A lambda that is made anew for each call compiles once."""
    a, b = LAYER.primals()[:2]

    def call():
        return jaxdnn.matmul(a, b, epilogue=lambda sums: sums * 2)

    jaxprs = [jax.make_jaxpr(call)().eqns[-1].params["spec"] for _ in range(2)]
    assert jaxprs[0] == jaxprs[1]
    assert hash(jaxprs[0]) == hash(jaxprs[1])


def test_out_sharding_is_xlas(cpus):
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2, devices=cpus)
    with jax.set_mesh(mesh):
        a = jax.device_put(np.ones((4, 8), np.float32), NamedSharding(mesh, P("a", "b")))
        b = jax.device_put(np.ones((8, 6), np.float32), NamedSharding(mesh, P("b", None)))
        y = jax.jit(lambda a, b: jaxdnn.matmul(a, b, epilogue=lambda s: s + 1, out_sharding=P("a", None)))(a, b)
    np.testing.assert_array_equal(y, np.full((4, 6), 9))


@pytest.mark.parametrize("engine", ENGINES)
def test_accumulation_in_place(engine):
    """alpha * a @ b + beta * c takes the place of c, step after step."""
    case = product((33, 40), (40, 24), epilogue="accumulate", extras=(((33, 24), F32), ((), F32), ((), F32)))
    a, b, c, alpha, beta = map(jnp.array, case.primals())
    with jaxdnn.options(engine=engine):
        y = jax.jit(case.call, donate_argnums=2)(a, b, c, alpha, beta)
    assert c.is_deleted()
    assert_close((y,), forward, case, primals)


@pytest.mark.parametrize("engine", ENGINES)
def test_runs_are_bitwise_equal(engine):
    case = product((130, 300), (300, 72), BF16, epilogue="largest")
    given = case.primals()
    with jaxdnn.options(engine=engine):
        function = jax.jit(lambda *arrays: jax.vjp(case.call, *arrays)[0])
        first = [np.asarray(y).tobytes() for y in function(*given)]
        assert all([np.asarray(y).tobytes() for y in function(*given)] == first for _ in range(20))


def layers(function, x, weights, cotangents):
    """Layers in a loop, computed again in the backward pass."""

    def loss(x, weights):
        def layer(x, weight):
            (y,) = jax.checkpoint(function)(x, weight)
            return y, jnp.mean(y)

        y, means = jax.lax.scan(layer, x, weights)
        return jnp.sum(y * cotangents[0]) + jnp.sum(jnp.square(means))

    return jax.value_and_grad(loss, (0, 1))(x, weights)


@pytest.mark.parametrize("engine", ENGINES)
def test_scan_and_remat(engine):
    case = product((5, 8), (8, 8), epilogue="silu")

    def given(case):
        several = [case.replace(seed=seed).primals()[1] for seed in range(3)]
        return case.primals()[0], np.stack(several) / 3, case.cotangents()

    check(layers, case, given, engine, surroundings=True)


# ------------------------------------------------------------ devices

MLP = product((8, 12), (12, 16), epilogue="bias gelu", extras=(((16,), F32),))


def placed(mesh, specs, arrays):
    return tuple(jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(arrays, specs, strict=True))


def compiled_for(cpus, case, specs, transform, *, kind=AxisType.Auto):
    """The program of `transform` with the operands placed by `specs`, after its results are checked."""
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(kind, kind), devices=cpus)
    given = arguments(case)
    with jax.set_mesh(mesh):
        operands = placed(mesh, specs, given[0])
        compiled = jax.jit(functools.partial(transform, as_tuple(case.call))).lower(operands, given[1]).compile()
        assert_close(compiled(operands, given[1]), transform, case, arguments)
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
    given = arguments(MLP)
    function = jax.shard_map(as_tuple(MLP.call), in_specs=(rows, whole, whole), out_specs=rows)
    with jax.set_mesh(mesh):
        operands = placed(mesh, (rows, whole, whole), given[0])
        actual = jax.jit(functools.partial(vjp, function))(operands, placed(mesh, (rows,), given[1]))
    assert_close(actual, vjp, MLP, arguments)


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


# ------------------------------------------------------------ export


def test_exported_for_a_named_gpu():
    """Without a GPU: the program holds the kernels' source, and their launches."""
    case = product((256, 128), (128, 512), BF16, epilogue="bias gelu", extras=(((512,), BF16),))
    allowed = [export.DisabledSafetyCheck.custom_call(name) for name in jaxdnn.CUSTOM_CALLS]
    types = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in case.primals()]
    with jaxdnn.options(target="sm_90"):
        exported = export.export(jax.jit(case.call), platforms=["cuda"], disabled_checks=allowed)(*types)
    text = exported.mlir_module()
    assert "jaxdnn_cuda" in text
    assert "matmul_sm90" in text
    assert export.deserialize(exported.serialize()).platforms == ("cuda",)


def test_symbolic_sizes():
    (m,) = export.symbolic_shape("m")
    types = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((m, 8), (8, 5), (5,))]
    call = functools.partial(jaxdnn.matmul, epilogue=lambda sums, bias: jax.nn.relu(sums + bias))
    exported = export.export(jax.jit(call))(*types)
    x = np.random.default_rng(0).standard_normal((7, 8)).astype(np.float32)
    w, bias = np.ones((8, 5), np.float32), np.ones(5, np.float32)
    np.testing.assert_allclose(exported.call(x, w, bias), jax.nn.relu(x @ w + bias), rtol=2e-3, atol=2e-3)


@needs_native
def test_one_call_forward_and_one_more_for_each_gradient():
    given, cotangents = arguments(MLP)
    forward_text = jax.jit(MLP.call).lower(*given).compile().as_text()
    text = jax.jit(functools.partial(vjp, as_tuple(MLP.call))).lower(given, cotangents).compile().as_text()
    # A GPU has a kernel for the epilogue's derivative, too.
    assert (native_calls(forward_text), native_calls(text)) == (1, 4 if platform() == "cuda" else 3)
