"""CUDA C++ as C++ for the CPU."""

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[3] / "cpp" / "kernels"
SHIM = Path(__file__).parent / "shim"
# `extern` ones are as long as the launch says; of the others each has its place in the block's memory.
_SHARED = re.compile(r"(extern )?__shared__ (?:__align__\(\d+\) )?([\w: ]+) (\w+)((?:\[[^\]]*\])+);")


def _placed(found: re.Match[str]) -> str:
    dynamic, type_, name, dimensions = found.groups()
    if dynamic:
        return f"auto* const {name} = reinterpret_cast<{type_}*>(emulation::dynamic_shared_memory());"
    return f"auto& {name} = emulation::shared_array<__COUNTER__, {type_}{dimensions}>();"


def compiled_for_cpu(text: str, folder: Path, arch: str = "") -> ctypes.CDLL:
    """CUDA C++ as C++ for the CPU, with what shim/ has in place of the wrappers of instructions."""
    if shutil.which("g++") is None:
        pytest.skip("g++, which compiles kernels for the CPU, is missing")
    for path in KERNELS.rglob("*.cuh"):
        header = path.relative_to(KERNELS)
        if not (SHIM / header).exists():
            (folder / header).parent.mkdir(parents=True, exist_ok=True)
            (folder / header).write_text(_SHARED.sub(_placed, path.read_text()))
    source, library = folder / "unit.cc", folder / "unit.so"
    source.write_text(_SHARED.sub(_placed, text))
    flags = ["-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-fno-gnu-unique", "-U_FORTIFY_SOURCE"]
    if arch:
        flags.append(f"-D__CUDA_ARCH__={arch.strip('sm_a')}0")
    command = ["g++", *flags, f"-I{SHIM}", f"-I{folder}", str(source), "-o", str(library)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[:4000]
    return ctypes.CDLL(str(library))
