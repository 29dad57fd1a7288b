"""Operands that are transposes are read where the array lies: nothing is copied for the kernel."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxdnn
from jaxdnn.planning.calls import find_calls
from jaxdnn.primitives import _define


def array(*shape):
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def swapped(x):
    return jnp.swapaxes(x, -1, -2)


def scanned(x, ws):
    return lax.scan(lambda x, w: (jaxdnn.matmul(x, w.T), None), x, ws)[0]


def twice(x, w):
    """The transpose of a transpose."""
    return jaxdnn.matmul(x, w.transpose(1, 0, 2).transpose(0, 2, 1))


def gated(x, gate, up):
    return jaxdnn.gated_linear_unit(x, gate.T, up.T)


def through(function):
    """The gradient with respect to x, in which the weight is read twice."""
    return lambda x, w: jax.grad(lambda x: jnp.sum(jnp.sin(function(x, w))))(x)


def linear(x, w):
    return jaxdnn.matmul(x, w.T)


# The function, its arguments, and the same of JAX.
CASES = {
    "weights of (out, in)": (linear, [(64, 96), (128, 96)], lambda x, w: x @ w.T),
    "x.T @ y": (lambda x, y: jaxdnn.matmul(x.T, y), [(64, 96), (64, 80)], lambda x, y: x.T @ y),
    "both": (lambda x, y: jaxdnn.matmul(x.T, y.T), [(64, 96), (80, 64)], lambda x, y: x.T @ y.T),
    "batched": (lambda x, w: jaxdnn.matmul(x, swapped(w)), [(3, 64, 96), (3, 80, 96)], lambda x, w: x @ swapped(w)),
    "batch not in front": (
        lambda x, w: jaxdnn.matmul(x.transpose(1, 0, 2), w),
        [(64, 3, 96), (3, 96, 80)],
        lambda x, w: x.transpose(1, 0, 2) @ w,
    ),
    "twice": (twice, [(3, 64, 96), (80, 3, 96)], lambda x, w: jnp.einsum("bmk,nbk->bmn", x, w)),
    "epilogue": (
        lambda x, w, b: jaxdnn.matmul(x, w.T, b, epilogue=lambda acc, b: jax.nn.relu(acc + b)),
        [(64, 96), (80, 96), (80,)],
        lambda x, w, b: jax.nn.relu(x @ w.T + b),
    ),
    "gated": (gated, [(64, 96), (80, 96), (80, 96)], lambda x, g, u: jax.nn.silu(x @ g.T) * (x @ u.T)),
    "scan": (scanned, [(64, 96), (3, 96, 96)], lambda x, ws: x @ ws[0].T @ ws[1].T @ ws[2].T),
    "gradient": (through(linear), [(64, 96), (80, 96)], through(lambda x, w: x @ w.T)),
    "remat": (through(jax.checkpoint(linear)), [(64, 96), (80, 96)], through(lambda x, w: x @ w.T)),
    "vmap": (jax.vmap(linear, (0, None)), [(3, 64, 96), (80, 96)], lambda x, w: x @ w.T),
    "vmap of the weight": (jax.vmap(linear), [(3, 64, 96), (3, 80, 96)], lambda x, w: x @ swapped(w)),
    "jit": (lambda x, w: jax.jit(linear)(x, w) + 1, [(64, 96), (80, 96)], lambda x, w: x @ w.T + 1),
}
# Of these some arrays are no matrices as they lie, or only one of two weights is a transpose.
COPIED = {
    "heads": (
        lambda x, w: jaxdnn.matmul(x.transpose(0, 2, 1, 3).reshape(64, 96), w),
        [(4, 3, 16, 32), (96, 80)],
        lambda x, w: x.transpose(0, 2, 1, 3).reshape(64, 96) @ w,
    ),
    "batch innermost": (
        lambda x, w: jaxdnn.matmul(x.transpose(2, 0, 1), w),
        [(64, 96, 3), (96, 80)],
        lambda x, w: x.transpose(2, 0, 1) @ w,
    ),
    "one of two": (
        lambda x, g, u: jaxdnn.gated_linear_unit(x, g.T, u),
        [(64, 96), (80, 96), (96, 80)],
        lambda x, g, u: jax.nn.silu(x @ g.T) * (x @ u),
    ),
}


@pytest.mark.parametrize("name", [*CASES, *COPIED])
@jax.default_matmul_precision("highest")
def test_results(name):
    function, shapes, of_jax = {**CASES, **COPIED}[name]
    arrays = [array(*shape) for shape in shapes]
    expected = of_jax(*arrays)
    np.testing.assert_allclose(jax.jit(function)(*arrays), expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_copied(name):
    function, shapes, _ = CASES[name]
    text = jax.jit(function).lower(*(array(*shape) for shape in shapes)).compile().as_text()
    assert "jaxdnn" in text
    moved = re.findall(r"= f32\[\d+,\d+[\d,]*\]\S* (?:transpose|fusion)\(.*", text)
    assert not [line for line in moved if "transpose" in line.split("metadata")[0]]


@pytest.mark.parametrize("name", CASES)
def test_kernels_for_a_gpu_read_no_transpose(name):
    function, shapes, _ = CASES[name]
    with jaxdnn.options(target="sm_90"):
        lowered = jax.jit(function).trace(*(array(*shape) for shape in shapes)).lower(lowering_platforms=("cuda",))
    # Names count from the beginning of each function.
    for body in lowered.as_text().split("func.func")[1:]:
        made = set(re.findall(r"(%\w+) = stablehlo.transpose", body))
        for read in re.findall(r"stablehlo.custom_call @jaxdnn\w*\(([^)]*)\)", body):
            assert not made & set(read.split(", "))
    assert "@jaxdnn" in lowered.as_text()


@pytest.mark.parametrize("name", ["weights of (out, in)", "batched", "twice", "epilogue", "gated", "scan", "remat"])
def test_what_is_found_is_what_is_lowered(name, monkeypatch):
    function, shapes, _ = CASES[name]
    arrays = [array(*shape) for shape in shapes]
    found = {(call.spec, str(call.signature)) for call in find_calls(function, *arrays)}
    lowered = set()

    def recorded(spec, signature, platform):
        lowered.add((spec, str(signature)))
        return select(spec, signature, platform)

    select = _define.select
    monkeypatch.setattr(_define, "select", recorded)
    jax.jit(lambda *arrays: function(*arrays)).lower(*arrays)
    assert lowered == found
