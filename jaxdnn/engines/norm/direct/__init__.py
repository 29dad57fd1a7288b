"""CUDA kernels that read every row once."""
