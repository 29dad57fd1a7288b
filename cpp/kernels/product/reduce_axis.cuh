// result[outer, kept] = the sum, maximum or minimum of values[outer, length, kept] over its middle axis, always in the
// same order. Kernels whose epilogue works one element at a time leave what is reduced whole in scratch memory; this
// takes it from there, one axis at a time.
//
//   grid             outer x ceil(kept / kColumns) blocks
//   block            256 threads: kColumns neighbours x 256 / kColumns values at a time, then pairs of threads through
//                    shared memory
//
// Bytes: each value once, much of it from L2. Memory bounds it.
#pragma once

#include "core/epilogue_element.cuh"

namespace jaxdnn {

template <class T>
struct SumOf {
  using Type = T;
  static __device__ __forceinline__ T identity() { return 0; }
  /// Integers wrap.
  static __device__ __forceinline__ T combine(T a, T b) {
    if constexpr (is_floating<T>) {
      return a + b;
    } else {
      return math::add(a, b);
    }
  }
};

/// NaNs pass through.
template <class T>
struct MaximumOf {
  using Type = T;
  static __device__ __forceinline__ T identity() {
    if constexpr (is_floating<T>) {
      return -math::infinity<T>();
    } else {
      return math::kLowest<T>;
    }
  }
  static __device__ __forceinline__ T combine(T a, T b) { return math::maximum(a, b); }
};

template <class T>
struct MinimumOf {
  using Type = T;
  static __device__ __forceinline__ T identity() {
    if constexpr (is_floating<T>) {
      return math::infinity<T>();
    } else {
      return math::kHighest<T>;
    }
  }
  static __device__ __forceinline__ T combine(T a, T b) { return math::minimum(a, b); }
};

/// `ResultOf`: the type of the result's elements; kColumnsOf: 1 where `kept` is 1.
template <class ReductionOf, class ResultOf, int kColumnsOf>
struct ProductReduceAxis {
  using Reduction = ReductionOf;
  using Value = typename Reduction::Type;
  using Result = ResultOf;
  static constexpr int kThreads = 256, kColumns = kColumnsOf, kRows = kThreads / kColumns;

  const Value* values = nullptr;
  Result* result = nullptr;
  long long length = 1, kept = 1;
};

template <class Reduction, class Result, int kColumns>
__device__ __forceinline__ void product_reduce_axis(const ProductReduceAxis<Reduction, Result, kColumns>& call) {
  using Call = ProductReduceAxis<Reduction, Result, kColumns>;
  using Value = typename Call::Value;
  __shared__ Value shared[Call::kRows][kColumns];
  const int x = threadIdx.x % kColumns, y = threadIdx.x / kColumns;
  const long long groups = (call.kept + kColumns - 1) / kColumns, outer = blockIdx.x / groups;
  const long long column = (blockIdx.x - outer * groups) * kColumns + x;
  Value value = Reduction::identity();
  if (column < call.kept) {
    const Value* const from = call.values + outer * call.length * call.kept + column;
#pragma unroll 4
    for (long long i = y; i < call.length; i += Call::kRows) value = Reduction::combine(value, from[i * call.kept]);
  }
  shared[y][x] = value;
#pragma unroll
  for (int half = Call::kRows / 2; half > 0; half /= 2) {
    __syncthreads();
    if (y < half) shared[y][x] = Reduction::combine(shared[y][x], shared[y + half][x]);
  }
  if (y == 0 && column < call.kept) call.result[outer * call.kept + column] = narrow<Result>(shared[0][x]);
}

}  // namespace jaxdnn
