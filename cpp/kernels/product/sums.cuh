// The second step of a product that was split along K: adds the splits' sums, always in the same order, and applies the
// epilogue, whose operands and results may be of any dtype.
//
//   grid             blocks of 256 elements of the result
//   thread           one element: neighbours in neighbouring columns
//
// Bytes: 4 (float64: 8) a sum and split, mostly from L2, and the operands and results. Memory bounds it.
#pragma once

#include "core/epilogue_element.cuh"

namespace jaxdnn {

template <class Config>
struct ProductSums {
  using Sum = typename Config::Sum;
  static constexpr int kThreads = 256;

  const Sum* sums[Config::kSums] = {};  // [batch, split, m, n]
  OperandAddress operands[Config::Operands::kArray];
  ResultAddress results[Config::Results::kCount];
  long long elements = 0;  // of all results' matrices
  int m = 0, n = 0, splits = 1;
};

__device__ __forceinline__ float add_sums(float a, float b) { return a + b; }
__device__ __forceinline__ double add_sums(double a, double b) { return a + b; }
__device__ __forceinline__ int add_sums(int a, int b) { return math::add(a, b); }

template <class Config>
__device__ __forceinline__ void product_sums(const ProductSums<Config>& call) {
  using Sum = typename Config::Sum;
  const long long element = static_cast<long long>(blockIdx.x) * ProductSums<Config>::kThreads + threadIdx.x;
  if (element >= call.elements) return;
  const long long line = element / call.n;
  const int batch = static_cast<int>(line / call.m),
            row = static_cast<int>(line - static_cast<long long>(batch) * call.m);
  const int column = static_cast<int>(element - line * call.n);
  const long long matrix = static_cast<long long>(call.m) * call.n;
  Sum sums[Config::kSums];
#pragma unroll
  for (int s = 0; s < Config::kSums; ++s) {
    const Sum* from = call.sums[s] + batch * call.splits * matrix + static_cast<long long>(row) * call.n + column;
    sums[s] = from[0];
#pragma unroll 4
    for (int split = 1; split < call.splits; ++split) sums[s] = add_sums(sums[s], from[split * matrix]);
  }
  apply_epilogue<Config>(call.operands, call.results, {row, column, batch}, sums);
}

}  // namespace jaxdnn
