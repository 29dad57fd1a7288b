"""What JAX's own tests of convolutions ask, asked of jaxdnn's functions in the place of `lax`'s.

JAX's tests are not installed with it. These cover the same grids of shapes, dtypes, layouts and arguments as lax_test,
lax_autodiff_test and lax_vmap_test, and take JAX's functions for the truth: values, dtypes, weak types, derivatives,
batching, and errors.
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
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint32")
DTYPES = ("bool", *INTEGERS, *FLOATS, "complex64", "complex128")
PREFERRED = [
    *(("int8", to) for to in ("int8", "int16", "int32", "float32")),
    *(("bfloat16", to) for to in ("bfloat16", "float32", "float64")),
    *(("float16", "float32"), ("float32", "float64"), ("int32", "float64"), ("complex64", "complex128")),
]
LAYOUTS = [("NCHW", "OIHW", "NCHW"), ("NHWC", "HWIO", "NHWC"), ("NCHW", "HWIO", "NHWC"), ("CHWN", "IWOH", "HCNW")]
# Groups of features and of the batch, as lax_test pairs them.
COUNTS = [(1, 1), (2, 1), (3, 1), (1, 2), (1, 3)]
STEPS = [
    {"window_strides": (1, 1), "padding": ((0, 0), (0, 0))},
    {"window_strides": (1, 2), "padding": ((1, 2), (2, 0)), "rhs_dilation": (2, 2)},
    {"window_strides": (2, 3), "padding": ((-1, 2), (0, -1)), "lhs_dilation": (2, 1)},
    {"window_strides": (1, 1), "padding": ((1, 2), (1, 1)), "lhs_dilation": (3, 2), "rhs_dilation": (1, 3)},
    {"window_strides": (2, 3), "padding": ((1, -1), (0, 0))},
    {"window_strides": (3, 4), "padding": "VALID"},
    {"window_strides": (2, 1), "padding": "SAME"},
    {"window_strides": (3, 2), "padding": "SAME_LOWER"},
]
# Of lax_vmap_test: lhs, rhs, and the rest.
BATCHED = [
    ((2, 3, 4, 4), (4, 3, 2, 3), {"window_strides": (1, 2), "padding": ((0, 1), (1, 0))}),
    ((2, 4, 4, 4), (4, 2, 2, 3), {"window_strides": (1, 1), "padding": "SAME", "feature_group_count": 2}),
    ((4, 3, 4, 4), (4, 3, 2, 3), {"window_strides": (2, 1), "padding": "VALID", "batch_group_count": 2}),
    ((2, 3, 4, 4), (4, 3, 2, 3), {"window_strides": (1, 1), "padding": ((1, 1), (1, 1)), "lhs_dilation": (2, 2)}),
]


def both(function, *calls):
    """Results of both functions, compiled as one program: `function` of one of them, and the arguments of a call."""

    def results(convolve):
        return [function(partial(convolve, **keywords), *arrays) for *arrays, keywords in calls]

    same(*jax.jit(lambda: (results(jaxdnn.conv_general_dilated), results(lax.conv_general_dilated)))())


def grid(layout, groups, batch_groups):
    """lhs and rhs of lax_test's, in a layout."""
    sizes = {"N": 2 * batch_groups, "C": 2 * groups, "H": 6, "W": 7}
    of_filter = {"O": 3 * groups * batch_groups, "I": 2, "H": 2, "W": 3}
    return tuple(sizes[letter] for letter in layout[0]), tuple(of_filter[letter] for letter in layout[1])


@pytest.fixture(autouse=True)
def _in_full_precision():
    with jax.default_matmul_precision("float32"):
        yield


@pytest.mark.parametrize("dtype", DTYPES)
def test_conv(dtype):
    shapes = [
        ((2, 3, 9, 10), (4, 3, 3, 2)),
        ((1, 2, 7), (3, 2, 2)),
        ((2, 5), (3, 5)),
        ((2, 3, 4, 5, 3), (2, 3, 2, 2, 2)),
    ]
    calls = []
    for (lhs, rhs), stride, padding in itertools.product(shapes, (1, 2), ("SAME", "VALID")):
        keywords = {"window_strides": (stride,) * (len(lhs) - 2), "padding": padding}
        calls.append((array(lhs, dtype), array(rhs, dtype, 1), keywords))
    both(lambda convolve, lhs, rhs: convolve(lhs, rhs), *calls)


@pytest.mark.parametrize("layout", LAYOUTS, ids=",".join)
@pytest.mark.parametrize(("groups", "batch_groups"), COUNTS)
def test_conv_general_dilated(layout, groups, batch_groups):
    lhs, rhs = grid(layout, groups, batch_groups)
    counts = {"feature_group_count": groups, "batch_group_count": batch_groups, "dimension_numbers": layout}
    calls = []
    for steps in STEPS:
        if not (isinstance(steps["padding"], str) and batch_groups > 1):
            calls.append((array(lhs, "float32"), array(rhs, "float32", 1), {**steps, **counts}))
            calls.append((array(lhs, "int32"), array(rhs, "int32", 1), {**steps, **counts}))
    both(lambda convolve, lhs, rhs: convolve(lhs, rhs), *calls)


@pytest.mark.parametrize("flip", [False, True])
def test_the_filter_may_be_reversed(flip):
    lhs, rhs = array((2, 3, 6, 7), "float32"), array((4, 3, 2, 3), "float32", 1)
    for keywords in STEPS[:4]:
        turned = jnp.flip(rhs, (2, 3)) if flip else rhs
        want = lax.conv_general_dilated(lhs, turned, **keywords)
        same(jaxdnn.conv_general_dilated(lhs, rhs, **keywords, flip_kernel=flip), want)


@pytest.mark.parametrize(("dtype", "preferred"), PREFERRED)
def test_preferred_element_type(dtype, preferred):
    # Shapes of their own: JAX's caches take float64 for None, where their hashes meet.
    keywords = {"window_strides": (1,), "padding": "SAME", "preferred_element_type": preferred}
    lhs, rhs = array((2, 3, 8), dtype), array((4, 3, 3), dtype, 1)
    ours = jaxdnn.conv_general_dilated(lhs, rhs, **keywords)
    with jax.default_device(jax.devices("cpu")[0]):  # GPUs have no convolutions of integers but ours
        theirs = lax.conv_general_dilated(*map(np.asarray, (lhs, rhs)), **keywords)
    same(ours, theirs)


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
@pytest.mark.parametrize("transpose_kernel", [False, True])
@pytest.mark.parametrize("consistent", [False, True])
def test_conv_transpose(dtype, transpose_kernel, consistent):
    rhs = (3, 2, 4, 3) if transpose_kernel else (3, 2, 3, 4)
    arrays = array((2, 5, 4, 3), dtype), array(rhs, dtype, 1)
    grid = itertools.product(((1, 1), (2, 3)), (None, (2, 1)), ("SAME", "VALID", ((1, 2), (0, 1))))

    def results(transposed):
        keywords = {"transpose_kernel": transpose_kernel, "use_consistent_padding": consistent}
        return [transposed(*arrays, strides, padding, dilation, **keywords) for strides, dilation, padding in grid]

    grid = list(grid)
    same(*jax.jit(lambda: (results(jaxdnn.conv_transpose), results(lax.conv_transpose)))())


def test_precisions():
    lhs, rhs = array((2, 3, 8), "float32"), array((4, 3, 3), "float32", 1)
    for precision in (None, "highest", "bfloat16", lax.Precision.HIGH, ("default", "highest"), "none such", 3.5):
        keywords = {"window_strides": (1,), "padding": "VALID", "precision": precision}
        want = outcome(lax.conv_general_dilated, lhs, rhs, **keywords)
        assert outcome(jaxdnn.conv_general_dilated, lhs, rhs, **keywords) == want


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "complex64"])
@pytest.mark.parametrize(("groups", "batch_groups"), COUNTS)
def test_derivatives(dtype, groups, batch_groups):
    lhs, rhs = grid(LAYOUTS[0], groups, batch_groups)
    counts = {"feature_group_count": groups, "batch_group_count": batch_groups}
    calls = [
        (array(lhs, dtype), array(rhs, dtype, 1), {**steps, **counts})
        for steps in (STEPS[:4] if dtype == "float32" else STEPS[2:4])
    ]

    def derivatives(convolve, lhs, rhs):
        y, tangent = jax.jvp(convolve, (lhs, rhs), (array(lhs.shape, dtype, 2), array(rhs.shape, dtype, 3)))
        return y, tangent, jax.vjp(convolve, lhs, rhs)[1](array(y.shape, dtype, 4))

    both(derivatives, *calls)


@pytest.mark.parametrize(("lhs", "rhs", "keywords"), BATCHED, ids=str)
def test_vmap(lhs, rhs, keywords):
    every = [(a, b) for a, b in itertools.product((None, 0, 2), (None, 0, 3)) if (a, b) != (None, None)]

    def stacked(shape, axis, seed):
        shape = list(shape)
        if axis is not None:
            shape.insert(axis, 3)
        return array(tuple(shape), "float32", seed)

    def mapped(convolve):
        return [
            jax.vmap(partial(convolve, **keywords), axes)(stacked(lhs, axes[0], 0), stacked(rhs, axes[1], 1))
            for axes in every
        ]

    def gradients(convolve):
        def loss(axes):
            return lambda a, b: jnp.sum(jnp.sin(jax.vmap(partial(convolve, **keywords), axes)(a, b)))

        return [jax.grad(loss(axes), (0, 1))(stacked(lhs, axes[0], 0), stacked(rhs, axes[1], 1)) for axes in every]

    functions = (jaxdnn.conv_general_dilated, lax.conv_general_dilated)
    same(*jax.jit(lambda: tuple((mapped(f), gradients(f)) for f in functions))())


BAD = {
    "ranks": ((2, 3, 5), (4, 3, 2, 2), {}),
    "no ranks": ((2,), (3,), {}),
    "features": ((2, 3, 5), (4, 2, 2), {}),
    "groups of features": ((2, 3, 5), (4, 3, 2), {"feature_group_count": 2}),
    "groups of results": ((2, 4, 5), (3, 2, 2), {"feature_group_count": 2}),
    "both groups": ((4, 4, 5), (4, 2, 2), {"feature_group_count": 2, "batch_group_count": 2}),
    "no groups": ((2, 3, 5), (4, 3, 2), {"feature_group_count": 0}),
    "groups of the batch": ((3, 3, 5), (4, 3, 2), {"batch_group_count": 2}),
    "zero strides": ((2, 3, 5), (4, 3, 2), {"window_strides": (0,)}),
    "too many strides": ((2, 3, 5), (4, 3, 2), {"window_strides": (1, 1)}),
    "negative dilation": ((2, 3, 5), (4, 3, 2), {"rhs_dilation": (-1,)}),
    "zero dilation": ((2, 3, 5), (4, 3, 2), {"lhs_dilation": (0,)}),
    "unknown padding": ((2, 3, 5), (4, 3, 2), {"padding": "FULL"}),
    "half a padding": ((2, 3, 5), (4, 3, 2), {"padding": ((1,),)}),
    "too many paddings": ((2, 3, 5), (4, 3, 2), {"padding": ((1, 1), (1, 1))}),
    "named padding of a dilated image": ((2, 3, 5), (4, 3, 2), {"padding": "SAME", "lhs_dilation": (2,)}),
    "unknown layout": ((2, 3, 5), (4, 3, 2), {"dimension_numbers": ("NXC", "OIW", "NCW")}),
    "layout of another rank": ((2, 3, 5), (4, 3, 2), {"dimension_numbers": ("NCHW", "OIHW", "NCHW")}),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    lhs, rhs, keywords = BAD[name]
    keywords = {"window_strides": (1,), "padding": "VALID", **keywords}
    arrays = jnp.zeros(lhs), jnp.zeros(rhs)
    want = outcome(lax.conv_general_dilated, *arrays, **keywords)
    assert isinstance(want, type)
    assert outcome(jaxdnn.conv_general_dilated, *arrays, **keywords) in (TypeError, ValueError)


def test_two_dtypes():
    lhs, rhs = jnp.zeros((2, 3, 5), "float32"), jnp.zeros((4, 3, 2), "bfloat16")
    with pytest.raises(TypeError, match="must have one dtype; got float32 and bfloat16: cast one of them"):
        jaxdnn.conv_general_dilated(lhs, rhs, (1,), "VALID")


def test_clearer_messages():
    lhs, rhs = jnp.zeros((2, 3, 5)), jnp.zeros((4, 3, 2))
    with pytest.raises(ValueError, match="window and window_strides must have the same number of dimensions, 1"):
        jaxdnn.conv_general_dilated(lhs, rhs, (1, 1), "VALID")
    with pytest.raises(ValueError, match="conv_general_dilated lhs and rhs must have the same number of dimensions"):
        jaxdnn.conv_general_dilated(lhs, rhs[0], (1,), "VALID")
    with pytest.raises(ValueError, match="window_strides must have a positive number for each of 1 dimensions"):
        jaxdnn.conv_general_dilated(lhs, rhs, (0,), "VALID")
    with pytest.raises(TypeError, match="lhs must be an array"):
        jaxdnn.conv_general_dilated([1.0], rhs, (1,), "VALID")
    with pytest.raises(TypeError, match="no keyword groups=; did you mean feature_group_count="):
        jaxdnn.conv_general_dilated(lhs, rhs, (1,), "VALID", groups=2)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="window_strides must be known when tracing"):
        jax.jit(lambda stride: jaxdnn.conv_general_dilated(lhs, rhs, (stride,), "VALID"))(1)
    with pytest.raises(TypeError, match="padding must be known when tracing"):
        jax.jit(lambda low: jaxdnn.conv_general_dilated(lhs, rhs, (1,), ((low, 0),)))(1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window_strides": (1.0,)}, "window_strides must have a positive number"),
        ({"window_strides": None}, "window_strides must have a positive number"),
        ({"window_strides": (np.int32(0),)}, "window_strides must have a positive number"),
        ({"rhs_dilation": "1"}, "rhs_dilation must have a positive number"),
        ({"padding": ((1.0, 1),)}, "padding must have a pair"),
        ({"padding": np.ones((1, 2))}, "padding must have a pair"),
        ({"feature_group_count": 1.0}, "feature_group_count must be a positive integer; got 1.0"),
        ({"batch_group_count": None}, "batch_group_count must be a positive integer; got None"),
    ],
    ids=repr,
)
def test_what_is_refused_stays_refused_after_calls_that_equal_it(changes, message):
    """JAX's cache of what it has checked takes 1.0 for 1."""
    lhs, rhs, given = jnp.zeros((2, 3, 5)), jnp.zeros((4, 3, 2)), {"window_strides": (1,), "padding": ((1, 1),)}
    jaxdnn.conv_general_dilated(lhs, rhs, **given)
    with pytest.raises((TypeError, ValueError), match=message):
        jaxdnn.conv_general_dilated(lhs, rhs, **{**given, **changes})


def test_names_of_a_transposed_padding():
    lhs, rhs, layout = jnp.zeros((2, 5, 3)), jnp.zeros((2, 3, 4)), ("NWC", "WIO", "NWC")
    with pytest.raises(ValueError, match="padding must be one of SAME, VALID, or a pair"):
        jaxdnn.conv_transpose(lhs, rhs, (2,), "SAME_LOWER", dimension_numbers=layout)
    ours, theirs = (
        f(lhs, rhs, (1,), "SAME_LOWER", dimension_numbers=layout) for f in (jaxdnn.conv_transpose, lax.conv_transpose)
    )
    same(ours, theirs)


def test_padding_in_an_array_of_jax():
    lhs, rhs = array((2, 3, 5), "float32"), array((4, 3, 2), "float32", 1)
    same(*(f(lhs, rhs, (1,), jnp.ones((1, 2), int)) for f in (jaxdnn.conv_general_dilated, lax.conv_general_dilated)))


def test_causal_padding():
    lhs, rhs = array((2, 7, 3), "float32"), array((3, 3, 4), "float32", 1)
    layout = ("NWC", "WIO", "NWC")
    for dilation in (1, 2):
        ours = jaxdnn.conv_general_dilated(lhs, rhs, (1,), "CAUSAL", rhs_dilation=(dilation,), dimension_numbers=layout)
        pads = ((2 * dilation, 0),)
        same(ours, lax.conv_general_dilated(lhs, rhs, (1,), pads, None, (dilation,), layout))
    with pytest.raises(ValueError, match=r"for one spatial dimension.*; got lhs float"):
        jaxdnn.conv_general_dilated(jnp.zeros((2, 3, 4, 4)), jnp.zeros((4, 3, 2, 2)), (1, 1), "CAUSAL")


def test_signatures():
    for name in ("conv_general_dilated", "conv_transpose"):
        ours, theirs = (inspect.signature(getattr(module, name)).parameters for module in (jaxdnn, lax))
        assert list(ours)[: len(theirs)] == list(theirs)
        assert all(ours[one].default == theirs[one].default for one in theirs)
