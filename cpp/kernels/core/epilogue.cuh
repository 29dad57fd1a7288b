// What happens to a tile of an accumulator between the multiply's registers and memory.
//
// An epilogue is a functor that Python emits: `Epilogue::apply(accumulator, operand, context, result)` computes one
// element of each result. Floats come widened exactly to float32, integers as they are; results leave rounded once to
// their own types. Each warp works on 16 rows: fragment by fragment (core/fragment.cuh) the functor is applied, and its
// results are stored, through the warp's own stages of shared memory and TMA or straight to memory
// (core/epilogue_results.cuh), or reduced, through shuffles (core/epilogue_reductions.cuh). No warp waits for another.
#pragma once

#include "core/epilogue_reductions.cuh"

namespace jaxdnn {

/// The stages of one warp: `kEpilogueStages` of each result that is stored, one after the other.
template <class Results, int kColumns, int kEpilogueStages>
struct ResultStages;
template <int kColumns, int kEpilogueStages>
struct ResultStages<TypeList<>, kColumns, kEpilogueStages> {
  static constexpr int kBytes = 0;
};
template <int kColumns, int kEpilogueStages, class First, class... Rest>
struct ResultStages<TypeList<First, Rest...>, kColumns, kEpilogueStages> {
  static constexpr int kOthers = ResultStages<TypeList<Rest...>, kColumns, kEpilogueStages>::kBytes;
  static constexpr int own() {
    if constexpr (is_reduced<First>) {
      return 0;
    } else {
      return kEpilogueStages * ResultStage<First, kColumns>::kBytes;
    }
  }
  static constexpr int kBytes = own() + kOthers;
};

/// The epilogue of a warp. Config has, besides what core/fragment.cuh wants: Results, kStoreColumns, kEpilogueStages,
/// kTensorStore, kPairedStore.
template <class Config>
struct TileEpilogue {
  using Operands = typename Config::Operands;
  using Results = typename Config::Results;
  using Accumulator = typename Config::Accumulator;
  static constexpr int kColumns = Config::kStoreColumns;
  static constexpr int kFetched = Config::kTensorStore ? 32 : 16;  // columns of operands that wait in registers
  static constexpr int kOperands = Operands::kArray;
  static constexpr int kResults = Results::kCount;
  static constexpr int kSharedBytes =
      Config::kTensorStore ? ResultStages<Results, kColumns, Config::kEpilogueStages>::kBytes : 0;

  const OperandAddress (&operands)[kOperands];
  const ResultAddress (&results)[kResults];
  int rows, columns;  // of a matrix
  unsigned stages;    // shared address of this warp's
  int stage = 0;

  /// Brings what `apply` will read of a tile of `kWidth` columns into the caches, while the tile is still multiplied.
  template <int kWidth>
  __device__ __forceinline__ void prefetch(int row, int column, int batch) const {
    prefetch_operands<Operands, kWidth>(operands, {row, column, batch, rows, columns});
  }

  /// Rows `row` .. `row + 15` of a tile, which are `others` of the matrix. `accumulators` are the warp's registers: of
  /// one 64 x kWidth, or of two side by side.
  template <int kRegisters, class Rows = StraightRows>
  __device__ __forceinline__ void apply(const Accumulator (&accumulators)[kRegisters], int row, int column, int batch,
                                        const Rows& others = {}) {
    constexpr int kWidth = 2 * kRegisters / Config::kAccumulators, kFragments = kColumns / kFragmentColumns;
    static_assert(kWidth % kColumns == 0, "a tile is made of whole subtiles");
    Partials<Results, kWidth> partials;
    partials.clear();
#pragma unroll
    for (int subtile = 0; subtile < kWidth / kColumns; ++subtile) {
      const int left = column + subtile * kColumns;
      const FragmentCoordinate first = FragmentCoordinate::of_lane(row, left, batch, rows, columns).through(others);
      FragmentOperands<Operands, kFetched> values;
      values.fetch(operands, first);
      acquire_stage();
#pragma unroll
      for (int i = 0; i < kFragments; ++i) {
        constexpr int kAtOnce = kFetched / kFragmentColumns;
        const FragmentCoordinate at = first.to_the_right(i * kFragmentColumns);
        if (i > 0 && i % kAtOnce == 0) values.fetch(operands, at);
        Fragment fragments[kResults];
        apply_to_fragment<Config>(accumulators, 8 * (subtile * kFragments + i), values, i % kAtOnce, operands, at,
                                  fragments);
        store<0>(fragments, i, at);
        partials.add(fragments, results, at);
      }
      store_stage(left, row, batch, others);
    }
    partials.finish(results, {row, column, batch, rows, columns});
  }

  /// After the last tile: TMA has to have read the stages before the block goes, and its shared memory.
  __device__ __forceinline__ void finish() const {
    if constexpr (kSharedBytes > 0) {
      if (threadIdx.x % 32 == 0) ptx::cp_async_bulk_wait_group_read<0>();
    }
  }

 private:
  /// Waits until TMA has read what the stage held before.
  __device__ __forceinline__ void acquire_stage() const {
    if constexpr (kSharedBytes > 0) {
      if (threadIdx.x % 32 == 0) ptx::cp_async_bulk_wait_group_read<Config::kEpilogueStages - 1>();
      ptx::bar_warp_sync();
    }
  }

  /// Has TMA store the stage, or the warp, where its rows are no neighbours; and goes on to the next one.
  template <class Rows>
  __device__ __forceinline__ void store_stage(int column, int row, int batch, const Rows& others) {
    if constexpr (kSharedBytes > 0 && !Rows::kBoxes) {
      ptx::bar_warp_sync();
      copy_rows<0>(stages, column, row, batch, others);
      stage = stage + 1 == Config::kEpilogueStages ? 0 : stage + 1;
    } else if constexpr (kSharedBytes > 0) {
      ptx::fence_proxy_async();
      ptx::bar_warp_sync();
      if (threadIdx.x % 32 == 0) {
        send<0>(stages, column, row, batch, others);
        ptx::cp_async_bulk_commit_group();
      }
      stage = stage + 1 == Config::kEpilogueStages ? 0 : stage + 1;
    }
  }

  /// Fragment `number` of a subtile: into the stage, or to memory.
  template <int kResult>
  __device__ __forceinline__ void store(const Fragment (&fragments)[kResults], int number, const FragmentCoordinate& at,
                                        unsigned base = 0) const {
    if constexpr (kResult < kResults) {
      using T = TypeAt<kResult, Results>;
      if constexpr (is_reduced<T>) {
        store<kResult + 1>(fragments, number, at, base);
      } else if constexpr (Config::kTensorStore) {
        using Stage = ResultStage<T, kColumns>;
        Stage::put(stages + base + stage * Stage::kBytes, number, fragments[kResult]);
        store<kResult + 1>(fragments, number, at, base + Config::kEpilogueStages * Stage::kBytes);
      } else {
        T* const matrix = static_cast<T*>(results[kResult].data) + static_cast<long long>(at.batch) * rows * columns;
        store_direct<T, Config::kPairedStore>(matrix, at, fragments[kResult]);
        store<kResult + 1>(fragments, number, at);
      }
    }
  }

  /// A warp's rows to where they are in the matrix, 16 bytes at once.
  template <int kResult, class Rows>
  __device__ __forceinline__ void copy_rows(unsigned base, int column, int row, int batch, const Rows& others) const {
    if constexpr (kResult < kResults) {
      using T = TypeAt<kResult, Results>;
      if constexpr (is_reduced<T>) {
        copy_rows<kResult + 1>(base, column, row, batch, others);
      } else {
        using Stage = ResultStage<T, kColumns>;
        constexpr int kChunks = Stage::kRowBytes / 16;
        T* const matrix = static_cast<T*>(results[kResult].data) + static_cast<long long>(batch) * rows * columns;
#pragma unroll
        for (int i = 0; i < 16 * kChunks; i += 32) {
          const int index = i + threadIdx.x % 32, line = index / kChunks, chunk = index % kChunks;
          const int to = others(row + line), first = column + chunk * (16 / static_cast<int>(sizeof(T)));
          if (to >= rows || first >= columns) continue;
          unsigned words[4];
          ptx::ld_shared<16>(words, base + stage * Stage::kBytes + Stage::offset(line, chunk));
          ptx::st_global<16>(matrix + static_cast<long long>(to) * columns + first, words);
        }
        copy_rows<kResult + 1>(base + Config::kEpilogueStages * Stage::kBytes, column, row, batch, others);
      }
    }
  }

  template <int kResult, class Rows>
  __device__ __forceinline__ void send(unsigned base, int column, int row, int batch, const Rows& others) const {
    if constexpr (kResult < kResults) {
      using T = TypeAt<kResult, Results>;
      if constexpr (is_reduced<T>) {
        send<kResult + 1>(base, column, row, batch, others);
      } else {
        using Stage = ResultStage<T, kColumns>;
        others.store(results[kResult].map, base + stage * Stage::kBytes, column, row, batch);
        send<kResult + 1>(base + Config::kEpilogueStages * Stage::kBytes, column, row, batch, others);
      }
    }
  }
};

}  // namespace jaxdnn
