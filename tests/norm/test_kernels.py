"""The run-time compiler takes every configuration that an engine offers, and kernels keep within their registers."""

import pytest

from checking.calls import calls_of, configurations, native
from checking.cases import BF16, F16, F32, F64, NormCase
from checking.compiler_log import compile_checked, launch_bounds
from checking.targets import A100, H100

# What changes the generated code: dtypes, operands, vector width, elements of a thread, threads and parts of a row.
SIGNATURES = [
    NormCase("layer_norm", (4096, 1024), x=BF16, scale=BF16, bias=BF16),
    NormCase("layer_norm", (4096, 4096), x=F32, scale=F32, bias=F32, statistics=True),
    NormCase("layer_norm", (4096, 8192), x=F16, scale=F32, bias=F32, residual=F16),
    NormCase("rms_norm", (4096, 4096), x=BF16, scale=F32, residual=F32),
    NormCase("rms_norm", (4096, 16_384), x=BF16, scale=BF16, residual=BF16),
    NormCase("layer_norm", (4096, 16_384), x=BF16, scale=F32, bias=F32, statistics=True),
    NormCase("rms_norm", (4096, 16_384), x=F16, scale=F32),
    NormCase("rms_norm", (4096, 16_384), x=F32, scale=F32),
    NormCase("layer_norm", (100_000, 128), x=BF16, scale=F32, bias=F32),
    NormCase("rms_norm", (100_000, 64), x=F32),
    NormCase("layer_norm", (1000, 1), scale=F32, bias=F32),
    NormCase("layer_norm", (1000, 13), x=BF16, scale=BF16, bias=BF16),
    NormCase("rms_norm", (77, 1023), x=BF16, scale=F32),
    NormCase("layer_norm", (77, 4099), scale=F32, bias=F32),
    NormCase("layer_norm", (7, 262_144), x=BF16, scale=BF16, bias=BF16),
    # Clusters that work through several rows.
    NormCase("rms_norm", (3711, 25_472), x=BF16, scale=F32),
    NormCase("layer_norm", (512, 131_072), x=BF16, scale=F32, bias=F32),
    NormCase("rms_norm", (527, 93_504), scale=F32),
    NormCase("rms_norm", (52, 185_752), scale=F32),
    NormCase("rms_norm", (334, 224_624), scale=F32),
    NormCase("layer_norm", (600, 50_257), x=BF16, scale=F32, bias=F32, statistics=True),
    NormCase("rms_norm", (7, 100_001), x=F32, scale=F32),
    NormCase("layer_norm", (512, 768), x=F64, scale=F64, bias=F64, residual=F64, statistics=True),
    NormCase("layer_norm", (512, 768), x=BF16, scale=F64, bias=F32),
]
MAPPED = [
    (NormCase("layer_norm", (64, 1024), x=BF16, scale=F32, bias=F32), (0, 0, None)),
    (NormCase("rms_norm", (64, 100), scale=F32, residual=F32), (None, 0, 0)),
]
CALLS = [(case, None) for case in SIGNATURES] + MAPPED


@pytest.mark.parametrize("target", [A100, H100], ids=["80", "90"])
@pytest.mark.parametrize(("case", "mapped"), CALLS, ids=[f"{case}{'-mapped' * bool(mapped)}" for case, mapped in CALLS])
@pytest.mark.parametrize("direction", [0, 1], ids=["forward", "backward"])
def test_configurations_compile(direction, case, mapped, target):
    call = calls_of(case, mapped)[direction]
    plans = [
        (config, engine.build(config, call.problem, target))
        for engine in native("cuda", "norm")
        for config in configurations(engine, call, target)
    ]
    assert plans, "no CUDA engine serves this call"
    # What two configurations share, or an earlier case had, was checked where it was compiled.
    for config, plan in {plan.unit: (config, plan) for config, plan in plans}.values():
        compile_checked(plan, config)


def test_launch_bounds_are_the_plans():
    for case in SIGNATURES:
        for call in calls_of(case):
            for engine in native("cuda", "norm"):
                for config in configurations(engine, call, H100):
                    plan = engine.build(config, call.problem, H100)
                    bounds = launch_bounds(plan.unit)
                    for launch in plan.launches:
                        assert launch.block == (bounds[launch.kernel][0], 1, 1)
                        assert launch.shared_memory <= H100.shared_memory


def test_sizes_are_not_in_the_code():
    """Another number of rows, or of mapped elements, is another number and not another kernel."""
    (engine,) = native("cuda", "norm")
    target = H100
    for direction in (0, 1):
        units = set()
        for rows in (1000, 1001, 50_000):
            call = calls_of(NormCase("layer_norm", (rows, 4096), x=BF16, scale=F32, bias=F32))[direction]
            config = configurations(engine, call, target)[0]
            units.add(engine.build(config, call.problem, target).unit)
        assert len(units) == 1
