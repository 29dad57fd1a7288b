"""What is particular to the matmul family under JAX's transformations: what is mapped, donated, fused and kept."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import jaxdnn
from checking.calls import native_calls
from checking.cases import BF16, F32, F64
from checking.cases.matmul import MatmulCase, product
from checking.compare import as_tuple, assert_close, check, engines, platform
from checking.transforms import forward, primals, stacked, stacked_by, vjp, vmapped, with_cotangents

LAYER = product((3, 4), (4, 2), epilogue="bias gelu", extras=(((2,), F32),))
MLP = product((8, 12), (12, 16), epilogue="bias gelu", extras=(((16,), F32),))
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
    given, cotangents = with_cotangents(case)
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
    assert "product_sm90" in text
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
    given, cotangents = with_cotangents(MLP)
    forward_text = jax.jit(MLP.call).lower(*given).compile().as_text()
    text = jax.jit(functools.partial(vjp, as_tuple(MLP.call))).lower(given, cotangents).compile().as_text()
    # A GPU has a kernel for the epilogue's derivative, too.
    assert (native_calls(forward_text), native_calls(text)) == (1, 4 if platform() == "cuda" else 3)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("dtype", "element", "preferred"),
    [("float16", 48.0, None), ("int8", 101, None), ("int16", 300, "int32"), (BF16, 1.0078125, F32)],
)
def test_derivatives_are_of_sums_that_nothing_has_rounded(engine, dtype, element, preferred):
    """Sums of float16 may be too large for it, those of integers have more digits, and so have wide results."""
    a, b = jnp.full((8, 128), element, dtype), jnp.full((128, 8), element, dtype)

    def loss(scale):
        function = functools.partial(jaxdnn.matmul, preferred_element_type=preferred)
        return jnp.sum(function(a, b, scale, epilogue=lambda sums, scale: jnp.sqrt(sums.astype(F32) * scale)))

    with jaxdnn.options(engine=engine):
        found = jax.jit(jax.grad(loss))(jnp.float32(4))
    assert float(found) == pytest.approx(64 * np.sqrt(128 * element**2) / 4, rel=1e-6)
