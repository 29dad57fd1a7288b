// What a warp group of attention/sm90.cuh does that multiplies: scores, weights, and sums of values.
#pragma once

#include "attention/dropout.cuh"
#include "attention/sm90/block.cuh"
#include "attention/sm90/results.cuh"
#include "attention/strip.cuh"
#include "core/turns.cuh"
#include "core/vector.cuh"
#include "ptx/math.cuh"
#include "ptx/mma.cuh"
#include "ptx/warp.cuh"

namespace jaxdnn {

/// The work of one warp group that multiplies. A thread has two rows, 8 apart, as ptx/wgmma.cuh says: element i of an
/// accumulator is of row i / 2 % 2.
template <class Config>
struct AttentionConsumer {
  using Call = AttentionSm90<Config>;
  using T = typename Config::T;
  using Tile = AttentionTile<Config>;
  using Own = OwnBlocks<Config>;
  static constexpr int kScores = Config::kTileN / 2, kSums = Config::kValueSize / 2;
  static constexpr int kHeld = 16 / static_cast<int>(sizeof(T)), kSteps = kScores / kHeld;  // of a multiply's operand
  static constexpr bool kScored = !is_same<typename Config::Score, void>;
  static constexpr bool kMasked = !is_same<typename Config::Mask, void>;
  static constexpr bool kDropped = !is_same<typename Config::Seeds, void>;
  static constexpr bool kTiled = Config::kScoreStages > 0;
  // Whether a tile's first scores are started behind the last product of the one before: where its queries are there.
  static constexpr bool kAhead = Config::kQueryInRegisters || Config::kQueryStages > 1;
  static constexpr bool kOnce = kScored || kDropped;  // the text of a step stands there, for the sake of registers
  static constexpr int kMaskColumns = 64;  // of which a mask's function loads at once: to the registers of weights
  static constexpr ptx::WgmmaType kType = wgmma_type<T>();
  static constexpr float kSlack = 8;  // of exponents: weights are at most 2^8, which float16 holds as well as 1

  const AttentionBlock<Config>& block;
  const ConsumerTurns<Call::kTurns, Call::kConsumers> turns;
  int first_row, lane;         // of the thread, in the tile; and in its warp
  float scale;                 // of scores, to the base of 2
  unsigned long long q, k, v;  // descriptors of the first stages
  StageReader<typename Call::Queries> queries;
  StageReader<typename Call::Keys> keys;
  StageReader<typename Call::Values> values;
  StageReader<typename Call::Scores> score_tiles;

  float scores[kScores], sums[kSums];
  Vector<T, kHeld> weights[kSteps];
  unsigned query[Config::kQueryInRegisters ? Config::kHeadSize / 16 : 1][4];
  float largest[2], total[2];  // of a row: the largest product, about; the sum of this thread's weights
  int first_key[2];            // that a row sees
  unsigned key_count[2];
  FragmentCoordinate first_score;  // of the thread, in the first block of keys
  StripFunction<typename Config::Score, Config::kTileN> score;
  Dropout dropout;

  __device__ __forceinline__ AttentionConsumer(const AttentionBlock<Config>& block, int consumer)
      : block(block),
        turns{consumer},
        first_row(consumer * 64 + ptx::shfl_sync_idx(threadIdx.x / 32 % 4) * 16 + threadIdx.x % 32 / 4),
        lane(threadIdx.x % 32),
        scale((kScored ? 1.0f : block.call.scale) * 1.4426950408889634f),
        q(Call::QueryTile::descriptor(block.queries.stages) + Call::QueryTile::vectors(4 * consumer)),
        k(Call::KeyTile::descriptor(block.keys.stages)),
        v(Call::ValueTile::descriptor(block.values.stages)),
        queries{block.queries},
        keys{block.keys},
        values{block.values},
        score_tiles{block.scores} {}

  /// Computes and writes all tiles.
  __device__ __forceinline__ void consume() {
    turns.start();
    auto walk = block.template tiles<true>();
    if constexpr (kAhead) {
      if (walk.on_a_tile()) consume_ahead(walk);
    } else {
      for (; walk.on_a_tile(); walk.advance()) {
        const Tile tile = block.tile(walk.index);
        const Own own = this->own(tile);
        let_pass(own.before);
        start_tile(own.half);
        begin(tile, own);
        compute(tile, own);
        start_sums();
        finish_sums<0>();
        store(tile);
        let_pass(own.behind);
      }
    }
  }

 private:
  /// With the first scores of a tile behind the last product of the one before, and behind its being written, unless
  /// blocks between them are let pass. The loop is left ahead of that product: a branch behind it would have the
  /// compiler wait for each multiply.
  template <class Walk>
  __device__ __forceinline__ void consume_ahead(Walk& walk) {
    Tile tile = block.tile(walk.index);
    Own own = this->own(tile);
    while (true) {
      let_pass(own.before);
      start_tile(own.half);
      begin(tile, own);
      while (true) {
        compute(tile, own);
        walk.advance();
        if (!walk.on_a_tile()) break;
        if constexpr (Own::kSkips) {
          if (own.behind > 0 || this->own(block.tile(walk.index)).before > 0) break;
        }
        start_sums();
        start_tile(Own::kHalves && this->own(block.tile(walk.index)).half);
        const Tile next = block.tile(walk.index);
        finish_sums<1>();
        store(tile);
        tile = next;
        own = this->own(tile);
        begin(tile, own);
      }
      start_sums();
      finish_sums<0>();
      store(tile);
      let_pass(own.behind);
      if (!Own::kSkips || !walk.on_a_tile()) break;
      tile = block.tile(walk.index);
      own = this->own(tile);
    }
  }

  __device__ __forceinline__ Own own(const Tile& tile) const { return {block.call, tile, turns.consumer}; }

  /// Lets go of so many blocks, whose stages are to be there, as other warp groups use them, and takes their turns. In
  /// this order: others may wait for the stage of keys before they pass on a turn, and for the turn before they let go
  /// of keys ahead of which these values don't come.
  __device__ __forceinline__ void let_pass(int blocks) {
    const auto let_go = [](auto& stages) {
      stages.wait();
      __syncwarp();  // no lane is behind, to wait for a phase that is over
      stages.release();
      stages.advance();
    };
    for (int i = 0; i < blocks; ++i) {
      let_go(keys);
      turns.wait();
      turns.pass_on();
      if constexpr (kTiled) let_go(score_tiles);
      let_go(values);
    }
  }

  /// Starts the first scores of a tile.
  __device__ __forceinline__ void start_tile(bool half) {
    queries.wait();
    if constexpr (Config::kQueryInRegisters) fetch_query();
    keys.wait();
    start_scores(half);
  }

  /// From the first scores, which are there, to the last weights, whose product is left to be started.
  __device__ __forceinline__ void compute(const Tile& tile, const Own& own) {
    KeyBlockWalk<Tile> blocks(tile, 1);
    int number = kMasked ? blocks.number() : own.end - 1;
    const int first = tile.first_query + (Config::kHeads == 1 ? turns.consumer * 64 : 0);
    const int last = tile.last_query(first, Config::kHeads == 1 ? 64 : Call::kQueries);
    const int whole_from = (tile.first_key(block.call, last) + Config::kTileN - 1) / Config::kTileN;
    const int whole_end = tile.end_key(block.call, first);  // in keys
    float correction[2];
    if (Own::kHalves && own.half) {
      soften<kScores / 2>(number, Edge::counted, correction);
      pack_weights<kSteps / 2>(number);
    } else {
      soften(number, first_edge(blocks), correction);
      pack_weights(number);
    }
    if constexpr (kMasked) {
      for (blocks.advance(); blocks.on_a_block(); blocks.advance()) {
        if (kOnce) {
          step(blocks.number(), blocks.edge());
        } else if (blocks.edge() == Edge::none) {
          step(blocks.number(), Edge::none);
        } else if (Config::kSpanned && blocks.edge() == Edge::counted) {
          step(blocks.number(), Edge::counted);
        } else {
          step(blocks.number(), Edge::asked);
        }
      }
    } else if constexpr (kOnce) {
      while (--number >= own.first) {
        const bool cut = (number + 1) * Config::kTileN > whole_end || number < whole_from;
        step(number, cut ? Edge::counted : Edge::none);
      }
    } else {
      if constexpr (Config::kRight) {
        // A half is multiplied by the values of its block here, cut or not, and not by a branch of the next loop.
        bool half = Own::kHalves && own.half;
        while (number > own.first && (half || number * Config::kTileN > whole_end)) {
          step(--number, Edge::counted, half);
          half = false;
        }
      }
      while (number > own.first && number > whole_from) step(--number, Edge::none);
      if constexpr (Config::kLeft) {
        while (number > own.first) step(--number, Edge::counted);
      }
    }
    if constexpr (!Config::kQueryInRegisters) let_go_of_query();
    values.wait();
  }

  /// One more block of keys, whose scores and weights follow those that are in the registers, of a whole block or half.
  __device__ __forceinline__ void step(int number, Edge edge, bool half = false) {
    fetch(number, edge);
    keys.wait();
    turns.wait();
    start_scores();
    values.wait();
    start_sums(half);
    turns.pass_on();
    finish_scores<1>();
    // A mask's function takes the weights' registers, if that is known here.
    const bool early = kMasked && !kOnce && edge == Edge::asked;
    if (early) finish_sums<0>();
    float correction[2];
    soften(number, edge, correction);
    if (!early) finish_sums<0>();
    pack_weights(number);
    if (ptx::vote_sync_any(correction[0] != 1 || correction[1] != 1)) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) sums[i] *= correction[i / 2 % 2];
    }
  }

  /// Of a tile's first block; without spans a function is asked of any, so that its text stands there once.
  static __device__ __forceinline__ Edge first_edge(const KeyBlockWalk<Tile>& blocks) {
    return !kMasked ? Edge::counted : Config::kSpanned ? blocks.edge() : Edge::asked;
  }

  __device__ __forceinline__ void begin(const Tile& tile, const Own& own) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i] = 0;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int query = tile.query(first_row + 8 * r);
      const KeySpan seen = tile.seen_keys(block.call, query);
      largest[r] = -math::infinity<float>();
      total[r] = 0;
      first_key[r] = seen.first;
      key_count[r] = seen.end > seen.first ? seen.end - seen.first : 0;
    }
    const int batch = tile.batch_of(block.call, first_row);
    first_score = {tile.query(first_row), lane % 4 * 2, batch, block.call.query_length, block.call.key_length};
    if constexpr (kDropped) {
      dropout = Dropout::of_batch<typename Config::Seeds>(block.call.seeds, batch, block.call.threshold);
    }
    const KeyBlockWalk<Tile> blocks(tile, 1);
    fetch(kMasked ? blocks.number() : own.end - 1, first_edge(blocks));
    finish_scores<0>();
  }

  /// Starts to load what the scores of a block of keys are made of besides products; what its mask reads, into caches.
  __device__ __forceinline__ void fetch(int number, Edge edge) {
    const FragmentCoordinate at = first_score.to_the_right(number * Config::kTileN);
    if constexpr (kScored) score.fetch(block.call.score_operands, at);
    if constexpr (kMasked) {
      FragmentCoordinate of_warp = at.to_the_right(-(lane % 4 * 2));
      of_warp.row -= lane / 4;
      if (edge == Edge::asked) {
        prefetch_operands<typename Config::Mask::Operands, Config::kTileN>(block.call.mask_operands, of_warp);
      }
    }
  }

  __device__ __forceinline__ void fetch_query() {
    const TileStrip<Call::QueryTile::kChunkBytes> strip(block.queries.stage(queries.position.stage),
                                                        first_row - lane / 4);
#pragma unroll
    for (int i = 0; i < Config::kHeadSize / 16; ++i) strip.read(i, query[i]);
    let_go_of_query();
  }

  __device__ __forceinline__ void let_go_of_query() {
    __syncwarp();  // lanes may not have met since each saw the queries arrive, or read them
    queries.release();
    queries.advance();
  }

  /// Of half a block the first multiply has all columns, so that each of the accumulator's registers is a multiply's on
  /// either way, and no copy; nobody reads the others' scores. A branch has all of a group: the compiler ends one where
  /// it branches, and counts what is unfinished in groups.
  __device__ __forceinline__ void start_scores(bool half = false) {
    ptx::warpgroup_fence_operand(scores);
    ptx::wgmma_fence();
    if constexpr (Own::kHalves) {
      if (half) {
        multiply_keys(scores, 0, 1);
        multiply_keys(*reinterpret_cast<float (*)[kScores / 2]>(scores), 1, Call::KeyTile::kSteps);
        ptx::wgmma_commit_group();
        return;
      }
    }
    multiply_keys(scores, 0, Call::KeyTile::kSteps);
    ptx::wgmma_commit_group();
  }

  /// By the first keys of a block, as many as there are columns; from one step along the vectors to another.
  template <int kCount>
  __device__ __forceinline__ void multiply_keys(float (&part)[kCount], int first, int end) {
    const unsigned query_stage = stage_offset(queries.position.stage, Call::QueryTile::kBytes);
    const unsigned stage = stage_offset(keys.position.stage, Call::KeyTile::kBytes);
#pragma unroll
    for (int i = first; i < end; ++i) {
      const unsigned long long of_keys = k + (stage + Call::KeyTile::elements(i));
      if constexpr (Config::kQueryInRegisters) {
        ptx::WgmmaRs<2 * kCount>::template mma_async<kType, false>(part, query[i], of_keys, i > 0);
      } else {
        ptx::Wgmma<2 * kCount>::template mma_async<kType, kType, false, false>(
            part, q + (query_stage + Call::QueryTile::elements(i)), of_keys, i > 0);
      }
    }
  }

  __device__ __forceinline__ void start_sums(bool half = false) {
    ptx::warpgroup_fence_operand(sums);
    ptx::wgmma_fence();
    if constexpr (Own::kHalves) {
      if (half) {
        multiply_values<kSteps / 2>();
        ptx::wgmma_commit_group();
        return;
      }
    }
    multiply_values<kSteps>();
    ptx::wgmma_commit_group();
  }

  template <int kCount>
  __device__ __forceinline__ void multiply_values() {
    const unsigned stage = stage_offset(values.position.stage, Call::ValueTile::kBytes);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      ptx::WgmmaRs<Config::kValueSize>::template mma_async<kType, !Call::ValueTile::kByFeature>(
          sums, weights[i].words, v + (stage + Call::ValueTile::positions(i)), true);
    }
  }

  /// With so many later multiplies left unfinished.
  template <int kPending>
  __device__ __forceinline__ void finish_scores() {
    ptx::wgmma_wait_group<kPending>();
    ptx::warpgroup_fence_operand(scores);
    keys.release();
    keys.advance();
  }

  template <int kPending>
  __device__ __forceinline__ void finish_sums() {
    ptx::wgmma_wait_group<kPending>();
    ptx::warpgroup_fence_operand(sums);
    values.release();
    values.advance();
  }

  /// Makes weights of the scores of a block of keys, relative to the rows' `largest`, and says by what earlier weights
  /// are to be multiplied: as a rule by one, since only a maximum that exceeds it by more than kSlack takes its place.
  /// Of the block's first keys, as many as a thread has kCount scores of.
  template <int kCount = kScores>
  __device__ __forceinline__ void soften(int number, Edge edge, float (&correction)[2]) {
    if constexpr (kScored) apply_score(number);
    if (edge != Edge::none) mask<kCount>(number, edge);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float before = largest[r];
      float now = before;
#pragma unroll
      for (int i = 0; i < kCount / 2; ++i) now = ::fmaxf(now, scores[i / 2 * 4 + 2 * r + i % 2]);
      now = ::fmaxf(now, ptx::shfl_sync_bfly(now, 1));
      now = ::fmaxf(now, ptx::shfl_sync_bfly(now, 2));
      const bool raised = (now - before) * scale > kSlack;
      if (raised) largest[r] = now;
      const float base = largest[r] == -math::infinity<float>() ? 0.0f : largest[r] * scale;
      correction[r] = raised ? ptx::ex2_approx_ftz(ptx::fma_rn(before, scale, -base)) : 1.0f;
      total[r] *= correction[r];
#pragma unroll
      for (int i = 0; i < kCount / 2; ++i) {
        float& weight = scores[i / 2 * 4 + 2 * r + i % 2];
        weight = ptx::ex2_approx_ftz(ptx::fma_rn(weight, scale, -base));
        total[r] += weight;
      }
    }
  }

  __device__ __forceinline__ void apply_score(int number) {
    const FragmentCoordinate at = first_score.to_the_right(number * Config::kTileN);
#pragma unroll
    for (int i = 0; i < kScores; ++i) scores[i] *= block.call.scale;
    const auto use = [&](int i, float result) { scores[i] = result; };
    if constexpr (kTiled) {
      score_tiles.wait();
      const unsigned stage = block.scores.stage(score_tiles.position.stage);
      const TileStrip<Call::ScoreTile::kChunkBytes> strip(stage, first_row - lane / 4);
      score.apply(scores, block.call.score_operands, at, use, strip);
      __syncwarp();  // all lanes have read what one lets go of
      score_tiles.release();
      score_tiles.advance();
    } else {
      score.apply(scores, block.call.score_operands, at, use);
    }
  }

  /// Hides what lies outside of each row's keys, and, if it is to be asked, what the mask's function hides. With that
  /// there are predicates of its own, which comparisons join; alone, bits take fewer instructions.
  template <int kCount>
  __device__ __forceinline__ void mask(int number, Edge edge) {
    if (kMasked && (!Config::kSpanned || edge == Edge::asked)) {
      hide_outside<true, kCount>(number);
      hide_asked(number);
    } else {
      hide_outside<false, kCount>(number);
    }
  }

  template <bool kCompared, int kCount>
  __device__ __forceinline__ void hide_outside(int number) {
    const int column = number * Config::kTileN + lane % 4 * 2;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      each_outside<kCount, kCompared>(r, column, first_key[r], key_count[r],
                                      [&](int i) { scores[i] = -math::infinity<float>(); });
    }
  }

  __device__ __forceinline__ void hide_asked(int number) {
    if constexpr (kMasked) {
      const FragmentCoordinate at = first_score.to_the_right(number * Config::kTileN);
      StripFunction<typename Config::Mask, kMaskColumns> visible;
      visible.fetch(block.call.mask_operands, at);
      visible.apply(scores, block.call.mask_operands, at, [&](int i, bool sees) {
        if (!sees) scores[i] = -math::infinity<float>();
      });
    }
  }

  template <int kCount = kSteps>
  __device__ __forceinline__ void pack_weights(int number) {
    if constexpr (kDropped) {
      dropout.each_dropped<kScores>(first_score.to_the_right(number * Config::kTileN), [&](int i) { scores[i] = 0; });
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) weights[i] = operand_of<T>(scores + i * kHeld);
  }

  __device__ __forceinline__ void store(const Tile& tile) {
    store_rows<Config>(block.call, tile, first_row, scale, largest, total, sums);
  }
};

}  // namespace jaxdnn
