// The producer's part of attention's kernel for Hopper (attention/sm90.cuh): which tiles a block has, and the copies of
// their vectors.
#pragma once

#include "attention/sm90/call.cuh"
#include "ptx/warp.cuh"

namespace jaxdnn {

/// The work of one block: which tiles, and its rings.
template <class Config>
struct AttentionBlock {
  using Call = AttentionSm90<Config>;

  const Call& call;
  typename Call::Queries queries;
  typename Call::Keys keys;
  typename Call::Values values;
  typename Call::Scores scores;
  TileOrder order;
  typename Call::Queue queue;

  __device__ __forceinline__ AttentionBlock(const Call& call, unsigned shared)
      : call(call),
        queries(shared, shared + Call::kBarriersAt),
        keys(shared + Call::kKeysAt, shared + Call::kKeyBarriersAt),
        values(shared + Call::kValuesAt, shared + Call::kValueBarriersAt),
        scores(shared + Call::kScoresAt, shared + Call::kScoreBarriersAt),
        order{static_cast<unsigned>(call.tile_rows),
              static_cast<unsigned>((call.query_length + Call::kQueries - 1) / Call::kQueries),
              static_cast<unsigned>(call.swizzle)},
        queue{shared + Call::kQueueAt, tile_counter(call.counter), order.rows * order.columns * call.splits} {}

  template <bool kWarp>
  __device__ __forceinline__ TileWalk<typename Call::Queue, kWarp> tiles() const {
    return {queue, blockIdx.x / Config::kCluster};
  }

  __device__ __forceinline__ AttentionTile<Config> tile(unsigned index) const {
    return {call, order, index, scores.cluster};
  }

  /// Starts the copies of all tiles; by one thread. Queries are copied even where they see nothing, so that the
  /// producer is at most one tile ahead of the consumers, as the ring of tiles asks.
  __device__ __forceinline__ void load() const {
    ptx::prefetch_tensormap(call.query);
    ptx::prefetch_tensormap(call.key);
    ptx::prefetch_tensormap(call.value);
    if constexpr (Config::kScoreStages > 0) ptx::prefetch_tensormap(call.score_tile);
    StageWriter<typename Call::Queries> to_queries{queries};
    StageWriter<typename Call::Keys> to_keys{keys};
    StageWriter<typename Call::Values> to_values{values};
    StageWriter<typename Call::Scores> to_scores{scores};
    for (auto walk = tiles<false>(); walk.on_a_tile(); walk.advance()) {
      const AttentionTile<Config> tile = this->tile(walk.index);
      const int key_head = tile.head / call.group;
      to_queries.fill([&](unsigned stage, unsigned full) {
        Call::QueryTile::load(call.query, stage, full, tile.first_query, tile.head, tile.element * call.query_batched);
      });
      const auto load_values = [&](int block) {
        to_values.fill([&](unsigned stage, unsigned full) {
          Call::ValueTile::load(call.value, stage, full, block * Config::kTileN, key_head,
                                tile.element * call.value_batched);
        });
      };
      int before = -1;
      for (KeyBlockWalk<AttentionTile<Config>> blocks(tile, 1); blocks.on_a_block(); blocks.advance()) {
        const int block = blocks.number();
        if (blocks.left == 1) queue.ask();  // not before: another block may be ready sooner
        to_keys.fill([&](unsigned stage, unsigned full) {
          Call::KeyTile::load(call.key, stage, full, block * Config::kTileN, key_head, tile.element * call.key_batched);
        });
        if (before >= 0) load_values(before);
        if constexpr (Config::kScoreStages > 0) {
          to_scores.fill([&](unsigned stage, unsigned full) {
            Call::ScoreTile::load(call.score_tile, stage, full, tile.first_query, tile.head * call.score_headed,
                                  tile.element * call.score_batched, scores.cluster, block * Config::kTileN);
          });
        }
        before = block;
      }
      load_values(before);
    }
  }
};

}  // namespace jaxdnn
