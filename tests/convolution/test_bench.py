"""The benchmark's calls compute what they say, jaxdnn's and the plain ones alike."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdnn.bench import convolution
from jaxdnn.bench.convolution import Call

DENSE = Call((3, 9, 8, 8), (3, 2), 4, "float32")
CALLS = [
    DENSE,
    replace(DENSE, kind="strided", stride=2),
    replace(DENSE, kind="dilated", dilation=2, groups=2),
    replace(DENSE, kind="transposed", spread=2, padding=((1, 1), (1, 0))),
    replace(DENSE, kind="depthwise", features=16, groups=8),
    replace(DENSE, kind="half", dtype="bfloat16"),
    Call((2, 5, 4, 6, 2), (2, 2, 2), 3, "float32", kind="3-D"),
    Call((2, 12, 4), (4,), 4, "float32", kind="causal", padding=((3, 0),)),
]


def check(call, direction):
    case = convolution.case(call, direction)
    assert case.sample is not None
    operands = case.operands(jax.random.key(0))
    for implementation in (case.jaxdnn, case.xla):
        results = jax.jit(implementation.run)(*implementation.prepare(*operands))
        for found, exact in case.sample(operands, results):
            bound = 4 * float(jnp.finfo(call.dtype).eps) * np.abs(exact).max()
            np.testing.assert_allclose(found, exact, rtol=0, atol=bound)


@pytest.mark.parametrize("direction", ["fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.kind or "dense")
def test_both_compute_the_same(call, direction):
    check(call, direction)


@pytest.mark.parametrize("epilogue", ["bias + relu", "bias + residual + relu", "statistics"])
def test_epilogues(epilogue):
    check(replace(DENSE, epilogue=epilogue), "fprop")


def test_statistics_are_of_the_whole_batch():
    case = convolution.case(replace(DENSE, epilogue="statistics"), "fprop")
    operands = case.operands(jax.random.key(0))
    (y, *sums), (_, *plain) = (jax.jit(one.run)(*operands) for one in (case.jaxdnn, case.xla))
    wide = np.asarray(y, np.float64)
    for found, of_xla, exact in zip(sums, plain, (wide.sum((0, 1, 2)), (wide**2).sum((0, 1, 2))), strict=True):
        bound = wide.size / wide.shape[-1] * float(jnp.finfo(jnp.float32).eps) * np.abs(exact).max()
        np.testing.assert_allclose(found, exact, rtol=0, atol=bound)
        np.testing.assert_allclose(of_xla, exact, rtol=0, atol=bound)


def test_operations_of_zeros_do_not_count():
    """A transposed convolution's are those of the one whose gradient it is."""
    spread = Call((1, 4, 4, 2), (2, 2), 3, spread=2, padding=((1, 1),) * 2)
    assert spread.result.shape == (1, 8, 8, 3)
    assert convolution.case(spread, "fprop").flops == 2 * 4 * 4 * (2 * 2) * 2 * 3


def test_depthwise_ones_are_bounded_by_memory():
    case = convolution.case(CALLS[4], "dgrad")
    assert case.flops == 0
    assert case.bytes == 4 * (3 * 9 * 8 * 8 + 3 * 2 * 16 + 3 * 9 * 8 * 16)
    assert case.shape == "3 x 9x8 x 8, 3x2 to 16"


def test_a_gpu_gets_layers_of_networks(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    cases = list(convolution.cases())
    kinds = {case.call.partition("convolution")[0].strip() for case in cases}
    assert kinds == {
        "", "stem", "patch", "grouped", "grouped, dilated", "dilated", "depthwise", "3-D", "3-D transposed", "1-D"
    }  # fmt: skip
    assert len({str(case) for case in cases}) == len(cases)
    # The layers of a residual network have as many operations each.
    dense = [case.flops for case in cases if case.call == "convolution + bias + relu fprop"]
    assert len(set(dense)) <= 1
