"""What JAX's own tests of `dot_general` and `matmul` ask, asked of jaxdnn's functions in their place.

JAX's tests are not installed with it. These cover the same grids of shapes, dtypes, dimension numbers and arguments,
and take JAX's function itself for the truth: values, dtypes, weak types, derivatives, batching, and errors.
"""

import inspect
import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxdnn
from checking.jax_own import array, outcome, same

FLOATS = ("bfloat16", "float16", "float32", "float64")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
COMPLEX = ("complex64", "complex128")
DTYPES = ("bool", *INTEGERS, *FLOATS, *COMPLEX)
NONE = ((), ())
PLAIN = (((1,), (0,)), NONE)

# Shapes and dimension numbers of lax_test, lax_vmap_test and lax_autodiff_test.
CONTRACTIONS = [
    ((5,), (5,), (((0,), (0,)), NONE)),
    ((5, 7), (5,), (((0,), (0,)), NONE)),
    ((7, 5), (5,), (((1,), (0,)), NONE)),
    ((3, 5), (2, 5), (((1,), (1,)), NONE)),
    ((5, 3), (5, 2), (((0,), (0,)), NONE)),
    ((5, 3, 2), (5, 2, 4), (((0,), (0,)), NONE)),
    ((5, 3, 2), (5, 2, 4), (((0, 2), (0, 1)), NONE)),
    ((5, 3, 2), (3, 5, 2, 4), (((0, 2), (1, 2)), NONE)),
    ((1, 2, 2, 3), (1, 2, 3, 1), (((1,), (1,)), NONE)),
    ((3, 2), (2, 4), (((1,), (0,)), NONE)),
    ((3, 3, 2), (3, 2, 4), (([2], [1]), ([0], [0]))),
    ((3, 3, 2), (2, 3, 4), (([2], [0]), ([0], [1]))),
    ((3, 4, 2, 4), (3, 4, 3, 2), (([2], [3]), ([0, 1], [0, 1]))),
    ((3, 5), (), (NONE, NONE)),
    ((0, 4), (4, 3), (((1,), (0,)), NONE)),
    ((2, 0), (0, 3), (((1,), (0,)), NONE)),
]
# Shapes of lax_numpy_test.
PRODUCTS = [
    ((3,), (3,)),
    ((3, 3), (3,)),
    ((3,), (3, 3)),
    ((3, 3), (3, 3)),
    ((3,), (5, 3, 2)),
    ((5, 3, 2), (2,)),
    ((5, 2), (3, 2, 4)),
    ((5, 2, 3), (3, 2)),
    ((5, 3, 4), (5, 4, 1)),
    ((3, 1, 3, 4), (5, 4, 1)),
    ((1, 5, 4), (1, 4, 3)),
    ((2, 1, 0, 4), (3, 4, 2)),
]
# To numpy, `np.dtype("float64") == None`. Where hashes of the two meet, which differ by process, JAX 0.10 takes a call
# that prefers float64 for one that prefers nothing: so those which do either have shapes of their own.
PREFERRED = [
    *(("float16", to) for to in ("float16", "float32", "float64")),
    *(("bfloat16", to) for to in ("bfloat16", "float32", "float64")),
    *(("float32", to) for to in ("float32", "float64", "bfloat16")),
    *(("int8", to) for to in ("int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")),
    *(("int16", to) for to in ("int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")),
    *(("int32", to) for to in ("int32", "int64", "float32", "float64")),
    *(("int64", to) for to in ("int64", "float64")),
    *(("complex64", to) for to in ("complex64", "complex128")),
    *(("float8_e4m3fn", to) for to in ("float32", "bfloat16")),
]
PRECISIONS = [
    *(None, "default", "high", "highest", "fastest", "float32", "bfloat16", "tensorfloat32"),
    *(lax.Precision.DEFAULT, lax.Precision.HIGH, lax.Precision.HIGHEST, ("default", "highest")),
    *((lax.Precision.HIGHEST, lax.Precision.DEFAULT), "F32_F32_F32", lax.DotAlgorithmPreset.F32_F32_F32),
]


@pytest.fixture(autouse=True)
def _in_full_precision():
    with jax.default_matmul_precision("float32"):
        yield


@pytest.mark.parametrize("dtype", DTYPES)
def test_dot_general(dtype):
    pairs = [(array(a, dtype), array(b, dtype, 1)) for a, b, _ in CONTRACTIONS]

    def results(function):
        return [function(a, b, numbers) for (a, b), (_, _, numbers) in zip(pairs, CONTRACTIONS, strict=True)]

    same(*jax.jit(lambda: (results(jaxdnn.dot_general), results(lax.dot_general)))())


@pytest.mark.parametrize("dtype", DTYPES)
def test_matmul(dtype):
    pairs = [(array(a, dtype), array(b, dtype, 1)) for a, b in PRODUCTS]
    same(*jax.jit(lambda: tuple([f(a, b) for a, b in pairs] for f in (jaxdnn.matmul, jnp.matmul)))())


@pytest.mark.parametrize("left", DTYPES)
def test_two_dtypes(left):
    a, longer, others = array((4, 3), left), array((5, 3), left), [array((3, 6), right, 1) for right in DTYPES]

    def results(matmul, dot_general):
        products = [matmul(a, b) for b in others] + [matmul(b.T, a.T) for b in others]
        contracted = [b for b in others if isinstance(outcome(lax.dot_general, longer, b, PLAIN)[0], tuple)]
        return products, [dot_general(longer, b, PLAIN) for b in contracted]

    same(*jax.jit(lambda: (results(jaxdnn.matmul, jaxdnn.dot_general), results(jnp.matmul, lax.dot_general)))())


@pytest.mark.parametrize(
    ("left", "right"), list(itertools.product((*DTYPES, "float8_e4m3fn", "float8_e5m2"), repeat=2))
)
def test_types_of_two_dtypes(left, right):
    """And errors, where there is no such product."""
    a, longer, b = jnp.zeros((4, 3), left), jnp.zeros((5, 3), left), jnp.zeros((3, 6), right)
    for preferred in (None, "float32", "bfloat16", "int32", "complex64"):
        keywords = {"preferred_element_type": preferred}
        want = outcome(lax.dot_general, longer, b, PLAIN, **keywords)
        assert outcome(jaxdnn.dot_general, longer, b, PLAIN, **keywords) == want
        want = outcome(jnp.matmul, a, b, **keywords)
        if preferred is None and "float8" in left and "float8" in right and left != right:
            continue  # which numpy's promotion refuses, and tensor cores multiply
        assert outcome(jaxdnn.matmul, a, b, **keywords) == want


@pytest.mark.parametrize("mode", ["standard", "strict"])
def test_promotion(mode):
    arrays = [jnp.ones((3, 3), dtype) for dtype in ("int32", "float32", "bfloat16")]
    with jax.numpy_dtype_promotion(mode):
        for a, b in itertools.product(arrays, repeat=2):
            assert outcome(jaxdnn.matmul, a, b) == outcome(jnp.matmul, a, b)
            assert outcome(jaxdnn.dot_general, a, b, PLAIN) == outcome(lax.dot_general, a, b, PLAIN)


@pytest.mark.parametrize(("dtype", "preferred"), PREFERRED)
def test_preferred_element_type(dtype, preferred):
    pairs = [(array(a, dtype), array(b, dtype, 1)) for a in ((6,), (4, 6)) for b in ((6,), (6, 3))]

    def results(matmul, dot_general):
        keywords = {"preferred_element_type": preferred}
        products = [matmul(a, b, **keywords) for a, b in pairs]
        return products, [dot_general(a, b, (((a.ndim - 1,), (0,)), NONE), **keywords) for a, b in pairs]

    same(*jax.jit(lambda: (results(jaxdnn.matmul, jaxdnn.dot_general), results(jnp.matmul, lax.dot_general)))())


def test_precisions():
    a, b = array((4, 3), "float32"), array((3, 6), "float32")
    for precision in PRECISIONS:
        want = outcome(lax.dot_general, a, b, PLAIN, precision=precision)
        assert outcome(jaxdnn.dot_general, a, b, PLAIN, precision=precision) == want
        assert outcome(jaxdnn.matmul, a, b, precision=precision) == want
        assert outcome(jaxdnn.dot_general, a, b, PLAIN, precision) == want
    for precision in (None, "highest", "F32_F32_F32"):
        ours = jax.jit(partial(jaxdnn.dot_general, dimension_numbers=PLAIN, precision=precision))(a, b)
        same(ours, lax.dot_general(a, b, PLAIN, precision="highest"))


@pytest.mark.parametrize("preset", ["BF16_BF16_F32", "F16_F16_F32", "F16_F16_F16", "F64_F64_F64", "TF32_TF32_F32"])
def test_types_of_algorithms(preset):
    for dtype in FLOATS:
        a, b = jnp.zeros((4, 3), dtype), jnp.zeros((3, 6), dtype)
        want = outcome(lax.dot_general, a, b, PLAIN, precision=preset)
        assert outcome(jaxdnn.dot_general, a, b, PLAIN, precision=preset) == want


@pytest.mark.parametrize(
    "pair", list(itertools.product([1.0, 2, np.float32(1), jnp.full((3, 3), 1.0), jnp.ones((3, 3))], repeat=2))
)
def test_weak_types_and_scalars(pair):
    """Python's scalars, numpy's, and arrays that have taken their dtype from one."""
    assert outcome(jaxdnn.matmul, *pair) == outcome(jnp.matmul, *pair)
    assert outcome(jaxdnn.dot_general, *pair, (NONE, NONE)) == outcome(lax.dot_general, *pair, (NONE, NONE))


SHAPES = {"scalar": (), "a": (4, 3), "b": (3, 6), "batched": (2, 4, 3), "other": (5, 3, 6), "vector": (7,)}
ARRAYS = {name: jnp.zeros(shape, jnp.float32) for name, shape in SHAPES.items()}
BAD_CONTRACTIONS = {
    "sizes": ("a", "a", (((1,), (0,)), NONE)),
    "batch sizes": ("batched", "other", (((2,), (1,)), ((0,), (0,)))),
    "too few": ("a", "b", (((1,), ()), NONE)),
    "too few in the batch": ("batched", "other", (((2,), (1,)), ((0,), ()))),
    "out of range": ("a", "b", (((2,), (0,)), NONE)),
    "batch out of range": ("a", "b", (((1,), (0,)), ((5,), (0,)))),
    "negative": ("a", "b", (((-1,), (0,)), NONE)),
    "twice": ("a", "a", (((1, 1), (1, 1)), NONE)),
    "twice in the batch": ("batched", "batched", (((2,), (2,)), ((0, 0), (0, 0)))),
    "contracted and batch": ("batched", "batched", (((0,), (0,)), ((0,), (0,)))),
    "not all of them": ("a", "b", (((1,), (0,)),)),
    "no sequence": ("a", "b", 1),
    "fractional": ("a", "b", (((1.0,), (0,)), NONE)),
    "missing": ("a", "b", None),
    "no sequences in it": ("batched", "batched", ((2, 2), (0, 0))),
}
NOT_ARRAYS = {"none": None, "text": "a", "list": [[1.0] * 3] * 3, "object": object(), "text array": np.array(["a"])}


@pytest.mark.parametrize("name", BAD_CONTRACTIONS)
def test_bad_dimension_numbers(name):
    a, b, numbers = BAD_CONTRACTIONS[name]
    want = outcome(lax.dot_general, ARRAYS[a], ARRAYS[b], numbers)
    assert outcome(jaxdnn.dot_general, ARRAYS[a], ARRAYS[b], numbers) == want


@pytest.mark.parametrize(("a", "b"), list(itertools.product(ARRAYS, repeat=2)))
def test_shapes_that_do_not_fit(a, b):
    assert outcome(jaxdnn.matmul, ARRAYS[a], ARRAYS[b]) == outcome(jnp.matmul, ARRAYS[a], ARRAYS[b])


@pytest.mark.parametrize("name", NOT_ARRAYS)
def test_what_is_no_array(name):
    for pair in itertools.permutations((ARRAYS["a"], NOT_ARRAYS[name])):
        assert outcome(jaxdnn.matmul, *pair) == outcome(jnp.matmul, *pair)
        assert outcome(jaxdnn.dot_general, *pair, PLAIN) == outcome(lax.dot_general, *pair, PLAIN)


@pytest.mark.parametrize("keywords", [{"precision": "none such"}, {"precision": 3.5}, {"preferred_element_type": "x"}])
def test_bad_keywords(keywords):
    pair = (ARRAYS["a"], ARRAYS["b"])
    assert outcome(jaxdnn.matmul, *pair, **keywords) == outcome(jnp.matmul, *pair, **keywords)
    want = outcome(lax.dot_general, *pair, PLAIN, **keywords)
    assert outcome(jaxdnn.dot_general, *pair, PLAIN, **keywords) == want


def test_signatures():
    def parameters(function):
        return {name: p for name, p in inspect.signature(function).parameters.items() if name != "out_sharding"}

    ours, theirs = parameters(jaxdnn.dot_general), parameters(lax.dot_general)
    assert list(ours)[: len(theirs)] == list(theirs)
    assert all(ours[name].default == theirs[name].default for name in theirs)
    ours, theirs = parameters(jaxdnn.matmul), parameters(jnp.matmul)
    assert set(theirs) <= set(ours)
    assert list(ours)[:2] == list(theirs)[:2]


# ---------------------------------------------------------------- transformations


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "complex64"])
def test_derivatives(dtype):
    pairs = [(array(a, dtype), array(b, dtype, 1)) for a, b, _ in CONTRACTIONS]

    def results(function):
        found = []
        for (a, b), (_, _, numbers) in zip(pairs, CONTRACTIONS, strict=True):
            call = partial(function, dimension_numbers=numbers)
            y, tangent = jax.jvp(call, (a, b), (array(a.shape, dtype, 2), array(b.shape, dtype, 3)))
            found += [y, tangent, jax.vjp(call, a, b)[1](array(y.shape, dtype, 4))]
        return found

    same(*jax.jit(lambda: (results(jaxdnn.dot_general), results(lax.dot_general)))())


def test_derivatives_of_matmul():
    pairs = [(array(a, "float32"), array(b, "float32", 1)) for a, b in PRODUCTS]

    def results(function):
        return [jax.grad(lambda a, b: jnp.sum(jnp.sin(function(a, b))), (0, 1))(a, b) for a, b in pairs]

    same(*jax.jit(lambda: (results(jaxdnn.matmul), results(jnp.matmul)))())


@pytest.mark.parametrize("dtypes", [("bfloat16", "float32"), ("float32", "float64"), ("float16", "float32")])
def test_derivatives_with_a_preferred_type(dtypes):
    dtype, preferred = dtypes
    a, b = array((4, 6), dtype), array((6, 3), dtype, 1)

    def gradients(function):
        call = partial(function, dimension_numbers=PLAIN, preferred_element_type=preferred)
        return jax.grad(lambda a, b: jnp.sum(call(a, b)), (0, 1))(a, b)

    same(gradients(jaxdnn.dot_general), gradients(lax.dot_general))


def test_derivatives_in_an_array_of_integers():
    """A bilinear function of floats and integers has derivatives in the floats."""
    a, b = array((4, 3), "float32"), array((3, 6), "int32", 1)
    same(jax.grad(lambda a: jnp.sum(jaxdnn.matmul(a, b)))(a), jax.grad(lambda a: jnp.sum(jnp.matmul(a, b)))(a))


def test_second_derivatives_of_a_python_scalar():
    def hessian(function):
        return jax.hessian(jax.remat(lambda x: function(x, x, (NONE, NONE))))(1.5)

    same(hessian(jaxdnn.dot_general), hessian(lax.dot_general))


@pytest.mark.parametrize("contraction", CONTRACTIONS, ids=str)
def test_vmap(contraction):
    """Over each dimension of each operand, and over both; and twice."""
    a_shape, b_shape, numbers = contraction
    a_axes, b_axes = ((None, *range(len(shape) + 1)) for shape in (a_shape, b_shape))
    axes = [pair for pair in itertools.product(a_axes, b_axes) if pair != (None, None)][:12]

    def mapped(shape, axis):
        return shape if axis is None else (*shape[:axis], 3, *shape[axis:])

    def results(function):
        call = partial(function, dimension_numbers=numbers)
        found = []
        for a_axis, b_axis in axes:
            a, b = array(mapped(a_shape, a_axis), "float32"), array(mapped(b_shape, b_axis), "float32", 1)
            found.append(jax.vmap(call, (a_axis, b_axis))(a, b))
        a, b = array((2, *a_shape), "float32"), array((3, *b_shape), "float32", 1)
        return [*found, jax.vmap(jax.vmap(call, (None, 0)), (0, None))(a, b)]

    same(*jax.jit(lambda: (results(jaxdnn.dot_general), results(lax.dot_general)))())


@pytest.mark.parametrize("preferred", ["int8", "int32"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_of_floats_are_rounded_to_integers_once(dtype, preferred):
    """And not their factors."""
    a, b = jnp.full((2, 3), 2.75, dtype), jnp.full((3, 2), 2.75, dtype)
    wanted = jnp.matmul(a, b, preferred_element_type=preferred)
    np.testing.assert_array_equal(jaxdnn.matmul(a, b, preferred_element_type=preferred), wanted)
    np.testing.assert_array_equal(wanted, np.full((2, 2), 22))
