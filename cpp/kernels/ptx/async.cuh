// Asynchronous copies from global to shared memory, by each thread for itself (cp.async), and into the L2 cache.
#pragma once

namespace jaxdnn::ptx {

/// `bytes` of the source are copied, and the rest of kBytes filled with zeros.
template <int kBytes>
__device__ __forceinline__ void cp_async(unsigned destination, const void* source, unsigned bytes) {
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source), "r"(bytes)
                 : "memory");
  } else {
    static_assert(kBytes == 8 || kBytes == 4, "16, 8 or 4 bytes at once");
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(destination), "l"(source), "n"(kBytes),
                 "r"(bytes)
                 : "memory");
  }
}

__device__ __forceinline__ void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/// Waits until at most `kPending` groups of this thread's copies are unfinished.
template <int kPending>
__device__ __forceinline__ void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

#if __CUDA_ARCH__ >= 900
/// Asks for memory, `bytes` of it, a multiple of 16, to come into the L2 cache.
__device__ __forceinline__ void cp_async_bulk_prefetch_l2(const void* address, unsigned bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address), "r"(bytes) : "memory");
}
#endif

}  // namespace jaxdnn::ptx
