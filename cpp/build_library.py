"""Fills the library of cubins that a FULL build puts into the wheel: build_library.py MODULE PACKAGE OUTPUT.

The library is nothing but a disk cache: MODULE (the native module just built) is put beside the sources of PACKAGE, its
cache folder is set to OUTPUT, and every (unit, arch) of `jaxdnn.library.units()` is compiled. The file
`compiler` holds NVRTC's version, which is part of the keys.

It takes NVRTC and jaxdnn's own dependencies, so a FULL build is made without build isolation:
    pip install jax rich nvidia-cuda-nvrtc scikit-build-core nanobind
    pip install --no-build-isolation -C cmake.define.JAXDNN_LIB_CONFIG=FULL .
"""

import os
import shutil
import sys
import tempfile
from pathlib import Path


def main(module: Path, package: Path, output: Path) -> None:
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(mode=0o755, parents=True)  # of a folder that others may write to, the cache takes nothing
    os.environ.update(JAXDNN_CACHE_DIR=str(output), JAXDNN_CACHE_LIMIT=str(1 << 40), JAX_PLATFORMS="cpu")
    with tempfile.TemporaryDirectory() as folder:
        staged = Path(folder, package.name)
        shutil.copytree(package, staged, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(module, staged)
        metadata = Path(folder, f"{package.name}-0.dist-info")  # for importlib.metadata.version
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package.name}\nVersion: 0\n")
        sys.path.insert(0, folder)

        from jaxdnn import _native, library

        major, minor = _native.compiler()["version"]
        (output / "compiler").write_text(f"{major}.{minor}\n")
        units = library.units()
        for unit, arch in units:
            _native.compile(unit, arch)
        missing = len(set(units)) - len(list(output.glob("*.cubin")))
        if missing:
            sys.exit(f"{missing} of {len(set(units))} units are not in {output}")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
