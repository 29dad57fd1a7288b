"""Many threads at once, tracing, compiling and running, on shared and on separate jitted functions."""

import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

import jaxdnn
from checking.cases import F32, NormCase

THREADS, CALLS = 8, 200
CASE = NormCase("layer_norm", (16, 96), scale=F32, bias=F32, residual=F32)


def step(x, residual, scale, bias):
    def loss(*arrays):
        y, total = CASE.call(*arrays)
        return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.square(total))

    return jax.value_and_grad(loss, (0, 1, 2, 3))(x, residual, scale, bias)


def run_together(work):
    """`work(thread)` in all threads, which begin at once; raises what one of them raised."""
    barrier = threading.Barrier(THREADS)

    def begin(thread):
        barrier.wait()
        return work(thread)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(begin, range(THREADS)))


def operands(thread):
    return tuple(map(jnp.asarray, CASE.replace(seed=thread).primals()))


def assert_equal(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_shared_function():
    shared = jax.jit(step)
    expected = [jax.jit(step)(*operands(thread)) for thread in range(THREADS)]

    def work(thread):
        given = operands(thread)
        for _ in range(CALLS):
            assert_equal(shared(*given), expected[thread])

    run_together(work)


def test_separate_functions():
    def work(thread):
        # A size of its own, so that the threads select, compile and load at the same time.
        case = CASE.replace(shape=(16, 96 + thread), seed=thread)
        given = tuple(map(jnp.asarray, case.primals()))
        function = jax.jit(lambda *arrays: case.call(*arrays))
        first = function(*given)
        for _ in range(CALLS - 1):
            assert_equal(function(*given), first)
        return given, first

    for thread, (given, got) in enumerate(run_together(work)):
        with jaxdnn.options(engine="xla"):
            want = CASE.replace(shape=(16, 96 + thread)).call(*given)
        for one, other in zip(got, want, strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


def test_options_belong_to_a_thread():
    def work(thread):
        engine = "xla" if thread % 2 else None
        seen = []
        for _ in range(CALLS):
            with jaxdnn.options(engine=engine) as inside:
                seen.append(inside.engine)
            with jaxdnn.options() as outside:
                seen.append(outside.engine)
        return set(seen)

    for thread, seen in enumerate(run_together(work)):
        assert seen == ({"xla", None} if thread % 2 else {None})
