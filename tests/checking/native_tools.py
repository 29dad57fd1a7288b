"""What the tests of the native runtime share."""

import os
import subprocess
import sys
import uuid

from jaxdnn import _native

ARCH = "sm_90a"


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
    command = [sys.executable, "-P", "-W", "error", "-c", code]
    return subprocess.run(command, env=kept, capture_output=True, text=True, check=False, timeout=300)
