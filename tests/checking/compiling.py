"""How XLA compiles programs that are small and run once: without optimization, on one thread, and by its older emitters
where it still has them. Tests of transformations take half the time.
"""

from importlib.metadata import version

QUICKLY: dict[str, int | bool] = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_parallel_codegen_split_count": 1,
}
if version("jaxlib").startswith("0.10."):
    QUICKLY["xla_cpu_use_fusion_emitters"] = False
