"""The engine table, the reasons, the options that steer it, and plans that must not change unnoticed."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import jaxdnn
from checking.calls import calls_of, choose, configurations, native, refusal
from checking.cases import BF16, F32, F64, TABLE, NormCase
from checking.compare import needs_native
from checking.targets import H100, TARGETS
from jaxdnn import device
from jaxdnn.config import Options
from jaxdnn.engines.table import ENGINES
from jaxdnn.planning.candidates import engines_for
from jaxdnn.planning.select import select

CASE = NormCase("layer_norm", (64, 256), scale=F32, bias=F32)


# ------------------------------------------------------------ the table


def test_the_table_ends_with_xla():
    *before, last = ENGINES
    assert (last.name, last.platform, last.family) == ("xla", "any", "any")
    assert all(engine.platform in ("cpu", "cuda") and engine.family != "any" for engine in before)


def test_names_are_unique():
    keys = [(engine.family, engine.platform, engine.name) for engine in ENGINES]
    assert len(set(keys)) == len(keys)
    assert all(engine.notes for engine in ENGINES)


@pytest.mark.parametrize("case", [*TABLE.every, *TABLE.empty], ids=str)
def test_an_engine_gives_a_reason_and_never_raises(case):
    for call in calls_of(case):
        for engine in engines_for(call.spec, call.problem):
            for target in TARGETS[engine.platform]:
                reason = refusal(engine, call, target)
                assert reason is None or (isinstance(reason, str) and reason)


@pytest.mark.parametrize("case", [*TABLE.every, *TABLE.empty], ids=str)
def test_a_configuration_makes_a_plan(case):
    """Every configuration that is offered plans, and its knobs survive being set by name."""
    for call in calls_of(case):
        for engine in engines_for(call.spec, call.problem):
            for target in TARGETS[engine.platform]:
                offered = configurations(engine, call, target)
                assert len(set(offered)) == len(offered)
                for config in offered:
                    plan = engine.build(dataclasses.replace(config), call.problem, target)
                    if plan is not None:
                        assert bool(plan.unit) == (engine.platform == "cuda")
                        assert all(min(*launch.grid, *launch.block) > 0 for launch in plan.launches)


# ------------------------------------------------------------ options


def test_the_first_engine_that_can_serves():
    selection = choose(CASE)
    (call, *_) = calls_of(CASE)
    names = [engine.name for engine in engines_for(call.spec, call.problem)]
    assert selection.engine == "host"
    assert [name for name, _ in selection.rejected] == names[: names.index("host")]
    assert dict(selection.rejected)["direct"] == "it runs on cuda, and this call is compiled for cpu"
    assert selection.plan.op == "layer_norm forward"


def test_engine_option():
    selection = choose(CASE, engine="xla")
    assert selection.engine == "xla"
    assert selection.plan is None
    assert dict(selection.rejected)["host"] == 'options(engine="xla") asks for another'


@pytest.mark.parametrize(
    ("engine", "on", "message"),
    [
        ("direct", "cpu", "runs on cpu.*: host, xla; got 'direct', which runs on cuda"),
        (
            "host",
            "cuda",
            "runs on cuda.*: direct, skinny, sm90, simt, lines, depthwise, pointwise, xla; "
            "got 'host', which runs on cpu",
        ),
    ],
)
def test_an_engine_of_another_platform_is_an_error(engine, on, message):
    call = calls_of(CASE)[0]
    with pytest.raises(ValueError, match=f"^options: engine must be one that {message}"):
        select(call.spec.replace(options=Options(engine=engine, target="sm_90")), call.signature, on)


def test_fallback_error_holds_every_reason():
    case = CASE.replace(bias=F64)
    with pytest.raises(jaxdnn.NoEngineError, match="layer_norm forward: no native engine serves this call") as caught:
        choose(case, fallback=False)
    for engine in (*native("cpu", "norm"), *native("cuda", "norm")):
        assert f"{engine.name}: " in str(caught.value)
    assert "float64" in str(caught.value)
    assert choose(case).engine == "xla"


def test_xla_may_be_asked_for_without_a_fallback():
    assert choose(CASE, engine="xla", fallback=False).engine == "xla"


def test_unknown_engine():
    names = ", ".join(dict.fromkeys(engine.name for engine in ENGINES))
    with pytest.raises(ValueError, match=f"there is no engine 'fast'; the engines are {names}"):
        choose(CASE, engine="fast")


def test_knobs():
    assert choose(CASE, engine="host", knobs=(("rows_per_task", 5),)).config.rows_per_task == 5
    with pytest.raises(ValueError, match="engine 'host' has no knob tile; its knobs here are rows_per_task"):
        choose(CASE, engine="host", knobs=(("tile", 5),))
    with pytest.raises(ValueError, match="rows_per_task must be an int of at least 1; got 0"):
        choose(CASE, engine="host", knobs=(("rows_per_task", 0),))


def test_workspace_limit():
    workspace = choose(CASE, direction=1).plan.workspace
    assert workspace > 0
    assert choose(CASE, direction=1, workspace_limit=workspace).engine == "host"
    selection = choose(CASE, direction=1, workspace_limit=workspace - 1)
    assert selection.engine == "xla"
    assert f"{workspace} bytes of workspace" in dict(selection.rejected)["host"]
    assert choose(CASE, direction=0, workspace_limit=0).engine == "host"


def test_sm_count_bounds_the_target():
    assert device.find_target("cuda", Options(target="sm_90", sm_count=7)).sm_count == 7
    assert device.find_target("cuda", Options(target="sm_90", sm_count=10_000)).sm_count == 132


def test_sm_count_bounds_the_grid():
    call = calls_of(NormCase("rms_norm", (100_000, 1024), x=BF16))[0]
    (engine,) = native("cuda", "norm")
    grids = []
    for count in (7, 132):
        target = dataclasses.replace(H100, sm_count=count)
        config = dataclasses.replace(next(iter(engine.configurations(call.problem, target))), turns=0)
        grids.append(engine.build(config, call.problem, target).launches[0].grid[0])
    assert grids[0] * 132 == grids[1] * 7


@needs_native
def test_the_error_reaches_the_user():
    with jaxdnn.options(fallback=False), pytest.raises(jaxdnn.NoEngineError, match="no elements"):
        jax.jit(jaxdnn.rms_norm)(jnp.ones((0, 8), jnp.float32))


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-40GB", "A100"),
        ("NVIDIA A10G", "A10"),
        ("NVIDIA L40S", "L40"),
        ("Quadro", None),
    ],
)
def test_a_gpu_that_is_here_has_the_bandwidth_of_its_name(monkeypatch, name, known):
    found = {"name": name, "compute_capability": (9, 0), "sm_count": 9, "shared_memory_per_block": 1, "l2_bytes": 2}
    monkeypatch.setattr(device._native, "driver", lambda: {"devices": [found]})
    (gpu,) = device.gpus.__wrapped__()
    assert gpu == device.Target("cuda", "sm_90", name, 9, 1, 2, gpu.bandwidth)
    assert gpu.bandwidth == next((one.bandwidth for one in device.KNOWN if one.name == known), 0)
