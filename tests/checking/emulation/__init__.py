"""The text of CUDA kernels as C++ for the CPU, where each of a block's threads is a coroutine."""
