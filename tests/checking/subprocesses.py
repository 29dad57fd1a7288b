"""Runs Python in another process, as a user would: nothing of this process's settings but the environment."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]


def run_python(source: str, *arguments: str, **environment: str) -> str:
    """What `source` prints. Warnings are errors there too; a failure shows all that it said."""
    kept = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_ENABLE_X64")}
    command = [sys.executable, "-P", "-W", "error", "-c", source, *arguments]
    run = subprocess.run(command, env=kept | environment, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, f"{source}\n{run.stdout}\n{run.stderr}"
    return run.stdout
