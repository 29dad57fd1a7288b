"""Measured configurations: remembered, used on request, and never wrong."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import BF16, NormCase
from checking import as_tuple, assert_close, platform
from test_vjp import arguments, vjp

import jaxdnn
from jaxdnn import _native
from jaxdnn.planning import cache

pytestmark = pytest.mark.skipif(platform() not in ("cpu", "cuda"), reason="no native engine runs on this platform")

CASE = NormCase("layer_norm", (48, 160), x=BF16, scale=BF16, bias=BF16)


@pytest.fixture(autouse=True)
def forgetful(monkeypatch, tmp_path):
    """An empty memory and a folder of its own for each test."""
    monkeypatch.setattr(cache, "_memory", {})
    monkeypatch.setattr(_native, "cache", lambda: {"directory": str(tmp_path)})
    return tmp_path


def entries(folder):
    return sorted(Path(folder, "autotune").glob("*.json"))


def chosen(case, **options):
    with jaxdnn.options(**options):
        _, (_, calls) = jaxdnn.explain(case.call, *case.primals()).sections
    return {call.call.spec.direction: call.selection for call in calls}


def test_forward_and_backward_are_measured(forgetful):
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


def test_the_winner_is_used_under_cached_and_not_under_off(forgetful):
    jaxdnn.autotune(CASE.call, *CASE.primals())
    for path in entries(forgetful):
        stored = json.loads(path.read_text())
        path.write_text(json.dumps(stored | {"engine": "xla", "knobs": [], "seconds": 1e-9}))
    cache._memory.clear()
    assert {selection.engine for selection in chosen(CASE, autotune="cached").values()} == {"xla"}
    assert {selection.engine for selection in chosen(CASE).values()} != {"xla"}


def test_a_remembered_native_winner_has_its_knobs(forgetful):
    native = next(iter(chosen(CASE).values()))
    if native.engine != "host":
        pytest.skip("the knob that is set is the CPU engine's")
    jaxdnn.autotune(CASE.call, *CASE.primals())
    for path in entries(forgetful):
        stored = json.loads(path.read_text())
        path.write_text(json.dumps(stored | {"engine": "host", "knobs": [["rows_per_task", 3]]}))
    cache._memory.clear()
    assert {selection.config.rows_per_task for selection in chosen(CASE, autotune="cached").values()} == {3}
    with jaxdnn.options(autotune="cached"):
        assert_close(jax.jit(lambda *a: vjp(as_tuple(CASE.call), *a))(*arguments(CASE)), vjp, CASE, arguments)


def test_cached_measures_nothing(forgetful):
    assert chosen(CASE, autotune="cached").keys() == {"forward", "backward"}
    assert entries(forgetful) == []


def test_on_measures_once_while_lowering(forgetful):
    with jaxdnn.options(autotune="on"):
        results = jax.jit(lambda *a: vjp(as_tuple(CASE.call), *a))(*arguments(CASE))
        assert len(entries(forgetful)) == 2
        before = [path.stat().st_mtime_ns for path in entries(forgetful)]
        # The same calls in another program.
        jax.jit(lambda *a: jax.tree.map(jnp.sin, vjp(as_tuple(CASE.call), *a)))(*arguments(CASE))
    assert_close(results, vjp, CASE, arguments)
    assert [path.stat().st_mtime_ns for path in entries(forgetful)] == before


@pytest.mark.parametrize("damage", ["", "{", '{"engine": "xla"}', "[]", '{"engine": 1, "knobs": 2}', "\x00" * 100])
def test_a_damaged_entry_counts_as_absent(forgetful, damage):
    jaxdnn.autotune(CASE.call, *CASE.primals())
    for path in entries(forgetful):
        path.write_text(damage)
    cache._memory.clear()
    expected = {direction: selection.config for direction, selection in chosen(CASE).items()}
    assert {d: s.config for d, s in chosen(CASE, autotune="cached").items()} == expected


def test_an_entry_of_an_engine_that_is_gone(forgetful):
    """A winner whose engine or knobs a later change of the code removed must not make calls fail."""
    jaxdnn.autotune(CASE.call, *CASE.primals())
    for path in entries(forgetful):
        path.write_text(json.dumps({"engine": "gone", "knobs": [["x", 1]], "seconds": 1e-6, "workspace": 0}))
    cache._memory.clear()
    x, scale, bias = CASE.primals()
    with jaxdnn.options(autotune="cached"):
        np.testing.assert_array_equal(jax.jit(CASE.call)(x, scale, bias), CASE.call(x, scale, bias))


def test_a_folder_that_can_not_be_written(monkeypatch, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("a file, where a folder is wanted")
    monkeypatch.setattr(_native, "cache", lambda: {"directory": str(blocked)})
    tuning = jaxdnn.autotune(CASE.call, *CASE.primals())
    assert tuning.calls
    assert chosen(CASE, autotune="cached").keys() == {"forward", "backward"}


def test_other_shapes_have_other_entries(forgetful):
    jaxdnn.autotune(CASE.call, *CASE.primals())
    first = len(entries(forgetful))
    other = CASE.replace(shape=(49, 160))
    jaxdnn.autotune(other.call, *other.primals())
    assert len(entries(forgetful)) == 2 * first


def test_an_engine_that_is_named_is_not_overruled():
    jaxdnn.autotune(CASE.call, *CASE.primals())
    assert {s.engine for s in chosen(CASE, autotune="cached", engine="xla").values()} == {"xla"}


def test_shapes_alone_will_do():
    x = jax.ShapeDtypeStruct((16, 64), jnp.float32)
    tuning = jaxdnn.autotune(jaxdnn.rms_norm, x)
    assert len(tuning.calls) >= 2
