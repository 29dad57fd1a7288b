"""Every configuration of the norm engines computes the same."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checking.calls import calls_of, configurations, native
from checking.cases import BF16, F16, F32, NormCase
from checking.compare import needs_native, platform
from jaxdnn import device
from jaxdnn.config import Options


@needs_native
@pytest.mark.parametrize(
    "case",
    [
        NormCase("layer_norm", (37, 771), scale=F32, bias=F32, residual=F32),
        NormCase("rms_norm", (300, 64), x=BF16, scale=F32, statistics=True),
        NormCase("layer_norm", (3, 40_000), x=BF16, scale=BF16, bias=BF16),
        NormCase("layer_norm", (3200, 5120), x=BF16, scale=F32, bias=F32),
        NormCase("layer_norm", (70, 771), x=BF16, scale=F32, bias=BF16, residual=F32),
        NormCase("rms_norm", (70, 8), x=F16, scale=F32, residual=F32),
    ],
    ids=str,
)
@pytest.mark.parametrize("direction", [0, 1], ids=["forward", "backward"])
def test_every_configuration_is_right(direction, case):
    """Knobs change the time and the order of sums, and nothing else."""
    forward, call = calls_of(case)[0], calls_of(case)[direction]
    random = np.random.default_rng(0)

    def arrays(call):
        return {
            name: jnp.asarray(random.standard_normal(array.shape), array.dtype)
            for name, array in call.signature.operands.items()
        }

    # What the backward pass gets from the forward one must fit its x, which is the sum if there is a residual.
    given = arrays(forward)
    if call is not forward:
        outputs = dict(zip(forward.spec.outputs, forward.spec.evaluate(*given.values()), strict=True))
        given = {"x": outputs.get("sum", given["x"]), **{k: v for k, v in given.items() if k != "x"}, **outputs}
    operands = [{**arrays(call), **given}[name] for name in call.spec.operands]
    target = device.find_target(platform(), Options())
    expected = [np.asarray(result, np.float64) for result in jax.jit(call.spec.evaluate)(*operands)]
    served = 0
    for engine in native(platform(), "norm"):
        for config in configurations(engine, call, target):
            knobs = tuple((field.name, getattr(config, field.name)) for field in dataclasses.fields(config))
            spec = call.spec.replace(options=Options(engine=engine.name, knobs=knobs, fallback=False))
            results = jax.jit(spec.bind)(*operands)
            for name, got, want in zip(call.signature.results, results, expected, strict=True):
                # Sums of up to `case.rows` or columns terms in float32, and one rounding to the result's dtype.
                unit = max(float(jnp.finfo(got.dtype).eps), 2.0**-23 * np.sqrt(max(case.rows, case.columns)))
                error = np.max(np.abs(np.asarray(got, np.float64) - want)) / np.max(np.abs(want))
                assert error <= 4 * unit, f"{engine.name} {config}: {name} is off by {error:.2g}"
            served += 1
    # On the GPU, rows too wide for a block, and some few and narrow ones, have a single configuration.
    assert served > (0 if platform() == "cuda" else 1)
