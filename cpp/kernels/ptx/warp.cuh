// What the lanes of a warp do together.
#pragma once

#include "ptx/convert.cuh"

namespace jaxdnn::ptx {

__device__ __forceinline__ void bar_warp_sync() { asm volatile("bar.warp.sync 0xffffffff;" ::: "memory"); }

/// The value of lane 0, in a form that lets the compiler know that it is the same in all lanes.
__device__ __forceinline__ int shfl_sync_idx(int value) {
  int result;
  asm volatile("shfl.sync.idx.b32 %0, %1, 0, 0x1f, 0xffffffff;" : "=r"(result) : "r"(value));
  return result;
}

/// The value of the lane whose number differs in the bits of `mask`.
__device__ __forceinline__ float shfl_sync_bfly(float value, int mask) {
  float result;
  asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 0x1f, 0xffffffff;" : "=f"(result) : "f"(value), "r"(mask));
  return result;
}

__device__ __forceinline__ double shfl_sync_bfly(double value, int mask) {
  unsigned low, high;
  mov_b64(low, high, value);
  asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 0x1f, 0xffffffff;" : "=r"(low) : "r"(low), "r"(mask));
  asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 0x1f, 0xffffffff;" : "=r"(high) : "r"(high), "r"(mask));
  return mov_f64(low, high);
}

}  // namespace jaxdnn::ptx
