// The Tensor Memory Accelerator (TMA): boxes of a tensor map of rank 3 to 5 to and from shared memory, and columns of
// places of an image's map.
//
// Elements outside the tensor are read as zeros and not written, so tiles need no edge cases. Innermost coordinates are
// multiples of 16 bytes. Boxes lie at multiples of 128 bytes, and are swizzled by the bits of the addresses.
#pragma once

namespace jaxdnn {

/// A CUtensorMap, passed by value as a `__grid_constant__` parameter.
struct alignas(64) TensorMap {
  unsigned long long words[16];
};

namespace ptx {

/// What createpolicy with L2::evict_first returns: of lines that the L2 cache gives up first.
constexpr unsigned long long kEvictFirstPolicy = 0x12f0000000000000;

__device__ __forceinline__ void prefetch_tensormap(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ __forceinline__ void cp_async_bulk_tensor_load(unsigned destination, const TensorMap* map, unsigned barrier,
                                                          int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::
          "r"(destination),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z)
      : "memory");
}

__device__ __forceinline__ void cp_async_bulk_tensor_load(unsigned destination, const TensorMap* map, unsigned barrier,
                                                          int x, int y, int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(destination),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}

__device__ __forceinline__ void cp_async_bulk_tensor_load(unsigned destination, const TensorMap* map, unsigned barrier,
                                                          int x, int y, int z, int w, int v) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], "
      "[%2];" ::"r"(destination),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w), "r"(v)
      : "memory");
}

/// Im2col, of an image of `kSpatial` dimensions. The map says how many places are loaded, from (x, y, ...) on, and
/// which comes after which; each is read `offset` further: at one tap of its window. Coordinates begin with the
/// innermost.
template <int kSpatial>
__device__ __forceinline__ void cp_async_bulk_tensor_load_im2col(unsigned destination, const TensorMap* map,
                                                                 unsigned barrier, int channel,
                                                                 const int (&place)[kSpatial], int image,
                                                                 const unsigned short (&offset)[kSpatial]) {
  if constexpr (kSpatial == 1) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %5}], [%2], {%6};" ::"r"(destination),
        "l"(map), "r"(barrier), "r"(channel), "r"(place[0]), "r"(image), "h"(offset[0])
        : "memory");
  } else if constexpr (kSpatial == 2) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %5, %6}], [%2], {%7, %8};" ::"r"(destination),
        "l"(map), "r"(barrier), "r"(channel), "r"(place[0]), "r"(place[1]), "r"(image), "h"(offset[0]), "h"(offset[1])
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %5, %6, %7}], [%2], {%8, %9, %10};" ::"r"(destination),
        "l"(map), "r"(barrier), "r"(channel), "r"(place[0]), "r"(place[1]), "r"(place[2]), "r"(image), "h"(offset[0]),
        "h"(offset[1]), "h"(offset[2])
        : "memory");
  }
}

template <int kSpatial>
__device__ __forceinline__ void cp_async_bulk_tensor_load_im2col_multicast(unsigned destination, const TensorMap* map,
                                                                           unsigned barrier, unsigned short blocks,
                                                                           int channel, const int (&place)[kSpatial],
                                                                           int image,
                                                                           const unsigned short (&offset)[kSpatial]) {
  if constexpr (kSpatial == 1) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%4, %5, %6}], [%2], {%7}, %3;" ::"r"(destination),
        "l"(map), "r"(barrier), "h"(blocks), "r"(channel), "r"(place[0]), "r"(image), "h"(offset[0])
        : "memory");
  } else if constexpr (kSpatial == 2) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%4, %5, %6, %7}], [%2], {%8, %9}, %3;" ::"r"(destination),
        "l"(map), "r"(barrier), "h"(blocks), "r"(channel), "r"(place[0]), "r"(place[1]), "r"(image), "h"(offset[0]),
        "h"(offset[1])
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%4, %5, %6, %7, %8}], [%2], {%9, %10, %11}, %3;" ::"r"(destination),
        "l"(map), "r"(barrier), "h"(blocks), "r"(channel), "r"(place[0]), "r"(place[1]), "r"(place[2]), "r"(image),
        "h"(offset[0]), "h"(offset[1]), "h"(offset[2])
        : "memory");
  }
}

/// Of what no other block reads.
__device__ __forceinline__ void cp_async_bulk_tensor_load_evict_first(unsigned destination, const TensorMap* map,
                                                                      unsigned barrier, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(destination),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "l"(kEvictFirstPolicy)
      : "memory");
}

/// Writes at `destination`, and signals `barrier`, in every block of the cluster that `blocks` has a bit for.
__device__ __forceinline__ void cp_async_bulk_tensor_load_multicast(unsigned destination, const TensorMap* map,
                                                                    unsigned barrier, unsigned short blocks, int x,
                                                                    int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%4, %5, %6}], [%2], %3;" ::"r"(destination),
      "l"(map), "r"(barrier), "h"(blocks), "r"(x), "r"(y), "r"(z)
      : "memory");
}

__device__ __forceinline__ void cp_async_bulk_tensor_load_multicast(unsigned destination, const TensorMap* map,
                                                                    unsigned barrier, unsigned short blocks, int x,
                                                                    int y, int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%4, %5, %6, %7}], [%2], %3;" ::"r"(destination),
      "l"(map), "r"(barrier), "h"(blocks), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}

template <bool kEvictFirst>
__device__ __forceinline__ void cp_async_bulk_tensor_store(const TensorMap* map, unsigned source, int x, int y, int z) {
  if constexpr (kEvictFirst) {
    asm volatile(
        "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group.L2::cache_hint [%0, {%2, %3, %4}], [%1], %5;" ::"l"(map),
        "r"(source), "r"(x), "r"(y), "r"(z), "l"(kEvictFirstPolicy)
        : "memory");
  } else {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
                 "r"(source), "r"(x), "r"(y), "r"(z)
                 : "memory");
  }
}

template <bool kEvictFirst>
__device__ __forceinline__ void cp_async_bulk_tensor_store(const TensorMap* map, unsigned source, int x, int y, int z,
                                                           int w, int v) {
  if constexpr (kEvictFirst) {
    asm volatile(
        "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group.L2::cache_hint"
        " [%0, {%2, %3, %4, %5, %6}], [%1], %7;" ::"l"(map),
        "r"(source), "r"(x), "r"(y), "r"(z), "r"(w), "r"(v), "l"(kEvictFirstPolicy)
        : "memory");
  } else {
    asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(map),
                 "r"(source), "r"(x), "r"(y), "r"(z), "r"(w), "r"(v)
                 : "memory");
  }
}

/// `bytes` that lie together, a multiple of 16, as their addresses are; to shared memory, or the other way.
__device__ __forceinline__ void cp_async_bulk_load(unsigned destination, const void* source, unsigned bytes,
                                                   unsigned barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(destination),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void cp_async_bulk_store(void* destination, unsigned source, unsigned bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(destination), "r"(source), "r"(bytes)
               : "memory");
}

/// Adds float32 numbers to those at `destination`.
__device__ __forceinline__ void cp_reduce_async_bulk_add(float* destination, unsigned source, unsigned bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(destination),
               "r"(source), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void cp_async_bulk_commit_group() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/// Waits until all but this thread's last `kPending` groups of stores have read their shared memory.
template <int kPending>
__device__ __forceinline__ void cp_async_bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

/// The same, and written what they store.
template <int kPending>
__device__ __forceinline__ void cp_async_bulk_wait_group() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

/// Makes this thread's ordinary writes to shared memory visible to TMA and the tensor cores.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/// Orders this thread's ordinary accesses of global memory and what TMA does to it.
__device__ __forceinline__ void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

}  // namespace ptx
}  // namespace jaxdnn
