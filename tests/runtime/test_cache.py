"""The cubin cache under faults: damaged entries, unusable folders, a full disk, threads and processes that race."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from checking.native_tools import ARCH, compile_cold, new_unit, run_python
from jaxdnn import _libraries, _native

pytestmark = pytest.mark.usefixtures("cache_folder")

HEADER_BYTES = 88
NOWHERE = {"trusted": False, "writable": False}


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


def test_key_depends_on_what_headers_say(tmp_path: Path):
    """In a copy of the module, in which a header's first comment is another one."""
    name, text = next((name, text) for name, text in _native.kernel_headers().items() if "// " in text)
    module = Path(_native.__file__).read_bytes()
    assert module.count(text.encode()) == 1
    changed = tmp_path / "_native.so"
    changed.write_bytes(module.replace(text.encode(), text.replace("// ", "//-", 1).encode()))
    unit = f'#include "{name}"\n{new_unit()}'
    done = run_python(f"""
from importlib import util
spec = util.spec_from_file_location("_native", {str(changed)!r})
module = util.module_from_spec(spec)
spec.loader.exec_module(module)
module.set_library_paths({_libraries.candidates()!r})
compiled = module.compile({unit!r}, "{ARCH}")
print(compiled.origin, compiled.key)
""")
    assert done.returncode == 0, done.stderr
    origin, key = done.stdout.split()
    here = _native.compile(unit, ARCH)
    assert origin == here.origin == "compiler"
    assert key != here.key


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
    assert _native.cache() == {"directory": folder, "entries": 0, "bytes": 0, "limit": 256 << 20, **NOWHERE}


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
    command = [sys.executable, "-P", "-c", code]
    with ExitStack() as stack:
        processes = [
            stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            for _ in range(4)
        ]
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        answers = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4
    results = [json.loads(answer) for answer in answers]
    assert results[1:] == results[:1] * 3
    assert sorted(path.name for path in cache_folder.iterdir()) == sorted(
        f"{key}.{suffix}" for key, _ in results[0] for suffix in ("cu", "cubin")
    )
    assert [compile_cold(unit).origin for unit in units] == ["disk"] * 4
