// The last step of a result that an epilogue reduces: combines what the warps of product/sm90.cuh wrote
// (core/epilogue_reductions.cuh), always in the same order, and rounds once.
//
//   partials         [outer, parts, kept]; result [outer, kept]
//   grid             ceil(kept / kColumns) x outer (at most 65,535, then they stride)
//   block            kColumns neighbours x kRows parts at a time. A thread takes every kRows-th part, then the threads
//                    of a column are combined through shared memory, in pairs
//
// Bytes: 4 a partial. Memory bounds it.
#pragma once

#include "core/epilogue_reductions.cuh"

namespace jaxdnn {

/// Config has: Reduced (as in the multiply's Results), Result (the element type) and kColumns, 1 or 32.
template <class Config>
struct ProductReduce {
  using Type = typename Config::Reduced::Type;
  static constexpr int kThreads = 1024;
  static constexpr int kColumns = Config::kColumns, kRows = kThreads / kColumns;

  const Type* partials = nullptr;
  typename Config::Result* result = nullptr;
  long long parts = 1, kept = 1;
  int outer = 1;
};

template <class Config>
__device__ __forceinline__ void product_reduce(const ProductReduce<Config>& call) {
  using Call = ProductReduce<Config>;
  using Reduced = typename Config::Reduced;
  using Type = typename Call::Type;
  using T = typename Config::Result;
  __shared__ Type shared[Call::kRows][Call::kColumns];
  const int x = threadIdx.x % Call::kColumns, y = threadIdx.x / Call::kColumns;
  const long long column = static_cast<long long>(blockIdx.x) * Call::kColumns + x;
  for (int outer = blockIdx.y; outer < call.outer; outer += gridDim.y) {
    Type value = Reduced::identity();
    if (column < call.kept) {
      const Type* const from = call.partials + outer * call.parts * call.kept + column;
#pragma unroll 4
      for (long long part = y; part < call.parts; part += Call::kRows) {
        value = Reduced::combine(value, from[part * call.kept]);
      }
    }
    shared[y][x] = value;
#pragma unroll
    for (int half = Call::kRows / 2; half > 0; half /= 2) {
      __syncthreads();
      if (y < half) shared[y][x] = Reduced::combine(shared[y][x], shared[y + half][x]);
    }
    if (y == 0 && column < call.kept) {
      const Held<T> total[1] = {static_cast<Held<T>>(shared[0][x])};
      Vector<T, 1> rounded;
      rounded.pack(total);
      rounded.store(call.result + outer * call.kept + column);
    }
    __syncthreads();
  }
}

}  // namespace jaxdnn
