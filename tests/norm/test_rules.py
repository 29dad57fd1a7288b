"""What is particular to norms under JAX's transformations: what is mapped, fused, kept and computed again."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn
from checking.calls import native_calls, primitives
from checking.cases import BF16, F32, NormCase
from checking.compare import platform
from checking.transforms import stacked, with_cotangents
from jaxdnn.planning.calls import find_differentiated_calls

CASE = NormCase("layer_norm", (6, 33), x=BF16, scale=F32, bias=F32, statistics=True)


def test_numpy_and_lists_are_arrays():
    np.testing.assert_allclose(jaxdnn.rms_norm([[3.0, 4.0]]), [[0.8485281, 1.1313708]], rtol=1e-6)
    np.testing.assert_allclose(jaxdnn.rms_norm(np.float32([3, 4]), np.ones(2, np.float32)).sum(), 1.9798989, rtol=1e-6)


def test_a_gradient_runs_the_fused_backward():
    """Neither the tangent nor the reference is left in a jitted gradient, and each direction is one custom call."""
    case = CASE.replace(residual=BF16)
    primals, cotangents = with_cotangents(case)

    def gradient(*primals):
        return jax.vjp(case.call, *primals)[1](cotangents)

    jaxpr = jax.make_jaxpr(jax.jit(gradient))(*primals)
    assert primitives(jaxpr.jaxpr) == {"jaxdnn_norm_forward": 1, "jaxdnn_norm_backward": 1}
    if platform() in ("cpu", "cuda"):
        assert native_calls(jax.jit(gradient).lower(*primals).compile().as_text()) == 2


def test_remat_computes_again():
    case = NormCase("layer_norm", (4, 16), scale=F32, bias=F32)
    x, scale, bias = case.primals()

    def loss(x):
        return jnp.sum(jnp.sin(jax.checkpoint(lambda x: case.call(x, scale, bias))(jnp.sin(x))))

    found = primitives(jax.make_jaxpr(jax.grad(loss))(x).jaxpr)
    assert found == {"jaxdnn_norm_forward": 2, "jaxdnn_norm_backward": 1}


def test_rows_are_absorbed():
    """An axis that only x carries is but more rows: nothing is mapped, and scale is not copied."""
    case = NormCase("rms_norm", (4, 8), scale=F32)
    x, scale = stacked(case, (0, None))
    jaxpr = jax.make_jaxpr(jax.vmap(case.call, (0, None)))(x, scale)
    (equation,) = jaxpr.eqns
    assert equation.params["spec"].batch == ()
    assert [v.aval.shape for v in equation.invars] == [(3, 4, 8), (8,)]


@pytest.mark.parametrize("levels", range(4))
def test_groups_are_as_far_apart_as_one_is_large(levels):
    """However many axes are mapped, forward and backward."""
    sizes, function = (2, 3, 4)[:levels], CASE.call
    for _ in sizes:
        function = jax.vmap(function)
    arrays = [jax.ShapeDtypeStruct((*sizes, *CASE.shape_of(name)), dtype) for name, dtype in CASE.dtypes.items()]
    for call in find_differentiated_calls(function, *arrays):
        rows = call.problem
        assert (rows.groups, rows.rows, rows.columns) == (math.prod(sizes), CASE.rows, CASE.columns)
        for array in (*rows.operands, *(rows.results if levels else ())):
            assert array.group_stride == (math.prod(CASE.shape_of(array.name.removeprefix("d_"))) if levels else 0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_what_the_reference_normalizes_is_the_sum_as_it_is_returned(dtype):
    """Which XLA, where it optimizes, keeps only if it is told to round."""
    case = NormCase("rms_norm", (4, 8), x=dtype, residual=dtype)
    call = find_differentiated_calls(case.call, *case.primals())[0]
    equations = jax.make_jaxpr(call.spec.evaluate)(*case.primals()).eqns
    (rounding,) = (e.params for e in equations if e.primitive.name == "reduce_precision")
    kind = jnp.finfo(dtype)
    assert (rounding["exponent_bits"], rounding["mantissa_bits"]) == (kind.nexp, kind.nmant)


def test_training_step():
    """Parameters are donated and updated, step after step, as a training loop does."""
    case = NormCase("layer_norm", (16, 32), scale=F32, bias=F32)
    x, scale, bias = map(jnp.array, case.primals())
    target = np.roll(np.asarray(x), 1)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(parameters):
        def loss(parameters):
            return jnp.mean(jnp.square(case.call(x, *parameters) - target))

        value, gradients = jax.value_and_grad(loss)(parameters)
        return jax.tree.map(lambda p, g: p - 0.5 * g, parameters, gradients), value

    parameters, losses = (scale, bias), []
    for _ in range(20):
        parameters, value = step(parameters)
        losses.append(float(value))
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]
