"""Remembers what was measured for a call, in memory and beside the compiled kernels on disk.

One small JSON file a call, published by an atomic rename, so that threads and processes need no lock. A file that can't
be read, or that was written by another version, counts as absent; a folder that can't be written, or none at all, is no
error.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jaxdnn import _native
from jaxdnn.config import Options
from jaxdnn.device import Target
from jaxdnn.planning.measure import Measurement
from jaxdnn.spec import Signature, Spec

_memory: dict[str, tuple[Measurement, ...]] = {}


def recall(spec: Spec, signature: Signature, target: Target) -> tuple[Measurement, ...]:
    """What was measured for this call on this device, the fastest first; nothing if it never was."""
    key = _key(spec, signature, target)
    if key not in _memory:
        try:
            _memory[key] = tuple(map(_measurement, json.loads(_path(key).read_text())))
        except (OSError, ValueError, KeyError, TypeError):
            return ()
    return _memory[key]


def remember(spec: Spec, signature: Signature, target: Target, measured: Sequence[Measurement]) -> None:
    """Keeps what was measured, which is in order of time."""
    key = _key(spec, signature, target)
    _memory[key] = tuple(measured)
    with contextlib.suppress(OSError):
        path = _path(key)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump([dataclasses.asdict(one) for one in measured], file)
        os.replace(file.name, path)


def _measurement(stored: dict[str, Any]) -> Measurement:
    knobs = tuple((str(name), value) for name, value in stored["knobs"])
    seconds, workspace, rank = float(stored["seconds"]), int(stored["workspace"]), int(stored["rank"])
    return Measurement(str(stored["engine"]), knobs, seconds, workspace, rank)


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
