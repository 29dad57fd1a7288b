"""What every test process sets before JAX starts: CPU devices to shard over, float64, a kernel cache of its own."""

import gc
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from checking.compiling import QUICKLY, RIGHT, add_flags

DEVICES = 4

add_flags({"xla_force_host_platform_device_count": DEVICES, **RIGHT, **QUICKLY})
# Several processes may share one GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# Kept until the process ends. Compile logs are only there when a unit is compiled, so nobody else's cache will do.
_cache = tempfile.TemporaryDirectory(prefix="jaxdnn-tests-", ignore_cleanup_errors=True)
os.environ["JAXDNN_CACHE_DIR"] = _cache.name

import jax  # noqa: E402
import pytest  # noqa: E402

from jaxdnn import _native  # noqa: E402

# What JAX keeps of traced programs would otherwise be searched for garbage again and again: a tenth of the time.
gc.freeze()
gc.set_threshold(100_000, 20, 100)

# float64 arrays must be possible; every array of the tests says its dtype. `test_default_precision` runs without it.
jax.config.update("jax_enable_x64", True)


@pytest.fixture(scope="session")
def cpus():
    """The fake CPU devices, which a machine with a GPU has too."""
    devices = jax.devices("cpu")
    assert len(devices) >= DEVICES, "XLA_FLAGS of the environment set another number of CPU devices"
    return devices[:DEVICES]


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cubin cache for one test."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("JAXDNN_CACHE_DIR", str(folder))
    monkeypatch.delenv("JAXDNN_CACHE_LIMIT", raising=False)
    return folder


@pytest.fixture
def log_file(tmp_path: Path) -> Iterator[Path]:
    """Where the native runtime's debug log goes during one test."""
    path = tmp_path / "log.txt"
    _native.set_log(2, str(path))
    yield path
    _native.set_log(0, "")
