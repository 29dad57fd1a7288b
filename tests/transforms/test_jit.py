"""Eager and jitted calls, and options, which JAX's caches must know about."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn
from checking.calls import expected_native_calls, native_calls
from checking.cases import TABLE
from checking.compare import as_tuple, assert_close, runs, served
from checking.transforms import forward, primals, vjp, with_cotangents

each_case = pytest.mark.parametrize("case", TABLE.plain, ids=str)


@pytest.mark.parametrize(("case", "engine"), runs(TABLE.plain))
def test_eager_is_jitted(case, engine):
    function, arrays = as_tuple(case.call), [jnp.asarray(array) for array in case.primals()]
    with jaxdnn.options(engine=engine):
        eager = function(*arrays)
        jitted = jax.jit(function)(*arrays)
    assert_close(eager, forward, case, primals)
    for one, other in zip(eager, jitted, strict=True):
        np.testing.assert_array_equal(one, other)


@each_case
def test_eager_gradient(case):
    assert_close(vjp(as_tuple(case.call), *with_cotangents(case)), vjp, case, with_cotangents)


@each_case
def test_without_jit(case):
    """As one steps through a model in a debugger: each call is compiled by itself still."""
    with jax.disable_jit():
        assert_close(vjp(as_tuple(case.call), *with_cotangents(case)), vjp, case, with_cotangents)


class Traces:
    """A jitted call that counts how often it is traced."""

    def __init__(self, case):
        self.count = 0
        self.arrays = [jnp.asarray(array) for array in case.primals()]

        def function(*arrays):
            self.count += 1
            return case.call(*arrays)

        self.function = jax.jit(function)

    def after_a_call(self):
        self.function(*self.arrays)
        return self.count


@each_case
def test_other_options_trace_again(case):
    traces = Traces(case)
    assert [traces.after_a_call(), traces.after_a_call()] == [1, 1]
    with jaxdnn.options(engine="xla"):
        assert [traces.after_a_call(), traces.after_a_call()] == [2, 2]
    assert traces.after_a_call() == 2
    with jaxdnn.options(engine="xla"):
        assert traces.after_a_call() == 2


@pytest.mark.parametrize("case", served(TABLE.plain), ids=str)
def test_option_inside_a_jitted_function(case):
    def both(first, *others):
        with jaxdnn.options(engine="xla"):
            portable = case.call(first, *others)
        return portable, case.call(first + 1, *others)

    def custom_calls(function):
        return native_calls(jax.jit(function).lower(*case.primals()).compile().as_text())

    assert custom_calls(both) == expected_native_calls(case, None, differentiated=False) == 1
    with jaxdnn.options(engine="xla"):
        assert custom_calls(lambda *arrays: both(*arrays)) == 0
