"""Arrays with more than 2^31 elements, and more than 2^31 bytes: offsets need 64 bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn
from checking.calls import calls_of, native, refusal
from checking.cases import BF16, F32, NormCase
from checking.memory import needs_memory
from checking.targets import H100, HOST
from jaxdnn.plan import Scalar

HUGE = [
    NormCase("layer_norm", (10_000_000, 1024), x=BF16, scale=BF16, bias=BF16),
    NormCase("rms_norm", (10_000_000, 4), scale=F32),
    NormCase("layer_norm", (20_000, 262_144), scale=F32, bias=F32, residual=F32, statistics=True),
    NormCase("rms_norm", (1_048_576, 8192), x=BF16, scale=F32),
]


@pytest.mark.parametrize("case", HUGE, ids=str)
@pytest.mark.parametrize("direction", [0, 1], ids=["forward", "backward"])
@pytest.mark.parametrize("on", ["cpu", "cuda"])
def test_plans(on, direction, case):
    """No size wraps, no grid is larger than the hardware's, and the workspace stays small beside the arrays."""
    target = H100 if on == "cuda" else HOST
    call = calls_of(case)[direction]
    for engine in native(on, "norm"):
        assert refusal(engine, call, target) is None
        for config in engine.configurations(call.problem, target):
            plan = engine.build(config, call.problem, target)
            assert plan.workspace <= call.signature.bytes / 4
            for launch in plan.launches:
                assert 0 < launch.grid[0] < 2**31
                assert all(0 < size < 2**16 for size in launch.grid[1:])
                for argument in launch.arguments:
                    if isinstance(argument, Scalar) and argument.dtype.startswith("int"):
                        assert int(np.array(argument.value, argument.dtype)) == argument.value


def test_mapped_strides():
    case = NormCase("layer_norm", (600_000, 1024), x=BF16, scale=F32, bias=F32)
    call = calls_of(case, (0, 0, 0))[0]
    for on, target in (("cuda", H100), ("cpu", HOST)):
        for engine in native(on, "norm"):
            config = next(iter(engine.configurations(call.problem, target)))
            plan = engine.build(config, call.problem, target)
            scalars = [a for launch in plan.launches for a in launch.arguments if isinstance(a, Scalar)]
            strides = [scalar for scalar in scalars if scalar.value == 600_000 * 1024]
            assert strides
            assert all(scalar.dtype == "int64" for scalar in strides)


@needs_memory(40)
@pytest.mark.parametrize("columns", [1024, 65_536])
def test_more_than_2_31_elements(columns):
    """The last rows lie past element 2^31; they are right, and so are sums over all rows."""
    rows = 2**31 // columns + 64
    pattern = jnp.asarray(np.random.default_rng(0).standard_normal((64, columns)), jnp.bfloat16)
    scale = jnp.ones(columns, jnp.float32)
    x = jax.jit(lambda p: jnp.tile(p, (rows // 64, 1)))(pattern)

    @jax.jit
    def both(x, scale):
        y, pull_back = jax.vjp(jaxdnn.rms_norm, x, scale)
        d_x, d_scale = pull_back(y)
        return y[:64], y[-64:], d_x[:64], d_x[-64:], d_scale / (rows // 64)

    first, last, d_first, d_last, d_scale = both(x, scale)
    np.testing.assert_array_equal(first, last)
    np.testing.assert_array_equal(d_first, d_last)
    y, pull_back = jax.vjp(jaxdnn.rms_norm, pattern, scale)
    # Of so few rows each may be summed by more blocks, in another order.
    np.testing.assert_allclose(*(one.astype(jnp.float32) for one in (first, y)), rtol=float(jnp.finfo(y.dtype).eps))
    np.testing.assert_allclose(d_scale, pull_back(y)[1], rtol=1e-3)
