"""Remembers what measurement found best for a call, in memory and beside the compiled kernels on disk.

One small JSON file a call, published by an atomic rename, so that threads and processes need no lock. A file that can't
be read, or that was written by another version, counts as absent; a folder that can't be written, or none at all, is no
error.
"""

import contextlib
import functools
import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from jaxdnn import _native
from jaxdnn.config import Options
from jaxdnn.device import Target
from jaxdnn.planning.measure import Measurement
from jaxdnn.spec import Signature, Spec

_memory: dict[str, Measurement] = {}


def recall(spec: Spec, signature: Signature, target: Target) -> Measurement | None:
    """The fastest configuration that was ever measured for this call on this device, if any."""
    key = _key(spec, signature, target)
    if key not in _memory:
        try:
            stored = json.loads(_path(key).read_text())
            knobs = tuple((str(name), value) for name, value in stored["knobs"])
            _memory[key] = Measurement(stored["engine"], knobs, float(stored["seconds"]), int(stored["workspace"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None
    return _memory[key]


def remember(spec: Spec, signature: Signature, target: Target, measured: Sequence[Measurement]) -> Measurement | None:
    """Keeps the fastest of `measured`, which are in order of time, and returns it."""
    if not measured:
        return None
    key, best = _key(spec, signature, target), measured[0]
    _memory[key] = best
    stored = {"engine": best.engine, "knobs": best.knobs, "seconds": best.seconds, "workspace": best.workspace}
    with contextlib.suppress(OSError):
        path = _path(key)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(stored, file)
        os.replace(file.name, path)
    return best


def _path(key: str) -> Path:
    """The call's file. Raises FileNotFoundError if there is no folder for it."""
    folder = _folder(*map(os.environ.get, ("JAXDNN_CACHE_DIR", "XDG_CACHE_HOME", "HOME")))
    if not folder:
        raise FileNotFoundError("there is no cache folder of this user's own: set JAXDNN_CACHE_DIR")
    return Path(folder) / "autotune" / f"{key}.json"


@functools.cache
def _folder(*environment: str | None) -> str:
    """The folder of compiled kernels, once for each environment: the runtime lists it and tries to write to it. None if
    others could have put something there.
    """
    del environment
    found = _native.cache()
    return found["directory"] if found["trusted"] else ""


def _key(spec: Spec, signature: Signature, target: Target) -> str:
    identity = (version("jaxdnn"), target, spec.replace(options=Options()), signature)
    return hashlib.sha256(repr(identity).encode()).hexdigest()[:32]
