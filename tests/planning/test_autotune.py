"""Measured configurations: remembered, used on request, and never wrong."""

import dataclasses
import itertools
import json
import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import export

import jaxdnn
from checking.calls import calls_of
from checking.cases import BF16, NormCase
from checking.compare import as_tuple, assert_close, platform
from checking.targets import TARGETS
from checking.transforms import vjp, with_cotangents
from jaxdnn import _native, device
from jaxdnn.config import Options
from jaxdnn.engines.norm.host import HostNorm
from jaxdnn.planning import cache, measure

pytestmark = pytest.mark.skipif(platform() not in ("cpu", "cuda"), reason="no native engine runs on this platform")

CASE = NormCase("layer_norm", (48, 160), x=BF16, scale=BF16, bias=BF16)


@pytest.fixture(autouse=True)
def forgetful(monkeypatch, cache_folder):
    """An empty memory and a folder of its own for each test."""
    monkeypatch.setattr(cache, "_memory", {})
    return cache_folder


def entries(folder):
    return sorted(Path(folder, "autotune").glob("*.json"))


def rewrite(folder, **changes):
    """Measures, and then changes what is remembered of the winners."""
    jaxdnn.autotune(CASE.call, *CASE.primals())
    for path in entries(folder):
        winner, *others = json.loads(path.read_text())
        path.write_text(json.dumps([winner | changes, *others]))
    cache._memory.clear()


def chosen(case, **options):
    with jaxdnn.options(**options):
        _, (_, calls) = jaxdnn.explain(case.call, *case.primals()).sections
    return {call.call.spec.direction: call.selection for call in calls}


@pytest.mark.skipif(platform() != "cpu", reason="the engine that is outdone is the CPU's")
def test_engines_that_are_outdone_are_measured_on_request_as_the_last(monkeypatch):
    call, target = calls_of(CASE)[0], device.find_target("cpu", Options())

    def measured(**options):
        return measure.configurations(call.spec, call.signature, "cpu", target, **options)

    before = measured()
    monkeypatch.setattr(HostNorm, "outdone", lambda *_: "others are faster")
    assert {one.engine for one in measured()} == {"xla"}
    every = measured(outdone=False)
    assert len(every) == len(before)
    assert {(one.engine, one.knobs) for one in every} == {(one.engine, one.knobs) for one in before}
    assert min(every, key=lambda one: one.rank).engine == "xla"


@pytest.mark.parametrize("rounds", [1, 3])
def test_forward_and_backward_are_measured(rounds, forgetful, monkeypatch):
    monkeypatch.setattr(measure, "_rounds", lambda *_: rounds)
    tuning = jaxdnn.autotune(CASE.call, *CASE.primals())
    assert {call.spec.direction for call, _ in tuning.calls} == {"forward", "backward"}
    for _, measured in tuning.calls:
        seconds = [one.seconds for one in measured]
        assert seconds == sorted(seconds)
        assert min(seconds) > 0
        assert len(measured) > 1
        assert {one.engine for one in measured} >= {"xla"}
    assert len(entries(forgetful)) == len(tuning.calls)
    text = str(tuning)
    for word in ("layer_norm forward", "layer_norm backward", "us", "xla"):
        assert word in text


@pytest.mark.parametrize(
    ("megabytes", "platform", "rounds"), [(1, "cuda", 16), (150, "cuda", 3), (900, "cuda", 1), (1, "cpu", 1)]
)
def test_programs_on_gpus_go_through_small_operands_several_times(megabytes, platform, rounds):
    assert measure._rounds(megabytes * 10**6, platform) == rounds
    assert measure._rounds(megabytes * 10**6, platform, 10**12) == 1


LINE = re.compile(
    r"jaxdnn: (\d)/(\d) layer_norm (?:for|back)ward \(x bfloat16\[48,160\], .*\): "
    r"([\d.]+) us before, ([\d.]+) us after, on"
)


@pytest.mark.usefixtures("last_is_fastest")
def test_a_line_for_each_call_and_nothing_is_measured_twice(capsys, monkeypatch):
    """The heuristic's choice comes before, and the fastest after; from files too, as another process has them."""
    tuning = jaxdnn.autotune(CASE.call, *CASE.primals())
    first = capsys.readouterr().err.splitlines()
    told = [LINE.match(line).groups() for line in first]
    count = len(tuning.calls)
    assert [(int(n), int(of)) for n, of, *_ in told] == [(n, count) for n in range(1, count + 1)]
    for (_, measured), (*_, before, after) in zip(tuning.calls, told, strict=True):
        assert float(after) == pytest.approx(measured[0].seconds * 1e6, abs=0.1)
        assert float(before) == pytest.approx(max(one.seconds for one in measured[:-1]) * 1e6, abs=0.1)

    def forbidden(*_, **__):
        raise AssertionError("it was measured before")

    monkeypatch.setattr(measure, "interleaved_medians", forbidden)
    for _ in range(2):
        assert jaxdnn.autotune(CASE.call, *CASE.primals()).calls == tuning.calls
        assert capsys.readouterr().err.splitlines() == [f"{line} (remembered)" for line in first]
        cache._memory.clear()


def test_the_winner_is_used_under_cached_and_not_under_off(forgetful):
    rewrite(forgetful, engine="xla", knobs=[])
    heuristic, tuned = chosen(CASE), chosen(CASE, autotune="cached")
    assert {selection.engine for selection in tuned.values()} == {"xla"}
    assert {selection.engine for selection in heuristic.values()} != {"xla"}
    for direction, selection in tuned.items():
        reasons = dict(selection.rejected)
        assert reasons[heuristic[direction].engine] == "measurement chose another"
        assert reasons.items() >= dict(heuristic[direction].rejected).items()


def test_a_remembered_native_winner_has_its_knobs(forgetful):
    native = next(iter(chosen(CASE).values()))
    if native.engine != "host":
        pytest.skip("the knob that is set is the CPU engine's")
    rewrite(forgetful, engine="host", knobs=[["rows_per_task", 3]])
    assert {selection.config.rows_per_task for selection in chosen(CASE, autotune="cached").values()} == {3}
    with jaxdnn.options(autotune="cached"):
        assert_close(
            jax.jit(lambda *a: vjp(as_tuple(CASE.call), *a))(*with_cotangents(CASE)), vjp, CASE, with_cotangents
        )


def test_cached_measures_nothing(forgetful):
    assert chosen(CASE, autotune="cached").keys() == {"forward", "backward"}
    assert entries(forgetful) == []


def test_on_measures_once_while_lowering(forgetful):
    with jaxdnn.options(autotune="on"):
        results = jax.jit(lambda *a: vjp(as_tuple(CASE.call), *a))(*with_cotangents(CASE))
        assert len(entries(forgetful)) == 2
        before = [path.stat().st_mtime_ns for path in entries(forgetful)]
        # The same calls in another program.
        jax.jit(lambda *a: jax.tree.map(jnp.sin, vjp(as_tuple(CASE.call), *a)))(*with_cotangents(CASE))
    assert_close(results, vjp, CASE, with_cotangents)
    assert [path.stat().st_mtime_ns for path in entries(forgetful)] == before


@pytest.mark.parametrize(
    "damage", ["", "{", '[{"engine": "xla"}]', "[]", '{"engine": "xla"}', '[{"engine": 1, "knobs": 2}]', "\x00" * 100]
)
def test_a_damaged_entry_counts_as_absent(forgetful, damage):
    jaxdnn.autotune(CASE.call, *CASE.primals())
    for path in entries(forgetful):
        path.write_text(damage)
    cache._memory.clear()
    expected = {direction: selection.config for direction, selection in chosen(CASE).items()}
    assert {d: s.config for d, s in chosen(CASE, autotune="cached").items()} == expected


@pytest.mark.parametrize(
    ("engine", "knobs"),
    [("gone", [["x", 1]]), ("host", [["x", 1]]), ("host", [["rows_per_task", 0]]), ("direct", [["x", 1]])],
)
def test_a_winner_that_is_gone_counts_as_absent(forgetful, engine, knobs):
    """An engine or knob that a later change of the code removed must not make calls fail, nor send them to XLA."""
    rewrite(forgetful, engine=engine, knobs=knobs)
    assert chosen(CASE, autotune="cached", fallback=False) == chosen(CASE, fallback=False)
    with jaxdnn.options(autotune="cached"):
        assert_close(
            jax.jit(lambda *a: vjp(as_tuple(CASE.call), *a))(*with_cotangents(CASE)), vjp, CASE, with_cotangents
        )


def test_a_winner_that_options_rule_out_counts_as_absent(forgetful):
    selection = chosen(CASE)["backward"]
    assert selection.plan.workspace > 0
    rewrite(forgetful, engine=selection.engine, knobs=list(dataclasses.asdict(selection.config).items()))
    options = {"workspace_limit": selection.plan.workspace - 1}
    assert chosen(CASE, autotune="cached")["backward"].config == selection.config
    assert chosen(CASE, autotune="cached", **options)["backward"] == chosen(CASE, **options)["backward"]
    rewrite(forgetful, engine="xla", knobs=[])
    assert chosen(CASE, autotune="cached", fallback=False) == chosen(CASE, fallback=False)


def knobs_of(config):
    return tuple((field.name, getattr(config, field.name)) for field in dataclasses.fields(config))


def winners_are_used(tuning):
    """Under "cached", from memory if nowhere else, with the knobs that were the fastest."""
    fastest = {call.spec.direction: (measured[0].engine, measured[0].knobs) for call, measured in tuning.calls}
    used = {name: (s.engine, knobs_of(s.config)) for name, s in chosen(CASE, autotune="cached").items()}
    return used == fastest


@pytest.fixture
def last_is_fastest(monkeypatch):
    """Of our kernels' configurations: what is the heuristic's choice is not the winner; and XLA's is the slowest."""

    def medians(calls, **_):
        return {(engine, *rest, rank): 2.0 if engine == "xla" else 0.5**rank for engine, *rest, rank in calls}

    monkeypatch.setattr(measure, "interleaved_medians", medians)


@pytest.mark.usefixtures("last_is_fastest")
def test_the_knobs_that_were_the_fastest_are_used():
    heuristic = chosen(CASE)
    tuning = jaxdnn.autotune(CASE.call, *CASE.primals())
    assert any(knobs_of(heuristic[call.spec.direction].config) != measured[0].knobs for call, measured in tuning.calls)
    assert winners_are_used(tuning)
    cache._memory.clear()
    assert winners_are_used(tuning), "files keep other knobs"


def test_a_folder_that_can_not_be_written(forgetful):
    forgetful.write_text("a file, where a folder is wanted")
    assert winners_are_used(jaxdnn.autotune(CASE.call, *CASE.primals()))


def test_nothing_is_taken_from_a_folder_that_others_may_write_to(forgetful):
    """Of what is remembered, source code is made."""
    jaxdnn.autotune(CASE.call, *CASE.primals())
    rewrite(forgetful, engine="xla", knobs=[])
    assert chosen(CASE, autotune="cached") != chosen(CASE)
    cache._memory.clear()
    cache._folder.cache_clear()
    forgetful.chmod(0o770)
    assert chosen(CASE, autotune="cached") == chosen(CASE)


def test_without_a_folder(monkeypatch, tmp_path):
    for name in ("JAXDNN_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    assert winners_are_used(jaxdnn.autotune(CASE.call, *CASE.primals()))
    assert list(tmp_path.iterdir()) == []


def test_the_folder_is_asked_for_once(monkeypatch, tmp_path):
    """The runtime lists it and tries to write to it when asked, and its name is all that is wanted."""
    calls, ask = [], _native.cache
    monkeypatch.setattr(_native, "cache", lambda: calls.append(None) or ask())
    for folder in ("one", "other", "one"):
        monkeypatch.setenv("JAXDNN_CACHE_DIR", str(tmp_path / folder))
        chosen(CASE, autotune="cached")
    assert len(calls) == 2


def test_other_shapes_have_other_entries(forgetful):
    jaxdnn.autotune(CASE.call, *CASE.primals())
    first = len(entries(forgetful))
    other = CASE.replace(shape=(49, 160))
    jaxdnn.autotune(other.call, *other.primals())
    assert len(entries(forgetful)) == 2 * first


def test_what_was_measured_serves_one_device_and_one_version(monkeypatch):
    """Whatever of a device engines see: they may plan by it. But who asks, and how, is no matter."""
    call, target = calls_of(CASE)[0], TARGETS["cuda"][0]
    best = measure.Measurement("xla", (), 1.0, 0, 0)
    cache.remember(call.spec, call.signature, target, [best])
    asked = call.spec.replace(options=Options(autotune="cached", deterministic=False))
    assert cache.recall(asked, call.signature, target) == (best,)
    for field in dataclasses.fields(target):
        value = getattr(target, field.name)
        other = dataclasses.replace(target, **{field.name: f"{value}?" if isinstance(value, str) else not value})
        assert cache.recall(call.spec, call.signature, other) == (), field.name
    monkeypatch.setattr(cache, "version", lambda package: f"{package} of tomorrow")
    assert cache.recall(call.spec, call.signature, target) == ()


def test_an_engine_that_is_named_is_not_overruled():
    jaxdnn.autotune(CASE.call, *CASE.primals())
    assert {s.engine for s in chosen(CASE, autotune="cached", engine="xla").values()} == {"xla"}


def test_shapes_alone_will_do():
    x = jax.ShapeDtypeStruct((16, 64), jnp.float32)
    tuning = jaxdnn.autotune(jaxdnn.rms_norm, x)
    assert len(tuning.calls) >= 2


def test_symbolic_sizes_are_not_measured(capsys):
    (rows,) = export.symbolic_shape("rows")
    x = jax.ShapeDtypeStruct((rows, 8), "float32")
    with jaxdnn.options(autotune="on"):
        exported = export.export(jax.jit(jaxdnn.rms_norm), disabled_checks=jaxdnn.export_checks())(x)
    assert exported.out_avals[0].shape == (rows, 8)
    assert jaxdnn.autotune(jaxdnn.rms_norm, x).calls == ()
    assert "not measured: the shapes are symbolic" in capsys.readouterr().err


@pytest.mark.parametrize(("seconds", "made"), [(20.0, 2 + 3), (2.0, 2 + 7), (0.5, 10 + 15), (0.01, 10 + 15 * 3)])
def test_slow_calls_are_sampled_less(seconds, made, monkeypatch):
    calls = []
    monkeypatch.setattr(measure.time, "perf_counter", lambda: seconds * len(calls))
    assert measure.interleaved_medians({"call": lambda: calls.append(None)}) == {"call": pytest.approx(seconds)}
    assert len(calls) == made


def test_a_call_that_begins_cold_is_sampled_as_often_as_others(monkeypatch):
    """What starts a sample is a part of its time, the larger the fewer calls it has."""
    made = []
    warm = 6  # calls from which on it takes as long as the other one

    def clock():
        cold = min(made.count("cold"), warm)
        return 0.02 * cold + 0.01 * (len(made) - cold)

    monkeypatch.setattr(measure.time, "perf_counter", clock)
    measure.interleaved_medians({name: partial(made.append, name) for name in ("cold", "warm")}, seconds=0.1)
    assert made.count("cold") == made.count("warm")


def test_no_call_follows_the_same_one_in_all_samples(monkeypatch):
    """What a call leaves of the power limit or of a cache is in the next one's time."""
    made = []
    monkeypatch.setattr(measure.time, "perf_counter", lambda: 0.1 * len(made))
    measure.interleaved_medians({name: partial(made.append, name) for name in "abcd"})
    rounds = [tuple(made[at : at + 4]) for at in range(len(made) - 15 * 4, len(made), 4)]
    assert all(sorted(one) == list("abcd") for one in rounds)
    before = {earlier for earlier, later in itertools.pairwise(itertools.chain(*rounds)) if later == "a"}
    assert before >= set("bcd")
