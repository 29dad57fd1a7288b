"""The engine table, the reasons, the options that steer it, and plans that must not change unnoticed."""

import dataclasses
import os
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn
from checking.calls import calls_of, choose, configurations, native
from checking.cases import BF16, CASES, EMPTY, F16, F32, F64, NormCase
from checking.cases.dtypes import E4M3
from checking.cases.matmul import product
from checking.compare import as_tuple, platform
from checking.transforms import vjp, with_cotangents
from jaxdnn import device
from jaxdnn.config import Options
from jaxdnn.engines.table import ENGINES
from jaxdnn.planning.candidates import engines_for

GOLDEN = Path(__file__).parents[1] / "golden"
HOST = device.Target("cpu", "avx2", "CPU", 8)
# Data, not hardware: what is planned for these is the same on every machine.
TARGETS = {"cpu": [HOST], "cuda": [device._NAMED[80], device._NAMED[90]], "any": [HOST]}
NATIVE = [pytest.param(engine, id=f"{engine.op}-{engine.name}") for engine in ENGINES if engine.op != "any"]
CASE = NormCase("layer_norm", (64, 256), scale=F32, bias=F32)


needs_native = pytest.mark.skipif(platform() not in ("cpu", "cuda"), reason="no native engine runs on this platform")


# ------------------------------------------------------------ the table


def test_the_table_ends_with_xla():
    *before, last = ENGINES
    assert (last.name, last.platform, last.op) == ("xla", "any", "any")
    assert all(engine.platform in ("cpu", "cuda") and engine.op != "any" for engine in before)


def test_names_are_unique():
    keys = [(engine.op, engine.platform, engine.name) for engine in ENGINES]
    assert len(set(keys)) == len(keys)
    assert all(engine.notes for engine in ENGINES)


@pytest.mark.parametrize("case", [*CASES, *EMPTY], ids=str)
def test_an_engine_gives_a_reason_and_never_raises(case):
    for call in calls_of(case):
        for engine in engines_for(call.spec):
            for target in TARGETS[engine.platform]:
                reason = engine.supports(call.spec, call.signature, target)
                assert reason is None or (isinstance(reason, str) and reason)


@pytest.mark.parametrize("case", [*CASES, *EMPTY], ids=str)
def test_a_configuration_makes_a_plan(case):
    """Every configuration that is offered plans, and its knobs survive being set by name."""
    for call in calls_of(case):
        for engine in engines_for(call.spec):
            for target in TARGETS[engine.platform]:
                offered = configurations(engine, call, target)
                assert len(set(offered)) == len(offered)
                for config in offered:
                    plan = engine.plan(dataclasses.replace(config), call.spec, call.signature, target)
                    if plan is not None:
                        assert plan.op == call.spec.title
                        assert bool(plan.unit) == (engine.platform == "cuda")
                        assert all(min(*launch.grid, *launch.block) > 0 for launch in plan.launches)


# ------------------------------------------------------------ options


def test_the_first_engine_that_can_serves():
    selection = choose(CASE)
    names = [engine.name for engine in engines_for(calls_of(CASE)[0].spec)]
    assert selection.engine == "host"
    assert [name for name, _ in selection.rejected] == names[: names.index("host")]
    assert dict(selection.rejected)["direct"] == "it runs on cuda, and this call is compiled for cpu"


def test_engine_option():
    selection = choose(CASE, engine="xla")
    assert selection.engine == "xla"
    assert selection.plan is None
    assert dict(selection.rejected)["host"] == 'options(engine="xla") asks for another'


def test_an_engine_of_another_platform_falls_back():
    selection = choose(CASE, engine="direct")
    assert selection.engine == "xla"
    assert "it runs on cuda" in dict(selection.rejected)["direct"]


def test_fallback_error_holds_every_reason():
    case = CASE.replace(bias=F64)
    with pytest.raises(jaxdnn.NoEngineError, match="layer_norm forward: no native engine serves this call") as caught:
        choose(case, fallback=False)
    for engine in (*native("cpu"), *native("cuda")):
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
    (engine,) = native("cuda")
    grids = []
    for count in (7, 132):
        target = dataclasses.replace(device._NAMED[90], sm_count=count)
        config = dataclasses.replace(next(iter(engine.candidates(call.spec, call.signature, target))), turns=0)
        grids.append(engine.plan(config, call.spec, call.signature, target).launches[0].grid[0])
    assert grids[0] * 132 == grids[1] * 7


@needs_native
def test_the_error_reaches_the_user():
    with jaxdnn.options(fallback=False), pytest.raises(jaxdnn.NoEngineError, match="no elements"):
        jax.jit(jaxdnn.rms_norm)(jnp.ones((0, 8), jnp.float32))


# ------------------------------------------------------------ results


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
    for engine in native(platform()):
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


@needs_native
@pytest.mark.parametrize("case", [CASE, NormCase("rms_norm", (1025, 96), x=BF16, scale=BF16, residual=BF16)], ids=str)
def test_runs_are_bitwise_equal(case):
    function = jax.jit(lambda *a: vjp(as_tuple(case.call), *a))
    given = with_cotangents(case)
    first = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(function(*given))]
    for _ in range(99):
        assert [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(function(*given))] == first


# ------------------------------------------------------------ golden


def same_as_golden(name, text):
    """Compares with tests/golden/`name`; JAXDNN_UPDATE_GOLDEN=1 writes it, to be read before it is committed."""
    path = GOLDEN / name
    if os.environ.get("JAXDNN_UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text(), f"{path.name} changed; if on purpose, run with JAXDNN_UPDATE_GOLDEN=1 and read it"


PLANNED = [
    NormCase("layer_norm", (16_384, 4096), x=BF16, scale=BF16, bias=BF16),
    NormCase("rms_norm", (32_768, 1024), x=BF16, scale=F32, residual=BF16),
    NormCase("layer_norm", (4096, 16_384), x=BF16, scale=F32, bias=F32),
    NormCase("rms_norm", (4096, 16_384), x=F32, scale=F32),
    NormCase("layer_norm", (1_048_576, 128), x=F32, scale=F32, bias=F32),
    NormCase("rms_norm", (7, 262_144), x=BF16, scale=BF16),
    NormCase("layer_norm", (1000, 13), x=BF16, scale=F32, bias=F32, statistics=True),
    NormCase("layer_norm", (512, 512), x=F64, scale=F64, bias=F64),
    product((8192, 4096), (4096, 14_336), BF16, epilogue="bias gelu", extras=(((14_336,), BF16),)),
    product((8192, 4096), (4096, 14_336), BF16).replace(kind="gated_linear_unit"),
    product((16, 8192), (8192, 8192), BF16),
    product((4096, 4096), (4096, 4096), E4M3, out_dtype=BF16),
    product((4096, 4096), (4096, 4096), F32, precision="highest"),
    product((4096, 128, 64), (4096, 64, 128), BF16),
    product((1000, 1000), (1000, 1000), F16, epilogue="largest"),
    product((512, 512), (512, 512), F64),
]


def calls_for(engine, cases):
    """Cases and their calls of the engine's op, numbered."""
    for case in cases:
        own = [call for call in calls_of(case) if call.spec.op == engine.op]
        yield from ((case, number, call) for number, call in enumerate(own))


def planned(engine, call, target):
    reason = engine.supports(call.spec, call.signature, target)
    if reason:
        return f"{engine.name} on {target.arch}: {reason}\n"
    config = next(iter(engine.candidates(call.spec, call.signature, target)))
    plan = engine.plan(config, call.spec, call.signature, target)
    lines = [f"{engine.name} on {target.arch}: {config}"]
    for launch in plan.launches:
        sizes = f"grid {launch.grid} block {launch.block} cluster {launch.cluster}"
        lines.append(
            f"    {launch.kernel}: {sizes}, {launch.shared_memory} bytes shared, {len(launch.arguments)} arguments"
        )
    return "\n".join([*lines, f"    workspace {plan.workspace}"]) + "\n"


@pytest.mark.parametrize("engine", NATIVE)
def test_golden_plans(engine):
    text = ""
    for case, _, call in calls_for(engine, PLANNED):
        text += f"{call.spec.title} {case}\n"
        for target in TARGETS[engine.platform]:
            text += textwrap.indent(planned(engine, call, target), "    ")
    same_as_golden(f"plans_{engine.op}_{engine.name}.txt", text)


@pytest.mark.parametrize("engine", NATIVE)
def test_golden_coverage(engine):
    """Which rows of the table an engine leaves to the next one, and why: coverage must not shrink unnoticed."""
    lines = []
    for case, number, call in calls_for(engine, (*CASES, *EMPTY)):
        for target in TARGETS[engine.platform]:
            reason = engine.supports(call.spec, call.signature, target)
            if reason:
                lines.append(f"{target.arch} {case} {call.spec.title} {number}: {reason}\n")
    same_as_golden(f"coverage_{engine.op}_{engine.name}.txt", "".join(lines))
