// Barriers: a block's numbered ones (barrier), and those in shared memory (mbarrier), whose phase flips on each
// completion; a waiter names the parity of the phase that it waits for.
#pragma once

namespace jaxdnn::ptx {

/// Waits until `threads` threads, whole warps, have come to barrier `index` (0 to 15).
__device__ __forceinline__ void barrier_sync(int index, int threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(index), "r"(threads) : "memory");
}

/// Counts this warp as come to barrier `index` (0 to 15) of `threads` threads without waiting there.
__device__ __forceinline__ void barrier_arrive(int index, int threads) {
  asm volatile("barrier.arrive %0, %1;" ::"r"(index), "r"(threads) : "memory");
}

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void mbarrier_init(unsigned barrier, unsigned arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

/// Makes initialised barriers visible to the other blocks of the cluster and to TMA.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/// Arrives, and announces `bytes` that TMA will write before the phase can complete.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(unsigned barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

/// The same at a barrier in the cluster's window.
__device__ __forceinline__ void mbarrier_arrive_expect_tx_cluster(unsigned barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

/// Takes `bytes` that were announced, and that nobody will write, for written.
__device__ __forceinline__ void mbarrier_complete_tx(unsigned barrier, unsigned bytes) {
  asm volatile("mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/// Arrives at the barrier that lies at `barrier` in the shared memory of block `rank` of the cluster. It orders nothing
/// but what its warp has already waited for: releasing at the cluster's scope would wait for all memory traffic, which
/// costs a third of a product's speed (benchmarks/results/product_kernels.md).
__device__ __forceinline__ void mbarrier_arrive_cluster(unsigned barrier, unsigned rank) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
      "}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

/// Whether the phase of parity `parity` has completed; may sleep for a while before it answers no.
__device__ __forceinline__ bool mbarrier_try_wait_parity(unsigned barrier, unsigned parity) {
  unsigned completed;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.b32 %0, 1, 0, done;\n"
      "}"
      : "=r"(completed)
      : "r"(barrier), "r"(parity)
      : "memory");
  return completed != 0;
}
#endif

}  // namespace jaxdnn::ptx
