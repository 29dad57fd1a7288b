// result[outer, kept] = the sum, maximum or minimum of values[outer, length, kept] over its middle axis, always in the
// same order, rounded once. What an epilogue reduces ends here: product/sm90.cuh leaves its warps' partial reductions
// (core/epilogue_reductions.cuh) in scratch memory and pointwise/pointwise.cuh its blocks'; kernels whose epilogue
// works on one element at a time leave all values, from which this takes one axis at a time.
//
//   grid             outer x parts of the axis x tiles of what is kept. A long axis of few columns, as that of a
//                    convolution's places, is cut into parts, so that more blocks read it: the first launch leaves the
//                    result of each in the place of its first value, and a second one reduces those
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
  unsigned tiles = 1;       // of what is kept
  unsigned parts = 1;       // of the axis
  long long part = 0;       // values of each, if there are several; the results of those lie as far apart
  long long neighbour = 1;  // values of the axis from one that is read to the next
};

template <class Of, class Result>
__device__ __forceinline__ void product_reduce(const ProductReduce<Of, Result>& call) {
  using Value = typename Of::Type;
  __shared__ Value shared[ProductReduce<Of, Result>::kMostThreads];
  const int width = blockDim.x, lane = threadIdx.y;
  const unsigned row = blockIdx.x / call.tiles, outer = row / call.parts;
  const long long column = static_cast<long long>(blockIdx.x % call.tiles) * width + threadIdx.x;
  const long long first = row % call.parts * call.part;
  const long long end = call.parts > 1 && first + call.part < call.length ? first + call.part : call.length;
  Value value = Of::identity();
  if (column < call.kept) {
    const Value* const from = call.values + outer * call.length * call.kept + column;
#pragma unroll 4
    for (long long i = first + lane * call.neighbour; i < end; i += blockDim.y * call.neighbour) {
      value = Of::combine(value, from[i * call.kept]);
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
    call.result[place * call.kept + column] = narrow<Result>(*own);
  }
}

}  // namespace jaxdnn
