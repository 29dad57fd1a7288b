// Clusters of blocks, and the shared memory of their other blocks.
#pragma once

namespace jaxdnn::ptx {

__device__ __forceinline__ unsigned cluster_ctarank() {
  unsigned rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ void barrier_cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}

__device__ __forceinline__ void barrier_cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

/// The address, in the cluster's window, of `address` in the shared memory of block `rank`.
__device__ __forceinline__ unsigned mapa(unsigned address, unsigned rank) {
  unsigned mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}

#if __CUDA_ARCH__ >= 900
/// Stores a number at `address`, in the cluster's window, and counts its bytes at the mbarrier of the same block.
__device__ __forceinline__ void st_async(unsigned address, unsigned value, unsigned barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(address), "r"(value),
               "r"(barrier)
               : "memory");
}

__device__ __forceinline__ void st_async(unsigned address, float value, unsigned barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(address), "f"(value),
               "r"(barrier)
               : "memory");
}

__device__ __forceinline__ void st_async(unsigned address, double value, unsigned barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f64 [%0], %1, [%2];" ::"r"(address), "d"(value),
               "r"(barrier)
               : "memory");
}
#endif

__device__ __forceinline__ void ld_shared_cluster(float& value, unsigned address) {
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
}

__device__ __forceinline__ void ld_shared_cluster(int& value, unsigned address) {
  asm volatile("ld.shared::cluster.s32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
}

}  // namespace jaxdnn::ptx
