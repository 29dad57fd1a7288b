// What happens to a tile of an accumulator between the multiply's registers and memory.
//
// An epilogue is a functor that Python emits: `Epilogue::apply(accumulator, operand, context, result)` computes one
// element of each result. Floats come widened exactly to float32, integers as they are; results leave rounded once to
// their own types. Each warp works on 16 rows: fragment by fragment (core/fragment.cuh) the functor is applied, and its
// results are stored, through the warp's own stages of shared memory and TMA or straight to memory
// (core/epilogue_results.cuh), or reduced (core/epilogue_reductions.cuh). No warp waits for another, unless results are
// swapped: a warp's 16 rows are 32 bytes of each column, for which TMA takes as long as for 128. So the warps of a
// group share the stages, each of whole lines of their 64 rows, and the first one has TMA store and load them.
//
// Operands of the result's own shape may be tiles, which TMA loads where results of elements as large leave from: tile
// i lies in the stages of stored result i. A warp has its own loaded while its tile is still multiplied, when memory
// has little else to do; reads a fragment, and writes the result's in its place:
//
//   stages 0, 1    | load 0, load 1 | multiply ... | wait 0, apply, store, load 2 | wait 1, apply, store, load 3 | ...
//   barriers       full[stage], of each warp: 1 arrival, of the lane that announces the bytes of all tiles. It has
//                  results stored too, and waits until TMA has read a stage before it has that loaded again
//
// Threads that load an operand themselves wait for it when their tile is done, a word of a row at a time
// (benchmarks/results/product_kernels.md).
#pragma once

#include "core/epilogue_lines.cuh"
#include "core/epilogue_reductions.cuh"
#include "core/pipeline_tma.cuh"

namespace jaxdnn {

/// The subtiles of a stage, of those results that are stored, one after the other.
template <class Results, int kColumns, bool kSwapped, class... Found>
struct StageSubtiles {
  using Types = TypeList<Found...>;

  /// Bytes of the first `count` of them, and of the boxes that fill these.
  static constexpr int bytes(int count) {
    int i = 0, sum = 0;
    ((sum += i++ < count ? Found::kBytes : 0), ...);
    return sum;
  }
  static constexpr int box_bytes(int count) {
    int i = 0, sum = 0;
    ((sum += i++ < count ? Found::kBoxBytes : 0), ...);
    return sum;
  }
};
template <class First, class... Rest, int kColumns, bool kSwapped, class... Found>
struct StageSubtiles<TypeList<First, Rest...>, kColumns, kSwapped, Found...>
    : Select<is_reduced<First>, StageSubtiles<TypeList<Rest...>, kColumns, kSwapped, Found...>,
             StageSubtiles<TypeList<Rest...>, kColumns, kSwapped, Found..., Subtile<First, kColumns, kSwapped>>> {};

constexpr int kSharedStages = 8;  // the first of the named barriers of groups that share stages

/// Blocks of 64 rows that a consumer has of each tile, where what it has of rows is kept from tile to tile; or 0.
template <class Config>
constexpr int kept_blocks() {
  if constexpr (Config::kBlockLines) {
    return Config::kTileM / (Config::kPingpong ? 1 : Config::kConsumers) / 64;
  } else {
    return 0;
  }
}

/// The epilogue of a warp. Config has, besides what core/fragment.cuh wants: Results, kStoreColumns, kEpilogueStages,
/// kTensorStore, kPairedStore, kPieceBytes, kStoreLines, kEvictFirst, kSwapped, kOwnLines, kBlockLines, kViews.
template <class Config>
struct TileEpilogue {
  using Operands = typename Config::Operands;
  using Results = typename Config::Results;
  using Accumulator = typename Config::Accumulator;
  static constexpr int kColumns = Config::kStoreColumns, kStages = Config::kEpilogueStages;
  using Subtiles = StageSubtiles<Select<Config::kTensorStore, Results, TypeList<>>, kColumns, Config::kSwapped>;
  static constexpr int kFetched = Config::kTensorStore ? 32 : 16;  // columns of operands that wait in registers
  static constexpr int kOperands = Operands::kArray;
  static constexpr int kResults = Results::kCount;
  static constexpr int kStored = StageSubtiles<Results, kColumns, Config::kSwapped>::Types::kCount;
  static constexpr int kTiles = tile_count<Operands>;
  static constexpr int kSharers = Config::kSwapped ? 4 : 1;  // warps that share stages
  static constexpr int kSharedBytes = kStages * Subtiles::bytes(Subtiles::Types::kCount) / kSharers;  // of a warp
  static constexpr int kBarrierBytes = kTiles > 0 ? 8 * kStages : 0;
  static constexpr bool kOverRows = kReducedOverRows<Results> > 0;
  static_assert(kTiles <= Subtiles::Types::kCount, "a tile is loaded where a result is stored from");

  const OperandAddress (&operands)[kOperands];
  const ResultAddress (&results)[kResults];
  int rows, columns;  // of a matrix
  unsigned stages;    // shared address of this warp's, or of those that it shares
  unsigned barriers;  // likewise
  OwnLines own = {};  // where what is reduced over rows has such
  int edge = 0;       // the column from which on what a tile has is another's, where there are views
  int begin = 0;      // the first of the columns whose lines leave whole
  StagePosition<kStages> position = {};
  Partials<Results, Config::kTileN / Config::kAccumulators, Config::kOwnLines, kept_blocks<Config>()> partials;

  /// Where the stages of warp `number` begin, and its barriers, of those of all warps.
  static __device__ __forceinline__ unsigned stages_of(int number, unsigned begin) {
    return begin + number / kSharers * kSharers * kSharedBytes;
  }
  static __device__ __forceinline__ unsigned barriers_of(int number, unsigned begin) {
    return begin + number / kSharers * kSharers * kBarrierBytes;
  }

  /// By one thread: makes the barriers of so many warps.
  static __device__ __forceinline__ void init(unsigned barriers, int warps) {
    for (int i = 0; i < warps * kBarrierBytes / 8; ++i) ptx::mbarrier_init(barriers + 8 * i, 1);
  }

  /// Before the first tile.
  __device__ __forceinline__ void open() {
    if constexpr (Config::kOwnLines) {
      partials.each([&](auto& partial, int result) {
        partial.clear();
        if constexpr (!Config::kBlockLines) partial.open(results[result], own);
      });
      if constexpr (!Config::kBlockLines) ptx::bar_warp_sync();  // other lanes add to what one has filled
    }
  }

  /// After a tile from `column` on, if the next one is of other columns, or of another matrix.
  __device__ __forceinline__ void leave(int column, int batch) {
    partials.each([&](auto& partial, int result) { partial.leave(results[result], own, column, batch); });
  }

  /// After the last tile of all warps of the block, whose tiles were all of the columns, or rows, from `begin` on:
  /// leaves their line. Warp `number` waits for the others at `barrier`.
  __device__ __forceinline__ void leave_together(int number, int barrier, int begin) {
    using Warps = BlockWarps<Config::kConsumers, 64 * kept_blocks<Config>(), Config::kPingpong, kSharedBytes>;
    constexpr int kBytes = 4 * (kOverRows ? Config::kTileN / Config::kAccumulators : Warps::kRows / 4);  // of a result
    static_assert((kResults - kStored) * kBytes <= kSharedBytes, "they meet where results are stored from");
    finish();
    meet();
    unsigned at = stages + number % kSharers * kSharedBytes;
    partials.each([&](auto& partial, int) {
      partial.put(at);
      at += kBytes;
    });
    ptx::barrier_sync(barrier, 32 * Warps::kWarps);
    at = stages - number / kSharers * kSharers * kSharedBytes;
    const int thread = 32 * number + threadIdx.x % 32, extent = kOverRows ? columns : rows;
    partials.each([&](auto& partial, int result) {
      partial.template gather<Warps>(results[result], own, at, thread, begin, extent);
      at += kBytes;
    });
  }

  /// Has tiles loaded, and brings the other operands that `apply` will read of `kBlocks` x `kWidth` into the caches,
  /// while these are still multiplied.
  template <int kBlocks, int kWidth, class Rows = StraightRows>
  __device__ __forceinline__ void prefetch(int row, int column, int batch, const Rows& others = {}) const {
    if constexpr (kTiles > 0) {
      if (leads()) {
        ptx::cp_async_bulk_wait_group_read<0>();
        auto next = position;
#pragma unroll
        for (int subtile = 0; subtile < kStages && subtile < kBlocks * kWidth / kColumns; ++subtile) {
          load<kWidth>(subtile, next.stage, row, column, batch, others);
          next.advance();
        }
      }
    }
    if constexpr (Rows::kStraight) {
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        prefetch_operands<Operands, kWidth>(operands, {row + block * 64, column, batch, rows, columns});
      }
    }
  }

  /// Rows `row` .. `row + 15` of a tile, which are `others` of the matrix, and as many of each block of 64 rows below.
  /// `accumulators` are the warp's registers: of a block one 64 x kWidth, or two side by side.
  template <int kBlocks, int kRegisters, class Rows = StraightRows>
  __device__ __forceinline__ void apply(const Accumulator (&accumulators)[kBlocks][kRegisters], int row, int column,
                                        int batch, const Rows& others = {}) {
    constexpr int kWidth = 2 * kRegisters / Config::kAccumulators, kSubtiles = kWidth / kColumns;
    constexpr int kFragments = kColumns / kFragmentColumns;
    static_assert(kWidth % kColumns == 0, "a tile is made of whole subtiles");
    static_assert(kResults == kStored || Config::kTileN == 2 * kRegisters, "what is reduced is so of a tile's columns");
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const int top = row + block * 64;
      const Presence present = this->present<kWidth>(top, column, batch, others);
      partials.each([](auto& partial, int) { partial.begin(); });
#pragma unroll
      for (int subtile = 0; subtile < kSubtiles; ++subtile) {
        const int left = column + subtile * kColumns;
        const FragmentCoordinate first = FragmentCoordinate::of_lane(top, left, batch, rows, columns).through(others);
        FragmentOperands<Operands, kFetched> values;
        values.fetch(operands, first);
        acquire_stage();
#pragma unroll
        for (int i = 0; i < kFragments; ++i) {
          constexpr int kAtOnce = kFetched / kFragmentColumns;
          const FragmentCoordinate at = first.to_the_right(i * kFragmentColumns);
          if (i > 0 && i % kAtOnce == 0) values.fetch(operands, at);
          values.read(*this, i);
          Fragment fragments[kResults];
          apply_to_fragment<Config>(accumulators[block], 8 * (subtile * kFragments + i), values, i % kAtOnce, operands,
                                    at, fragments);
          store<0, 0>(fragments, i, at);
          partials.each([&](auto& partial, int result) {
            partial.add(fragments[result], results[result], at, block, subtile * kFragments + i, present);
          });
        }
        store_stage(left, top, batch, others);
        if constexpr (kTiles > 0) {
          const int next = block * kSubtiles + subtile + kStages;  // that is loaded where this one was
          if (next < kBlocks * kSubtiles && leads()) {
            ptx::cp_async_bulk_wait_group_read<0>();
            load<kWidth>(next, position.stage, row, column, batch, others);
          }
        }
        position.advance();
      }
      partials.each([&](auto& partial, int result) {
        partial.finish(results[result], FragmentCoordinate::of_lane(top, column, batch, rows, columns), others);
      });
    }
  }

  /// Reads fragment `number` of tile kTile in the stage.
  template <int kTile, int kWords>
  __device__ __forceinline__ void read(int number, unsigned (&words)[kWords]) const {
    using Tile = TypeAt<kTile, typename Subtiles::Types>;
    Tile::get(place<kTile>(position.stage), number, words);
  }

  /// After the last tile of rows that leave in whole lines, which ended at `column`: what is left of them.
  __device__ __forceinline__ void store_rest(int row, int column, int batch) const {
    store_lines(column, row, column < columns ? column : columns, batch);
  }

  /// After the last tile: TMA has to have read the stages before the block goes, and its shared memory.
  __device__ __forceinline__ void finish() const {
    if constexpr (kSharedBytes > 0) {
      if (leads()) ptx::cp_async_bulk_wait_group_read<0>();
    }
  }

 private:
  __device__ __forceinline__ unsigned full(int stage) const { return barriers + 8 * stage; }

  /// Whether this thread starts the copies of the warp's stages.
  static __device__ __forceinline__ bool leads() { return threadIdx.x % (32 * kSharers) == 0; }

  /// Waits for all threads that share the stages.
  static __device__ __forceinline__ void meet() {
    if constexpr (kSharers == 1) {
      ptx::bar_warp_sync();
    } else {
      ptx::barrier_sync(kSharedStages + threadIdx.x / (32 * kSharers), 32 * kSharers);
    }
  }

  /// What the matrix has of 16 rows and kWidth columns, as far as it matters to what is reduced.
  template <int kWidth, class Rows>
  __device__ __forceinline__ Presence present(int row, int column, int batch, const Rows& others) const {
    Presence found;
    if constexpr (kStored < kResults) {
      const auto look = [&] {
        const auto its = FragmentCoordinate::of_lane(row, column, batch, rows, columns).through(others);
#pragma unroll
        for (int r = 0; r < 2; ++r) found.rows[r] = its.row + its.below * r < rows;
      };
      bool all_rows;
      if constexpr (Rows::kStraight) {
        look();
        all_rows = row + 16 <= rows;
      } else if constexpr (Rows::kBoxes) {
        all_rows = others.has_box(row);
        if (!all_rows) look();  // which takes divisions
      } else {
        look();
        all_rows = !ptx::vote_sync_any(!found.rows[0] || !found.rows[1]);
      }
      found.whole = all_rows && column + kWidth <= columns;
    }
    return found;
  }

  /// The shared address of subtile kSubtile of a stage.
  template <int kSubtile>
  __device__ __forceinline__ unsigned place(int stage) const {
    using Own = TypeAt<kSubtile, typename Subtiles::Types>;
    return stages + kStages * Subtiles::bytes(kSubtile) + stage * Own::kBytes;
  }

  /// Of subtile kSubtile.
  template <int kSubtile>
  static constexpr int row_bytes() {
    return TypeAt<kSubtile, typename Subtiles::Types>::kRowBytes;
  }

  /// By one thread: starts the copies of all tiles' subtile `number` of a tile of kWidth columns to a stage.
  template <int kWidth, class Rows>
  __device__ __forceinline__ void load(int number, int stage, int row, int column, int batch,
                                       const Rows& others) const {
    constexpr int kSubtiles = kWidth / kColumns;
    ptx::mbarrier_arrive_expect_tx(full(stage), Subtiles::box_bytes(kTiles));
    load_tiles<0, 0>(stage, row + number / kSubtiles * 64, column + number % kSubtiles * kColumns, batch, others);
  }

  template <int kOperand, int kTile, class Rows>
  __device__ __forceinline__ void load_tiles(int stage, int row, int column, int batch, const Rows& others) const {
    if constexpr (kTile < kTiles) {
      constexpr bool kIsTile = TypeAt<kOperand, Operands>::kIsTile;
      if constexpr (kIsTile) {
        const OperandAddress& operand = operands[kOperand];
        others.load(operand.map, place<kTile>(stage), full(stage), row_bytes<kTile>(), column, row,
                    operand.batch_stride == 0 ? 0 : batch);
      }
      load_tiles<kOperand + 1, kTile + kIsTile>(stage, row, column, batch, others);
    }
  }

  /// Waits until the stage has what is loaded to it, or until TMA has read what it held before.
  __device__ __forceinline__ void acquire_stage() const {
    if constexpr (kTiles > 0) {
      mbarrier_wait(full(position.stage), position.parity);
    } else if constexpr (kSharedBytes > 0) {
      if (leads()) ptx::cp_async_bulk_wait_group_read<kStages - 1>();
      meet();
    }
  }

  /// Has TMA store the stage, or the warp, where its rows are no neighbours.
  template <class Rows>
  __device__ __forceinline__ void store_stage(int column, int row, int batch, const Rows& others) {
    if constexpr (Config::kStoreLines) {
      ptx::bar_warp_sync();
      store_lines(column, row, columns, batch);
    } else if constexpr (kSharedBytes > 0 && !Rows::kBoxes) {
      ptx::bar_warp_sync();
      // Which row the matrix has there may take divisions: each lane reckons one of 16.
      copy_rows<0, 0>(column, row, others(row + threadIdx.x % 16), batch, others);
    } else if constexpr (kSharedBytes > 0) {
      ptx::fence_proxy_async();
      meet();
      if (leads()) {
        send<0, 0>(column, row, batch, others);
        ptx::cp_async_bulk_commit_group();
      }
    }
  }

  /// Fragment `number` of a subtile: into the stage, or to memory.
  template <int kResult, int kSubtile>
  __device__ __forceinline__ void store(const Fragment (&fragments)[kResults], int number,
                                        const FragmentCoordinate& at) const {
    if constexpr (kResult < kResults) {
      using T = TypeAt<kResult, Results>;
      if constexpr (Config::kStoreLines) {
        ring().put(position.stage, number, fragments[kResult]);
      } else if constexpr (!is_reduced<T> && Config::kTensorStore) {
        Subtile<T, kColumns, Config::kSwapped>::put(place<kSubtile>(position.stage), number, fragments[kResult]);
      } else if constexpr (!is_reduced<T>) {
        T* const matrix = static_cast<T*>(results[kResult].data) + static_cast<long long>(at.batch) * rows * columns;
        store_direct<T, Config::kPairedStore>(matrix, at, fragments[kResult]);
      }
      store<kResult + 1, kSubtile + !is_reduced<T>>(fragments, number, at);
    }
  }

  using Line = LineRing<TypeAt<0, Results>, Config::kPieceBytes>;
  __device__ __forceinline__ Line ring() const { return {stages}; }

  /// Stores the lines that end before the subtile at `column` does, up to column `end`.
  __device__ __forceinline__ void store_lines(int column, int row, int end, int batch) const {
    static_assert(kResults == 1 && kStages == 2 && Line::kRowBytes == 2 * row_bytes<0>(), "two subtiles are a ring");
    auto* const matrix =
        static_cast<TypeAt<0, Results>*>(results[0].data) + static_cast<long long>(batch) * rows * columns;
    ring().store(matrix, position.stage, row, rows, column, columns, begin, end, UnalignedRows());
  }

  /// A warp's rows to where they are in the matrix, a piece at once. Lanes know the matrix' rows, of 16 one each.
  template <int kResult, int kSubtile, class Rows>
  __device__ __forceinline__ void copy_rows(int column, int row, int of_lane, int batch, const Rows& others) const {
    if constexpr (kResult < kResults) {
      using T = TypeAt<kResult, Results>;
      if constexpr (!is_reduced<T>) {
        using Own = Subtile<T, kColumns>;
        constexpr int kSize = static_cast<int>(sizeof(T)), kPiece = Config::kPieceBytes;
        constexpr int kBytes = kPiece > kSize ? kPiece : kSize, kPieces = Own::kRowBytes / kBytes;
        T* const matrix = static_cast<T*>(results[kResult].data) + static_cast<long long>(batch) * rows * columns;
        static_assert(kPieces % 2 == 0, "each lane has pieces of its own");
        constexpr int kTurns = 16 * kPieces / 32, kAtOnce = kBytes <= 4 && kTurns % 4 == 0 ? 4 : 1;
#pragma unroll
        for (int turn = 0; turn < kTurns; turn += kAtOnce) {
          unsigned words[kAtOnce][(kBytes + 3) / 4];  // of short pieces several, or each would wait for its own
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i) {
            const int index = 32 * (turn + i) + threadIdx.x % 32, byte = index % kPieces * kBytes;
            const unsigned offset = Own::offset(index / kPieces, byte / 16) + byte % 16;
            ptx::ld_shared<kBytes>(words[i], place<kSubtile>(position.stage) + offset);
          }
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i) {
            const int index = 32 * (turn + i) + threadIdx.x % 32, line = index / kPieces;
            const int to = Rows::kStraight ? row + line : ptx::shfl_sync_idx(of_lane, line);
            const int first = column + index % kPieces * kBytes / kSize;
            if (to >= rows || first >= columns || (Config::kViews > 1 && first >= edge)) continue;
            ptx::st_global<kBytes>(matrix + others.offset(to, first, columns), words[i]);
          }
        }
      }
      copy_rows<kResult + 1, kSubtile + !is_reduced<T>>(column, row, of_lane, batch, others);
    }
  }

  template <int kResult, int kSubtile, class Rows>
  __device__ __forceinline__ void send(int column, int row, int batch, const Rows& others) const {
    if constexpr (kResult < kResults) {
      using T = TypeAt<kResult, Results>;
      if constexpr (!is_reduced<T>) {
        const TensorMap* const map = results[kResult].map;
        others.template store<Config::kEvictFirst>(map, place<kSubtile>(position.stage), row_bytes<kSubtile>(), column,
                                                   row, batch);
      }
      send<kResult + 1, kSubtile + !is_reduced<T>>(column, row, batch, others);
    }
  }
};

}  // namespace jaxdnn
