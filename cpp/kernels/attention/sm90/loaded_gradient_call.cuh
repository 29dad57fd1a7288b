// A call of the kernel of gradients of what scores load (attention/sm90_loaded_gradient.cuh): how the array is cut into
// tiles, where they lie in shared memory, and which scores add to them.
#pragma once

#include "attention/lists.cuh"
#include "attention/sm90/call.cuh"
#include "attention/strip.cuh"

namespace jaxdnn {

/// What a `Config` has besides T, kTileN, kHeadSize, kValueSize, the stages of vectors' rings, Score and DLoaded, the
/// gradient's EpilogueOperand.
struct AttentionSm90LoadedGradientDefaults : AttentionMaskDefaults {
  static constexpr int kTileM = 128;
  static constexpr int kSeenM = 64, kSeenN = 128;  // blocks of which it is known what is visible
  static constexpr bool kOut = true;               // whether results have a cotangent
  static constexpr int kCluster = 1;               // blocks of one, of an array whose rows and columns are all its own
  // Of tiles of an array that Score reads, 0 where it reads none; and whether all scores of a tile read the same one.
  static constexpr int kLoadedStages = 0;
  static constexpr bool kLoadedOnce = false;
  using Seeds = void;
};

template <class Config>
struct AttentionSm90LoadedGradient : AttentionMask<Config> {
  using T = typename Config::T;
  const TensorMap *query = nullptr, *key = nullptr, *value = nullptr, *d_out = nullptr, *score_tile = nullptr;
  const float* rows = nullptr;    // of each query the log-sum-exp, to the base of 2, and delta (backward_rows.cuh)
  const Visible* seen = nullptr;  // blocks of each matrix; strides are of matrices
  long long seen_element = 0, seen_head = 0;
  OperandAddress seeds, score_operands[kOperandsOf<typename Config::Score>];
  OperandAddress d_loaded, summed;  // of target i and member j, the batch: i a batch, j a row
  int targets = 1, members = 1, parts = 1;
  long long part_stride = 0;
  int batch_rows = 0;                                                            // of `rows`
  int group = 1;                                                                 // query heads that share a key head
  int query_batched = 1, key_batched = 1, value_batched = 1, d_out_batched = 1;  // 0 when one array serves the batch
  int score_batched = 1, score_headed = 1;  // likewise; and when one serves all heads
  float scale = 1;
  unsigned threshold = 0;  // of dropout, and the factor of what is kept
  float kept = 1;

  static constexpr int kTileM = Config::kTileM, kTileN = Config::kTileN, kThreads = 384, kConsumers = 2;
  using DLoaded = typename Config::DLoaded;
  static_assert(Config::kCluster == 1 || (DLoaded::kByRow && DLoaded::kByColumn), "sums stay in a block");
  using Cluster = ClusterCoordinate<Config::kCluster, 1>;
  using QueryTile = VectorTile<T, kTileM, Config::kHeadSize>;
  using DOutTile = VectorTile<T, kTileM, Config::kValueSize>;
  using KeyTile = VectorTile<T, kTileN, Config::kHeadSize>;
  using ValueTile = VectorTile<T, kTileN, Config::kValueSize>;
  using LoadedTile = VectorTile<T, kTileM, kTileN>;
  using Scores = TmaPipeline<Config::kScoreStages, QueryTile::kBytes + KeyTile::kBytes, Cluster>;
  using Weights = TmaPipeline<Config::kWeightStages, DOutTile::kBytes + ValueTile::kBytes, Cluster>;
  using Loaded = TmaPipeline<Config::kLoadedStages, LoadedTile::kBytes>;
  static constexpr int kWeightsAt = Config::kScoreStages * Scores::kStageStride;
  static constexpr int kLoadedAt = kWeightsAt + Config::kOut * Config::kWeightStages * Weights::kStageStride;
  static constexpr int kSumsAt = kLoadedAt + Config::kLoadedStages * LoadedTile::kBytes;
  static constexpr int kBarriersAt = kSumsAt + (DLoaded::kByRow ? 0 : 8 * kTileN * 4);
  static constexpr int kWeightBarriersAt = kBarriersAt + Scores::kBarrierBytes;
  static constexpr int kLoadedBarriersAt = kWeightBarriersAt + Weights::kBarrierBytes;
  static constexpr int kSharedBytes = kLoadedBarriersAt + Loaded::kBarrierBytes;
};

/// A tile of the array, and a walk through the tiles of scores that add to it.
template <class Config>
struct LoadedGradientTile : KeyRange<Config> {
  using Call = AttentionSm90LoadedGradient<Config>;
  using DLoaded = typename Config::DLoaded;
  static constexpr bool kByRow = DLoaded::kByRow, kByColumn = DLoaded::kByColumn;
  static constexpr bool kListed = !is_same<typename Config::Mask, void>;
  static constexpr int kRows = Config::kCluster * Call::kTileM;  // of a cluster

  const Call& call;
  const int row_in_cluster;
  int row_tiles, column_tiles, own_row, own_column, own_batch, part;
  long long step;
  int batch, first_query, first_key_of_tile;  // of the scores
  bool partial;                               // whether some of the cluster's are not visible

  static __device__ __forceinline__ int tiles(int length, int tile) { return (length + tile - 1) / tile; }

  __device__ __forceinline__ LoadedGradientTile(const Call& call, const typename Call::Cluster& cluster, int index)
      : call(call),
        row_in_cluster(cluster.row * Call::kTileM),
        row_tiles(tiles(call.query_length, kRows)),
        column_tiles(tiles(call.key_length, Call::kTileN)) {
    part = index % call.parts;
    const int owner = index / call.parts, own_columns = kByColumn ? column_tiles : 1;
    own_column = owner % own_columns;
    own_row = owner / own_columns % (kByRow ? row_tiles : 1);
    own_batch = static_cast<int>(call.summed.template of_batch<true>(owner / own_columns / (kByRow ? row_tiles : 1)));
    step = part;
    find();
  }

  static __device__ __forceinline__ int count(const Call& call) {
    const int own =
        (kByRow ? tiles(call.query_length, kRows) : 1) * (kByColumn ? tiles(call.key_length, Call::kTileN) : 1);
    return call.targets * own * call.parts;
  }

  /// Of the array, where rows, or columns, are not summed over.
  __device__ __forceinline__ int own_first_row() const { return own_row * kRows + row_in_cluster; }
  __device__ __forceinline__ int own_first_column() const { return own_column * Call::kTileN; }

  __device__ __forceinline__ bool on_a_step() const { return step < steps(); }

  __device__ __forceinline__ void advance() {
    step += call.parts;
    find();
  }

 private:
  __device__ __forceinline__ long long steps() const {
    return static_cast<long long>(call.members) * (kByRow ? 1 : row_tiles) * (kByColumn ? 1 : column_tiles);
  }

  /// The next step of which something is visible.
  __device__ __forceinline__ void find() {
    for (; on_a_step(); step += call.parts) {
      const int summed_rows = kByRow ? 1 : row_tiles, summed_columns = kByColumn ? 1 : column_tiles;
      const int column = kByColumn ? own_column : static_cast<int>(step % summed_columns);
      const int row = kByRow ? own_row : static_cast<int>(step / summed_columns % summed_rows);
      const int member = static_cast<int>(step / summed_columns / summed_rows);
      batch = own_batch + static_cast<int>(call.summed.template of_row<true>(member));
      first_query = row * kRows + row_in_cluster;
      first_key_of_tile = column * Call::kTileN;
      this->read(call, batch);
      if (visible(row * kRows)) return;
    }
  }

  /// Of all rows of the cluster, whose blocks take the same steps.
  __device__ __forceinline__ bool visible(int first) {
    const int last = this->last_query(first, kRows), end = first_key_of_tile + Call::kTileN;
    if (last < first || this->end_key(call, last) <= first_key_of_tile || this->first_key(call, first) >= end)
      return false;
    if constexpr (kListed) {
      const int element = batch / call.query_heads, head = batch - element * call.query_heads;
      const int rows = tiles(call.query_length, Config::kSeenM), columns = tiles(call.key_length, Config::kSeenN);
      const Visible* const seen = call.seen + (element * call.seen_element + head * call.seen_head) * rows * columns;
      bool none = true;
      partial = last + 1 < first + kRows || end > this->key_length;
      for (int m = first / Config::kSeenM; m <= last / Config::kSeenM; ++m) {
        for (int n = first_key_of_tile / Config::kSeenN; n < columns && n * Config::kSeenN < end; ++n) {
          const Visible found = seen[static_cast<long long>(m) * columns + n];
          none = none && found == Visible::none;
          partial = partial || found != Visible::all;
        }
      }
      return !none;
    } else {
      partial = last + 1 < first + kRows || this->first_key(call, last) > first_key_of_tile ||
                this->end_key(call, first) < end;
      return true;
    }
  }
};

}  // namespace jaxdnn
