// The producer's part of attention's backward kernel for Hopper (attention/sm90_backward.cuh): which tiles a block has,
// the copies of their vectors, and what is added to the gradients of queries.
#pragma once

#include "attention/sm90/backward_call.cuh"
#include "ptx/warp.cuh"

namespace jaxdnn {

/// The work of one block: which tiles, and its rings.
template <class Config>
struct AttentionBackwardBlock {
  using Call = AttentionSm90Backward<Config>;
  using Tile = AttentionBackwardTile<Config>;
  using Sight = AttentionSight<Config>;

  const Call& call;
  unsigned shared;
  typename Call::Keys keys;
  typename Call::Queries queries;
  TileOrder order;
  typename Call::Queue queue;

  __device__ __forceinline__ AttentionBackwardBlock(const Call& call, unsigned shared)
      : call(call),
        shared(shared),
        keys(shared, shared + Call::kBarriersAt),
        queries(shared + Call::kQueriesAt, shared + Call::kQueryBarriersAt),
        order{static_cast<unsigned>(call.heads), static_cast<unsigned>(call.key_blocks()),
              static_cast<unsigned>(call.swizzle)},
        queue{shared + Call::kQueueAt, call.counter, order.rows * order.columns} {}

  /// Visits the query heads of a tile, the first of as many as see the same.
  template <class Visit>
  __device__ __forceinline__ void each_head(const Tile& tile, const Visit& visit) const {
    for (int i = 0; i < call.group; i += call.together) {
      Sight sight(call, tile, tile.share * call.group + i);
      visit(sight);
    }
  }

  /// Visits the blocks of queries that see a tile, from the last to the first, each of all heads that see the same.
  template <class Visit>
  __device__ __forceinline__ void each_block(const Tile& tile, const Visit& visit) const {
    each_head(tile, [&](Sight& sight) {
      for (; sight.on(); sight.advance()) visit(sight, sight.block());
    });
  }

  template <bool kWarp, class Visit>
  __device__ __forceinline__ void each_tile(const Visit& visit) const {
    for (TileWalk<typename Call::Queue, kWarp> walk(queue, blockIdx.x); walk.on_a_tile(); walk.advance()) {
      visit(Tile(call, order, walk.index));
    }
  }

  /// Starts the copies of all tiles; by one thread. Keys and values are copied even where nobody sees them, so that the
  /// producer is at most one tile ahead of all who read the tiles' numbers, as the ring of tiles asks.
  __device__ __forceinline__ void load() const {
    StageWriter<typename Call::Keys> to_keys{keys};
    StageWriter<typename Call::Queries> to_queries{queries};
    each_tile<false>([&](const Tile& tile) {
      const int first = tile.block * Call::kTileN;
      to_keys.fill([&](unsigned stage, unsigned full) {
        Call::KeyTile::load(call.key, stage, full, first, tile.key_head, tile.element * call.key_batched);
        Call::ValueTile::load(call.value, stage + Call::kValuesAt, full, first, tile.key_head,
                              tile.element * call.value_batched);
      });
      each_block(tile, [&](const Sight& sight, const QueryBlock& block) {
        const int head = sight.head, query = block.number * Call::kTileM;
        to_queries.fill([&](unsigned stage, unsigned full) {
          Call::QueryTile::load(call.query, stage, full, query, head, tile.element * call.query_batched);
          if constexpr (Config::kOut) {
            Call::DOutTile::load(call.d_out, stage + Call::kDOutAt, full, query, head,
                                 tile.element * call.d_out_batched);
          }
          if constexpr (Config::kScoreTiled) {
            Call::ScoreTile::load(call.score_tile, stage + Call::kScoresAt, full, query, head * call.score_headed,
                                  tile.element * call.score_batched, first);
          }
          const long long row = static_cast<long long>(sight.batch) * call.query_blocks() * Call::kTileM + query;
          ptx::cp_async_bulk_load(stage + Call::kRowsAt, call.rows + 2 * row, Call::kRowsBytes, full);
        });
      });
      queue.ask();  // not before: others wait for what is taken
    });
  }

  /// Adds what consumers leave in shared memory to the sums in global memory, in the order of the keys; by one of two
  /// warps, which takes every second step. So the next one's sums leave while this one's are waited for. Consumers wait
  /// until their buffer has been read: by the same warp, or, where both warps have one buffer, by the other.
  __device__ __forceinline__ void add(int warp) const {
    using Sums = typename Call::Sums;
    constexpr bool kOwnBuffers = Config::kSumBuffers == 2;
    const unsigned staged = shared + Call::kSumsAt + (kOwnBuffers ? warp * Sums::kBytes : 0);
    const bool leads = threadIdx.x % 32 == 0;
    StageReader<typename Call::Keys> tiles{keys};
    int turn = warp;
    if (kOwnBuffers || warp == 1) release(warp);
    each_tile<true>([&](const Tile& tile) {
      // It uses no keys, but has read the tile's number, whose place in the ring of tiles their stage stands for.
      tiles.wait();
      __syncwarp();
      tiles.release();
      tiles.advance();
      each_block(tile, [&](const Sight& sight, const QueryBlock& block) {
        turn ^= 1;
        if (turn == 0) return;
        const int rank = sight.rank(block.number);
        const long long index = static_cast<long long>(sight.batch) * call.query_blocks() + block.number;
        if (leads && rank > 0) {
          while (ptx::ld_acquire(call.contributions + index) != rank) {
          }
          ptx::fence_proxy_async_global();
        }
        __syncwarp();
        ptx::barrier_sync(Call::kSumsFull + warp, Call::kSumsFullThreads);
        if (leads) {
          float* const sums = call.query_sums + (index - call.first_block) * (Sums::kBytes / 4);
          if (rank == 0) {
            ptx::cp_async_bulk_store(sums, staged, Sums::kBytes);
          } else {
            ptx::cp_reduce_async_bulk_add(sums, staged, Sums::kBytes);
          }
          ptx::cp_async_bulk_commit_group();
          ptx::cp_async_bulk_wait_group_read<0>();
        }
        __syncwarp();
        release(warp);
        if (leads) {
          ptx::cp_async_bulk_wait_group<0>();
          ptx::fence_proxy_async_global();
          ptx::red_release_add(call.contributions + index, 1);
        }
      });
    });
  }

 private:
  /// Tells both consumers that a warp has read its sums.
  __device__ __forceinline__ void release(int warp) const {
#pragma unroll
    for (int consumer = 0; consumer < Call::kConsumers; ++consumer) {
      ptx::barrier_arrive(Call::kSumsEmpty + 2 * warp + consumer, Call::kSumsEmptyThreads);
    }
  }
};

}  // namespace jaxdnn
