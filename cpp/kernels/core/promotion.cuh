// Sums of 8-bit floats, which the tensor cores add with 14 bits: after some stages each they are added in float32, in
// as many registers again.
#pragma once

#include "ptx/wgmma.cuh"

namespace jaxdnn {

/// The accumulators of a tile in float32, to which those of the tensor cores are added every `kEvery` stages (0:
/// never).
template <int kEvery, int kConsumers, class Accumulator, int kRegisters>
struct Promotion {
  Accumulator promoted[kRegisters] = {};
  int starts = 0;  // the first block of K in the tensor cores' accumulators
  int next;        // the first block after

  /// Each consumer promotes at another time.
  __device__ __forceinline__ explicit Promotion(int consumer) : next(kEvery - consumer * kEvery / kConsumers) {}

  /// Whether the accumulators of the blocks before `block` are to be promoted now; after the last block, `finish` does
  /// it.
  __device__ __forceinline__ bool due(int block, int depth_blocks) const {
    return kEvery > 0 && block == next && next < depth_blocks;
  }

  __device__ __forceinline__ void promote(Accumulator (&accumulators)[kRegisters]) {
    add(promoted, accumulators);
    starts = next;
    next += kEvery;
  }

  /// Leaves the whole accumulators in `accumulators`.
  __device__ __forceinline__ void finish(Accumulator (&accumulators)[kRegisters]) {
    if constexpr (kEvery > 0) add(accumulators, promoted);
  }

 private:
  static __device__ __forceinline__ void add(Accumulator (&to)[kRegisters], Accumulator (&from)[kRegisters]) {
    ptx::warpgroup_fence_operand(from);
#pragma unroll
    for (int i = 0; i < kRegisters; ++i) to[i] += from[i];
  }
};

}  // namespace jaxdnn
