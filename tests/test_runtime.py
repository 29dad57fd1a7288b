"""The native runtime under faults: compiler, cache, plans, and what the machine lacks."""

import json
import os
import re
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdnn import _native, lowering
from jaxdnn.plan import Launch, Operand, Plan, Result, Scalar, TensorMap

ARCH = "sm_90a"
HEADER_BYTES = 88


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("JAXDNN_CACHE_DIR", str(folder))
    monkeypatch.delenv("JAXDNN_CACHE_LIMIT", raising=False)
    return folder


@pytest.fixture
def log_file(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "log.txt"
    _native.set_log(2, str(path))
    yield path
    _native.set_log(0, "")


def new_unit() -> str:
    """A unit that no test has compiled before."""
    return f'extern "C" __global__ void k(float* x) {{ x[threadIdx.x] *= 2; }}  // {uuid.uuid4()}\n'


def compile_cold(unit: str) -> _native.CompiledUnit:
    """Compiles past what is held in memory."""
    _native.clear_memory_cache()
    return _native.compile(unit, ARCH)


def run_python(code: str, **environment: str | None) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "JAX_PLATFORMS": "cpu", **environment}
    kept = {name: value for name, value in variables.items() if value is not None}
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(command, env=kept, capture_output=True, text=True, check=False, timeout=300)


# ---- The cache ---------------------------------------------------------------------------------------------------------


def test_unit_comes_from_compiler_then_memory_then_disk(cache_folder: Path):
    unit = new_unit()
    before = _native.counters()
    first = _native.compile(unit, ARCH)
    second = _native.compile(unit, ARCH)
    third = compile_cold(unit)
    assert [first.origin, second.origin, third.origin] == ["compiler", "memory", "disk"]
    assert first.cubin[:4] == b"\x7fELF"
    assert first.cubin == second.cubin == third.cubin
    assert first.key == second.key == third.key
    assert re.search(r"Used \d+ registers", first.log)
    assert "0 bytes spill stores" in first.log
    assert second.log == third.log == ""
    assert (cache_folder / f"{first.key}.cu").read_text() == unit
    change = {name: value - before[name] for name, value in _native.counters().items()}
    assert change == {**dict.fromkeys(change, 0), "compiles": 1, "memory_hits": 1, "disk_hits": 1}


def test_key_depends_on_the_architecture_and_on_included_headers():
    unit = new_unit()
    header = next(iter(_native.kernel_headers()))
    including = f'#include "{header}"\n{unit}'
    keys = {
        _native.compile(unit, "sm_80").key,
        _native.compile(unit, "sm_90").key,
        _native.compile(unit, "sm_90a").key,
        _native.compile(including, "sm_90a").key,
    }
    assert len(keys) == 4


def truncate_header(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: HEADER_BYTES // 2])


def truncate_cubin(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def flip_bit(position: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[position] ^= 4
        path.write_bytes(content)

    return damage


def empty(path: Path) -> None:
    path.write_bytes(b"")


def foreign(path: Path) -> None:
    path.write_text("not a cubin\n" * 100)


def other_entry(path: Path) -> None:
    other = _native.compile(new_unit(), ARCH)
    (path.parent / f"{other.key}.cubin").replace(path)


DAMAGES = {
    "header truncated": truncate_header,
    "cubin truncated": truncate_cubin,
    "bytes appended": append,
    "bit flipped in the magic": flip_bit(3),
    "bit flipped in the format": flip_bit(8),
    "bit flipped in the length": flip_bit(50),
    "bit flipped in the checksum": flip_bit(60),
    "bit flipped in the cubin": flip_bit(HEADER_BYTES + 500),
    "bit flipped in the last byte": flip_bit(-1),
    "empty": empty,
    "foreign": foreign,
    "entry of another unit": other_entry,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_damaged_entry_is_compiled_and_published_again(damage: Callable[[Path], None], cache_folder: Path):
    unit = new_unit()
    good = _native.compile(unit, ARCH)
    damage(cache_folder / f"{good.key}.cubin")
    again = compile_cold(unit)
    assert again.origin == "compiler"
    assert again.cubin == good.cubin
    assert compile_cold(unit).origin == "disk"


@pytest.mark.parametrize("obstacle", [Path.mkdir, os.mkfifo], ids=["folder", "pipe"])
def test_entry_that_is_no_file_is_passed_over(obstacle: Callable[[Path], None], cache_folder: Path):
    unit = new_unit()
    good = _native.compile(unit, ARCH)
    entry = cache_folder / f"{good.key}.cubin"
    entry.unlink()
    obstacle(entry)
    assert compile_cold(unit).cubin == good.cubin


def unwritable_folder(tmp_path: Path) -> str:
    if os.geteuid() == 0:  # no permission stops root; nobody can create anything here
        return "/proc/jaxdnn"
    tmp_path.chmod(0o500)
    return str(tmp_path / "cache")


def file_in_place_of_folder(tmp_path: Path) -> str:
    path = tmp_path / "file"
    path.write_text("in the way")
    return str(path)


def file_above_folder(tmp_path: Path) -> str:
    return file_in_place_of_folder(tmp_path) + "/below"


@pytest.mark.parametrize("place", [unwritable_folder, file_in_place_of_folder, file_above_folder])
def test_unusable_folder_is_only_logged(
    place: Callable[[Path], str], tmp_path: Path, log_file: Path, monkeypatch: pytest.MonkeyPatch
):
    log_file.touch()
    folder = place(tmp_path)
    monkeypatch.setenv("JAXDNN_CACHE_DIR", folder)
    unit = new_unit()
    assert _native.compile(unit, ARCH).origin == "compiler"
    assert _native.compile(unit, ARCH).origin == "memory"
    assert compile_cold(unit).origin == "compiler"
    assert f"cache: can't create {folder}" in log_file.read_text()
    assert _native.cache() == {"directory": folder, "entries": 0, "bytes": 0, "limit": 256 << 20, "writable": False}


def test_no_home():
    code = f"""
from jaxdnn import _native
_native.set_log(1, "")
print(_native.compile({new_unit()!r}, "{ARCH}").origin, _native.cache()["directory"] == "")
"""
    done = run_python(code, HOME=None, XDG_CACHE_HOME=None, JAXDNN_CACHE_DIR=None)
    assert done.stdout.split() == ["compiler", "True"], done.stderr
    assert "set JAXDNN_CACHE_DIR" in done.stderr


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"JAXDNN_CACHE_DIR": "/a/b", "XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/a/b"),
        ({"JAXDNN_CACHE_DIR": "", "XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/x/jaxdnn"),
        ({"JAXDNN_CACHE_DIR": "", "XDG_CACHE_HOME": "", "HOME": "/h"}, "/h/.cache/jaxdnn"),
    ],
)
def test_cache_folder(environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert _native.cache()["directory"] == expected


def test_full_disk_is_only_logged(cache_folder: Path):
    # A limit on the size of files fails a write half-way through, as a full disk does.
    code = f"""
import resource
from jaxdnn import _native
_native.set_log(1, "")
resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))
for _ in range(2):
    print(_native.compile({new_unit()!r}, "{ARCH}").origin)
    _native.clear_memory_cache()
"""
    done = run_python(code)
    assert done.stdout.split() == ["compiler", "compiler"], done.stderr
    assert "cache: can't write" in done.stderr
    assert not list(cache_folder.glob("*.cubin"))
    assert not list(cache_folder.glob(".tmp-*"))


def test_folder_is_kept_under_its_limit(cache_folder: Path, monkeypatch: pytest.MonkeyPatch):
    units = [new_unit() for _ in range(6)]
    first = _native.compile(units[0], ARCH)
    entry_bytes = _native.cache()["bytes"]
    limit = 3 * entry_bytes + entry_bytes // 2
    monkeypatch.setenv("JAXDNN_CACHE_LIMIT", str(limit))
    stranger = cache_folder / "stranger.cubin"
    stranger.write_bytes(b"\0" * limit)
    for unit in units[1:]:
        time.sleep(0.02)  # apart by more than the file system's clock tick
        _native.compile(unit, ARCH)
        time.sleep(0.02)
        assert compile_cold(units[0]).origin == "disk"  # each use makes it the newest
    state = _native.cache()
    assert state["entries"] == 3
    assert state["bytes"] <= limit == state["limit"]
    assert (cache_folder / f"{first.key}.cubin").exists()
    assert compile_cold(units[1]).origin == "compiler"
    assert stranger.exists()


def test_limit_that_is_no_number(log_file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAXDNN_CACHE_LIMIT", "1 GB")
    assert _native.cache()["limit"] == 256 << 20
    assert 'JAXDNN_CACHE_LIMIT must be a number of bytes, not "1 GB"' in log_file.read_text()


def test_left_over_temporary_file_is_removed(cache_folder: Path):
    _native.compile(new_unit(), ARCH)
    old, fresh = cache_folder / ".tmp-aaaaaa", cache_folder / ".tmp-bbbbbb"
    for path in (old, fresh):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    _native.compile(new_unit(), ARCH)
    assert not old.exists()
    assert fresh.exists()


def test_threads_share_one_compilation():
    unit = new_unit()
    barrier = threading.Barrier(8)

    def compile_together() -> _native.CompiledUnit:
        barrier.wait()
        return _native.compile(unit, ARCH)

    with ThreadPoolExecutor(8) as pool:
        compiled = [job.result() for job in [pool.submit(compile_together) for _ in range(8)]]
    assert sorted(one.origin for one in compiled) == ["compiler", *["memory"] * 7]
    assert len({one.cubin for one in compiled}) == 1


def test_threads_compile_different_units():
    units = [new_unit() for _ in range(12)]
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda unit: _native.compile(unit, ARCH), units))
    for unit, one in zip(units, together, strict=True):
        assert one.origin == "compiler"
        assert compile_cold(unit).cubin == one.cubin


def test_four_processes_fill_one_empty_cache(cache_folder: Path):
    units = [new_unit() for _ in range(4)]
    code = f"""
import json, sys, zlib
from jaxdnn import _native
print("ready", flush=True)
sys.stdin.readline()
compiled = [_native.compile(unit, "{ARCH}") for unit in {units!r}]
print(json.dumps([[one.key, zlib.crc32(one.cubin)] for one in compiled]))
"""
    processes = [
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    answers = {process: process.communicate("go\n", timeout=300)[0] for process in processes}
    assert all(process.returncode == 0 for process in processes)
    results = [json.loads(answer) for answer in answers.values()]
    assert results[1:] == results[:1] * 3
    assert sorted(path.name for path in cache_folder.iterdir()) == sorted(
        f"{key}.{suffix}" for key, _ in results[0] for suffix in ("cu", "cubin")
    )
    assert [compile_cold(unit).origin for unit in units] == ["disk"] * 4


# ---- The compiler ------------------------------------------------------------------------------------------------------


def test_compile_error_holds_the_log():
    unit = new_unit() + "this is not C++;\n"
    with pytest.raises(_native.CompileError, match=r"rejected unit_[0-9a-f]{12}\.cu for sm_90a:\n") as caught:
        _native.compile(unit, ARCH)
    assert 'identifier "this" is undefined' in str(caught.value) or "error:" in str(caught.value)
    with pytest.raises(_native.CompileError):  # and is not remembered as a success
        _native.compile(unit, ARCH)


def test_missing_header_is_a_compile_error():
    with pytest.raises(_native.CompileError, match=r"no_such_header\.cuh"):
        _native.compile('#include "no_such_header.cuh"\n', ARCH)


@pytest.mark.parametrize("arch", ["sm_20", "sm_999", "avx2", ""])
def test_unsupported_architecture(arch: str):
    major, minor = _native.compiler()["version"]
    message = rf"NVRTC {major}\.{minor} .* can't compile for {arch}: it supports sm_\d+ to sm_\d+.*pip install"
    with pytest.raises(_native.Unavailable, match=message):
        _native.compile(new_unit(), arch)


def test_description():
    compiler = _native.compiler()
    assert compiler["version"] >= (12, 0)
    assert {80, 90} <= set(compiler["architectures"])
    assert Path(compiler["path"]).exists()


def test_import_opens_neither_nvrtc_nor_the_driver():
    done = run_python("""
import jaxdnn._native
print([line for line in open("/proc/self/maps") if "libnvrtc" in line or "libcuda.so" in line])
""")
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_disk_hit_is_quick_and_needs_no_nvrtc_in_memory():
    unit = new_unit()
    _native.compile(unit, ARCH)
    version = ".".join(map(str, _native.compiler()["version"]))
    if not Path(_native.compiler()["path"]).with_name(f"libnvrtc-builtins.so.{version}").exists():
        pytest.skip("this NVRTC's builtins lie elsewhere, so its version is known only once it is loaded")
    done = run_python(f"""
from jaxdnn import _native
compiled = []
for _ in range(5):
    compiled.append(_native.compile({unit!r}, "{ARCH}"))
    _native.clear_memory_cache()
print({{one.origin for one in compiled}}, min(one.seconds for one in compiled) <= 0.020)
print([line for line in open("/proc/self/maps") if "libnvrtc" in line])
""")
    assert done.stdout == "{'disk'} True\n[]\n", done.stdout + done.stderr


def test_nvrtc_that_cannot_be_loaded_is_passed_over(tmp_path: Path, cache_folder: Path):
    # Its file names foretell a version, which must not get into the key of what another NVRTC compiles.
    (tmp_path / "libnvrtc.so.99").write_text("not a library")
    (tmp_path / "libnvrtc-builtins.so.99.9").write_text("not a library")
    unit = new_unit()
    good = _native.compile(unit, ARCH)
    (cache_folder / f"{good.key}.cubin").unlink()
    done = run_python(f"""
from jaxdnn import _libraries, _native
_native.set_library_paths([{str(tmp_path)!r}, *_libraries.candidates()])
compiled = _native.compile({unit!r}, "{ARCH}")
print(compiled.origin, compiled.key)
""")
    assert done.stdout.split() == ["compiler", good.key], done.stderr


def test_no_nvrtc_names_the_remedy():
    done = run_python(f"""
from jaxdnn import _native
_native.set_library_paths([])
try:
    _native.compile({new_unit()!r}, "{ARCH}")
except _native.Unavailable as unavailable:
    print(unavailable)
else:
    print("found by the loader itself:", _native.compiler()["path"])
""")
    assert "pip install nvidia-cuda-nvrtc" in done.stdout or "found by the loader itself: /" in done.stdout, done.stderr


# ---- The driver --------------------------------------------------------------------------------------------------------


def test_driver_describes_devices_or_says_what_to_do():
    try:
        driver = _native.driver()
    except _native.Unavailable as unavailable:
        assert re.search("Install NVIDIA's driver|update NVIDIA's driver|nvidia-smi", str(unavailable))
        with pytest.raises(_native.Unavailable):
            _native.load(new_unit(), ARCH)
    else:
        assert driver["version"] >= (12, 0)
        for device in driver["devices"]:
            assert device["sm_count"] > 0
            major, minor = device["compute_capability"]
            _native.load(new_unit(), f"sm_{major}{minor}")


# ---- The log -----------------------------------------------------------------------------------------------------------


def test_log_has_one_line_a_compile(log_file: Path):
    unit = new_unit()
    key = _native.compile(unit, ARCH).key
    compile_cold(unit)
    _native.set_log(0, "")
    _native.compile(new_unit(), ARCH)
    lines = log_file.read_text().splitlines()
    assert len(lines) == 2
    for line, origin in zip(lines, ["compiler", "disk"], strict=True):
        assert re.fullmatch(rf"jaxdnn: compile: {key[:12]} for {ARCH} from {origin} in \d+\.\d ms", line)


def test_log_arguments(tmp_path: Path):
    with pytest.raises(ValueError, match=r"level must be 0 \(silent\), 1 \(info\) or 2 \(debug\)"):
        _native.set_log(3, "")
    with pytest.raises(RuntimeError, match="can't open the log file .*: No such file or directory"):
        _native.set_log(1, str(tmp_path / "missing" / "log.txt"))


# ---- The host ----------------------------------------------------------------------------------------------------------


def test_host_isa_can_be_lowered(monkeypatch: pytest.MonkeyPatch):
    best = _native.host()
    assert best["isas"][-1] == "baseline"
    assert best["isa"] == best["isas"][0]
    assert best["threads"] >= 1
    monkeypatch.setenv("JAXDNN_HOST_ISA", "baseline")
    assert _native.host()["isas"] == ["baseline"]
    monkeypatch.setenv("JAXDNN_HOST_ISA", "mmx")
    with pytest.raises(ValueError, match='JAXDNN_HOST_ISA is "mmx"; here it can be .*baseline'):
        _native.host()


KERNEL = "norm_forward_float32"
GOOD = Launch(KERNEL, (Operand(0), Result(0)), (0, 1, 1))


def host_plan(*launches: Launch, arch: str = "") -> Plan:
    return Plan("probe", "", arch, launches)


def call_host(attributes: dict[str, Any]) -> jax.Array:
    x = jnp.zeros((4, 8), jnp.float32)
    return jax.jit(jax.ffi.ffi_call("jaxdnn_host", jax.ShapeDtypeStruct(x.shape, x.dtype)))(x, **attributes)


def test_plan_without_tasks_runs():
    before = _native.counters()
    jax.block_until_ready(call_host(lowering.attributes(host_plan(GOOD, GOOD), results=1)))
    after = _native.counters()
    assert after["instantiates"] == before["instantiates"] + 1
    assert after["executes"] == before["executes"] + 1


TENSOR_MAP = TensorMap(Operand(0), 7, (8, 4), (32,), (8, 4), (1, 1))
BAD_PLANS = {
    "unknown kernel": (host_plan(replace(GOOD, kernel="nope")), "probe: there is no host kernel nope for .*; there are:"),
    "kernel without a name": (host_plan(replace(GOOD, kernel="")), "probe, launch 0: the kernel has no name"),
    "unknown instruction set": (host_plan(GOOD, arch="mmx"), "probe: instruction set mmx can't run here; .*baseline"),
    "operand beyond the call": (
        host_plan(replace(GOOD, arguments=(Operand(1),))),
        "probe: the plan uses 2 operands and 0 results, but the call has 1 and 1",
    ),
    "result beyond the call": (
        host_plan(GOOD, replace(GOOD, arguments=(Result(5),))),
        "probe: the plan uses 1 operands and 6 results, but the call has 1 and 1",
    ),
    "negative operand": (
        host_plan(replace(GOOD, arguments=(Operand(-1),))),
        "probe, launch 0, argument 0: operand index is -1; it must be 0 to",
    ),
    "negative offset": (
        host_plan(GOOD, replace(GOOD, arguments=(Result(0), Operand(0, -4)))),
        "probe, launch 1, argument 1: offset is -4; it must be 0 to",
    ),
    "offset beyond the buffer": (
        host_plan(replace(GOOD, arguments=(Operand(0, 129),))),
        "probe: offset 129 is beyond the 128 bytes of operand 0",
    ),
    "too many arguments": (
        host_plan(replace(GOOD, arguments=(Scalar("int32", 1),) * 129)),
        "probe, launch 0: number of arguments is 129; it must be 0 to 128",
    ),
    "negative grid": (host_plan(replace(GOOD, grid=(-1, 1, 1))), "probe, launch 0: grid is -1; it must be 0 to"),
    "two-dimensional grid": (host_plan(replace(GOOD, grid=(1, 2, 1))), "only grid\\[0\\], the number of tasks, may be set"),
    "block": (host_plan(replace(GOOD, block=(32, 1, 1))), "only grid\\[0\\], the number of tasks, may be set"),
    "tensor map": (host_plan(replace(GOOD, arguments=(TENSOR_MAP,))), "there are no tensor maps on the host"),
    "tensor map of rank 6": (
        host_plan(replace(GOOD, arguments=(replace(TENSOR_MAP, dimensions=(1,) * 6),))),
        "probe, tensor map 0: rank is 6; it must be 1 to 5",
    ),
    "tensor map of unequal ranks": (
        host_plan(replace(GOOD, arguments=(replace(TENSOR_MAP, box=(8,)),))),
        "probe, tensor map 0: has 15 words; rank 2 takes 16",
    ),
}


@pytest.mark.parametrize(("plan", "message"), BAD_PLANS.values(), ids=BAD_PLANS.keys())
def test_bad_plan_is_an_error(plan: Plan, message: str):
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"INVALID_ARGUMENT: .*jaxdnn: .*{message}"):
        jax.block_until_ready(call_host(lowering.attributes(plan, results=1)))


def without(name: str) -> dict[str, Any]:
    attributes = lowering.attributes(host_plan(GOOD), results=1)
    del attributes[name]
    return attributes


def with_launch(**changes: Any) -> dict[str, Any]:
    attributes = lowering.attributes(host_plan(GOOD), results=1)
    attributes["launches"]["0"].update(changes)
    return attributes


BAD_ATTRIBUTES = {
    "nothing": ({}, 'a plan: attribute "op" is missing'),
    "no unit": (without("unit"), 'the plan of probe: attribute "unit" is missing'),
    "no launches": (without("launches"), 'the plan of probe: attribute "launches" is missing'),
    "op a number": ({**without("op"), "op": 3}, 'attribute "op": Wrong attribute type'),
    "launches a string": ({**without("launches"), "launches": "0"}, 'attribute "launches": Wrong attribute type'),
    "launch misnamed": ({**without("launches"), "launches": {"1": {}}}, 'launch 0: attribute "0" is missing'),
    "geometry of 32 bits": (with_launch(geometry=np.ones(10, np.int32)), 'attribute "geometry": Wrong array data type'),
    "geometry too short": (with_launch(geometry=np.arange(1, 10)), "geometry has 9 numbers; it must have 10"),
    "argument cut off": (with_launch(arguments=np.arange(4)), "arguments have 4 words; each takes 3"),
    "unknown argument kind": (with_launch(arguments=np.array([4, 0, 0])), "argument kind 4; it must be 0 to 3"),
    "scalar of 2 bytes": (with_launch(arguments=np.array([2, 2, 0])), "scalar of 2 bytes; it must have 4 or 8"),
    "no such tensor map": (with_launch(arguments=np.array([3, 0, 0])), "tensor map 0 of 0"),
}


@pytest.mark.parametrize(("attributes", "message"), BAD_ATTRIBUTES.values(), ids=BAD_ATTRIBUTES.keys())
def test_bad_attributes_are_an_error(attributes: dict[str, Any], message: str):
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"INVALID_ARGUMENT: .*jaxdnn: .*{re.escape(message)}"):
        jax.block_until_ready(call_host(attributes))
