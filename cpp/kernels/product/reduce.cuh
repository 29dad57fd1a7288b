// result[outer, kept] = the sum, maximum or minimum of values[outer, length, kept] over its middle axis, always in the
// same order, rounded once. What an epilogue reduces ends here: product/sm90.cuh leaves its warps' partial reductions
// (core/epilogue_reductions.cuh) in scratch memory and pointwise/pointwise.cuh its blocks'; kernels whose epilogue
// works on one element at a time leave all values, from which this takes one axis at a time.
//
//   grid             outer x tiles of what is kept
//   block            (neighbours, lanes): a lane takes every lanes-th value, then lanes are combined in pairs
//   barriers         one for each halving of the lanes
//   shared memory    one value a thread
//
// Bytes: each value once, much of it from L2. Flops: one a value. Memory bounds it, or, where there are few blocks, the
// latency of one.
#pragma once

#include "core/reduction.cuh"

namespace jaxdnn {

/// `Of` is a `ReductionOf`; `ResultOf` the type of the result's elements.
template <class Of, class ResultOf>
struct ProductReduce {
  using Value = typename Of::Type;
  using Result = ResultOf;
  static constexpr int kMostThreads = 1024;

  const Value* values = nullptr;
  Result* result = nullptr;
  long long length = 1, kept = 1;
  unsigned tiles = 1;  // of what is kept
};

template <class Of, class Result>
__device__ __forceinline__ void product_reduce(const ProductReduce<Of, Result>& call) {
  using Value = typename Of::Type;
  __shared__ Value shared[ProductReduce<Of, Result>::kMostThreads];
  const int width = blockDim.x, lane = threadIdx.y;
  const unsigned outer = blockIdx.x / call.tiles;
  const long long column = static_cast<long long>(blockIdx.x % call.tiles) * width + threadIdx.x;
  Value value = Of::identity();
  if (column < call.kept) {
    const Value* const from = call.values + outer * call.length * call.kept + column;
#pragma unroll 4
    for (long long i = lane; i < call.length; i += blockDim.y) value = Of::combine(value, from[i * call.kept]);
  }
  Value* const own = shared + lane * width + threadIdx.x;
  *own = value;
  for (int half = blockDim.y / 2; half > 0; half /= 2) {
    __syncthreads();
    if (lane < half) *own = Of::combine(*own, own[half * width]);
  }
  if (lane == 0 && column < call.kept) call.result[outer * call.kept + column] = narrow<Result>(*own);
}

}  // namespace jaxdnn
