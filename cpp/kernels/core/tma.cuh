// The bulk tensor copy engine (TMA): boxes of a rank-3 tensor map to and from shared memory.
//
// Elements outside the tensor are read as zeros and not written, so tiles need no edge cases.
#pragma once

#include "core/ptx.cuh"

namespace jaxdnn {

/// A CUtensorMap, passed by value as a `__grid_constant__` parameter.
struct alignas(64) TensorMap {
  unsigned long long words[16];
};

namespace ptx {

__device__ __forceinline__ void tensor_map_prefetch(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ __forceinline__ void tensor_load(unsigned destination, const TensorMap* map, unsigned barrier, int x, int y,
                                            int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::
          "r"(destination),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z)
      : "memory");
}

/// Of what no other block reads: the L2 cache gives its lines up first.
__device__ __forceinline__ void tensor_load_once(unsigned destination, const TensorMap* map, unsigned barrier, int x,
                                                 int y, int z) {
  constexpr unsigned long long kEvictFirst = 0x12f0000000000000;  // what createpolicy with L2::evict_first returns
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(destination),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "l"(kEvictFirst)
      : "memory");
}

/// Writes at `destination`, and signals `barrier`, in every block of the cluster that `blocks` has a bit for.
__device__ __forceinline__ void tensor_load_multicast(unsigned destination, const TensorMap* map, unsigned barrier,
                                                      unsigned short blocks, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%4, %5, %6}], [%2], %3;" ::"r"(destination),
      "l"(map), "r"(barrier), "h"(blocks), "r"(x), "r"(y), "r"(z)
      : "memory");
}

__device__ __forceinline__ void tensor_store(const TensorMap* map, unsigned source, int x, int y, int z) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
               "r"(source), "r"(x), "r"(y), "r"(z)
               : "memory");
}

__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

/// Waits until all but this thread's last `kPending` groups of stores have read their shared memory.
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

/// Makes this thread's ordinary writes to shared memory visible to the copy engine and the tensor cores.
__device__ __forceinline__ void async_proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/// Four 8x8 matrices of 16-bit elements; lane i's `address` is row i % 8 of matrix i / 8.
__device__ __forceinline__ void store_matrices(unsigned address, const unsigned (&words)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(words[0]),
               "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

__device__ __forceinline__ void store_shared_2(unsigned address, unsigned word) {
  asm volatile("st.shared.b16 [%0], %1;" ::"r"(address), "h"(static_cast<unsigned short>(word)) : "memory");
}

__device__ __forceinline__ void store_shared_8(unsigned address, unsigned first, unsigned second) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(address), "r"(first), "r"(second) : "memory");
}

}  // namespace ptx
}  // namespace jaxdnn
