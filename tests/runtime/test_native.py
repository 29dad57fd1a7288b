"""The native runtime: its compiler, the driver, the log, and what the machine may lack."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from checking.native_tools import ARCH, compile_cold, new_unit, run_python
from jaxdnn import _native

pytestmark = pytest.mark.usefixtures("cache_folder")


@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("nm"), reason="it takes nm, and Linux's object files")
def test_other_modules_see_its_beginning_alone():
    """A C++ library that is linked in would else share symbols with that of another version."""
    exports = subprocess.run(
        ["nm", "-D", "--defined-only", _native.__file__], capture_output=True, text=True, check=True
    )
    assert [line.split()[-1] for line in exports.stdout.splitlines()] == ["PyInit__native"]


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


def test_kernel_headers_are_those_of_the_sources():
    folder = Path(__file__).parents[2] / "cpp" / "kernels"
    sources = {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*.cuh")}
    assert _native.kernel_headers() == sources, "the installed module is older than cpp/kernels: install again"


def test_import_opens_neither_nvrtc_nor_the_driver():
    done = run_python("""
from pathlib import Path
import jaxdnn._native
maps = Path("/proc/self/maps").read_text().splitlines()
print([line for line in maps if "libnvrtc" in line or "libcuda.so" in line])
""")
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_disk_hit_is_quick_and_needs_no_nvrtc_in_memory():
    unit = new_unit()
    _native.compile(unit, ARCH)
    version = ".".join(map(str, _native.compiler()["version"]))
    if not Path(_native.compiler()["path"]).with_name(f"libnvrtc-builtins.so.{version}").exists():
        pytest.skip("this NVRTC's builtins lie elsewhere, so its version is known only once it is loaded")
    done = run_python(f"""
from pathlib import Path
from jaxdnn import _native
compiled = []
for _ in range(5):
    compiled.append(_native.compile({unit!r}, "{ARCH}"))
    _native.clear_memory_cache()
print({{one.origin for one in compiled}}, min(one.seconds for one in compiled) <= 0.020)
print([line for line in Path("/proc/self/maps").read_text().splitlines() if "libnvrtc" in line])
""")
    assert done.stdout == "{'disk'} True\n[]\n", done.stdout + done.stderr


def test_nvrtc_that_cannot_be_loaded_is_passed_over(tmp_path: Path):
    # Its file names foretell a version: of that one nothing is on disk, and it must not get into the key of what
    # another NVRTC compiles.
    (tmp_path / "libnvrtc.so.99").write_text("not a library")
    (tmp_path / "libnvrtc-builtins.so.99.9").write_text("not a library")
    unit = new_unit()
    good = _native.compile(unit, ARCH)
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


def test_driver_describes_devices_or_says_what_to_do():
    try:
        driver = _native.driver()
    except _native.Unavailable:
        with pytest.raises(_native.Unavailable, match=r"Install NVIDIA's driver|update NVIDIA's driver|nvidia-smi"):
            _native.load(new_unit(), ARCH)
    else:
        assert driver["version"] >= (12, 0)
        for device in driver["devices"]:
            assert device["sm_count"] > 0
            major, minor = device["compute_capability"]
            _native.load(new_unit(), f"sm_{major}{minor}")


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
    with pytest.raises(ValueError, match=r"level must be 0 \(warnings\), 1 \(info\) or 2 \(debug\)"):
        _native.set_log(3, "")
    with pytest.raises(RuntimeError, match=r"can't open the log file .*: No such file or directory"):
        _native.set_log(1, str(tmp_path / "missing" / "log.txt"))


def test_host_isa_can_be_lowered(monkeypatch: pytest.MonkeyPatch):
    best = _native.host()
    assert best["isas"][-1] == "baseline"
    assert best["isa"] == best["isas"][0]
    assert best["threads"] >= 1
    monkeypatch.setenv("JAXDNN_HOST_ISA", "baseline")
    assert _native.host()["isas"] == ["baseline"]
    monkeypatch.setenv("JAXDNN_HOST_ISA", "mmx")
    with pytest.raises(
        ValueError, match='JAXDNN_HOST_ISA is "mmx"; it can be amx, avx512_bf16, avx512, avx2, baseline'
    ):
        _native.host()


def test_host_isa_is_a_maximum(monkeypatch: pytest.MonkeyPatch):
    """Whatever this processor has: one that it lacks bounds nothing below it."""
    monkeypatch.delenv("JAXDNN_HOST_ISA", raising=False)
    had = _native.host()
    known = ["amx", "avx512_bf16", "avx512", "avx2", "baseline"]
    for number, highest in enumerate(known):
        monkeypatch.setenv("JAXDNN_HOST_ISA", highest)
        bounded = _native.host()
        for sets in ("isas", "extensions"):
            assert bounded[sets] == [isa for isa in had[sets] if isa in known[number:]]
