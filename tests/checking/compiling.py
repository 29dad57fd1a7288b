"""How XLA compiles what tests run."""

import os
from collections.abc import Mapping
from importlib.metadata import version

# Where XLA hands sums to YNNPACK, jitted derivatives of a norm of 20001 x 4 in plain JAX are wrong by more than their
# magnitude (jaxlib 0.10 to 0.12).
RIGHT = {"xla_cpu_experimental_ynn_fusion_type": "-reduce"}
# Programs that are small and run once: without optimization, on one thread, and by older emitters where there still are
# some. Tests of transformations take half the time.
QUICKLY: dict[str, int | bool] = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_parallel_codegen_split_count": 1,
}
if version("jaxlib").startswith("0.10."):
    QUICKLY["xla_cpu_use_fusion_emitters"] = False


def add_flags(flags: Mapping[str, object]) -> None:
    """Before JAX starts: gives XLA these flags, unless the environment has them."""
    found = os.environ.get("XLA_FLAGS", "")
    added = [f"--{name}={value}" for name, value in flags.items() if name not in found]
    os.environ["XLA_FLAGS"] = " ".join([found, *added]).strip()
