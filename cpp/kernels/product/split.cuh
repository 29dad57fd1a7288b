// The second step of a product that was split along K: adds the splits' accumulators, always in the same order, and
// applies the epilogue, whose operands and results may be of any dtype and anywhere in memory.
//
//   grid             tiles of columns x tiles of rows x matrices; blocks stride over what is left of the last two
//   block            256 threads, as many of them along the columns as there are columns, up to all
//   thread           an element of the result, or of so large ones a few rows', whose loads are in flight together,
//                    as are those of several splits; no barriers, no shared memory
//   groups           where some were multiplied together, the blocks of one by another are left out. Two of 2 x 3:
//
//                        accumulators  0 0 0 . . .        result  0 0 0 1 1 1
//                                      0 0 0 . . .                0 0 0 1 1 1
//                                      . . . 1 1 1
//                                      . . . 1 1 1
//
// Bytes: 4 (float64: 8) an accumulator and split, mostly from L2, and the operands and results. Flops: one an
// accumulator and split, and the epilogue's. Memory bounds it.
#pragma once

#include "core/epilogue_element.cuh"
#include "core/reduction.cuh"

namespace jaxdnn {

/// Config has: Accumulator, kAccumulators, kRows of a thread and what `apply_epilogue` wants.
template <class Config>
struct ProductSplit {
  const typename Config::Accumulator* accumulators[Config::kAccumulators] = {};  // [batch, split, m, n]
  OperandAddress operands[Config::Operands::kArray];
  ResultAddress results[Config::Results::kCount];
  unsigned m = 0, n = 0, batches = 1, splits = 1;  // below 2^31, so that a step beyond does not wrap
  unsigned groups = 1, group_rows = 1, group_columns = 1;

  /// The row of the accumulators that a column of a row of the result comes from.
  __device__ __forceinline__ unsigned source(unsigned row, unsigned column) const {
    if (groups == 1) return row;
    const unsigned block = row / group_rows;
    return row + (block * (groups - 1) + column / group_columns % groups) * group_rows;
  }
};

/// Adds `count` splits' accumulators, at most kTogether, to those before: of rows `row`, `row` + `step` and so on, of
/// which the first is there. `from` is the first split's at the column.
template <unsigned kTogether, class Call, class Accumulator, int kRows>
__device__ __forceinline__ void add_splits(const Call& call, Accumulator (&sums)[kRows], const Accumulator* from,
                                           long long matrix, unsigned row, unsigned step, unsigned column,
                                           unsigned count) {
  Accumulator loaded[kRows][kTogether];
#pragma unroll
  for (unsigned r = 0; r < kRows; ++r) {
    const Accumulator* const own = from + static_cast<long long>(call.source(row + r * step, column)) * call.n;
#pragma unroll
    for (unsigned i = 0; i < kTogether; ++i) {
      if ((r == 0 || row + r * step < call.m) && i < count) loaded[r][i] = own[i * matrix];
    }
  }
#pragma unroll
  for (unsigned i = 0; i < kTogether; ++i) {
#pragma unroll
    for (unsigned r = 0; r < kRows; ++r) {
      if (i < count) sums[r] = ReductionOf<Reduction::sum, Accumulator>::combine(sums[r], loaded[r][i]);
    }
  }
}

template <class Config>
__device__ __forceinline__ void product_split(const ProductSplit<Config>& call) {
  using Accumulator = typename Config::Accumulator;
  constexpr int kRows = Config::kRows;
  constexpr unsigned kTogether = 64 / (kRows * sizeof(Accumulator));
  const unsigned column = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.y * blockDim.y;
  if (column >= call.n) return;
  const long long matrix = static_cast<long long>(call.m) * call.groups * call.n;
  for (unsigned batch = blockIdx.z; batch < call.batches; batch += gridDim.z) {
    const long long first = static_cast<long long>(batch) * call.splits * matrix + column;
    for (unsigned row = blockIdx.y * blockDim.y + threadIdx.y; row < call.m; row += kRows * step) {
      Accumulator sums[Config::kAccumulators][kRows] = {};
#pragma unroll
      for (int s = 0; s < Config::kAccumulators; ++s) {
        const Accumulator* from = call.accumulators[s] + first;
        unsigned left = call.splits;
        for (; left >= kTogether; left -= kTogether, from += kTogether * matrix) {
          add_splits<kTogether>(call, sums[s], from, matrix, row, step, column, kTogether);
        }
        add_splits<kTogether>(call, sums[s], from, matrix, row, step, column, left);
      }
#pragma unroll
      for (unsigned r = 0; r < kRows; ++r) {
        if (row + r * step >= call.m) break;
        Accumulator accumulator[Config::kAccumulators];
#pragma unroll
        for (int s = 0; s < Config::kAccumulators; ++s) accumulator[s] = sums[s][r];
        const Coordinate at{static_cast<int>(row + r * step), static_cast<int>(column), static_cast<int>(batch)};
        apply_epilogue<Config>(call.operands, call.results, at, accumulator);
      }
    }
  }
}

}  // namespace jaxdnn
