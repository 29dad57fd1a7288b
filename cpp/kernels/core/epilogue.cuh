// What happens to a tile of an accumulator between the multiply's registers and memory.
//
// An epilogue is a functor that Python emits: `Epilogue::apply(sum, operand, at, result)` computes one element of
// each result. Floats come widened exactly to float32, integers as they are; results leave rounded once to their own
// types. Each warp works on 16 rows: fragment by fragment (core/fragment.cuh) the functor is applied, and its results
// are stored, through the warp's own slots of shared memory and the copy engine or straight to memory
// (core/epilogue_results.cuh), or reduced, through shuffles (core/epilogue_reductions.cuh). No warp waits for another.
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

/// The epilogue of a warp. Config has, besides what core/fragment.cuh wants: Results, kStoreColumns, kSlots,
/// kTensorStore, kPairedStore.
template <class Config>
struct TileEpilogue {
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

  /// Brings what `apply` will read of a tile of `kWidth` columns into the caches, while the tile is still multiplied.
  template <int kWidth>
  __device__ __forceinline__ void prefetch(int row, int column, int batch) const {
    prefetch_operands<Operands, kWidth>(operands, {row, column, batch, rows, columns});
  }

  /// Rows `row` .. `row + 15` of a tile. `sums` are the warp's registers: of one 64 x kWidth sum, or of two side by
  /// side.
  template <int kRegisters>
  __device__ __forceinline__ void apply(const Sum (&sums)[kRegisters], int row, int column, int batch) {
    constexpr int kWidth = 2 * kRegisters / Config::kSums, kFragments = kColumns / kFragmentColumns;
    static_assert(kWidth % kColumns == 0, "a tile is made of whole pieces");
    Partials<Results, kWidth> partials;
    partials.clear();
#pragma unroll
    for (int piece = 0; piece < kWidth / kColumns; ++piece) {
      const int left = column + piece * kColumns;
      const FragmentPlace first = FragmentPlace::of_lane(row, left, batch, rows, columns);
      FragmentOperands<Operands, kFetched> values;
      values.fetch(operands, first);
      acquire_slot();
#pragma unroll
      for (int i = 0; i < kFragments; ++i) {
        constexpr int kAtOnce = kFetched / kFragmentColumns;
        const FragmentPlace place = first.to_the_right(i * kFragmentColumns);
        if (i > 0 && i % kAtOnce == 0) values.fetch(operands, place);
        Fragment fragments[kResults];
        apply_to_fragment<Config>(sums, 8 * (piece * kFragments + i), values, i % kAtOnce, operands, place, fragments);
        store<0>(fragments, i, place);
        partials.add(fragments, results, place);
      }
      send_slot(left, row, batch);
    }
    partials.finish(results, {row, column, batch, rows, columns});
  }

  /// After the last tile: the copy engine has to have read the slots before the block goes, and its shared memory.
  __device__ __forceinline__ void finish() const {
    if constexpr (kSharedBytes > 0) {
      if (threadIdx.x % 32 == 0) ptx::cp_async_bulk_wait_group_read<0>();
    }
  }

 private:
  /// Waits until the copy engine has read what the slot held before.
  __device__ __forceinline__ void acquire_slot() const {
    if constexpr (kSharedBytes > 0) {
      if (threadIdx.x % 32 == 0) ptx::cp_async_bulk_wait_group_read<Config::kSlots - 1>();
      ptx::bar_warp_sync();
    }
  }

  /// Has the copy engine store the slot, and goes on to the next one.
  __device__ __forceinline__ void send_slot(int column, int row, int batch) {
    if constexpr (kSharedBytes > 0) {
      ptx::fence_proxy_async();
      ptx::bar_warp_sync();
      if (threadIdx.x % 32 == 0) {
        send<0>(slots, column, row, batch);
        ptx::cp_async_bulk_commit_group();
      }
      slot = slot + 1 == Config::kSlots ? 0 : slot + 1;
    }
  }

  /// Fragment `number` of a piece: into the slot, or to memory.
  template <int kResult>
  __device__ __forceinline__ void store(const Fragment (&fragments)[kResults], int number, const FragmentPlace& place,
                                        unsigned base = 0) const {
    if constexpr (kResult < kResults) {
      using T = TypeAt<kResult, Results>;
      if constexpr (is_reduced<T>) {
        store<kResult + 1>(fragments, number, place, base);
      } else if constexpr (Config::kTensorStore) {
        using Slot = ResultSlot<T, kColumns>;
        Slot::put(slots + base + slot * Slot::kBytes, number, fragments[kResult]);
        store<kResult + 1>(fragments, number, place, base + Config::kSlots * Slot::kBytes);
      } else {
        T* const matrix = static_cast<T*>(results[kResult].data) + static_cast<long long>(place.batch) * rows * columns;
        store_direct<T, Config::kPairedStore>(matrix, place, fragments[kResult]);
        store<kResult + 1>(fragments, number, place);
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
