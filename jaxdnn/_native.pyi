"""The nanobind module: XLA FFI handlers, the run-time compiler and its cache, and the hardware's description."""

from typing import Any

class Unavailable(RuntimeError):
    """Something outside the package is missing or too old (libcuda, NVRTC, a GPU); the message names the remedy."""

class CompileError(RuntimeError):
    """NVRTC rejected a translation unit; the message holds the unit's name and the whole log."""

class CompiledUnit:
    """A translation unit's machine code and where it came from."""

    @property
    def cubin(self) -> bytes: ...
    @property
    def origin(self) -> str:
        """ "memory", "disk", "library" (built into the wheel) or "compiler"."""
    @property
    def seconds(self) -> float: ...
    @property
    def log(self) -> str:
        """What the compiler and ptxas said, with registers and spills of each kernel; empty unless just compiled."""
    @property
    def key(self) -> str:
        """The cache key, which is also the entry's file name."""

def registrations() -> dict[str, dict[str, Any]]:
    """FFI handlers by platform ("cpu", "CUDA"): {"type": registration of the state's type, "handlers": stages}."""

def compile(unit: str, arch: str) -> CompiledUnit:
    """Compiles `unit` for `arch` ("sm_80", "sm_90a"), through the cache. Raises Unavailable or CompileError."""

def load(unit: str, arch: str) -> None:
    """Compiles and loads `unit` into the driver, as `instantiate` does. Raises Unavailable when it can't be loaded."""

def compiler() -> dict[str, Any]:
    """{"path", "builtins", "version": (major, minor), "architectures": [80, 90, ...]}. Raises Unavailable."""

def driver() -> dict[str, Any]:
    """{"path", "version": (major, minor), "devices": [{"name", "compute_capability": (9, 0), "sm_count",
    "shared_memory_per_block", "l2_bytes", "memory_bytes"}, ...]}. Raises Unavailable."""

def host() -> dict[str, Any]:
    """{"isa": the best instruction set that this processor and this build share, "isas": [...], "extensions": what
    kernels of "avx512" use beyond it, "threads": int}."""

def cache() -> dict[str, Any]:
    """{"directory", "entries", "bytes", "limit", "trusted": nobody else could have put something there, "writable"}."""

def clear_memory_cache() -> None:
    """Forgets compiled units held in memory, so that the next compile goes to the disk (for tests and timing)."""

def kernel_headers() -> dict[str, str]:
    """Every CUDA header built into the module, by the name that a unit includes it under."""

def host_kernels() -> list[str]:
    """Names of the host kernels."""

def counters() -> dict[str, int]:
    """Since the process began: "executes", "instantiates", "compiles", "memory_hits", "disk_hits",
    "execute_nanoseconds" (host time spent in CUDA `execute`) and "scratch_allocations" (on the host)."""

def set_log(level: int, path: str) -> None:
    """0 warnings, once each; 1 info (each compile), 2 debug (each instantiate and execute); "" is stderr."""

def set_library_paths(paths: list[str]) -> None:
    """Replaces the folders that NVRTC is looked for in before the loader's path; at first `_libraries.candidates()`."""
