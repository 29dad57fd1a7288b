// results = f(operands) for a pointwise function of arrays [batch, rows, columns], and sums (maxima, minima) of it over
// rows: what is left of an epilogue's derivative once its sums are known, the gradient of a bias with it.
//
//   grid             blocks of kAcross x kWidth columns by `chunk` rows of a matrix, neighbours in neighbouring columns
//   block            256 threads: kAcross along the columns, each with kWidth neighbours; the others take other rows. A
//                    thread loads its columns of kRows rows before it computes the first
//   reductions       a thread combines its rows in registers, the threads of a column through shared memory; each block
//                    leaves a part in scratch memory [batch, chunk, column], and product/reduce.cuh combines
//                    those. All orders are fixed
//
// Bytes: each element read and written once, and 4 for each column of a chunk. Flops: the functor's. Memory bounds it
// (benchmarks/results/product_kernels.md).
#pragma once

#include "core/epilogue_operands.cuh"
#include "core/reduction.cuh"
#include "core/vector.cuh"

namespace jaxdnn {

/// The reduction of a result that is stored whole.
struct Whole {};

/// Config has: Epilogue (the functor), Operands (of `EpilogueOperand`), Results (as they lie in memory), Registers
/// (what the functor leaves of each result), Reductions (each `Whole` or a `ReductionOf`),
/// kWidth, kAcross, kRows.
template <class Config>
struct Pointwise {
  static constexpr int kThreads = 256;
  static constexpr int kDown = kThreads / Config::kAcross;
  static constexpr int kColumns = Config::kAcross * Config::kWidth;

  OperandAddress operands[Config::Operands::kArray];
  ResultAddress results[Config::Results::kCount];  // of a reduction: its parts
  int rows = 0, columns = 0;
  int chunk = 1;          // rows of a block
  int chunks = 1;         // of a matrix
  int column_blocks = 1;  // of columns
};

/// What a thread holds of the operands from `kIndex` on.
template <class Config, int kIndex = 0, bool kEnd = kIndex == Config::Operands::kCount>
struct PointwiseOperands {
  using Operand = TypeAt<kIndex, typename Config::Operands>;
  using T = typename Operand::Type;

  Vector<T, Operand::kByColumn ? Config::kWidth : 1> own;
  PointwiseOperands<Config, kIndex + 1> others;

  /// Those that vary with rows, or (`kFixed`) those that don't.
  template <bool kFixed>
  __device__ __forceinline__ void load(const OperandAddress* addresses, const Coordinate& at) {
    if constexpr (kFixed == !Operand::kByRow && !Operand::kIsTable) {
      const T* const data = static_cast<const T*>(addresses[kIndex].data);
      if constexpr (Operand::kByColumn && Operand::kColumns == Columns::strided) {
#pragma unroll
        for (int i = 0; i < Config::kWidth; ++i) {
          own.set(i, data[addresses[kIndex].offset<Operand>(Coordinate{at.row, at.column + i, at.batch})]);
        }
      } else {
        own.load(data + addresses[kIndex].offset<Operand>(at));
      }
    }
    others.template load<kFixed>(addresses, at);
  }

  __device__ __forceinline__ void widen(const PointwiseOperands& fixed, int i, Register* to) const {
    const auto& from = Operand::kByRow ? own : fixed.own;
    if constexpr (!Operand::kIsTable) to[kIndex].set(jaxdnn::widen(from.get(Operand::kByColumn ? i : 0)));
    others.widen(fixed.others, i, to);
  }
};
template <class Config, int kIndex>
struct PointwiseOperands<Config, kIndex, true> {
  template <bool kFixed>
  __device__ __forceinline__ void load(const OperandAddress*, const Coordinate&) {}
  __device__ __forceinline__ void widen(const PointwiseOperands&, int, Register*) const {}
};

/// What a thread holds of the results from `kIndex` on: of a row, if they are stored whole; else of all its rows.
template <class Config, int kIndex = 0, bool kEnd = kIndex == Config::Results::kCount>
struct PointwiseResults {
  using T = TypeAt<kIndex, typename Config::Results>;
  using From = TypeAt<kIndex, typename Config::Registers>;
  using Reduction = TypeAt<kIndex, typename Config::Reductions>;
  static constexpr bool kWhole = is_same<Reduction, Whole>;
  static constexpr int kWidth = Config::kWidth;

  Vector<T, kWhole ? kWidth : 1> own;
  T parts[kWhole ? 1 : kWidth];
  PointwiseResults<Config, kIndex + 1> others;

  __device__ __forceinline__ void clear() {
    if constexpr (!kWhole) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) parts[i] = Reduction::identity();
    }
    others.clear();
  }

  __device__ __forceinline__ void take(int i, const Register* from) {
    const From value = from[kIndex];
    if constexpr (kWhole) {
      own.set(i, narrow<T>(value));
    } else {
      parts[i] = Reduction::combine(parts[i], value);
    }
    others.take(i, from);
  }

  __device__ __forceinline__ void store(const ResultAddress* addresses, const Coordinate& at) const {
    if constexpr (kWhole) own.store(static_cast<T*>(addresses[kIndex].data) + addresses[kIndex].offset(at));
    others.store(addresses, at);
  }

  /// By all threads: leaves the block's part of each reduction in row `at.row` of its scratch memory.
  __device__ __forceinline__ void finish(const ResultAddress* addresses, const Coordinate& at, bool inside) {
    if constexpr (!kWhole) {
      constexpr int kAcross = Config::kAcross, kDown = Pointwise<Config>::kDown;
      const int x = threadIdx.x % kAcross, y = threadIdx.x / kAcross;
      if constexpr (kDown > 1) {
        __shared__ T shared[kWidth][kDown][kAcross];
        __syncthreads();  // of an earlier reduction's memory, which may be the same
#pragma unroll
        for (int i = 0; i < kWidth; ++i) shared[i][y][x] = parts[i];
#pragma unroll
        for (int half = kDown / 2; half > 0; half /= 2) {
          __syncthreads();
          if (y < half) {
#pragma unroll
            for (int i = 0; i < kWidth; ++i) {
              shared[i][y][x] = Reduction::combine(shared[i][y][x], shared[i][y + half][x]);
            }
          }
        }
#pragma unroll
        for (int i = 0; i < kWidth; ++i) parts[i] = shared[i][y][x];
      }
      if (y == 0 && inside) {
        Vector<T, kWidth> part;
#pragma unroll
        for (int i = 0; i < kWidth; ++i) part.set(i, parts[i]);
        part.store(static_cast<T*>(addresses[kIndex].data) + addresses[kIndex].offset(at));
      }
    }
    others.finish(addresses, at, inside);
  }
};
template <class Config, int kIndex>
struct PointwiseResults<Config, kIndex, true> {
  __device__ __forceinline__ void clear() {}
  __device__ __forceinline__ void take(int, const Register*) {}
  __device__ __forceinline__ void store(const ResultAddress*, const Coordinate&) const {}
  __device__ __forceinline__ void finish(const ResultAddress*, const Coordinate&, bool) {}
};

template <class Config>
__device__ __forceinline__ void pointwise(const Pointwise<Config>& call) {
  using Call = Pointwise<Config>;
  constexpr int kRows = Config::kRows, kDown = Call::kDown;
  const int column_block = blockIdx.x % call.column_blocks, index = blockIdx.x / call.column_blocks;
  const int chunk = index % call.chunks, batch = index / call.chunks;
  const int column = column_block * Call::kColumns + threadIdx.x % Config::kAcross * Config::kWidth;
  const bool inside = column < call.columns;
  const long long end = static_cast<long long>(chunk + 1) * call.chunk;
  const int last = inside ? (end < call.rows ? static_cast<int>(end) : call.rows) : 0;

  PointwiseOperands<Config> fixed, operands[kRows];
  PointwiseResults<Config> results;
  results.clear();
  if (inside) fixed.template load<true>(call.operands, Coordinate{0, column, batch});
#pragma unroll 1
  for (int row = chunk * call.chunk + threadIdx.x / Config::kAcross; row < last; row += kRows * kDown) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const Coordinate at{row + r * kDown, column, batch};
      if (at.row < last) operands[r].template load<false>(call.operands, at);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int here = row + r * kDown;
      if (here >= last) continue;
#pragma unroll
      for (int i = 0; i < Config::kWidth; ++i) {
        Register operand[Config::Operands::kArray], result[Config::Results::kCount];
        operands[r].widen(fixed, i, operand);
        const ElementContext<typename Config::Operands> context{{here, column + i, batch}, call.operands};
        Config::Epilogue::apply(nullptr, operand, context, result);
        results.take(i, result);
      }
      results.store(call.results, Coordinate{here, column, batch});
    }
  }
  results.finish(call.results, Coordinate{chunk, column, batch}, inside);
}

}  // namespace jaxdnn
