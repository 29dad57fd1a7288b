"""What is particular to the matmul family under JAX's transformations: what is mapped, donated, fused and kept."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax

import jaxdnn
from checking.calls import native_calls
from checking.cases import BF16, F32, F64, TABLE
from checking.cases.matmul import product
from checking.compare import as_tuple, engines, needs_native, platform
from checking.transforms import stacked, vjp, with_cotangents
from jaxdnn.engines.product.problem import Product
from jaxdnn.planning.calls import find_calls
from jaxdnn.primitives.matmul.dimensions import Dimensions

LAYER = product((3, 4), (4, 2), epilogue="bias gelu", extras=(((2,), F32),))
MLP = product((8, 12), (12, 16), epilogue="bias gelu", extras=(((16,), F32),))
ENGINES = engines("matmul")

# ------------------------------------------------------------ mapped axes


def spec_of(function, *arrays):
    """The spec of the only call in a function."""
    (equation,) = (e for e in jax.make_jaxpr(function)(*arrays).eqns if e.primitive.name == "jaxdnn_matmul")
    return equation.params["spec"]


def test_a_mapped_axis_of_a_is_rows():
    """All the rows are multiplied by the one b, which is read once; nothing is copied."""
    a, b, bias = stacked(LAYER, (0, None, None))
    jaxpr = jax.make_jaxpr(jax.vmap(LAYER.call, (0, None, None)))(a, b, bias)
    (equation,) = jaxpr.eqns
    assert (equation.params["spec"].dimensions.rows, equation.params["spec"].dimensions.batched) == (2, ())
    assert [v.aval.shape for v in equation.invars] == [(3, 3, 4), (4, 2), (2,)]


def test_a_mapped_axis_of_b_is_a_batch_that_a_lacks():
    spec = spec_of(jax.vmap(LAYER.call, (None, 0, None)), *stacked(LAYER, (None, 0, None)))
    assert spec.dimensions.batched == ((False, True),)


def test_strides_and_no_copies():
    """A mapped axis that lies between an operand's rows and columns stays there."""
    a, b, bias = stacked(LAYER, (1, 1, None))
    jaxpr = jax.make_jaxpr(jax.vmap(LAYER.call, (1, 1, None)))(a, b, bias)
    assert [e.primitive.name for e in jaxpr.eqns] == ["jaxdnn_matmul"]
    assert (jaxpr.eqns[0].params["spec"].dimensions.a_order, jaxpr.eqns[0].params["spec"].dimensions.b_order) == (
        "mbk",
        "kbn",
    )


@pytest.mark.parametrize(("case", "axes"), [row for row in TABLE.mapped if row[0].op == "matmul"], ids=str)
def test_a_mapped_product_is_a_product(case, axes):
    """An axis becomes rows or a batch, and engines can have it, but for one of two batches of a single operand."""
    (call,) = find_calls(jax.vmap(case.call, axes), *stacked(case, axes))
    batched = call.spec.dimensions.batched
    alike = all(len({flags[side] for flags in batched}) <= 1 for side in (0, 1))
    assert isinstance(call.problem, Product if alike else str), call.problem
    (call,) = find_calls(jax.vmap(case.call, axes), *stacked(case, axes, mapped=1))
    assert isinstance(call.problem, Product), "a batch of one is none"


@pytest.mark.parametrize("order", ["bmk", "bkm"])
def test_a_mapped_axis_stays_in_front_or_between_groups(order):
    for rows, contracted in itertools.product((1, 2, 3), repeat=2):
        dimensions = Dimensions(a_order=order, rows=rows, contracted=contracted)
        between = rows if order == "bmk" else contracted
        for axis in range(rows + contracted + 1):
            labels = dimensions.with_batch(axis, None, (True, False)).labels("a")
            assert labels.index(("b", 0)) == (axis if axis == between else 0)
            assert [label for label in labels if label != ("b", 0)] == list(dimensions.labels("a"))


@needs_native
def test_gradients_are_products_of_the_same_kind():
    """Forward, with what the derivative needs stored by the same kernel, then one product for each matrix."""
    case = product((64, 32), (32, 48), BF16, epilogue="bias gelu", extras=(((48,), BF16),))
    given, cotangents = with_cotangents(case)
    jaxpr = jax.make_jaxpr(lambda *arrays: jax.vjp(case.call, *arrays)[1](*cotangents))(*given)
    specs = [e.params["spec"] for e in jaxpr.eqns if e.primitive.name == "jaxdnn_matmul"]
    assert [len(spec.results) for spec in specs] == [2, 1, 1]
    assert [spec.epilogue is None for spec in specs] == [False, True, True]
    assert not [e for e in jaxpr.eqns if e.primitive.name == "transpose"]


def test_relu_saves_nothing_it_can_do_without():
    """The derivative of a sum with an operand needs no sums."""
    jaxpr = jax.make_jaxpr(lambda *arrays: jax.vjp(BIAS.call, *arrays)[0])(*BIAS.primals())
    (spec,) = [e.params["spec"] for e in jaxpr.eqns if e.primitive.name == "jaxdnn_matmul"]
    assert len(spec.results) == 1


BIAS = product((3, 4), (4, 2), epilogue="bias", extras=(((2,), F32),))


# ------------------------------------------------------------ the function


@pytest.mark.parametrize(
    ("epilogue", "results"),
    [
        (lambda acc: (acc.astype(BF16), jnp.sum(acc * acc, 0)), ["bfloat16", "float32"]),
        (lambda acc: (jnp.sum(acc * acc, 0), acc.astype(BF16)), ["float32", "bfloat16"]),
        (lambda acc: (jnp.sin(acc).astype(BF16), jnp.sum(acc * acc, 0)), ["bfloat16", "float32", "bfloat16"]),
    ],
)
def test_a_result_that_is_the_accumulator_is_not_saved_again(epilogue, results):
    """Statistics of a result, whose gradient needs it, take no more memory than the result."""
    x, w = (jnp.asarray(np.random.default_rng(i).normal(size=(8, 8)), BF16) for i in range(2))

    def loss(multiply, x, w):
        return sum(jnp.sum(jnp.sin(y.astype("float32"))) for y in multiply(x, w))

    fused = functools.partial(loss, functools.partial(jaxdnn.matmul, epilogue=epilogue))
    first, *_ = find_calls(jax.grad(fused, (0, 1)), x, w)
    assert [result.dtype.name for result in first.signature.results.values()] == results
    plain = functools.partial(loss, lambda x, w: epilogue(jnp.matmul(x, w, preferred_element_type="float32")))
    for found, expected in zip(jax.grad(fused, (0, 1))(x, w), jax.grad(plain, (0, 1))(x, w), strict=True):
        np.testing.assert_allclose(found.astype("float32"), expected.astype("float32"), rtol=0.05, atol=0.1)


def test_results_are_arranged_as_returned():
    def epilogue(acc, bias):
        return {"y": acc + bias, "statistics": [jnp.max(acc), jnp.sum(acc, axis=0)]}

    a, b, bias = LAYER.primals()
    got = jaxdnn.matmul(a, b, bias, epilogue=epilogue)
    expected = epilogue(jnp.matmul(a, b, precision="highest"), bias)
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-3 if platform() == "cuda" else 1e-5, atol=1e-3)


def test_dtypes_of_results():
    """What is left in the sums' dtype is rounded to the call's; a cast or a reduction keeps its own."""
    a, b = jnp.ones((3, 4), jnp.bfloat16), jnp.ones((4, 5), jnp.bfloat16)

    def epilogue(acc):
        return acc, acc.astype(jnp.float16), jnp.max(acc), acc > 2

    def dtypes(**keywords):
        return [y.dtype.name for y in jaxdnn.matmul(a, b, epilogue=epilogue, **keywords)]

    assert dtypes() == [BF16, "float16", F32, "bool"]
    assert dtypes(out_dtype=F32) == [F32, "float16", F32, "bool"]
    assert dtypes(preferred_element_type=F64) == [F64, "float16", F64, "bool"]
    assert jaxdnn.matmul(a, b, out_dtype="float8_e5m2").dtype == jnp.float8_e5m2


@pytest.mark.parametrize(
    "precision", [None, *itertools.product(lax.Precision, repeat=2), *lax.DotAlgorithmPreset], ids=str
)
def test_float32_is_rounded_unless_something_forbids_it(precision):
    """The precision of either operand, or an algorithm."""
    tf32 = (lax.DotAlgorithmPreset.DEFAULT, lax.DotAlgorithmPreset.TF32_TF32_F32)
    rounds = {None, lax.Precision.DEFAULT, lax.Precision.HIGH, *tf32}
    types = [jax.ShapeDtypeStruct(shape, F32) for shape in ((4, 8), (8, 6))]
    (call,) = find_calls(functools.partial(jaxdnn.matmul, precision=precision), *types)
    both = precision if isinstance(precision, tuple) else (precision,)
    assert call.problem.exact == (not rounds.issuperset(both))


def test_programs_and_not_functions_are_compared():
    """A lambda that is made anew for each call compiles once."""
    a, b = LAYER.primals()[:2]

    def call():
        return jaxdnn.matmul(a, b, epilogue=lambda acc: acc * 2)

    jaxprs = [jax.make_jaxpr(call)().eqns[-1].params["spec"] for _ in range(2)]
    assert jaxprs[0] == jaxprs[1]
    assert hash(jaxprs[0]) == hash(jaxprs[1])


def test_a_gradient_without_jit():
    with jax.disable_jit():
        gradient = jax.grad(lambda a: jaxdnn.matmul(a, a, epilogue=jax.nn.gelu).sum())(jnp.eye(3))
    np.testing.assert_allclose(gradient, 2 * jax.grad(jax.nn.gelu)(1.0) * np.eye(3) + (1 - np.eye(3)), atol=1e-6)


# ------------------------------------------------------------ export


def test_exported_for_a_named_gpu():
    """Without a GPU: the program holds the kernels' source, and their launches."""
    case = product((512, 256), (256, 1024), BF16, epilogue="bias gelu", extras=(((1024,), BF16),))
    types = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in case.primals()]
    with jaxdnn.options(target="sm_90"):
        exported = export.export(jax.jit(case.call), platforms=["cuda"], disabled_checks=jaxdnn.export_checks())(*types)
    text = exported.mlir_module()
    assert "jaxdnn_cuda" in text
    assert "product_sm90" in text
    assert export.deserialize(exported.serialize()).platforms == ("cuda",)


@pytest.mark.parametrize(
    ("shapes", "epilogue", "summed"),
    [
        (((320, 280), (280, 69)), None, BF16),
        (((320, 280), (280, 69)), "relu", F32),
        (((1, 280), (280, 69)), None, F32),
        (((64, 16, 109), (64, 109, 69)), None, BF16),
        (((64, 3, 1), (64, 1, 69)), None, F32),
    ],
    ids=["rounded by cuBLAS", "of an epilogue", "a vector", "many small ones", "too small for cuBLAS"],
)
def test_what_xla_multiplies_on_a_gpu(shapes, epilogue, summed):
    """Sums that only have to be rounded are no array of their own; those that XLA would round too early are."""
    case = product(*shapes, BF16, epilogue=epilogue)
    types = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in case.primals()]
    with jaxdnn.options(target="sm_90", engine="xla"):
        text = jax.jit(case.call).trace(*types).lower(lowering_platforms=("cuda",)).as_text()
    (line,) = (line for line in text.splitlines() if "stablehlo.dot_general" in line)
    assert line.endswith(f"x69x{'bf16' if summed == BF16 else 'f32'}>")


@needs_native
def test_one_call_forward_and_one_more_for_each_gradient():
    given, cotangents = with_cotangents(MLP)
    forward_text = jax.jit(MLP.call).lower(*given).compile().as_text()
    text = jax.jit(functools.partial(vjp, as_tuple(MLP.call))).lower(given, cotangents).compile().as_text()
    # A GPU has a kernel for the epilogue's derivative, too.
    assert (native_calls(forward_text), native_calls(text)) == (1, 4 if platform() == "cuda" else 3)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("narrow", [(), (BF16,)], ids=["alone", "beside bfloat16"])
@pytest.mark.parametrize(
    ("dtype", "element", "preferred"),
    [("float16", 48.0, None), ("int8", 101, None), ("int16", 300, "int32"), (BF16, 1.0078125, F32)],
)
def test_derivatives_are_of_sums_that_nothing_has_rounded(engine, dtype, element, preferred, narrow):
    """Sums of float16 may be too large for it, those of integers have more digits, and so has any wide result."""
    a, b = jnp.full((8, 128), element, dtype), jnp.full((128, 8), element, dtype)

    def epilogue(acc, scale):
        return [*(acc.astype(one) for one in narrow), jnp.sqrt(acc.astype(F32) * scale)]

    def loss(scale):
        return jnp.sum(jaxdnn.matmul(a, b, scale, epilogue=epilogue, preferred_element_type=preferred)[-1])

    with jaxdnn.options(engine=engine):
        found = jax.jit(jax.grad(loss))(jnp.float32(4))
    assert float(found) == pytest.approx(64 * np.sqrt(128 * element**2) / 4, rel=1e-6)


@pytest.mark.parametrize("dtypes", [*itertools.product(("float8_e4m3fn", "float8_e5m2"), repeat=2)], ids=str)
def test_cotangents_have_more_digits_than_float8(dtypes):
    """Neither has a number between 1 and 1.125, and what is left of these sums is what lies beyond 1."""
    a, b = (jnp.ones((32, 32), dtype) for dtype in dtypes)
    cotangent = np.where(np.indices((32, 32)).sum(0) % 2, 1.0625, -1).astype(np.float32)
    _, pull_back = jax.vjp(functools.partial(jaxdnn.matmul, out_dtype=F32), a, b)
    for gradient in pull_back(cotangent):
        np.testing.assert_array_equal(gradient.astype(F32), np.ones((32, 32)))
