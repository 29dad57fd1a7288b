// The gradient of an array that attention's function of scores loads, on Hopper's tensor cores: the sum of what each
// score adds, over the batches, rows and columns that load the same element.
//
//   p = exp(score - log_sum_exp)      d_p = kept * (d_out . value)      added = p * (d_p - delta) * slope
//
// where the slope, of the score by what is loaded, is the function's second result, if it isn't one.
//
//   grid             at most one block a multiprocessor. Each works through tiles of kTileM x kTileN elements of the
//                    array, dealt in turn, for those batches that have elements of their own; times `parts`, of which
//                    each sums some of the tiles of scores, and writes its own array of sums. A row or column that is
//                    summed over is in one tile as a whole. The kCluster blocks of a cluster have tiles of
//                    neighbouring rows, and share keys, which the first one loads, and values, which the last one does
//   warp groups      two, of 64 rows each, then one producer, of which one thread starts the copies. While one has
//                    arithmetic to do, the tensor cores have the other's multiplies
//
//                        tensor cores | S = Q K^T | dP = dO V^T |       |  S, dP of the next tile of scores ...
//                        arithmetic               | p, slopes   | added |
//
//   masks            hide what scores add. Tiles of which nothing is visible are left out: by arithmetic, or by what
//                    attention/lists.cuh says of blocks of kSeenM x kSeenN
//   sums             in registers, in a fixed order; rows or columns that are summed are at the end of a tile
//   what is loaded   an array with a row for each query and an element for each key comes in tiles by TMA, where it
//   can.
//                    All scores that add to a tile of a bias read the same tile of it, which is loaded once
//
//   barriers         full[stage]   of the rings of Q with K, of dO with V and of loaded tiles: 1 arrival (the
//   producer's)
//                    empty[stage]  a lane of each consuming warp: 8, of the first two of each block of a cluster
//                    named 1       256 threads: sums of warps are in shared memory, or have been read
//   shared memory    | Q, K stages | dO, V stages | loaded tiles | a line of sums of each warp, if there are any |
//   barriers
//                    |
//   registers        of a consumer's thread: kTileN / 2 for each of S, dP and the sums
//
// Bytes: for each tile of scores those of its queries, keys, cotangents and values, from the L2 cache: with 128 x 128
// of 64 elements 64 KiB, or 48 in a cluster of two, in the 1024 clocks of its multiplies. The cache gives about 24 of
// them a clock, which is what bounds it. Flops: 2 (d + dv) for each score, and one exponential, in as many clocks at d
// = dv = 64.
#pragma once

#include "attention/dropout.cuh"
#include "attention/sm90/loaded_gradient_call.cuh"
#include "core/reduce.cuh"
#include "ptx/math.cuh"
#include "ptx/mma.cuh"

namespace jaxdnn {

/// The work of one block.
template <class Config>
struct LoadedGradientBlock {
  using Call = AttentionSm90LoadedGradient<Config>;
  using Tile = LoadedGradientTile<Config>;
  static constexpr bool kTiled = Config::kLoadedStages > 0;

  const Call& call;
  unsigned shared;
  typename Call::Scores scores;
  typename Call::Weights weights;
  typename Call::Loaded loaded;

  __device__ __forceinline__ LoadedGradientBlock(const Call& call, unsigned shared)
      : call(call),
        shared(shared),
        scores(shared, shared + Call::kBarriersAt),
        weights(shared + Call::kWeightsAt, shared + Call::kWeightBarriersAt),
        loaded(shared + Call::kLoadedAt, shared + Call::kLoadedBarriersAt) {}

  template <class Visit>
  __device__ __forceinline__ void each_tile(const Visit& visit) const {
    const int count = Tile::count(call);
    for (int index = blockIdx.x / Config::kCluster; index < count; index += gridDim.x / Config::kCluster) {
      Tile tile(call, scores.cluster, index);
      visit(tile);
    }
  }

  /// Starts the copies of all tiles; by one thread.
  __device__ __forceinline__ void load() const {
    StageWriter<typename Call::Scores> to_scores{scores};
    StageWriter<typename Call::Weights> to_weights{weights};
    StageWriter<typename Call::Loaded> to_loaded{loaded};
    const auto load_tile = [&](int batch, int row, int column) {
      const int element = batch / call.query_heads, head = batch - element * call.query_heads;
      to_loaded.fill([&](unsigned stage, unsigned full) {
        Call::LoadedTile::load(call.score_tile, stage, full, row, head * call.score_headed,
                               element * call.score_batched, column);
      });
    };
    each_tile([&](Tile& tile) {
      if constexpr (kTiled && Config::kLoadedOnce) {
        load_tile(tile.own_batch, tile.own_first_row(), tile.own_first_column());
      }
      for (; tile.on_a_step(); tile.advance()) {
        const int element = tile.batch / call.query_heads, head = tile.batch - element * call.query_heads;
        const int key_head = head / call.group;
        to_scores.fill([&](unsigned stage, unsigned full) {
          Call::QueryTile::load(call.query, stage, full, tile.first_query, head, element * call.query_batched);
          Call::KeyTile::load_by(0, call.key, stage + Call::QueryTile::kBytes, full, tile.first_key_of_tile, key_head,
                                 element * call.key_batched, scores.cluster);
        });
        if constexpr (kTiled && !Config::kLoadedOnce) load_tile(tile.batch, tile.first_query, tile.first_key_of_tile);
        if constexpr (Config::kOut) {
          to_weights.fill([&](unsigned stage, unsigned full) {
            Call::DOutTile::load(call.d_out, stage, full, tile.first_query, head, element * call.d_out_batched);
            Call::ValueTile::load_by(Config::kCluster - 1, call.value, stage + Call::DOutTile::kBytes, full,
                                     tile.first_key_of_tile, key_head, element * call.value_batched, weights.cluster);
          });
        }
      }
    });
  }
};

/// The work of one warp group that multiplies. A thread has two rows, 8 apart, as ptx/wgmma.cuh says: element i of an
/// accumulator is of row i / 2 % 2.
template <class Config>
struct LoadedGradientConsumer {
  using Call = AttentionSm90LoadedGradient<Config>;
  using Tile = LoadedGradientTile<Config>;
  using DLoaded = typename Config::DLoaded;
  static constexpr int kScores = Config::kTileN / 2;
  static constexpr bool kDropped = !is_same<typename Config::Seeds, void>;
  static constexpr bool kTiled = LoadedGradientBlock<Config>::kTiled;
  static constexpr ptx::WgmmaType kType = wgmma_type<typename Config::T>();

  const LoadedGradientBlock<Config>& block;
  const int consumer, first_row, lane;  // of the thread, in the tile; and in its warp
  StageReader<typename Call::Scores> score_stages;
  StageReader<typename Call::Weights> weight_stages;
  StageReader<typename Call::Loaded> loaded_tiles;
  StripFunction<typename Config::Score, kFragmentColumns> score;

  float sums[kScores];

  __device__ __forceinline__ LoadedGradientConsumer(const LoadedGradientBlock<Config>& block, int consumer)
      : block(block),
        consumer(consumer),
        first_row(consumer * 64 + ptx::shfl_sync_idx(threadIdx.x / 32 % 4) * 16 + threadIdx.x % 32 / 4),
        lane(threadIdx.x % 32),
        score_stages{block.scores},
        weight_stages{block.weights},
        loaded_tiles{block.loaded} {}

  __device__ __forceinline__ void consume() {
    block.each_tile([&](Tile& tile) {
#pragma unroll
      for (int i = 0; i < kScores; ++i) sums[i] = 0;
      if constexpr (kTiled && Config::kLoadedOnce) loaded_tiles.wait();
      for (; tile.on_a_step(); tile.advance()) add(tile);
      if constexpr (kTiled && Config::kLoadedOnce) let_go_of_loaded();
      store(tile);
    });
  }

 private:
  /// Products of the vectors of a stage: those of rows, and after them those of columns.
  template <class Rows, class Columns>
  __device__ __forceinline__ void start_products(float (&products)[kScores], unsigned stage) const {
    const unsigned long long rows = Rows::descriptor(stage) + Rows::vectors(4 * consumer);
    const unsigned long long columns = Columns::descriptor(stage + Rows::kBytes);
    ptx::warpgroup_fence_operand(products);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < Rows::kSize / 16; ++i) {
      ptx::Wgmma<Config::kTileN>::template mma_async<kType, kType, false, false>(products, rows + Rows::elements(i),
                                                                                 columns + Columns::elements(i), i > 0);
    }
    ptx::wgmma_commit_group();
  }

  /// What one tile of scores adds.
  __device__ __forceinline__ void add(const Tile& tile) {
    const Call& call = block.call;
    const FragmentCoordinate at{tile.first_query + first_row, tile.first_key_of_tile + lane % 4 * 2, tile.batch,
                                call.query_length, call.key_length};
    float log_sum_exp[2], delta[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = at.row + 8 * r;
      Vector<float, 2> numbers;
      numbers.load(call.rows + 2 * (static_cast<long long>(tile.batch) * call.batch_rows +
                                    (row < call.query_length ? row : call.query_length - 1)));
      log_sum_exp[r] = numbers.get(0);
      delta[r] = numbers.get(1);
    }
    score.fetch(call.score_operands, at);
    float weights[kScores], gradients[kScores];
    score_stages.wait();
    start_products<typename Call::QueryTile, typename Call::KeyTile>(weights,
                                                                     block.scores.stage(score_stages.position.stage));
    if constexpr (Config::kOut) {
      weight_stages.wait();
      start_products<typename Call::DOutTile, typename Call::ValueTile>(
          gradients, block.weights.stage(weight_stages.position.stage));
    }
    ScoreSetOf<kScores> dropped;
    if constexpr (kDropped) {
      const Dropout dropout = Dropout::of_batch<typename Config::Seeds>(call.seeds, tile.batch, call.threshold);
      dropout.each_dropped<kScores>(at, [&](int i) { dropped.add(i); });
    }
    ptx::wgmma_wait_group<Config::kOut>();
    ptx::warpgroup_fence_operand(weights);
    score_stages.release();
    score_stages.advance();
#pragma unroll
    for (int i = 0; i < kScores; ++i) weights[i] *= call.scale;
    apply_score(weights, at, [&](int i, float score, auto... slope) {
      const float exponent = ptx::fma_rn(score, 1.4426950408889634f, -log_sum_exp[i / 2 % 2]);
      weights[i] = (ptx::ex2_approx_ftz(exponent) * ... * static_cast<float>(slope));
    });
    if (tile.partial) each_hidden(weights, tile, at, [&](int i) { weights[i] = 0; });
    if constexpr (Config::kOut) {
      ptx::wgmma_wait_group<0>();
      ptx::warpgroup_fence_operand(gradients);
      weight_stages.release();
      weight_stages.advance();
    }
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      float gradient = Config::kOut && !dropped.has(i) ? gradients[i] : 0;
      if constexpr (kDropped) gradient *= call.kept;
      sums[i] = ptx::fma_rn(weights[i], gradient - delta[i / 2 % 2], sums[i]);
    }
  }

  /// Hands `use` what the function makes of scaled products.
  template <class Use>
  __device__ __forceinline__ void apply_score(const float (&products)[kScores], const FragmentCoordinate& at,
                                              const Use& use) {
    const OperandAddress* const operands = block.call.score_operands;
    if constexpr (kTiled) {
      if constexpr (!Config::kLoadedOnce) loaded_tiles.wait();
      const unsigned stage = block.loaded.stage(loaded_tiles.position.stage);
      score.apply(products, operands, at, use, TileStrip<Call::LoadedTile::kChunkBytes>(stage, first_row - lane / 4));
      if constexpr (!Config::kLoadedOnce) let_go_of_loaded();
    } else {
      score.apply(products, operands, at, use);
    }
  }

  __device__ __forceinline__ void let_go_of_loaded() {
    __syncwarp();  // all lanes have read what one lets go of
    loaded_tiles.release();
    loaded_tiles.advance();
  }

  /// Calls `hide` with the number of each score that the mask hides.
  template <class Hide>
  __device__ __forceinline__ void each_hidden(const float (&scores)[kScores], const Tile& tile,
                                              const FragmentCoordinate& at, const Hide& hide) const {
    const Call& call = block.call;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = at.row + 8 * r, first = tile.first_key(call, row), end = tile.end_key(call, row);
      const unsigned count = row < tile.query_length && end > first ? end - first : 0;
      each_outside<kScores, Tile::kListed>(r, at.column, first, count, hide);
    }
    if constexpr (Tile::kListed) {
      StripFunction<typename Config::Mask, kFragmentColumns> visible;
      visible.fetch(call.mask_operands, at);
      visible.apply(scores, call.mask_operands, at, [&](int i, bool sees) {
        if (!sees) hide(i);
      });
    }
  }

  __device__ __forceinline__ void store(const Tile& tile) {
    const int row = tile.own_first_row() + first_row, column = tile.own_first_column() + lane % 4 * 2;
    if constexpr (!DLoaded::kByColumn) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < kScores / 2; ++i) sum += sums[i / 2 * 4 + 2 * r + i % 2];
        sums[r] = lanes_sum<4>(sum);
      }
    }
    if constexpr (DLoaded::kByRow) {
      if constexpr (DLoaded::kByColumn) {
        constexpr int kTogether = DLoaded::kColumns == Columns::pairs ? 2 : 1;
#pragma unroll
        for (int i = 0; i < kScores; i += kTogether) {
          put<kTogether>(tile, row + i / 2 % 2 * 8, column + i / 4 * 8 + i % 2, sums + i);
        }
      } else if (lane % 4 == 0) {
        put<1>(tile, row, 0, sums);
        put<1>(tile, row + 8, 0, sums + 1);
      }
    } else {
      constexpr int kColumns = DLoaded::kByColumn ? Call::kTileN : 1;
      const unsigned line = block.shared + Call::kSumsAt + (threadIdx.x / 32) * kColumns * 4;
#pragma unroll
      for (int i = 0; i < (DLoaded::kByColumn ? kScores / 2 : 1); ++i) {
        float sum = DLoaded::kByColumn ? sums[i / 2 * 4 + i % 2] + sums[i / 2 * 4 + 2 + i % 2] : sums[0] + sums[1];
#pragma unroll
        for (int mask = 4; mask < 32; mask *= 2) sum += ptx::shfl_sync_bfly(sum, mask);
        const int own = DLoaded::kByColumn ? lane % 4 * 2 + i / 2 * 8 + i % 2 : 0;
        if (lane < (DLoaded::kByColumn ? 4 : 1)) ptx::st_shared(line + own * 4, sum);
      }
      ptx::barrier_sync(1, 256);
      if (static_cast<int>(threadIdx.x) < kColumns) {
        float sum = 0;
#pragma unroll
        for (int warp = 0; warp < 8; ++warp) {
          float of_warp;
          ptx::ld_shared(of_warp, block.shared + Call::kSumsAt + (warp * kColumns + threadIdx.x) * 4);
          sum += of_warp;
        }
        put<1>(tile, 0, tile.own_first_column() + threadIdx.x, &sum);
      }
      ptx::barrier_sync(1, 256);
    }
  }

  /// Writes the sums of neighbouring columns, whose number is even where several are put.
  template <int kColumns>
  __device__ __forceinline__ void put(const Tile& tile, int row, int column, const float* sums) const {
    using Type = typename DLoaded::Type;
    const Call& call = block.call;
    if (row >= call.query_length || column >= call.key_length) return;
    auto* const to = static_cast<Type*>(const_cast<void*>(call.d_loaded.data)) + tile.part * call.part_stride;
    float own[kColumns];
#pragma unroll
    for (int i = 0; i < kColumns; ++i) own[i] = sums[i];
    Vector<Type, kColumns> rounded;
    rounded.pack(own);
    rounded.store(to + call.d_loaded.template offset<DLoaded>(Coordinate{row, column, tile.own_batch}));
  }
};

template <class Config>
__device__ __forceinline__ void attention_sm90_loaded_gradient(const AttentionSm90LoadedGradient<Config>& call) {
  using Call = AttentionSm90LoadedGradient<Config>;
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const LoadedGradientBlock<Config> block(call, ptx::cvta_to_shared(shared_memory));
  if (threadIdx.x == 0) {
    block.scores.init(4 * Call::kConsumers);
    block.weights.init(4 * Call::kConsumers);
    block.loaded.init(4 * Call::kConsumers);
  }
  block.scores.open();
  const int group = ptx::shfl_sync_idx(threadIdx.x / 128);
  if (group == Call::kConsumers) {
    ptx::setmaxnreg_dec<40>();
    if (threadIdx.x == Call::kConsumers * 128) block.load();
  } else {
    ptx::setmaxnreg_inc<232>();
    LoadedGradientConsumer<Config>(block, group).consume();
  }
  block.scores.close();
}

}  // namespace jaxdnn
