// The gradients of attention on Hopper's tensor cores, with five products for each block of scores, in one pass:
//
//   S^T = K Q^T     dP^T = V dO^T     P^T = 2^(scale S^T - log-sum-exp)     dS^T = P^T (dP^T - delta)
//   dV += P^T dO    dK += dS^T Q      dQ += dS K
//
// The scheme is that of FlashAttention-3 (Shah et al., 2024); the order in which dQ is summed is not.
//
//   grid             at most one block a multiprocessor. Each takes tiles of 128 keys of one head
//                    (core/tile_queue.cuh), and works for each of them through the queries that see it: kTileM at a
//                    time, each of all heads that share the keys. So dK and dV stay in registers until they are whole.
//                    Where there are few tiles, each has a share of these heads, and attention/sm90/backward_shares.cuh
//                    adds up what shares leave
//   warp groups      two consumers of 64 keys each, then the producer, of which one thread starts the copies, one of
//                    another warp takes tiles, and the other two warps add to dQ, of every second block of queries each
//
//                        tensor cores | dP | dV     | dQ | dK      | S of the next block | ...
//                        arithmetic   | P  | dS     |    | dQ out  |
//
//                    Scores are transposed, so that P^T and dS^T are operands in registers: an accumulator's columns
//                    are queries, whose numbers are read from shared memory. dS^T goes to shared memory, too: dQ is a
//                    sum over the keys of both consumers. Each has half of its columns, or of 128 queries
//   dQ               sums in float32 in scratch memory, as fragments (`QuerySums`). TMA adds to them, from shared
//                    memory. Until that is known to be done takes longer than a block's products: two are under way,
//                    by a warp each. Where shared memory is short, both have one buffer, which has been read long
//                    before.
//                    attention/sm90/backward_query.cuh scales and rounds what they are in the end. Where they are
//                    large, heads are computed in parts, one after the other, which have the same memory for them
//   order            tiles add to a block of queries in the order of their keys: the first one stores, the others wait
//                    until as many as see less keys have added, which a counter says. As all tiles go through the
//                    queries from the last block to the first, and are taken in the order of their keys, those who
//                    follow each other are at different blocks, and nobody waits for long. Under a causal mask this has
//                    the longest tiles first
//   no deadlock      a tile waits for tiles of the same head and smaller keys alone, which come before it in the order
//                    in which tiles are taken. Of all tiles that are taken and not finished the first waits for none,
//                    and its block works on it: what a block takes while it works on a tile comes after that one. This
//                    needs no number of blocks to be resident
//   masks            hide weights, in blocks that an edge cuts; blocks that it hides are not visited, and not counted.
//                    Where a mask has a function, blocks are those of a list (attention/lists.cuh), which says of which
//                    the function is to be asked; and how many have less keys, a table. Rows that aren't there have the
//                    log-sum-exp infinity (attention/sm90/backward_rows.cuh)
//   scores           a function of them (attention/strip.cuh) is given scaled products. Its derivative is a factor of
//                    the gradients, as the weights are: the product of both takes the scores' registers, and what the
//                    function was given need not be kept. What it loads is fetched during the block before, as far as
//                    there are registers. Where TMA can, and shared memory has the room, a tile of an array with a row
//                    for each query comes with the block's queries, and is read transposed, fragment by fragment
//
//   dropout          of weights, and of their gradients, by the same bits (attention/dropout.cuh), computed behind dP
//
//   barriers         full[stage]   of the rings of keys (1 stage: K, V) and queries (2: Q, dO, numbers): 1 arrival
//                    empty[stage]  a lane of each consuming warp: 8; of keys, and of the warps that add: 10
//                    named 1       256 threads: dS^T is in shared memory
//                    named 2, 3    288 threads, the consumers and a warp that adds: its dQ is in shared memory
//                    named 4 .. 7  160 threads, such a warp and each consumer: it has been read
//   shared memory    | K, V | Q, dO, score tile, log-sum-exp and delta: 2 stages | dS^T, twice | dQ, twice or once |
//                    barriers | tiles |
//                    dS^T alternates: who writes it again has since met who read it, at named barrier 1
//   registers        of a consumer's thread 240: (d + dv) / 2 for dK and dV, kTileM / 2 for each of S and dP, and
//                    kTileM / 4 for each of P and dS
//
// Bytes: those of Q, K, V, out, dO and the gradients, once; for each tile again those of Q and dO, and 8 d for each
// query in and out of the float32 sums, and 2 for each score that reads an array, from the L2 cache. Flops: 4 (d + dv)
// + 2 d for each query and key that it sees, of which a multiprocessor does 4096 a clock. Shared memory is read as fast
// as the tensor cores compute where 64 queries are multiplied by 64 keys, and with it what the tensor cores wait for
// arithmetic is what bounds it.
#pragma once

#include "attention/dropout.cuh"
#include "attention/sm90/backward_block.cuh"
#include "attention/sm90/fragment_row.cuh"
#include "attention/strip.cuh"
#include "core/vector.cuh"
#include "ptx/math.cuh"
#include "ptx/mma.cuh"
#include "ptx/warp.cuh"

namespace jaxdnn {

/// The work of one warp group that multiplies, with 64 of a tile's keys. A thread has two of them, 8 apart, as
/// ptx/wgmma.cuh says: element i of an accumulator of scores is of key i / 2 % 2, and of query i / 4 * 8 + i % 2 after
/// the thread's first one.
template <class Config>
struct AttentionBackwardConsumer {
  using Call = AttentionSm90Backward<Config>;
  using T = typename Config::T;
  using Tile = AttentionBackwardTile<Config>;
  using Sight = AttentionSight<Config>;
  using Sums = typename Call::Sums;
  using ScoreSet = ScoreSetOf<Config::kTileM / 2>;
  static constexpr int kScores = Config::kTileM / 2, kSteps = Config::kTileM / 16;
  static constexpr bool kDropped = !is_same<typename Config::Seeds, void>;
  static constexpr bool kScored = Sight::kScored, kSloped = kResultsOf<typename Config::Score> == 2;
  static constexpr ptx::WgmmaType kType = wgmma_type<T>();

  const AttentionBackwardBlock<Config>& block;
  const int consumer;
  const unsigned base;     // of shared memory, as descriptors count
  const unsigned rows_at;  // shared addresses: of the numbers of the thread's first query, in stage 0;
  const unsigned line_at;  // of where it writes gradients of scores;
  const unsigned sums_at;  // and of where it leaves sums
  StageReader<typename Call::Keys> keys;
  StageReader<typename Call::Queries> queries;
  unsigned buffer = 0;  // of gradients of scores, and of sums; and the warp that adds these
  StripFunction<typename Config::Score, Config::kFetched> score;
  Dropout dropout;

  float d_keys[Config::kHeadSize / 2], d_values[Config::kValueSize / 2];

  __device__ __forceinline__ AttentionBackwardConsumer(const AttentionBackwardBlock<Config>& block, int consumer)
      : block(block),
        consumer(consumer),
        base(block.shared / 16),
        rows_at(block.shared + Call::kQueriesAt + Call::kRowsAt + threadIdx.x % 4 * 16),
        line_at(block.shared + Call::kWeightsAt + (consumer * 64 + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 16) * 128 +
                (threadIdx.x % 32 / 16 ^ threadIdx.x % 8) * 16),
        sums_at(block.shared + Call::kSumsAt + Sums::vector(consumer, 0, threadIdx.x % 128)),
        keys{block.keys},
        queries{block.queries} {}

  /// Computes and writes all tiles.
  __device__ __forceinline__ void consume() {
    block.template each_tile<true>([&](const Tile& tile) {
#pragma unroll
      for (int i = 0; i < Config::kHeadSize / 2; ++i) d_keys[i] = 0;
#pragma unroll
      for (int i = 0; i < Config::kValueSize / 2; ++i) d_values[i] = 0;
      keys.wait();
      int left = 0;  // blocks of queries
      block.each_head(tile, [&](const Sight& sight) { left += sight.count(); });
      float scores[kScores];
      start_scores(scores, left > 0);
      ptx::wgmma_wait_group<0>();
      ptx::warpgroup_fence_operand(scores);
      block.each_head(tile, [&](Sight& sight) {
        if (kScored && sight.on()) fetch(sight);
        if constexpr (kDropped) {
          dropout = Dropout::of_batch<typename Config::Seeds>(block.call.seeds, sight.batch, block.call.threshold);
        }
        while (sight.on()) step(scores, sight, --left > 0);
      });
      __syncwarp();  // where no query sees the keys, no multiply has had the lanes meet since each saw them arrive
      keys.release();
      keys.advance();
      if constexpr (Call::kDKey) store(block.call.d_key, tile, d_keys, block.call.scale, block.call.head_size);
      if constexpr (!is_same<typename Config::DValue, void>) {
        store(block.call.d_value, tile, d_values, kDropped ? block.call.kept : 1.0f, block.call.value_size);
      }
    });
  }

 private:
  /// Of the thread's first key, in the tile.
  __device__ __forceinline__ int own_key() const {
    return consumer * 64 + ptx::shfl_sync_idx(threadIdx.x / 32 % 4) * 16 + threadIdx.x % 32 / 4;
  }

  /// The descriptor of a tile at an address in shared memory, `offset` after which, as descriptors count, it is used.
  template <class Vectors>
  __device__ __forceinline__ unsigned long long descriptor(int at, unsigned offset) const {
    return Vectors::descriptor(0) + (base + at / 16 + offset);
  }
  /// What to add for the stage of queries.
  __device__ __forceinline__ unsigned stage() const {
    return stage_offset(queries.position.stage, Call::Queries::kStageStride);
  }

  /// A block of the queries that see the keys, whose scores have been started; starts the scores of the next block,
  /// if there is one.
  __device__ __forceinline__ void step(float (&scores)[kScores], Sight& sight, bool more) {
    using Q = typename Call::QueryTile;
    using DOut = typename Call::DOutTile;
    float gradients[kScores];
    Vector<T, 8> weights[kSteps];
    if constexpr (Config::kOut) {
      start_products<typename Call::ValueTile, DOut>(gradients, Call::kValuesAt, Call::kDOutAt);
      ptx::wgmma_commit_group();
    }
    const QueryBlock query_block = sight.block();
    ScoreSet dropped;
    if constexpr (kDropped) {
      dropout.each_dropped_key<kScores>(first_score(sight, query_block.number), [&](int one) { dropped.add(one); });
    }
    const bool whole = sight.whole(query_block, sight.first_key() + consumer * 64, 64);
    const auto each_hidden = [&](const auto& hide) {
      each_hidden_key(sight, block.call, scores, first_score(sight, query_block.number), hide);
    };
    if constexpr (kSloped) {
      ScoreSet hidden;
      if (!whole) each_hidden([&](int one) { hidden.add(one); });
      weigh_with_slopes(scores, weights, hidden, dropped, sight, query_block.number);
    } else {
      weigh(scores, sight, query_block.number);
      if (!whole) each_hidden([&](int one) { scores[one] = 0; });
      if constexpr (Call::kDValue) pack(weights, scores, dropped);
    }
    if constexpr (Call::kDValue) start_sums<DOut>(d_values, weights, Call::kDOutAt);
    if constexpr (Config::kOut) {
      ptx::wgmma_wait_group<Call::kDValue>();
      ptx::warpgroup_fence_operand(gradients);
    }
    differentiate(scores, gradients, dropped);
    Vector<T, 8> d_scores[kSteps];
    pack(d_scores, scores, ScoreSet{});
    float d_query[Sums::kNumbers];
    if constexpr (Call::kDQuery) {
      share(d_scores);
      start_query_sums(d_query);
    }
    if constexpr (Call::kDKey) start_sums<Q>(d_keys, d_scores, 0);
    ptx::wgmma_wait_group<Call::kDQuery + Call::kDKey>();  // until weights are free
    queries.advance();
    start_scores(scores, more);
    sight.advance();
    if (kScored && sight.on()) fetch(sight);
    if constexpr (Call::kDQuery) {
      ptx::wgmma_wait_group<1 + Call::kDKey>();
      ptx::warpgroup_fence_operand(d_query);
      hand_over(d_query);
    }
    ptx::wgmma_wait_group<1>();
    ptx::warpgroup_fence_operand(d_keys);
    ptx::warpgroup_fence_operand(d_values);
    __syncwarp();  // all lanes have read the rows' numbers of the stage
    queries.release_previous();
    ptx::wgmma_wait_group<0>();
    ptx::warpgroup_fence_operand(scores);
  }

  /// Waits for the next block of queries, if there is one, and starts its scores; else those of what lies there, which
  /// nobody uses: the compiler follows multiplies of a loop only where each of its rounds has them.
  __device__ __forceinline__ void start_scores(float (&scores)[kScores], bool there) const {
    if (there) queries.wait();
    start_products<typename Call::KeyTile, typename Call::QueryTile>(scores, 0, 0);
    ptx::wgmma_commit_group();
  }

  /// Products of own keys, or values, and a block's queries, or their cotangents, which lie there in their stages.
  template <class A, class B>
  __device__ __forceinline__ void start_products(float (&products)[kScores], int a_at, int b_at) const {
    const unsigned long long a = descriptor<A>(a_at, consumer * A::vectors(4));
    const unsigned long long b = descriptor<B>(Call::kQueriesAt + b_at, stage());
    ptx::warpgroup_fence_operand(products);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < A::kSize / 16; ++i) {
      ptx::Wgmma<Config::kTileM>::template mma_async<kType, kType, false, false>(products, a + A::elements(i),
                                                                                 b + B::elements(i), i > 0);
    }
  }

  /// Adds products of weights, or of gradients, and a block's vectors, which lie `at` in the stage.
  template <class Vectors, int kCount>
  __device__ __forceinline__ void start_sums(float (&sums)[kCount], const Vector<T, 8> (&weights)[kSteps],
                                             int at) const {
    const unsigned long long vectors = descriptor<Vectors>(Call::kQueriesAt + at, stage());
    ptx::warpgroup_fence_operand(sums);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      ptx::WgmmaRs<2 * kCount>::template mma_async<kType, true>(sums, weights[i].words, vectors + Vectors::vectors(i),
                                                                true);
    }
    ptx::wgmma_commit_group();
  }

  /// The gradient of a block's queries: of the rows, or the columns, that this warp group has.
  __device__ __forceinline__ void start_query_sums(float (&sums)[Sums::kNumbers]) const {
    using Weights = typename Call::WeightTile;
    using Keys = typename Call::KeyTile;
    const unsigned rows = Sums::kByRows ? consumer * Weights::elements(4) : 0;
    const unsigned columns = Sums::kByRows ? 0 : consumer * Keys::elements(Sums::kColumns / 16);
    const unsigned long long a = descriptor<Weights>(Call::kWeightsAt, rows + stage_offset(buffer, Weights::kBytes));
    const unsigned long long b = descriptor<Keys>(0, columns);
    ptx::warpgroup_fence_operand(sums);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < Call::kTileN / 16; ++i) {
      ptx::Wgmma<Sums::kColumns>::template mma_async<kType, kType, true, true>(sums, a + Weights::vectors(i),
                                                                               b + Keys::vectors(i), i > 0);
    }
    ptx::wgmma_commit_group();
  }

  /// For each four elements of an accumulator of scores: `change(element, log-sum-exp, delta)` of its query.
  template <class Change>
  __device__ __forceinline__ void each_score(const Change& change) const {
    const unsigned rows = rows_at + queries.position.stage * Call::Queries::kStageStride;
#pragma unroll
    for (int i = 0; i < kScores; i += 4) {
      unsigned row[4];
      ptx::ld_shared<16>(row, rows + i * 16);
#pragma unroll
      for (int j = 0; j < 4; ++j) change(i + j, ptx::mov_f32(row[j % 2 * 2]), ptx::mov_f32(row[j % 2 * 2 + 1]));
    }
  }

  /// Of the thread's first score with a block of queries.
  __device__ __forceinline__ FragmentCoordinate first_score(const Sight& sight, int query_block) const {
    return {sight.first_key() + own_key(), query_block * Config::kTileM + static_cast<int>(threadIdx.x % 4) * 2,
            sight.batch, block.call.key_length, block.call.query_length};
  }

  /// Starts to load what the scores of a block are made of besides products.
  __device__ __forceinline__ void fetch(const Sight& sight) {
    if constexpr (kScored) score.fetch(block.call.score_operands, first_score(sight, sight.block().number));
  }

  /// Makes weights of the products of keys and queries.
  __device__ __forceinline__ void weigh(float (&scores)[kScores], const Sight& sight, int query_block) {
    const float scale = (kScored ? 1.0f : block.call.scale) * 1.4426950408889634f;
    if constexpr (kScored) {
      apply_score(scores, sight, query_block, [&](int i, float result) { scores[i] = result; });
    }
    each_score([&](int i, float log_sum_exp, float) {
      scores[i] = ptx::ex2_approx_ftz(ptx::fma_rn(scores[i], scale, -log_sum_exp));
    });
  }

  /// Makes weights, in 16 bits, and of scores their products with the function's derivatives, which is all that is left
  /// to know of both. Nothing moves a hidden score.
  __device__ __forceinline__ void weigh_with_slopes(float (&scores)[kScores], Vector<T, 8> (&weights)[kSteps],
                                                    const ScoreSet& hidden, const ScoreSet& dropped, const Sight& sight,
                                                    int query_block) {
    const unsigned rows = rows_at + queries.position.stage * Call::Queries::kStageStride;
    unsigned row[4];
    float fragment[8];
    apply_score(scores, sight, query_block, [&](int i, float score, float slope) {
      if (i % 4 == 0) ptx::ld_shared<16>(row, rows + i * 16);
      const float exponent = ptx::fma_rn(score, 1.4426950408889634f, -ptx::mov_f32(row[i % 2 * 2]));
      const float weight = ptx::ex2_approx_ftz(exponent);
      fragment[i % 8] = hidden.has(i) || dropped.has(i) ? 0 : weight;
      scores[i] = hidden.has(i) ? 0 : weight * slope;
      if (Call::kDValue && i % 8 == 7) weights[i / 8].pack(fragment);
    });
  }

  /// Hands `use` what the function makes of scaled products.
  template <class Use>
  __device__ __forceinline__ void apply_score(float (&products)[kScores], const Sight& sight, int query_block,
                                              const Use& use) {
    const OperandAddress* const operands = block.call.score_operands;
    const FragmentCoordinate at = first_score(sight, query_block);
#pragma unroll
    for (int i = 0; i < kScores; ++i) products[i] *= block.call.scale;
    if constexpr (Config::kScoreTiled) {
      const unsigned tile = block.queries.stage(queries.position.stage) + Call::kScoresAt;
      const int key = consumer * 64 + ptx::shfl_sync_idx(threadIdx.x / 32 % 4) * 16;
      score.apply(products, operands, at, use, TransposedTileStrip<Call::ScoreTile::kChunkBytes>(tile, key));
    } else {
      score.apply(products, operands, at, use);
    }
  }

  /// Makes gradients of scaled products of weights, with slopes, and of the weights' gradients.
  __device__ __forceinline__ void differentiate(float (&weights)[kScores], const float (&gradients)[kScores],
                                                const ScoreSet& dropped) const {
    each_score([&](int i, float, float delta) {
      float gradient = Config::kOut && !dropped.has(i) ? gradients[i] : 0;
      if constexpr (kDropped) gradient *= block.call.kept;
      weights[i] *= gradient - delta;
    });
  }

  /// Those that are dropped are zero.
  static __device__ __forceinline__ void pack(Vector<T, 8> (&packed)[kSteps], const float (&numbers)[kScores],
                                              const ScoreSet& dropped) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      float values[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) values[j] = dropped.has(8 * i + j) ? 0 : numbers[8 * i + j];
      packed[i].pack(values);
    }
  }

  /// Writes the gradients of own keys' scores to where both warp groups read them, and waits for the other's.
  __device__ __forceinline__ void share(const Vector<T, 8> (&d_scores)[kSteps]) const {
    const unsigned line = line_at + buffer * Call::WeightTile::kBytes;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      ptx::stmatrix_x4<false>((line ^ i % 4 * 32) + i / 4 * Call::WeightTile::kChunkBytes, d_scores[i].words);
    }
    ptx::fence_proxy_async();
    ptx::barrier_sync(Call::kWeightsThere, Call::kConsumers * 128);
  }

  /// Leaves a block's sums to the warp that adds them.
  __device__ __forceinline__ void hand_over(const float (&d_query)[Sums::kNumbers]) {
    constexpr bool kOwnBuffers = Config::kSumBuffers == 2;
    const unsigned reader = kOwnBuffers ? buffer : buffer ^ 1;  // the warp that has to have read what lies there
    ptx::barrier_sync(Call::kSumsEmpty + 2 * reader + consumer, Call::kSumsEmptyThreads);
#pragma unroll
    for (int i = 0; i < Sums::kNumbers / 4; ++i) {
      unsigned words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) words[j] = ptx::mov_b32(d_query[4 * i + j]);
      ptx::st_shared<16>(sums_at + (kOwnBuffers ? buffer * Sums::kBytes : 0) + Sums::vector(0, i, 0), words);
    }
    ptx::fence_proxy_async();
    ptx::barrier_arrive(Call::kSumsFull + buffer, Call::kSumsFullThreads);
    buffer ^= 1;
  }

  template <class Result, int kCount>
  __device__ __forceinline__ void store(const HeadsAddress<Result>& to, const Tile& tile, const float (&sums)[kCount],
                                        float factor, int columns) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int key = tile.block * Call::kTileN + own_key() + 8 * r;
      store_fragment_row(to.vector(tile.element, tile.share, key), sums, r, factor, columns,
                         key < block.call.key_length);
    }
  }
};

template <class Config>
__device__ __forceinline__ void attention_sm90_backward(const AttentionSm90Backward<Config>& call) {
  using Call = AttentionSm90Backward<Config>;
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const AttentionBackwardBlock<Config> block(call, ptx::cvta_to_shared(shared_memory));
  constexpr unsigned kProducer = Call::kConsumers * 128;
  const bool takes = threadIdx.x == kProducer + 32;
  if (threadIdx.x == 0) {
    block.queue.init();
    block.keys.init(4 * Call::kConsumers + (Call::kDQuery ? 2 : 0));
    block.queries.init(4 * Call::kConsumers);
  }
  __syncthreads();

  const int group = ptx::shfl_sync_idx(threadIdx.x / 128);
  if (group == Call::kConsumers) {
    ptx::setmaxnreg_dec<24>();
    const int warp = ptx::shfl_sync_idx(threadIdx.x / 32 % 4);
    if (warp == 0 && threadIdx.x % 32 == 0) block.load();
    if (takes) block.queue.take_others(block.queue.take());
    if (Call::kDQuery && warp >= 2) block.add(warp - 2);
  } else {
    ptx::setmaxnreg_inc<240>();
    AttentionBackwardConsumer<Config>(block, group).consume();
  }
}

}  // namespace jaxdnn
