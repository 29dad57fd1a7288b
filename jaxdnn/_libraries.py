"""Where NVRTC may lie. The native module asks while it is imported; nothing is opened before the first compile."""

import os
from importlib.util import find_spec


def candidates() -> list[str]:
    """Folders that may hold libnvrtc, best first; the loader's own path comes after them."""
    try:
        nvidia = find_spec("nvidia")
    except ValueError:  # a module of that name without a specification is loaded: not NVIDIA's
        nvidia = None
    packages = nvidia.submodule_search_locations if nvidia is not None else None
    folders = [
        os.path.join(package, *part)
        for part in (("cu13", "lib"), ("cuda_nvrtc", "lib"))  # the wheels of CUDA 13 and of CUDA 12
        for package in packages or ()
    ]
    toolkits = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    folders += [os.path.join(toolkit, "lib64") for toolkit in toolkits]
    return [folder for folder in folders if os.path.isdir(folder)]
