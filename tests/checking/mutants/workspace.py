"""Copies of the checkout, one with each mistake, in a temporary folder; the checkout itself is only read.

Tests run in a virtual environment that sees this one's packages, but not its editable installations: those are import
hooks, which would win over any path. So PYTHONPATH alone says which copy of the package is imported, by processes that
tests start too.

A copy with a mistake in Python takes the native module that is installed. For one in C++ or CUDA the module is built
again, all in one build folder, so that only what depends on the changed file is compiled.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
import venv
from dataclasses import dataclass
from pathlib import Path

from checking.mutants.table import ROOT, Mutant
from jaxdnn import _native


@dataclass(frozen=True)
class Outcome:
    """What the tests said of a mutant: which of them failed, if any, and how long that took."""

    mutant: Mutant
    caught: tuple[str, ...]
    seconds: float
    error: str = ""  # why it could not be tried


class Workspace:
    """A temporary folder for copies and for the build of the native module."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._building = threading.Lock()
        self._original = folder / "original"
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
        for name in filter(None, names.split("\0")):
            if (ROOT / name).is_file():
                target = self._original / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, target)
        self._module = Path(_native.__file__)
        venv.create(folder / "venv", with_pip=False)
        self._python = folder / "venv" / "bin" / "python"
        (packages,) = (folder / "venv").glob("lib/python*/site-packages")
        paths = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
        (packages / "packages.pth").write_text("".join(f"{path}\n" for path in paths))

    def run(self, mutant: Mutant, timeout: float, *, all_failures: bool = False) -> Outcome:
        """Applies the mistake to a copy, and runs the tests nearest to it, up to the first failure."""
        started = time.perf_counter()
        copy = self._folder / mutant.name
        try:
            shutil.copytree(self._original, copy)
            (copy / mutant.file).write_text(mutant.applied(copy))
            module = copy / "jaxdnn" / self._module.name
            error = self._build(mutant, module) if mutant.is_native else ""
            if not error:
                if not mutant.is_native:
                    shutil.copy2(self._module, module)
                caught, error = self._test(mutant.tests, copy, timeout, all_failures=all_failures)
                return Outcome(mutant, caught, time.perf_counter() - started, error)
            return Outcome(mutant, (), time.perf_counter() - started, error)
        finally:
            shutil.rmtree(copy, ignore_errors=True)

    def _build(self, mutant: Mutant, module: Path) -> str:
        """Builds the native module with a mistake; returns what the compiler says against it."""
        source, build = self._original / mutant.file, self._folder / "build"
        with self._building:
            if not build.exists() and (error := self._configure(build)):
                return error
            kept = source.read_text()
            source.write_text(mutant.applied(self._original))
            try:
                error = _said(["cmake", "--build", str(build)])
            finally:
                source.write_text(kept)
            if not error:
                shutil.copy2(build / module.name, module)
            return error

    def _configure(self, build: Path) -> str:
        settings = {"CMAKE_BUILD_TYPE": "Release", "Python_EXECUTABLE": sys.executable}
        given = [f"-D{name}={value}" for name, value in settings.items()]
        return _said(["cmake", "-G", "Ninja", "-S", str(self._original), "-B", str(build), *given])

    def _test(
        self, tests: tuple[str, ...], copy: Path, timeout: float, *, all_failures: bool
    ) -> tuple[tuple[str, ...], str]:
        command = [str(self._python), "-P", "-m", "pytest", "--numprocesses=0", "--dist=no", "-p", "no:cacheprovider"]
        command += ["-q", "--tb=no", *(() if all_failures else ("--exitfirst",)), *tests]
        environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
        # A group of its own, so that what tests have started ends with them.
        with subprocess.Popen(
            command, cwd=copy, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        ) as process:  # fmt: skip
            try:
                said = process.communicate(timeout=timeout)[0]
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                return (f"no end after {timeout:.0f} s",), ""
        failed = tuple(re.findall(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE))
        if process.returncode == 0:
            return (), ""
        if process.returncode in (1, 2) and failed:
            return failed, ""
        if process.returncode < 0:
            return (f"killed by {signal.Signals(-process.returncode).name}",), ""
        return (), f"pytest returned {process.returncode}:\n{said[-2000:]}"


def _said(command: list[str]) -> str:
    """What a command that fails says; empty if it does not."""
    run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return run.stdout[-4000:] if run.returncode else ""
