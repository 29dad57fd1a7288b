"""Options that pass over configurations and engines, and what is taken in their place."""

import dataclasses
import gc
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest

import jaxdnn
from checking.calls import calls_of, choose
from checking.cases import F32, NormCase
from checking.cases.matmul import product
from jaxdnn import device
from jaxdnn.config import Options, current_options
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


def engine():
    return current_options().engine


def test_one_options_object_may_be_entered_by_several_threads():
    """Of which the first to enter is the first to leave."""
    shared, turn = jaxdnn.options(deterministic=False), threading.Barrier(2, timeout=10)

    def first():
        with jaxdnn.options(engine="xla"):
            with shared:
                turn.wait()  # the second enters
                turn.wait()
            found = engine()
            turn.wait()  # and leaves
            return found

    def second():
        turn.wait()
        with shared:
            turn.wait()
            turn.wait()
        return engine()

    with ThreadPoolExecutor(2) as pool:
        assert [one.result() for one in [pool.submit(first), pool.submit(second)]] == ["xla", None]


@pytest.mark.parametrize("decorated", ["generator", "coroutine", "class", "number"])
def test_what_would_run_without_the_options_is_not_decorated(decorated):
    def generator():
        yield engine()

    async def coroutine():
        return engine()

    function = {"generator": generator, "coroutine": coroutine, "class": dict, "number": 3}[decorated]
    with pytest.raises(TypeError, match="options: what it decorates must be a function whose body runs"):
        jaxdnn.options(engine="xla")(function)


def test_knobs_are_named_by_strings_and_are_what_they_were():
    with pytest.raises(TypeError, match="options: knobs must be a dict of names and values"):
        jaxdnn.options(engine="host", knobs={1: 2})
    with (
        jaxdnn.options(engine="host", knobs={"pack_a": "yes"}),
        pytest.raises(ValueError, match="options: knob pack_a must be True or False; got 'yes'"),
    ):
        jaxdnn.matmul(jnp.ones((2, 3)), jnp.ones((3, 2)))


def test_a_function_is_decorated_with_options():
    """Jitted or not, also by itself, with the options of where it is called for the rest."""

    @jaxdnn.options(engine="xla")
    def decorated(depth):
        """Documented."""
        with jaxdnn.options(engine="host"):
            inner = decorated(depth - 1) if depth else ()
        return (*inner, engine(), current_options().fallback)

    with jaxdnn.options(fallback=False):
        assert decorated(1) == ("xla", False) * 2
        assert engine() is None
    assert (decorated.__name__, decorated.__doc__) == ("decorated", "Documented.")


def test_options_of_the_process():
    """They reach jitted functions and other threads, and give way to a block's."""
    traced = []
    function = jax.jit(lambda x: traced.append(engine()) or x)
    function(1.0)
    with jaxdnn.options(engine="host"):
        try:
            jaxdnn.options(engine="xla", fallback=False).set_global()
            jaxdnn.options(sm_count=7).set_global()
            with ThreadPoolExecutor(1) as pool:
                assert pool.submit(current_options).result() == Options(engine="xla", fallback=False, sm_count=7)
            assert engine() == "host"
            with ThreadPoolExecutor(1) as pool:
                pool.submit(function, 1.0).result()
        finally:
            jaxdnn.options(**dataclasses.asdict(Options()) | {"knobs": {}}).set_global()
    function(1.0)
    assert traced == [None, "xla"]
    assert current_options() == Options()


def test_options_that_nothing_uses_warn():
    with pytest.warns(RuntimeWarning, match=r"options\(engine='xla'\) had no effect; write `with") as caught:
        jaxdnn.options(engine="xla")
    assert caught[0].filename == __file__


@pytest.mark.parametrize("use", [lambda o: o.__enter__() and o.__exit__(None, None, None), lambda o: o(len)])
def test_options_that_are_used_do_not(use):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        use(jaxdnn.options(engine="xla"))
        gc.collect()
