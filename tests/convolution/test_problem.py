"""The problem that a call states means what the call does: run in numpy, from the places that it names."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn
from checking.calls import calls_of
from checking.cases import TABLE
from checking.compiling import QUICKLY
from checking.convolution import problems
from jaxdnn.engines.convolution.problem import Convolution, Window
from jaxdnn.engines.product.problem import Product

CASES = [case for case in TABLE.every if case.op == "convolution"]
MAPPED = [
    (case, axes) for case, axes in TABLE.mapped if case.op == "convolution" and all(axis in (0, None) for axis in axes)
]


def operand(type_, random):
    """Small numbers, of which sums and products are exact."""
    values = random.integers(-3, 4, type_.shape)
    return (values if np.issubdtype(type_.dtype, np.integer) else values / 4).astype(type_.dtype)


def checked(calls):
    """How many calls of each direction had a problem of its own."""
    found = []
    for call in calls:
        problem = call.problem
        if not isinstance(problem, Convolution):
            continue
        found.append(problem.result)
        random = np.random.default_rng(0)
        arrays = [operand(type_, random) for type_ in call.signature.operands.values()]
        wanted = jax.jit(call.spec.evaluate, compiler_options=QUICKLY)(*arrays)
        for got, want in zip(problems.run(problem, arrays), wanted, strict=True):
            exact = np.asarray(want).astype(np.float64).ravel()
            off = 40 * float(jnp.finfo(want.dtype).eps) if jnp.issubdtype(want.dtype, jnp.floating) else 0
            scale = max(1.0, float(np.max(np.abs(exact), initial=0)))
            np.testing.assert_allclose(got.astype(np.float64), exact, rtol=0, atol=off * scale, err_msg=call.spec.title)
    return sorted(found)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_means_the_call(case):
    calls = [call for call in calls_of(case) if call.spec.op == "convolution"]
    matrices = [call for call in calls if isinstance(call.problem, Product)]
    assert not [call.problem for call in calls if isinstance(call.problem, str)]
    assert len(checked(calls)) == (0 if matrices else len(calls))


@pytest.mark.parametrize(("case", "axes"), MAPPED, ids=str)
def test_mapped_axes_join_the_batch_or_images(case, axes):
    calls = [call for call in calls_of(case, axes) if call.spec.op == "convolution"]
    forward = calls[0].problem
    assert checked(calls)
    assert isinstance(forward, Convolution)
    if axes[1:] == (None,) * len(axes[1:]) and forward.result == "output":
        assert forward.batch == 1, "an image that is mapped alone is more images"


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_no_places_are_summed_by_no_kernel(target):
    """Though the arrays that are read have elements, and so has the sum."""
    images, filters = jnp.ones((2, 3, 32), "bfloat16"), jnp.ones((5, 32, 4), "bfloat16")
    summed = partial(
        jaxdnn.conv_general_dilated,
        window_strides=(1,),
        padding="VALID",
        dimension_numbers=("NHC", "HIO", "NHC"),
        epilogue=lambda acc: jnp.sum(acc, (0, 1)),
    )
    with jaxdnn.options(target=target):
        (call,) = jaxdnn.explain(summed, images, filters).sections[0][1]
    assert (call.engine, call.call.problem) == ("xla", "the result has no elements")
    np.testing.assert_array_equal(jax.jit(summed)(images, filters), np.zeros(4))


WINDOWS = [
    Window(5, 3, 3),
    Window(6, 3, 5, stride=2, dilation=1, low=4),
    Window(7, 2, 4, stride=2, dilation=3, base_dilation=1, low=-1),
    Window(4, 3, 6, stride=1, dilation=2, base_dilation=2, low=3, flipped=True),
    Window(1, 1, 1),
]


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_transposed_windows_meet_at_the_same_places(window):
    def meetings(one):
        found = one.meetings
        return {(int(found[o, r]), r, o) for o, r in zip(*np.nonzero(found >= 0), strict=True)}

    there = meetings(window)
    assert there
    assert {(o, r, i) for i, r, o in meetings(window.transposed)} == there
    assert window.transposed.transposed == window
    if not window.flipped:
        assert {(i, o, r) for i, r, o in meetings(window.exchanged)} == there
