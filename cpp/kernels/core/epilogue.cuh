// What happens to a sum between the multiply's registers and memory: the epilogue's operands in, its results out.
//
// An epilogue is a functor that Python emits:
//
//   struct Epilogue {
//       static __device__ void apply(const float (&sum)[kSums], const float (&operand)[kOperands], const Place& place,
//                                    float (&result)[kResults]);
//   };
//
// Operands come widened exactly to float32, results leave rounded once to their own types. Each warp works on
// 16 rows x `kColumns` at a time: the operands are fetched 32 columns at a time, the functor runs on each element, and
// the results go out through the warp's own slots of shared memory and the copy engine, or straight to memory. No warp
// waits for another.
#pragma once

#include "core/barrier.cuh"
#include "core/epilogue_operands.cuh"
#include "core/tma.cuh"

namespace jaxdnn {

struct ResultAddress {
  const TensorMap* map = nullptr;  // of boxes of 16 rows x kColumns, when the copy engine stores
  void* data = nullptr;            // else
};

/// Rounds one element of each result.
template <int kIndex, class Results>
__device__ __forceinline__ void store_results(const ResultAddress* addresses, long long offset, const float* values) {
  if constexpr (kIndex < Results::kCount) {
    using T = typename TypeAt<kIndex, Results>::Type;
    unsigned words[Packed<T>::kWords];
    Packed<T>::round(values[kIndex], 0.0f, words);
    T* const to = static_cast<T*>(addresses[kIndex].data) + offset;
    if constexpr (sizeof(T) == 2) {
      ptx::store_2(to, words);
    } else {
      ptx::store_4(to, words);
    }
    store_results<kIndex + 1, Results>(addresses, offset, values);
  }
}

/// One result's piece of 16 rows in shared memory, swizzled as its tensor map says: by 128 bytes, or by 64 when its
/// rows are that short.
template <class T, int kColumns>
struct ResultSlot {
  static constexpr int kRowBytes = kColumns * static_cast<int>(sizeof(T));
  static constexpr int kBytes = 16 * kRowBytes;
  static_assert(kRowBytes == 128 || kRowBytes == 64, "a row of a slot is as long as a swizzle's");

  static __device__ __forceinline__ unsigned place(int row, int chunk) {
    const int exchange = kRowBytes == 128 ? row & 7 : row >> 1 & 3;
    return row * kRowBytes + (chunk ^ exchange) * 16;
  }

  /// 16 columns: `values` are of two column pairs, two rows, two neighbours.
  static __device__ __forceinline__ void put(unsigned slot, int step, const float (&values)[2][2][2]) {
    const int lane = threadIdx.x % 32;
    if constexpr (sizeof(T) == 2) {
      unsigned words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        unsigned word[1];
        Packed<T>::round(values[i / 2][i % 2][0], values[i / 2][i % 2][1], word);
        words[i] = word[0];
      }
      ptx::store_matrices(slot + place(lane % 16, 2 * step + lane / 16), words);
    } else {
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          unsigned words[2];
          Packed<T>::round(values[pair][r][0], values[pair][r][1], words);
          const unsigned address = slot + place(lane / 4 + 8 * r, 4 * step + 2 * pair + lane % 4 / 2);
          ptx::store_shared_8(address + lane % 2 * 8, words[0], words[1]);
        }
      }
    }
  }
};

/// Writes 16 columns without the copy engine; `kPairs` says that pairs of columns are aligned.
template <class T, bool kPairs>
__device__ __forceinline__ void store_direct(T* matrix, int row, int column, int rows, int columns,
                                             const float (&values)[2][2][2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    T* const line = matrix + static_cast<long long>(row + 8 * r) * columns;
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const int first = column + 8 * pair;
      unsigned words[Packed<T>::kWords];
      Packed<T>::round(values[pair][r][0], values[pair][r][1], words);
      if (row + 8 * r >= rows || first >= columns) continue;
      if constexpr (sizeof(T) == 2) {
        if constexpr (kPairs) {
          ptx::store_4(line + first, words);
        } else {
          ptx::store_2(line + first, words);
          words[0] >>= 16;
          if (first + 1 < columns) ptx::store_2(line + first + 1, words);
        }
      } else if constexpr (kPairs) {
        ptx::store_8(line + first, words);
      } else {
        ptx::store_4(line + first, words);
        if (first + 1 < columns) ptx::store_4(line + first + 1, words + 1);
      }
    }
  }
}

/// The slots of one warp: `kSlots` of each result, one after the other.
template <class Results, int kColumns, int kSlots>
struct ResultSlots;
template <int kColumns, int kSlots>
struct ResultSlots<TypeList<>, kColumns, kSlots> {
  static constexpr int kBytes = 0;
};
template <int kColumns, int kSlots, class First, class... Rest>
struct ResultSlots<TypeList<First, Rest...>, kColumns, kSlots> {
  static constexpr int kBytes =
      kSlots * ResultSlot<First, kColumns>::kBytes + ResultSlots<TypeList<Rest...>, kColumns, kSlots>::kBytes;
};

/// The epilogue of a warp. Config has: Epilogue, Operands, Results, kSums, kStoreColumns, kSlots, kTensorStore,
/// kPairedStore.
template <class Config>
struct ResultWriter {
  using Operands = typename Config::Operands;
  using Results = typename Config::Results;
  static constexpr int kColumns = Config::kStoreColumns;
  static constexpr int kFetched = Config::kTensorStore ? 32 : 16;  // columns of operands that wait in registers
  static constexpr int kOperands = Operands::kCount > 0 ? Operands::kCount : 1;
  static constexpr int kResults = Results::kCount;
  static constexpr int kSharedBytes = Config::kTensorStore ? ResultSlots<Results, kColumns, Config::kSlots>::kBytes : 0;

  const OperandAddress (&operands)[kOperands];
  const ResultAddress (&results)[kResults];
  int rows, columns;  // of a matrix
  unsigned slots;     // shared address of this warp's
  int slot = 0;

  /// Rows `row` .. `row + 15` of a tile. `sums` are the warp's registers: of one 64 x kWidth sum, or of two side by
  /// side.
  template <int kRegisters>
  __device__ __forceinline__ void write(const float (&sums)[kRegisters], int row, int column, int batch) {
    constexpr int kWidth = 2 * kRegisters / Config::kSums;
    static_assert(kWidth % kColumns == 0, "a tile is made of whole pieces");
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int piece = 0; piece < kWidth / kColumns; ++piece) {
      const int left = column + piece * kColumns;
      const int first = left + lane % 4 * 2;
      OperandPieces<0, Operands, kFetched / 8> values;
      if constexpr (Config::kTensorStore) {
        if (lane == 0) ptx::bulk_wait_read<Config::kSlots - 1>();
        ptx::warp_sync();
      }
#pragma unroll
      for (int step = 0; step < kColumns / 16; ++step) {
        if (step % (kFetched / 16) == 0) {
          values.fetch(operands, row + lane / 4, first + step * 16, batch, rows, columns);
        }
        float out[kResults][2][2][2];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const int pair = i / 4, r = i / 2 % 2, side = i % 2;
          const int index = (piece * kColumns + step * 16 + pair * 8) / 2 + r * 2 + side;
          float sum[Config::kSums], operand[kOperands], result[kResults];
#pragma unroll
          for (int s = 0; s < Config::kSums; ++s) sum[s] = sums[s * (kWidth / 2) + index];
          values.values(r, (step * 2 + pair) % (kFetched / 8), side, operand);
          const Place place{row + lane / 4 + 8 * r, first + step * 16 + pair * 8 + side, batch};
          Config::Epilogue::apply(sum, operand, place, result);
#pragma unroll
          for (int j = 0; j < kResults; ++j) out[j][pair][r][side] = result[j];
        }
        put<0>(out, step, row + lane / 4, first + step * 16, batch);
      }
      if constexpr (Config::kTensorStore) {
        ptx::async_proxy_fence();
        ptx::warp_sync();
        if (lane == 0) {
          send<0>(slots, left, row, batch);
          ptx::bulk_commit();
        }
        slot = slot + 1 == Config::kSlots ? 0 : slot + 1;
      }
    }
  }

 private:
  template <int kResult>
  __device__ __forceinline__ void put(const float (&out)[kResults][2][2][2], int step, int row, int column, int batch,
                                      unsigned base = 0) const {
    if constexpr (kResult < kResults) {
      using T = typename TypeAt<kResult, Results>::Type;
      if constexpr (Config::kTensorStore) {
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
      using Slot = ResultSlot<typename TypeAt<kResult, Results>::Type, kColumns>;
      ptx::tensor_store(results[kResult].map, base + slot * Slot::kBytes, column, row, batch);
      send<kResult + 1>(base + Config::kSlots * Slot::kBytes, column, row, batch);
    }
  }
};

}  // namespace jaxdnn
