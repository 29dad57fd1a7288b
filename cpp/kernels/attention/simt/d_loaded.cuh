// The gradient of an array that attention's function of scores loads: the sum of what each score adds, over the
// batches, rows and columns that load the same element.
//
//   grid             blocks of kTileM x kTileN elements of the array, for those batches that have elements of their
//   own;
//                    times `parts`, of which each sums some of the tiles of scores, and writes its own array of sums.
//                    A row or column that is summed over has one block for all of it
//   block            scores and their cotangents as on the side of queries in attention/simt/backward.cuh, added up in
//                    registers; rows or columns that are summed are, at the end, in shared memory
//   barriers         two __syncthreads a tile of scores, up to four at the end
//   shared memory    | Q | d_out | K | V |, and at the end the tile of sums
//
// Flops: 2 (d + dv) for each score. Exactly, at one fused multiply-add a lane and cycle, they bound it.
#pragma once

#include "attention/simt/backward.cuh"

namespace jaxdnn {

template <class Config>
struct AttentionSimtDLoaded {
  using Call = AttentionSimt<Config>;
  using Element = typename Config::Element;
  using Scores = AttentionScores<Config>;
  using Tile = BackwardScores<Config, false>;
  using Products = typename Tile::Products;
  using Strip = typename SimtTiles<Config>::Strip;
  using Operand = typename Config::DLoaded;
  static constexpr bool kByRow = Operand::kByRow, kByColumn = Operand::kByColumn;
  static constexpr int kTileM = Config::kTileM, kTileN = Config::kTileN;
  static constexpr int kThreads = SimtTiles<Config>::kThreads;
  static constexpr int kEnd = Tile::kEnd > Strip::kCount ? Tile::kEnd : Strip::kCount;
  static constexpr int kSharedBytes = kEnd * static_cast<int>(sizeof(Element));

  const Call& call;
  Tile tile;
  Products sums;

  __device__ __forceinline__ void run(int block) {
    const int row_tiles = (call.query_length + kTileM - 1) / kTileM;
    const int column_tiles = (call.key_length + kTileN - 1) / kTileN;
    const int own_rows = kByRow ? row_tiles : 1, own_columns = kByColumn ? column_tiles : 1;
    const int summed_rows = kByRow ? 1 : row_tiles, summed_columns = kByColumn ? 1 : column_tiles;
    const int part = block % call.parts, owner = block / call.parts;
    const int own_column = owner % own_columns, own_row = owner / own_columns % own_rows;
    const int first = static_cast<int>(call.summed.template of_batch<true>(owner / own_columns / own_rows));
    const long long steps = static_cast<long long>(call.members) * summed_rows * summed_columns;
    sums.clear();
#pragma unroll 1
    for (long long step = part; step < steps; step += call.parts) {
      const int column_tile = kByColumn ? own_column : static_cast<int>(step % summed_columns);
      const int row_tile = kByRow ? own_row : static_cast<int>(step / summed_columns % summed_rows);
      const int member = static_cast<int>(step / summed_columns / summed_rows);
      const Scores scores(call, first + static_cast<int>(call.summed.template of_row<true>(member)));
      const int row = row_tile * kTileM, column = column_tile * kTileN;
      const Span span = scores.keys_of({row, row + kTileM});
      if (column < span.end && column + kTileN > span.begin && tile.find(scores, row, column)) add(scores);
    }
    store({own_row * kTileM, own_column * kTileN, first}, part);
  }

 private:
  __device__ __forceinline__ void add(const Scores& scores) {
    __syncthreads();
    tile.start_staying(scores);
    tile.start_passing(scores);
    ptx::cp_async_commit_group();
    ptx::cp_async_wait_group<0>();
    tile.finish_staying();
    tile.finish_passing();
    __syncthreads();
    tile.multiply();
    tile.template differentiate<Config::kOutput>(scores);
    Products::each([&](int i, int j) { sums.values[i][j] += tile.products.values[i][j]; });
  }

  __device__ __forceinline__ void store(const Coordinate& first, int part) {
    Element* const shared = tile.shared;
    __syncthreads();
    Products::each(
        [&](int i, int j) { shared[Products::row(i) * Strip::kPitch + Products::column(j)] = sums.values[i][j]; });
    __syncthreads();
    if constexpr (!kByRow) {
      for (int column = threadIdx.x; column < kTileN; column += kThreads) {
        for (int row = 1; row < kTileM; ++row) shared[column] += shared[row * Strip::kPitch + column];
      }
      __syncthreads();
    }
    constexpr int kOwnRows = kByRow ? kTileM : 1;
    if constexpr (!kByColumn) {
      for (int row = threadIdx.x; row < kOwnRows; row += kThreads) {
        for (int column = 1; column < kTileN; ++column)
          shared[row * Strip::kPitch] += shared[row * Strip::kPitch + column];
      }
      __syncthreads();
    }
    using T = typename Operand::Type;
    T* const to = static_cast<T*>(const_cast<void*>(call.d_loaded.data)) + part * call.part_stride;
    constexpr int kOwnColumns = kByColumn ? kTileN : 1;
    for (int i = threadIdx.x; i < kOwnRows * kOwnColumns; i += kThreads) {
      const int row = i / kOwnColumns, column = i % kOwnColumns;
      const Coordinate at{first.row + row, first.column + column, first.batch};
      if (at.row >= call.query_length || at.column >= call.key_length) continue;
      to[call.d_loaded.template offset<Operand>(at)] = narrow<T>(shared[row * Strip::kPitch + column]);
    }
  }
};

template <class Config>
__device__ __forceinline__ void attention_simt_d_loaded(const AttentionSimt<Config>& call) {
  extern __shared__ __align__(16) unsigned char shared_memory[];
  AttentionSimtDLoaded<Config>{call, {reinterpret_cast<typename Config::Element*>(shared_memory)}}.run(blockIdx.x);
}

}  // namespace jaxdnn
