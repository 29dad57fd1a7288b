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

/// The value of the lane of this number.
__device__ __forceinline__ int shfl_sync_idx(int value, int lane) {
  int result;
  asm volatile("shfl.sync.idx.b32 %0, %1, %2, 0x1f, 0xffffffff;" : "=r"(result) : "r"(value), "r"(lane));
  return result;
}

__device__ __forceinline__ float shfl_sync_idx(float value, int lane) {
  float result;
  asm volatile("shfl.sync.idx.b32 %0, %1, %2, 0x1f, 0xffffffff;" : "=f"(result) : "f"(value), "r"(lane));
  return result;
}

/// In which lanes the predicate holds, a bit each.
__device__ __forceinline__ unsigned vote_sync_ballot(bool predicate) {
  unsigned lanes;
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %1, 0; vote.sync.ballot.b32 %0, p, 0xffffffff; }"
               : "=r"(lanes)
               : "r"(static_cast<unsigned>(predicate)));
  return lanes;
}

/// The value of the lane whose number differs in the bits of `mask`.
__device__ __forceinline__ float shfl_sync_bfly(float value, int mask) {
  float result;
  asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 0x1f, 0xffffffff;" : "=f"(result) : "f"(value), "r"(mask));
  return result;
}

__device__ __forceinline__ unsigned shfl_sync_bfly(unsigned value, int mask) {
  unsigned result;
  asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 0x1f, 0xffffffff;" : "=r"(result) : "r"(value), "r"(mask));
  return result;
}

__device__ __forceinline__ double shfl_sync_bfly(double value, int mask) {
  unsigned low, high;
  mov_b64(low, high, value);
  asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 0x1f, 0xffffffff;" : "=r"(low) : "r"(low), "r"(mask));
  asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 0x1f, 0xffffffff;" : "=r"(high) : "r"(high), "r"(mask));
  return mov_f64(low, high);
}

/// Whether any lane says so.
__device__ __forceinline__ bool vote_sync_any(bool value) {
  int result;
  asm volatile(
      "{\n.reg .pred p, q;\nsetp.ne.s32 p, %1, 0;\nvote.sync.any.pred q, p, 0xffffffff;\nselp.s32 %0, 1, 0, q;\n}\n"
      : "=r"(result)
      : "r"(static_cast<int>(value)));
  return result;
}

}  // namespace jaxdnn::ptx
