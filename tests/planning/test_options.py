"""Options that pass over configurations and engines, and what is taken in their place."""

import dataclasses

import pytest

import jaxdnn
from checking.calls import calls_of, choose
from checking.cases import F32, NormCase
from checking.cases.matmul import product
from jaxdnn import device
from jaxdnn.config import Options
from jaxdnn.engines import table
from jaxdnn.engines.norm.host import HostNorm
from jaxdnn.engines.table import ENGINES
from jaxdnn.planning import cache
from jaxdnn.planning.measure import Measurement

CASE = NormCase("layer_norm", (64, 256), scale=F32, bias=F32)


@pytest.mark.parametrize(
    ("direction", "case"), [(1, CASE.replace(shape=(6400, 256))), (0, product((300, 6144), (6144, 64), F32))], ids=str
)
def test_workspace_limit_takes_another_configuration(direction, case):
    best = choose(case, direction)
    limit = best.plan.workspace - 1
    frugal = choose(case, direction, workspace_limit=limit)
    assert frugal.engine == best.engine == "host"
    assert frugal.config != best.config
    assert frugal.plan.workspace <= limit
    # Knobs that are named are not exchanged.
    knobs = tuple(dataclasses.asdict(best.config).items())
    named = choose(case, direction, workspace_limit=limit, engine="host", knobs=knobs)
    assert named.engine == "xla"
    assert dict(named.rejected)["host"].startswith(f"it needs {best.plan.workspace} bytes of workspace")


def test_workspace_limit_that_nothing_fits():
    """The reason is that of the configuration that would run without the limit."""
    case = CASE.replace(shape=(6400, 256))
    selection = choose(case, direction=1, workspace_limit=0)
    assert selection.engine == "xla"
    assert f"needs {choose(case, direction=1).plan.workspace} bytes" in dict(selection.rejected)["host"]


class Hasty(HostNorm):
    name = "hasty"
    notes = ("adds in the order in which threads end",)


def test_deterministic(monkeypatch):
    monkeypatch.setattr(table, "ENGINES", (Hasty(), *ENGINES))
    selection = choose(CASE)
    assert selection.engine == "host"
    assert "options(deterministic=False) allows" in dict(selection.rejected)["hasty"]
    assert choose(CASE, engine="hasty").engine == "xla"
    assert choose(CASE, deterministic=False).engine == "hasty"


@pytest.mark.usefixtures("cache_folder")
def test_what_options_rule_out_is_not_taken_because_it_was_the_fastest(monkeypatch):
    monkeypatch.setattr(table, "ENGINES", (Hasty(), *ENGINES))
    monkeypatch.setattr(cache, "_memory", {})
    call, target = calls_of(CASE)[0], device.find_target("cpu", Options())
    cache.remember(call.spec, call.signature, target, [Measurement("hasty", (), 1.0, 0, 0)])
    assert choose(CASE, autotune="cached") == choose(CASE)
    assert choose(CASE, autotune="cached", deterministic=False).engine == "hasty"


def test_every_engine_of_the_table_is_deterministic():
    assert [engine.name for engine in ENGINES if "deterministic" not in engine.notes] == ["xla"]


def test_options_nest():
    with jaxdnn.options(deterministic=False, engine="xla") as outer:
        with jaxdnn.options(workspace_limit=7) as inner:
            assert (inner.engine, inner.deterministic, inner.workspace_limit) == ("xla", False, 7)
        assert outer.workspace_limit is None
    with jaxdnn.options() as fresh:
        assert fresh == jaxdnn.config.Options()


@pytest.mark.parametrize(
    "changes", [{"engine": name} for name in ("xla", "host", None)] + [{"fallback": False}], ids=str
)
def test_knobs_are_those_of_the_engine_that_they_were_named_with(changes):
    with jaxdnn.options(engine="host", knobs={"rows_per_task": 5}), jaxdnn.options(**changes) as inner:
        assert inner.knobs == (() if "engine" in changes else (("rows_per_task", 5),))


def test_options_end_with_an_exception():
    with pytest.raises(RuntimeError, match="on purpose"), jaxdnn.options(engine="xla"):
        raise RuntimeError("on purpose")
    with jaxdnn.options() as now:
        assert now.engine is None


def test_one_options_object_may_be_entered_twice():
    portable = jaxdnn.options(engine="xla")
    with portable, portable, jaxdnn.options() as now:
        assert now.engine == "xla"
    with portable, jaxdnn.options() as now:
        assert now.engine == "xla"
    with jaxdnn.options() as now:
        assert now.engine is None
