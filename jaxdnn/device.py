"""The hardware that code is made for. The only file that asks the machine."""

import functools
from dataclasses import dataclass, replace
from math import ceil

from jaxdnn import _native
from jaxdnn.config import Options


@dataclass(frozen=True)
class Target:
    """A device, as engines see it.

    Attributes:
      platform: "cuda" or "cpu".
      arch: "sm_90" for compute capability 9.0; on the CPU the best instruction set ("avx512", "avx2", "baseline").
      name: the device's own name.
      sm_count: streaming multiprocessors; on the CPU the threads.
      shared_memory: bytes of shared memory that one thread block may use.
      l2_bytes: size of the L2 cache.
      bandwidth: bytes per second between the GPU and its memory, 0 where it is not known.
      present: whether the device is in this machine, so that kernels can be loaded and timed.
    """

    platform: str
    arch: str
    name: str
    sm_count: int
    shared_memory: int = 0
    l2_bytes: int = 0
    bandwidth: float = 0.0
    present: bool = True

    @property
    def compute_capability(self) -> int:
        """90 for "sm_90"."""
        return int(self.arch.removeprefix("sm_"))


def resident_clusters(size: int, sm_count: int) -> int:
    """How many clusters of so many blocks run at once, a block on each multiprocessor. One more would wait for the
    others' end, and take as long.
    """
    # Graphics processing clusters have 14 to 18 multiprocessors: 132 hold 66 pairs, but 30 groups of four, 15 of eight.
    return max(1, (sm_count if size <= 2 else sm_count * 10 // 11) // size)


def fewest_clusters(tiles: int, size: int, sm_count: int, columns: int = 1) -> int:
    """The fewest clusters, a multiple of `columns`, that take no more rounds of tiles than all that are resident would:
    others would idle in the last round, and draw power.
    """
    at_once = max(1, resident_clusters(size, sm_count) // columns)
    rows = ceil(tiles / columns)
    return columns * ceil(rows / ceil(rows / at_once))


_KIB, _MIB = 2**10, 2**20

# What to assume of a GPU that is named but not here: the first of its compute capability, the largest part; from the
# CUDA C++ programming guide's table of technical specifications and the vendors' datasheets. Of one that is here the
# bytes per second are those of the name that its own has; of H100 and H200 what a copy reads and writes, measured.
KNOWN = (
    Target("cuda", "sm_80", "A100", 108, 163 * _KIB, 40 * _MIB, 1.9e12, present=False),
    Target("cuda", "sm_86", "A10", 84, 99 * _KIB, 6 * _MIB, 0.6e12, present=False),
    Target("cuda", "sm_89", "L40", 142, 99 * _KIB, 96 * _MIB, 0.86e12, present=False),
    Target("cuda", "sm_90", "H200", 132, 227 * _KIB, 50 * _MIB, 4.28e12, present=False),
    Target("cuda", "sm_90", "H100", 132, 227 * _KIB, 50 * _MIB, 2.96e12, present=False),
    Target("cuda", "sm_100", "B200", 148, 227 * _KIB, 126 * _MIB, 8.0e12, present=False),
    Target("cuda", "sm_103", "B300", 148, 227 * _KIB, 126 * _MIB, 8.0e12, present=False),
    Target("cuda", "sm_120", "RTX PRO 6000", 188, 99 * _KIB, 128 * _MIB, 1.79e12, present=False),
)


@functools.cache
def gpus() -> tuple[Target, ...] | str:
    """The GPUs of this machine, or the reason why there is none."""
    try:
        devices = _native.driver()["devices"]
    except _native.Unavailable as unavailable:
        return str(unavailable)
    if not devices:
        return "the driver reports no GPU"
    return tuple(
        Target(
            platform="cuda",
            arch="sm_{}{}".format(*device["compute_capability"]),
            name=device["name"],
            sm_count=device["sm_count"],
            shared_memory=device["shared_memory_per_block"],
            l2_bytes=device["l2_bytes"],
            bandwidth=next((known.bandwidth for known in KNOWN if known.name in device["name"]), 0.0),
        )
        for device in devices
    )


@functools.cache
def _cpu() -> Target:
    host = _native.host()
    return Target("cpu", host["isa"], "CPU", host["threads"])


def _named(arch: str) -> Target:
    """The GPU of this machine with this compute capability, or else what is assumed of one."""
    found = gpus()
    here = () if isinstance(found, str) else found
    for gpu in (*here, *KNOWN):
        if gpu.arch == arch:
            return gpu
    known = ", ".join(dict.fromkeys(gpu.arch for gpu in (*KNOWN, *here)))
    raise ValueError(f'options: target must be a GPU that jaxdnn knows, one of {known}; got "{arch}"')


def find_target(platform: str, options: Options) -> Target | str:
    """The device to make code for on `platform` under `options`, or the reason why there is none.

    Raises:
      ValueError: the options name a target that is neither known nor here, whatever the platform.
    """
    named = None if options.target is None else _named(options.target)
    if platform == "cpu":
        return _cpu()
    if named is not None:
        target = named
    else:
        found = gpus()
        if isinstance(found, str):
            return f'{found.rstrip(".")}; to compile for a GPU that is not here, name it: options(target="sm_90")'
        target = found[0]
    return target if options.sm_count is None else replace(target, sm_count=min(options.sm_count, target.sm_count))
