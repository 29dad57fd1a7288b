"""Arrays that are transposes are read where they lie: heads before positions, as other libraries have them."""

import itertools
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxdnn
from checking.attention import problems
from checking.compiling import QUICKLY
from checking.sharding import collectives, make_mesh, placed
from jaxdnn.planning.calls import find_calls, find_differentiated_calls
from jaxdnn.planning.transposes import composed, split
from jaxdnn.primitives import _define


def heads_first(query, key, value):
    """Attention of (batch, heads, length, size)."""
    given = (jnp.swapaxes(array, 1, 2) for array in (query, key, value))
    return jnp.swapaxes(jaxdnn.dot_product_attention(*given, is_causal=True), 1, 2)


def length_first(query, key, value):
    """Of (length, batch, heads, size)."""
    given = (jnp.swapaxes(array, 0, 1) for array in (query, key, value))
    return jnp.swapaxes(jaxdnn.dot_product_attention(*given, is_causal=True), 0, 1)


def arrays(heads, function=heads_first):
    random = np.random.default_rng(0)
    order = {heads_first: (0, 2, 1, 3), length_first: (1, 0, 2, 3)}[function]
    shapes = ((3, 5, heads, 8), (3, 7, 2, 8), (3, 7, 2, 8))
    return [random.standard_normal([shape[d] for d in order]).astype(np.float32) for shape in shapes]


@pytest.mark.parametrize(("function", "labels"), [(heads_first, ("bkgth", "bksh")), (length_first, ("tbkgh", "sbkh"))])
@pytest.mark.parametrize("heads", [2, 4])
def test_operands_lie_as_they_are(function, labels, heads):
    forward, backward = find_differentiated_calls(function, *arrays(heads, function))
    of_query, of_key = labels
    of_out, of_value = (order.replace("h", "d") for order in labels)
    assert dict(forward.spec.orders) == {"query": of_query, "key": of_key, "value": of_value}
    gradients = {"d_query": of_query, "d_key": of_key, "d_value": of_value}
    assert dict(backward.spec.orders) == dict(forward.spec.orders) | {"d_out": of_out} | gradients


@jax.default_matmul_precision("highest")
@pytest.mark.parametrize("function", [heads_first, length_first])
@pytest.mark.parametrize("heads", [2, 4])
def test_the_problem_reads_them_so(function, heads):
    given = arrays(heads, function)
    (call,) = find_calls(function, *given)
    shapes = [array.shape for array in call.signature.operands.values()]
    operands = [array.reshape(shape) for array, shape in zip(given, shapes, strict=True)]
    (out,) = problems.run(call.problem, operands, list(call.signature.results.values()))
    (want,) = jax.jit(call.spec.evaluate, compiler_options=QUICKLY)(*operands)
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)
    plain = [np.moveaxis(array, *((1, 2) if function is heads_first else (0, 1))) for array in given]
    np.testing.assert_allclose(
        out.reshape(plain[0].shape), jaxdnn.dot_product_attention(*plain, is_causal=True), rtol=1e-5, atol=1e-5
    )


@jax.default_matmul_precision("highest")
@pytest.mark.parametrize("function", [heads_first, length_first])
def test_lowering_reads_them_so(function, monkeypatch):
    """What is planned while lowering is what `explain` says."""
    seen, select = [], _define.select

    def watched(spec, signature, platform):
        seen.append(spec.orders)
        return select(spec, signature, platform)

    monkeypatch.setattr(_define, "select", watched)
    given = arrays(4, function)
    got = jax.jit(function)(*given)
    (call,) = find_calls(function, *given)
    assert seen == [call.spec.orders]
    with jax.disable_jit():
        np.testing.assert_allclose(got, function(*given), rtol=1e-5, atol=1e-5)


@jax.default_matmul_precision("highest")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_on_several_devices(cpus, kind):
    """Batch elements and heads, wherever they lie, by themselves."""
    shapes = (2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8)
    given = [np.random.default_rng(i).standard_normal(shape).astype(np.float32) for i, shape in enumerate(shapes)]

    def both(*given):
        out, pull_back = jax.vjp(heads_first, *given)
        return out, pull_back(jnp.cos(out))

    mesh = make_mesh(cpus, kind)
    with jax.set_mesh(mesh):
        compiled = jax.jit(both).lower(*placed(mesh, (P("a", "b"),) * 3, given)).compile()
        got = compiled(*placed(mesh, (P("a", "b"),) * 3, given))
    assert not collectives(compiled.as_text())
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5), got, both(*given))


def test_vectors_are_not_taken_apart():
    """What would not be read in whole vectors is copied."""

    def function(query, key, value):
        return jaxdnn.dot_product_attention(jnp.swapaxes(query, 2, 3), key, value)

    types = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((2, 5, 8, 4), (2, 7, 2, 8), (2, 7, 2, 8))]
    (call,) = find_calls(function, *types)
    assert call.spec.orders == ()


SPLITS = [
    ((6, 4), (3, 2, 4)),
    ((2, 3, 4), (2, 3, 2, 2)),
    ((2, 3, 4), (2, 1, 3, 4)),
    ((5, 6), (5, 3, 2, 1)),
    ((1, 6), (1, 2, 3)),
]


@pytest.mark.parametrize(("before", "after"), SPLITS)
def test_a_split_transpose_is_the_transpose_of_a_split(before, after):
    for order in itertools.permutations(range(len(before))):
        shape = [before[order.index(d)] for d in range(len(before))]
        array = np.arange(prod(shape)).reshape(shape)
        want = array.transpose(order).reshape(after)
        split_shape, split_order = split(order, before, after)
        np.testing.assert_array_equal(array.reshape(split_shape).transpose(split_order), want)


@pytest.mark.parametrize(
    ("before", "after"), [((6, 4), (4, 6)), ((6, 4), (24,)), ((2, 3), (3, 2)), ((4, 6), (2, 4, 3))]
)
def test_dimensions_that_are_joined_are_no_split(before, after):
    assert split((1, 0), before, after) is None


def test_transposes_are_composed():
    array = np.arange(24).reshape(2, 3, 4)
    for inner, outer in itertools.product(itertools.permutations(range(3)), repeat=2):
        want = array.transpose(inner).transpose(outer)
        np.testing.assert_array_equal(array.transpose(composed(outer, inner)), want)
