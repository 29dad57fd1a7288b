"""What a build says that can't be made."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.skipif(not (shutil.which("cmake") and shutil.which("ninja")), reason="CMake and Ninja are not installed")
def test_without_a_compiler_it_says_what_to_install(tmp_path):
    environment = {**os.environ, "CXX": "/no/such/compiler"}
    command = ["cmake", "-G", "Ninja", "-S", ROOT, "-B", tmp_path]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode
    said = " ".join(run.stderr.split())
    assert "a C++17 compiler, and none was found (CXX is '/no/such/compiler')" in said
    assert "apt install g++" in said
