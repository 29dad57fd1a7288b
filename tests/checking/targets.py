"""Devices that plans are made for: data, not hardware, so that plans are the same on every machine."""

from jaxdnn import device

_KNOWN = {known.name: known for known in device.KNOWN}
A100, A10, H100, H200 = (_KNOWN[name] for name in ("A100", "A10", "H100", "H200"))
HOST = device.Target("cpu", "avx2", "CPU", 8)
# Those that every case is planned for, by the platform that an engine runs on.
TARGETS = {"cpu": [HOST], "cuda": [A100, H100], "any": [HOST]}
