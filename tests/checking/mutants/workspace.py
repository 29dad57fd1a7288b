"""Copies of the checkout, one with each mistake, in a temporary folder; the checkout itself is only read.

Tests run in a virtual environment that sees this one's packages, but not its editable installations: those are import
hooks, which would win over any path. So PYTHONPATH alone says which copy of the package is imported, by processes that
tests start too.

A copy with a mistake in Python, or in a kernel for the GPU, whose text tests compile, takes the native module that is
installed. For other mistakes in C++ it is built again, all in one build folder, so that only what depends on the
changed file is compiled.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
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
        installed = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
        (packages / "packages.pth").write_text("".join(f"{path}\n" for path in installed))
        shutil.copy2(self._module, self._original / "jaxdnn")
        self._passed: set[str] = set()  # tests that are known to pass without a mistake

    def run(self, mutant: Mutant, timeout: float, *, all_failures: bool = False) -> Outcome:
        """Applies the mistake to a copy, and runs the tests nearest to it, up to the first failure or all.

        One after the other, so that of what kills the process it is known which it was.
        """
        started = time.perf_counter()
        copy = self._folder / mutant.name
        try:
            shutil.copytree(self._original, copy)
            (copy / mutant.file).write_text(mutant.applied(copy))
            caught: tuple[str, ...] = ()
            error = self._build(mutant, copy / "jaxdnn" / self._module.name) if mutant.is_native else ""
            for test in mutant.tests:
                if error or (caught and not all_failures):
                    break
                more, error = self._test(test, copy, timeout, () if all_failures else ("--exitfirst",))
                caught += more
            if caught and not error:
                error = self._without(caught[0], timeout)
            return Outcome(mutant, caught, time.perf_counter() - started, error)
        finally:
            shutil.rmtree(copy, ignore_errors=True)

    def _without(self, test: str, timeout: float) -> str:
        """Why a test's failure tells nothing of a mistake: it fails without one, too."""
        if test.endswith(")") or test in self._passed:  # it was killed, or has passed
            return ""
        flags = () if "::" in test else ("--collect-only",)
        failed, error = self._test(test, self._original, timeout, flags)
        if failed or error:
            return f"{test} fails without a mistake: {error}"
        self._passed.add(test)
        return ""

    def _build(self, mutant: Mutant, module: Path) -> str:
        """Builds the native module with a mistake; returns what the compiler says against it."""
        sources, build = self._folder / "sources", self._folder / "build"
        with self._building:
            if not sources.exists():
                shutil.copytree(self._original, sources)
                if error := self._configure(sources, build):
                    return error
            kept = (sources / mutant.file).read_text()
            (sources / mutant.file).write_text(mutant.applied(sources))
            try:
                error = _said(["cmake", "--build", str(build)])
            finally:
                (sources / mutant.file).write_text(kept)
            if not error:
                shutil.copy2(build / module.name, module)
            return error

    def _configure(self, sources: Path, build: Path) -> str:
        settings = {"CMAKE_BUILD_TYPE": "Release", "Python_EXECUTABLE": sys.executable}
        given = [f"-D{name}={value}" for name, value in settings.items()]
        return _said(["cmake", "-G", "Ninja", "-S", str(sources), "-B", str(build), *given])

    def _test(self, test: str, copy: Path, timeout: float, flags: tuple[str, ...]) -> tuple[tuple[str, ...], str]:
        """Runs a test, a file or a folder of a copy. Returns which tests failed, and why they could not be run."""
        command = [str(self._python), "-P", "-m", "pytest", "--numprocesses=0", "--dist=no", "-p", "no:cacheprovider"]
        command += ["-q", "--tb=no", *flags, test]
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
                return (f"{test} (no end after {timeout:.0f} s)",), ""
        failed = tuple(re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", said, re.MULTILINE))
        if process.returncode == 0:
            return (), ""
        if process.returncode in (1, 2) and failed:
            return failed, ""
        if process.returncode < 0:
            return (f"{test} (killed by {signal.Signals(-process.returncode).name})",), ""
        return (), f"pytest returned {process.returncode}:\n{said[-2000:]}"


def _said(command: list[str]) -> str:
    """What a command that fails says; empty if it does not."""
    run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return run.stdout[-4000:] if run.returncode else ""
