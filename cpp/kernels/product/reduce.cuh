// result[outer, kept] = the sum, maximum or minimum of values[outer, length, kept] over its middle axis, always in the
// same order, rounded once. What an epilogue reduces ends here: product/sm90.cuh leaves its warps' partial reductions
// (core/epilogue_reductions.cuh) in scratch memory and pointwise/pointwise.cuh its blocks'; kernels whose epilogue
// works on one element at a time leave all values, from which this takes one axis at a time.
//
//   grid             outer x parts of the axis x tiles of what is kept; and results that are reduced alike. A long axis
//                    of few columns is cut into parts, so that more blocks read it: the first launch leaves the result
//                    of each in the place of its first value, and a second one reduces those
//   block            (neighbours, lanes): a lane takes every lanes-th value, several at once; then lanes are combined
//                    in pairs
//   barriers         one for each halving of the lanes
//   shared memory    one value a thread
//
// Bytes: each value once, much of it from L2. Flops: one a value. Memory bounds it, or, where there are few blocks, the
// latency of one.
#pragma once

#include "core/reduction.cuh"

namespace jaxdnn {

/// `Of` is a `ReductionOf`; `ResultOf` the type of a result's elements, of which there are `kCountOf`.
template <class Of, class ResultOf, int kCountOf = 1>
struct ProductReduce {
  using Value = typename Of::Type;
  using Result = ResultOf;
  static constexpr int kMostThreads = 1024, kCount = kCountOf;

  const Value* values[kCount] = {};
  Result* results[kCount] = {};
  long long length = 1, kept = 1;
  unsigned tiles = 1;       // of what is kept
  unsigned parts = 1;       // of the axis
  long long part = 0;       // values of each, if there are several; the results of those lie as far apart
  long long neighbour = 1;  // values of the axis from one that is read to the next
};

template <class Of, class Result, int kCount>
__device__ __forceinline__ void product_reduce(const ProductReduce<Of, Result, kCount>& call) {
  using Value = typename Of::Type;
  constexpr int kAtOnce = 8;  // values of a lane that are on their way; the last ones may be none
  __shared__ Value shared[ProductReduce<Of, Result, kCount>::kMostThreads];
  const Value* values = call.values[0];
  Result* result = call.results[0];
#pragma unroll
  for (int i = 1; i < kCount; ++i) {
    const Value* const its_values = call.values[i];
    Result* const its_result = call.results[i];
    values = blockIdx.y == i ? its_values : values;
    result = blockIdx.y == i ? its_result : result;
  }
  const int width = blockDim.x, lane = threadIdx.y;
  const unsigned row = blockIdx.x / call.tiles, outer = row / call.parts;
  const long long column = static_cast<long long>(blockIdx.x % call.tiles) * width + threadIdx.x;
  const long long first = row % call.parts * call.part;
  const long long end = call.parts > 1 && first + call.part < call.length ? first + call.part : call.length;
  Value value = Of::identity();
  if (column < call.kept) {
    const Value* const from = values + outer * call.length * call.kept + column;
    const Value* const stop = from + end * call.kept;
    const long long step = blockDim.y * call.neighbour * call.kept;
    for (const Value* next = from + (first + lane * call.neighbour) * call.kept; next < stop;) {
      Value several[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        several[i] = next < stop ? *next : Of::identity();
        next += step;
      }
#pragma unroll
      for (int half = kAtOnce / 2; half > 0; half /= 2) {
#pragma unroll
        for (int i = 0; i < half; ++i) several[i] = Of::combine(several[i], several[i + half]);
      }
      value = Of::combine(value, several[0]);
    }
  }
  Value* const own = shared + lane * width + threadIdx.x;
  *own = value;
  for (int half = blockDim.y / 2; half > 0; half /= 2) {
    __syncthreads();
    if (lane < half) *own = Of::combine(*own, own[half * width]);
  }
  if (lane == 0 && column < call.kept) {
    const long long place = call.parts > 1 ? outer * call.length + first : outer;
    result[place * call.kept + column] = narrow<Result>(*own);
  }
}

}  // namespace jaxdnn
