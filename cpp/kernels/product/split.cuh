// The second step of a product that was split along K: adds the splits' sums, always in the same order, and applies the
// epilogue.
//
//   grid             blocks of 256 columns x rows (at most 65,535, then they stride) x matrices
//   thread           one element of the result
//
// Bytes: 4 a sum and split, mostly from L2, and the operands and results. Memory bounds it.
#pragma once

#include "core/epilogue_element.cuh"
#include "core/epilogue_reductions.cuh"

namespace jaxdnn {

template <class Config>
struct ProductSplit {
  static constexpr int kThreads = 256;

  const typename Config::Sum* sums[Config::kSums] = {};  // [batch, split, m, n]
  OperandAddress operands[Config::Operands::kArray];
  ResultAddress results[Config::Results::kCount];
  int m = 0, n = 0, splits = 1;
};

template <class Config>
__device__ __forceinline__ void product_split(const ProductSplit<Config>& call) {
  const int column = blockIdx.x * ProductSplit<Config>::kThreads + threadIdx.x;
  if (column >= call.n) return;
  const int batch = blockIdx.z;
  const long long matrix = static_cast<long long>(call.m) * call.n;
  for (int row = blockIdx.y; row < call.m; row += gridDim.y) {
    const long long element = static_cast<long long>(row) * call.n + column;
    typename Config::Sum sum[Config::kSums];
#pragma unroll
    for (int s = 0; s < Config::kSums; ++s) {
      const typename Config::Sum* from = call.sums[s] + batch * call.splits * matrix + element;
      sum[s] = from[0];
#pragma unroll 4
      for (int split = 1; split < call.splits; ++split) sum[s] = combine<Reduction::sum>(sum[s], from[split * matrix]);
    }
    apply_epilogue<Config>(call.operands, call.results, {row, column, batch}, sum);
  }
}

}  // namespace jaxdnn
