// What happens to a sum between the multiply's registers and memory: the epilogue's operands in, its results out.
//
// An epilogue is a functor that Python emits: `Epilogue::apply(sum, operand, at, result)` computes one element of
// each result. Floats come widened exactly to float32, integers as they are; results leave rounded once to their own
// types. Each warp works on 16 rows x `kColumns` at a time: the operands are fetched 32 columns at a time, the functor
// runs on each element, and the results go out through the warp's own slots of shared memory and the copy engine, or
// straight to memory; those that are reduced, through shuffles. No warp waits for another.
#pragma once

#include "core/epilogue_reductions.cuh"

namespace jaxdnn {

/// The slots of one warp: `kSlots` of each result that is stored, one after the other.
template <class Results, int kColumns, int kSlots>
struct ResultSlots;
template <int kColumns, int kSlots>
struct ResultSlots<TypeList<>, kColumns, kSlots> {
  static constexpr int kBytes = 0;
};
template <int kColumns, int kSlots, class First, class... Rest>
struct ResultSlots<TypeList<First, Rest...>, kColumns, kSlots> {
  static constexpr int kOthers = ResultSlots<TypeList<Rest...>, kColumns, kSlots>::kBytes;
  static constexpr int own() {
    if constexpr (is_reduced<First>) {
      return 0;
    } else {
      return kSlots * ResultSlot<First, kColumns>::kBytes;
    }
  }
  static constexpr int kBytes = own() + kOthers;
};

/// The epilogue of a warp. Config has: Epilogue, Operands, Results, Sum, kSums, kStoreColumns, kSlots, kTensorStore,
/// kPairedStore, kLongEpilogue (the functor's code stands once for 8 elements, and not for each: they pass through
/// local memory, and the compiler takes a second instead of many).
template <class Config>
struct ResultWriter {
  using Operands = typename Config::Operands;
  using Results = typename Config::Results;
  using Sum = typename Config::Sum;
  static constexpr int kColumns = Config::kStoreColumns;
  static constexpr int kFetched = Config::kTensorStore ? 32 : 16;  // columns of operands that wait in registers
  static constexpr int kOperands = Operands::kArray;
  static constexpr int kResults = Results::kCount;
  static constexpr int kSharedBytes = Config::kTensorStore ? ResultSlots<Results, kColumns, Config::kSlots>::kBytes : 0;

  const OperandAddress (&operands)[kOperands];
  const ResultAddress (&results)[kResults];
  int rows, columns;  // of a matrix
  unsigned slots;     // shared address of this warp's
  int slot = 0;

  /// Brings what `write` will read of a tile of `kWidth` columns into the caches, while the tile is still multiplied.
  template <int kWidth>
  __device__ __forceinline__ void prefetch(int row, int column, int batch) const {
    prefetch_operands<0, Operands, kWidth>(operands, row, column, batch, rows, columns);
  }

  /// Rows `row` .. `row + 15` of a tile. `sums` are the warp's registers: of one 64 x kWidth sum, or of two side by
  /// side.
  template <int kRegisters>
  __device__ __forceinline__ void write(const Sum (&sums)[kRegisters], int row, int column, int batch) {
    constexpr int kWidth = 2 * kRegisters / Config::kSums;
    static_assert(kWidth % kColumns == 0, "a tile is made of whole pieces");
    const int lane = threadIdx.x % 32;
    Partials<0, Results, kWidth> partials;
    partials.clear();
#pragma unroll
    for (int piece = 0; piece < kWidth / kColumns; ++piece) {
      const int left = column + piece * kColumns;
      const int first = left + lane % 4 * 2;
      OperandPieces<0, Operands, kFetched / 8> values;
      values.fetch(operands, row + lane / 4, first, batch, rows, columns);
      if constexpr (kSharedBytes > 0) {
        if (lane == 0) ptx::cp_async_bulk_wait_group_read<Config::kSlots - 1>();
        ptx::bar_warp_sync();
      }
#pragma unroll
      for (int step = 0; step < kColumns / 16; ++step) {
        if (step > 0 && step % (kFetched / 16) == 0) {
          values.fetch(operands, row + lane / 4, first + step * 16, batch, rows, columns);
        }
        Patch out[kResults];
        Sum sum[8][Config::kSums];
        RegisterOf<4> operand[8][kOperands], result[8][kResults];
        const Coordinate at{row + lane / 4, first + step * 16, batch};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const int index = (piece * kColumns + step * 16 + i / 4 * 8) / 2 + i / 2 % 2 * 2 + i % 2;
#pragma unroll
          for (int s = 0; s < Config::kSums; ++s) sum[i][s] = sums[s * (kWidth / 2) + index];
          values.values(i / 2 % 2, (step * 2 + i / 4) % (kFetched / 8), i % 2, operand[i]);
          if constexpr (!Config::kLongEpilogue) apply(sum[i], operand[i], at, i, result[i]);
        }
        if constexpr (Config::kLongEpilogue) {
#pragma unroll 1
          for (int i = 0; i < 8; ++i) apply(sum[i], operand[i], at, i, result[i]);
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
#pragma unroll
          for (int j = 0; j < kResults; ++j) out[j][i / 4][i / 2 % 2][i % 2] = result[i][j];
        }
        put<0>(out, step, row + lane / 4, first + step * 16, batch);
        partials.add(out, results, row + lane / 4, first + step * 16, batch, rows, columns);
      }
      if constexpr (kSharedBytes > 0) {
        ptx::fence_proxy_async();
        ptx::bar_warp_sync();
        if (lane == 0) {
          send<0>(slots, left, row, batch);
          ptx::cp_async_bulk_commit_group();
        }
        slot = slot + 1 == Config::kSlots ? 0 : slot + 1;
      }
    }
    partials.finish(results, row, column, batch, rows, columns);
  }

  /// After the last tile: the copy engine has to have read the slots before the block goes, and its shared memory.
  __device__ __forceinline__ void finish() const {
    if constexpr (kSharedBytes > 0) {
      if (threadIdx.x % 32 == 0) ptx::cp_async_bulk_wait_group_read<0>();
    }
  }

 private:
  /// The functor, for element `i` of the patch whose first one is at `first`.
  static __device__ __forceinline__ void apply(const Sum (&sum)[Config::kSums],
                                               const RegisterOf<4> (&operand)[kOperands], const Coordinate& first,
                                               int i, RegisterOf<4> (&result)[kResults]) {
    const Coordinate at{first.row + i / 2 % 2 * 8, first.column + i / 4 * 8 + i % 2, first.batch};
    Config::Epilogue::apply(sum, operand, at, result);
  }

  template <int kResult>
  __device__ __forceinline__ void put(const Patch (&out)[kResults], int step, int row, int column, int batch,
                                      unsigned base = 0) const {
    if constexpr (kResult < kResults) {
      using T = TypeAt<kResult, Results>;
      if constexpr (is_reduced<T>) {
        put<kResult + 1>(out, step, row, column, batch, base);
      } else if constexpr (Config::kTensorStore) {
        using Slot = ResultSlot<T, kColumns>;
        Slot::put(slots + base + slot * Slot::kBytes, step, out[kResult]);
        put<kResult + 1>(out, step, row, column, batch, base + Config::kSlots * Slot::kBytes);
      } else {
        T* const matrix = static_cast<T*>(results[kResult].data) + static_cast<long long>(batch) * rows * columns;
        store_direct<T, Config::kPairedStore>(matrix, row, column, rows, columns, out[kResult]);
        put<kResult + 1>(out, step, row, column, batch);
      }
    }
  }

  template <int kResult>
  __device__ __forceinline__ void send(unsigned base, int column, int row, int batch) const {
    if constexpr (kResult < kResults) {
      using T = TypeAt<kResult, Results>;
      if constexpr (is_reduced<T>) {
        send<kResult + 1>(base, column, row, batch);
      } else {
        using Slot = ResultSlot<T, kColumns>;
        ptx::cp_async_bulk_tensor_store(results[kResult].map, base + slot * Slot::kBytes, column, row, batch);
        send<kResult + 1>(base + Config::kSlots * Slot::kBytes, column, row, batch);
      }
    }
  }
};

}  // namespace jaxdnn
