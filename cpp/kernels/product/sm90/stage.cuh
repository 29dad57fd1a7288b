// Stages of product/sm90.cuh: the tiles of both operands that one holds, where these are matrices in memory, how they
// are loaded, and a warp group's multiplies of them.
#pragma once

#include "core/group_tile.cuh"
#include "core/tile.cuh"
#include "core/views.cuh"

namespace jaxdnn {

/// The copies of one tile's operands, where these are matrices; by one thread.
template <class Call>
struct MatrixLoads {
  using ATile = typename Call::Stage::ATile;
  using BTile = typename Call::Stage::BTile;

  const Call& call;
  const typename Call::Cluster& cluster;
  int row, column, batch;
  int k_first;  // where the first stage begins
  EdgeLoad<ATile> a_edge;
  EdgeLoad<BTile> b_edge;  // of the first matrix B, of which others have as much

  __device__ __forceinline__ MatrixLoads(const Call& call, const typename Call::Cluster& cluster, int row, int column,
                                         int batch, int first_stage)
      : call(call),
        cluster(cluster),
        row(row),
        column(column),
        batch(batch),
        k_first(first_stage * ATile::kDepth),
        a_edge(call.a, call.a_edge, call.a_edge_less, cluster.column, row, call.tiled_rows()),
        b_edge(call.b[0], call.b_edge[0], call.b_edge_less, cluster.row, column, call.n) {}

  /// Starts those of stage `index`, at shared address `stage`.
  __device__ __forceinline__ void load(int index, unsigned stage, unsigned full) {
    const unsigned short a_blocks = cluster.row_mask(), b_blocks = cluster.column_mask();
    const int k = k_first + index * ATile::kDepth;
    constexpr int kViews = Call::Config::kViews;
    // Many tiles end past the last column, and of all rows of tiles one past the last row: unless the product is
    // transposed, the producer's few registers are worth more. Of views, columns to the right are moved to the left.
    constexpr bool kToLastRow = Call::Config::kSwapped, kToLastColumn = kViews == 1;
    if constexpr (Call::Config::kEdgeA) {
      a_edge.load(stage, full, cluster.column, a_blocks, k, row, batch * call.a_batched);
    } else {
      ATile::template load<1, kToLastRow>(call.a, stage, full, cluster.column, a_blocks, k, row, batch * call.a_batched,
                                          0, call.tiled_rows());
    }
    const int view = kViews > 1 ? index / call.view_stages : 0, b_k = k - view * call.view_stages * ATile::kDepth;
#pragma unroll
    for (int i = 0; i < Call::kAccumulators; ++i) {
      if constexpr (Call::Config::kEdgeB) {
        EdgeLoad<BTile> edge = b_edge;
        if (i > 0) edge.map = edge.map == call.b[0] ? call.b[i] : call.b_edge[i];
        edge.load(stage + ATile::kBytes + i * BTile::kBytes, full, cluster.row, b_blocks, k, column,
                  batch * call.b_batched);
        continue;
      }
      const TensorMap* b = call.b[i * kViews];
#pragma unroll
      for (int j = 1; j < kViews; ++j) b = view == j ? call.b[i * kViews + j] : b;
      BTile::template load<1, kToLastColumn>(b, stage + ATile::kBytes + i * BTile::kBytes, full, cluster.row, b_blocks,
                                             b_k, column, batch * call.b_batched, 0, call.n);
    }
  }
};

/// What a stage holds, and a warp group's multiplies of it: tiles of both operands, in shared memory.
template <class Config>
struct TileStage {
  static constexpr int kWidth = Config::kTileN / Config::kAccumulators;
  static constexpr int kLoaded = Config::kNMajorB ? (kWidth + kChunk - 1) / kChunk * kChunk : kWidth;  // of B's columns
  using ATile =
      OperandTile<typename Config::A, Config::kTileM, Config::kMMajorA, Config::kClusterN, false, Config::kLine>;
  template <int kColumns>
  using TileOfB = OperandTile<typename Config::B, kColumns, Config::kNMajorB, Config::kClusterM, false,
                              Config::kNMajorB ? 128 : Config::kLine, Config::kGroups>;
  using BTile = TileOfB<kLoaded>;
  using BTiles = TileOfB<Config::kAccumulators * kLoaded>;  // of both matrices, in each part one behind the other
  static constexpr int kDepth = ATile::kDepth, kBytes = ATile::kBytes + Config::kAccumulators * BTile::kBytes;
  static_assert(Config::kAccumulators == 1 || kLoaded == kWidth,
                "one multiply reads both matrices, one behind the other");
  static_assert(Config::kGroups == 1 || kLoaded == Config::kTileN, "a group's columns lie behind the one's before");

  unsigned long long a, b;  // descriptors of the first stage's tiles
  unsigned stages;          // shared address
  int first_row;            // of the warp's

  /// Of the rows from `first_row` on, in stages at shared address `stages`.
  template <class Call>
  __device__ __forceinline__ TileStage(const Call&, unsigned stages, int first_row)
      : a(ATile::descriptor(stages) + ATile::block(first_row / 64)),
        b(BTile::descriptor(stages + ATile::kBytes)),
        stages(stages),
        first_row(first_row + threadIdx.x / 32 % 4 * 16) {}

  /// Starts the multiplies of the stage in place `stage` of the ring. Which part of K it is matters to others.
  template <int kSteps = Config::kSteps, class Accumulators>
  __device__ __forceinline__ void multiply(Accumulators& accumulators, int stage, int, bool accumulate) const {
    if constexpr (BTile::kGroups > ATile::kSteps) {
      const unsigned tiles = stages + stage * kBytes;
      multiply_groups<ATile, BTile>(accumulators, tiles + first_row * kDepthBytes, tiles + ATile::kBytes, accumulate);
    } else {
      ptx::wgmma_fence();
      multiply_tiles<ATile, BTiles, kSteps>(accumulators, a, b, stage_offset(stage, kBytes), accumulate);
      ptx::wgmma_commit_group();
    }
  }
};

}  // namespace jaxdnn
