// d_query = scale * d_s * key on Hopper's tensor cores, where d_s, the scores' gradients, are computed anew
// (attention/sm90/gradient_call.cuh), in one pass over K and V.
//
//   grid             at most one block a multiprocessor. Each works through tiles of kTileM queries of one head, in the
//                    order of the forward kernel (attention/sm90.cuh)
//   warp groups      kConsumers of 64 queries each, then one producer, of which one thread starts the copies, and one
//                    of another warp takes tiles
//
//                        producer     | Q, dO | K[n] | V[n] | K[n-1] | V[n-1] | ...               as there is room
//                        tensor cores | S[n] | dP[n] |       | dQ += dS[n] K[n] | S[n-1] | dP[n-1] | ...
//                        arithmetic          | P[n]  | dS[n] |                           | P[n-1]  | dS[n-1] ...
//
//                    A consumer starts the product of a block's scores' gradients and its keys together with those of
//                    the next block, and makes probabilities of that while its cotangents dP are multiplied. Two
//                    consumers take turns to start, so that the rest of the arithmetic is behind the other's
//                    multiplies. K[n] is needed longer than V[n]: with two stages of K and one of V, which is all that
//                    fits at 256 elements, the next block is always on its way.
//   keys             from the last block to the first, those cut by an edge of the mask peeled from the loop, as in the
//                    forward kernel; or those of a list. Functions of scores, masks and dropout as in
//                    attention/sm90_backward.cuh, but that scores aren't transposed
//
//   barriers         full[stage]   of each of the rings of Q with dO (1 stage), K and V: 1 arrival (the producer's)
//                    empty[stage]  a lane of each consuming warp: 4 x kConsumers
//                    named 1, ...  turns, 256 threads: a consumer waits, the one before arrives
//   shared memory    | Q, dO | K stages | V stages | barriers | tiles |
//                    tiles of vectors as attention/sm90.cuh's
//   registers        of a consumer's thread: kHeadSize / 2 for dQ, kTileN / 2 for each of S and dP, and kTileN / 4 for
//                    dS, which is multiplied before dP is begun: 192 with 64 keys of 256 elements
//
// Bytes: those of Q, K, V, dO and the result, once; for each tile again those of K and V, from the L2 cache: with 64
// keys of 256 elements, 64 KiB in the 3072 clocks of their multiplies, 21 of them a clock. Flops: 2 (2 d + dv) for each
// query and key that it sees. Shared memory gives 128 bytes a clock, and multiplies of 64 columns, of which both
// operands lie there, take them all. With those of dQ, of which one is in registers and which take half, and with what
// TMA writes it is 384 KiB in those clocks, just as many as there are.
#pragma once

#include "attention/sm90.cuh"
#include "attention/sm90/gradient_call.cuh"

namespace jaxdnn {

template <class Config>
struct AttentionSm90QueryGradient : AttentionSm90Gradient<Config> {
  using T = typename Config::T;
  HeadsAddress<typename Config::DQuery> d_query;

  static constexpr int kConsumers = Config::kTileM / 64;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static_assert(Config::kTileM % 64 == 0, "a warp group has 64 queries");
  static_assert(Config::kHeadSize % 32 == 0 && Config::kValueSize % 16 == 0, "a row of four lanes, and a multiply");
  using QueryTile = VectorTile<T, Config::kTileM, Config::kHeadSize>;
  using DOutTile = VectorTile<T, Config::kTileM, Config::kValueSize>;
  using KeyTile = VectorTile<T, Config::kTileN, Config::kHeadSize>;
  using ValueTile = VectorTile<T, Config::kTileN, Config::kValueSize>;
  // What is summed lies behind what is multiplied before, or is the same.
  using KeySumTile = SummedTile<T, Config::kTileN, Config::kHeadSize>;
  static constexpr bool kByFeature = AttentionSm90Gradient<Config>::kByFeature;
  static constexpr int kKeySumsAt = kByFeature ? KeyTile::kBytes : 0;  // in a stage
  using Queries = TmaPipeline<1, QueryTile::kBytes + DOutTile::kBytes>;
  using Keys = TmaPipeline<Config::kKeyStages, kKeySumsAt + KeySumTile::kBytes>;
  using Values = TmaPipeline<Config::kValueStages, ValueTile::kBytes>;
  using Queue = TileQueue<1>;
  static constexpr int kKeysAt = Queries::kStageBytes;
  static constexpr int kValuesAt = kKeysAt + Config::kKeyStages * Keys::kStageBytes;
  static constexpr int kBarriersAt = kValuesAt + Config::kValueStages * ValueTile::kBytes;
  static constexpr int kKeyBarriersAt = kBarriersAt + Queries::kBarrierBytes;
  static constexpr int kValueBarriersAt = kKeyBarriersAt + Keys::kBarrierBytes;
  static constexpr int kQueueAt = kValueBarriersAt + Values::kBarrierBytes;
  static constexpr int kSharedBytes = kQueueAt + Queue::kSharedBytes;
  // As the forward kernel's.
  static constexpr int kShare = 65536 / kThreads / 8 * 8, kProducerRegisters = kConsumers == 2 ? 40 : 32;
  static constexpr int kConsumerRegisters = ((kConsumers + 1) * kShare - kProducerRegisters) / kConsumers / 8 * 8;
};

/// The work of one block: which tiles, and its rings.
template <class Config>
struct QueryGradientBlock {
  using Call = AttentionSm90QueryGradient<Config>;
  using Tile = AttentionTile<Config, Call>;

  const Call& call;
  typename Call::Queries queries;
  typename Call::Keys keys;
  typename Call::Values values;
  TileOrder order;
  typename Call::Queue queue;

  __device__ __forceinline__ QueryGradientBlock(const Call& call, unsigned shared)
      : call(call),
        queries(shared, shared + Call::kBarriersAt),
        keys(shared + Call::kKeysAt, shared + Call::kKeyBarriersAt),
        values(shared + Call::kValuesAt, shared + Call::kValueBarriersAt),
        order{static_cast<unsigned>(call.batches * call.query_heads),
              static_cast<unsigned>((call.query_length + Config::kTileM - 1) / Config::kTileM),
              static_cast<unsigned>(call.swizzle)},
        queue{shared + Call::kQueueAt, tile_counter(call.counter), order.rows * order.columns} {}

  template <bool kWarp>
  __device__ __forceinline__ TileWalk<typename Call::Queue, kWarp> tiles() const {
    return {queue, blockIdx.x};
  }

  __device__ __forceinline__ Tile tile(unsigned index) const { return {call, order, index}; }

  /// Starts the copies of all tiles; by one thread.
  __device__ __forceinline__ void load() const {
    ptx::prefetch_tensormap(call.query);
    ptx::prefetch_tensormap(call.d_out);
    ptx::prefetch_tensormap(call.key);
    ptx::prefetch_tensormap(call.value);
    StageWriter<typename Call::Queries> to_queries{queries};
    StageWriter<typename Call::Keys> to_keys{keys};
    StageWriter<typename Call::Values> to_values{values};
    for (auto walk = tiles<false>(); walk.on_a_tile(); walk.advance()) {
      queue.ask();
      const Tile tile = this->tile(walk.index);
      const int key_head = tile.head / call.group;
      to_queries.fill([&](unsigned stage, unsigned full) {
        Call::QueryTile::load(call.query, stage, full, tile.first_query, tile.head, tile.element * call.query_batched);
        Call::DOutTile::load(call.d_out, stage + Call::QueryTile::kBytes, full, tile.first_query, tile.head,
                             tile.element * call.d_out_batched);
      });
      for (KeyBlockWalk<Tile> blocks(tile); blocks.on_a_block(); blocks.advance()) {
        const int block = blocks.number();
        to_keys.fill([&](unsigned stage, unsigned full) {
          const int first = block * Config::kTileN, element = tile.element * call.key_batched;
          Call::KeyTile::load(call.key, stage, full, first, key_head, element);
          if constexpr (Call::kByFeature) {
            Call::KeySumTile::load(call.key_features, stage + Call::kKeySumsAt, full, first, key_head, element);
          }
        });
        to_values.fill([&](unsigned stage, unsigned full) {
          Call::ValueTile::load(call.value, stage, full, block * Config::kTileN, key_head,
                                tile.element * call.value_batched);
        });
      }
    }
  }
};

/// The work of one warp group that multiplies. A thread has two rows, 8 apart, as ptx/wgmma.cuh says: element i of an
/// accumulator is of row i / 2 % 2.
template <class Config>
struct QueryGradientConsumer {
  using Call = AttentionSm90QueryGradient<Config>;
  using T = typename Config::T;
  using Tile = typename QueryGradientBlock<Config>::Tile;
  static constexpr int kScores = Config::kTileN / 2, kSums = Config::kHeadSize / 2;
  static constexpr int kHeld = 16 / static_cast<int>(sizeof(T)), kSteps = kScores / kHeld;  // of a multiply's operand
  static constexpr bool kScored = Call::kScored, kDropped = Call::kDropped;
  static constexpr ptx::WgmmaType kType = wgmma_type<T>();

  const QueryGradientBlock<Config>& block;
  const ConsumerTurns<Config::kTurns && (Call::kConsumers > 1), Call::kConsumers> turns;
  int first_row, lane;                        // of the thread, in the tile; and in its warp
  float scale;                                // to the base of 2
  unsigned long long q, d_out, k, k_sums, v;  // descriptors of the first stages
  StageReader<typename Call::Queries> queries;
  StageReader<typename Call::Keys> keys;
  StageReader<typename Call::Values> values;

  float scores[kScores], cotangents[kScores], sums[kSums];
  Vector<T, kHeld> gradients[kSteps];  // of scores
  float log_sum_exp[2], delta[2];      // of a row
  int first_key[2];                    // that a row sees
  unsigned key_count[2];
  FragmentCoordinate first_score;  // of the thread, in the first block of keys
  StripFunction<typename Config::Score, kFragmentColumns> score;
  Dropout dropout;

  __device__ __forceinline__ QueryGradientConsumer(const QueryGradientBlock<Config>& block, int consumer)
      : block(block),
        turns{consumer},
        first_row(consumer * 64 + ptx::shfl_sync_idx(threadIdx.x / 32 % 4) * 16 + threadIdx.x % 32 / 4),
        lane(threadIdx.x % 32),
        scale(block.call.scale_to_base_2()),
        q(Call::QueryTile::descriptor(block.queries.stages) + Call::QueryTile::vectors(4 * consumer)),
        d_out(Call::DOutTile::descriptor(block.queries.stages + Call::QueryTile::kBytes) +
              Call::DOutTile::vectors(4 * consumer)),
        k(Call::KeyTile::descriptor(block.keys.stages)),
        k_sums(Call::KeySumTile::descriptor(block.keys.stages + Call::kKeySumsAt)),
        v(Call::ValueTile::descriptor(block.values.stages)),
        queries{block.queries},
        keys{block.keys},
        values{block.values} {}

  /// Computes and writes all tiles.
  __device__ __forceinline__ void consume() {
    turns.start();
    auto walk = block.template tiles<true>();
    while (walk.on_a_tile()) {
      const Tile tile = block.tile(walk.index);
      compute(tile);
      store(tile);
      walk.advance();
    }
  }

 private:
  __device__ __forceinline__ void compute(const Tile& tile) {
    begin(tile);
    queries.wait();
    KeyBlockWalk<Tile> blocks(tile);
    if (blocks.on_a_block()) {
      int number = blocks.number();
      const int first = tile.first_query + turns.consumer * 64;
      const int whole_from =
          (tile.first_key(block.call, tile.last_query(first, 64)) + Config::kTileN - 1) / Config::kTileN;
      const int whole_end = tile.end_key(block.call, first);  // in keys
      start_scores();
      start_cotangents();
      differentiate(number, true);
      if constexpr (Tile::kListed) {
        for (blocks.advance(); blocks.on_a_block(); blocks.advance()) {
          step(blocks.number(), blocks.edge() != Edge::none);
        }
      } else {
        if constexpr (Config::kRight) {
          while (number > tile.first_block && number * Config::kTileN > whole_end) step(--number, true);
        }
        while (number > tile.first_block && number > whole_from) step(--number, false);
        if constexpr (Config::kLeft) {
          while (number > tile.first_block) step(--number, true);
        }
      }
    }
    __syncwarp();  // where there are no keys, no multiply has had the lanes meet since each saw the queries arrive
    queries.release();
    queries.advance();
    if (tile.blocks > 0) {
      start_sums();
      finish_sums<0>();
    }
  }

  /// One more block of keys, before whose the gradients are in the registers.
  __device__ __forceinline__ void step(int number, bool masked) {
    turns.wait();
    start_sums();
    start_scores();
    finish_sums<1>();  // before the cotangents start, for which there are no registers sooner
    start_cotangents();
    turns.pass_on();
    differentiate(number, masked);
  }

  __device__ __forceinline__ void begin(const Tile& tile) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i] = 0;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int query = tile.first_query + first_row + 8 * r;
      const float* const numbers = block.call.numbers_of_row(tile.batch, query);
      log_sum_exp[r] = numbers[0];
      delta[r] = numbers[1];
      const int end = tile.end_key(block.call, query);
      first_key[r] = tile.first_key(block.call, query);
      key_count[r] = end > first_key[r] ? end - first_key[r] : 0;
    }
    const Call& call = block.call;
    first_score = {tile.first_query + first_row, lane % 4 * 2, tile.batch, call.query_length, call.key_length};
    dropout = call.dropout(tile.batch);
  }

  __device__ __forceinline__ void start_scores() {
    keys.wait();
    const unsigned stage = stage_offset(keys.position.stage, Call::Keys::kStageBytes);
    const unsigned long long q = recomputed(this->q), k = recomputed(this->k);
    ptx::warpgroup_fence_operand(scores);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < Call::KeyTile::kSteps; ++i) {
      ptx::Wgmma<Config::kTileN>::template mma_async<kType, kType, false, false>(
          scores, q + Call::QueryTile::elements(i), k + (stage + Call::KeyTile::elements(i)), i > 0);
    }
    ptx::wgmma_commit_group();
  }

  /// Those of a block's probabilities.
  __device__ __forceinline__ void start_cotangents() {
    values.wait();
    const unsigned stage = stage_offset(values.position.stage, Call::ValueTile::kBytes);
    const unsigned long long d_out = recomputed(this->d_out), v = recomputed(this->v);
    ptx::warpgroup_fence_operand(cotangents);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < Call::ValueTile::kSteps; ++i) {
      ptx::Wgmma<Config::kTileN>::template mma_async<kType, kType, false, false>(
          cotangents, d_out + Call::DOutTile::elements(i), v + (stage + Call::ValueTile::elements(i)), i > 0);
    }
    ptx::wgmma_commit_group();
  }

  /// Of the block whose gradients are in the registers.
  __device__ __forceinline__ void start_sums() {
    const unsigned stage = stage_offset(keys.previous, Call::Keys::kStageBytes);
    ptx::warpgroup_fence_operand(sums);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      ptx::WgmmaRs<Config::kHeadSize>::template mma_async<kType, !Call::kByFeature>(
          sums, gradients[i].words, k_sums + (stage + Call::KeySumTile::positions(i)), true);
    }
    ptx::wgmma_commit_group();
  }

  /// With so many later multiplies left unfinished.
  template <int kPending>
  __device__ __forceinline__ void finish_sums() {
    ptx::wgmma_wait_group<kPending>();
    ptx::warpgroup_fence_operand(sums);
    keys.release_previous();
  }

  /// Makes gradients of the scores of a block, probabilities while the tensor cores are at their cotangents.
  __device__ __forceinline__ void differentiate(int number, bool masked) {
    const Call& call = block.call;
    const FragmentCoordinate at = first_score.to_the_right(number * Config::kTileN);
    ScoreSetOf<kScores> dropped;
    if constexpr (kScored) score.fetch(call.score_operands, at);
    if constexpr (kDropped) dropout.each_dropped<kScores>(at, [&](int i) { dropped.add(i); });
    ptx::wgmma_wait_group<1>();
    ptx::warpgroup_fence_operand(scores);
    keys.advance();  // the keys are needed once more
    const auto probability = [&](int i, float score) {
      return ptx::ex2_approx_ftz(ptx::fma_rn(score, scale, -log_sum_exp[i / 2 % 2]));
    };
    if constexpr (kScored) {
#pragma unroll
      for (int i = 0; i < kScores; ++i) scores[i] *= call.scale;
      // Times the function's derivative, of which gradients are a multiple.
      score.apply(scores, call.score_operands, at, [&](int i, float score, auto... slope) {
        scores[i] = (probability(i, score) * ... * static_cast<float>(slope));
      });
    } else {
#pragma unroll
      for (int i = 0; i < kScores; ++i) scores[i] = probability(i, scores[i]);
    }
    ptx::wgmma_wait_group<0>();
    ptx::warpgroup_fence_operand(cotangents);
    values.release();
    values.advance();
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const int r = i / 2 % 2;
      float cotangent = dropped.has(i) ? 0 : cotangents[i];
      if constexpr (kDropped) cotangent *= call.kept;
      scores[i] *= cotangent - delta[r];
    }
    if (masked) mask(at);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) gradients[i] = operand_of<T>(scores + i * kHeld);
  }

  __device__ __forceinline__ void mask(const FragmentCoordinate& at) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // By comparisons: with dropout at head size 256, bits spill.
      each_outside<kScores, true>(r, at.column, first_key[r], key_count[r], [&](int i) { scores[i] = 0; });
    }
    if constexpr (Tile::kListed) {
      StripFunction<typename Config::Mask, kFragmentColumns> visible;
      visible.fetch(block.call.mask_operands, at);
      visible.apply(scores, block.call.mask_operands, at, [&](int i, bool sees) {
        if (!sees) scores[i] = 0;
      });
    }
  }

  __device__ __forceinline__ void store(const Tile& tile) {
    const Call& call = block.call;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = tile.first_query + first_row + 8 * r;
#pragma unroll
      for (int i = 0; i < kSums; ++i) {
        // A function may make infinities of queries that aren't there.
        if (kScored && i / 2 % 2 == r && row >= tile.query_length) sums[i] = 0;
      }
      store_fragment_row(call.d_query.vector(tile.element, tile.head, row), sums, r, call.scale, call.head_size,
                         row < call.query_length);
    }
  }
};

template <class Config>
__device__ __forceinline__ void attention_sm90_query_gradient(const AttentionSm90QueryGradient<Config>& call) {
  using Call = AttentionSm90QueryGradient<Config>;
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const QueryGradientBlock<Config> block(call, ptx::cvta_to_shared(shared_memory));
  constexpr unsigned kProducer = Call::kConsumers * 128;
  const bool takes = threadIdx.x == kProducer + 32 && block.queue.taken();
  const unsigned taken = takes ? block.queue.take() : 0;
  if (threadIdx.x == 0) {
    block.queue.init();
    block.queries.init(4 * Call::kConsumers);
    block.keys.init(4 * Call::kConsumers);
    block.values.init(4 * Call::kConsumers);
  }
  __syncthreads();

  const int group = ptx::shfl_sync_idx(threadIdx.x / 128);
  if (group == Call::kConsumers) {
    if constexpr (Call::kConsumers > 1) ptx::setmaxnreg_dec<Call::kProducerRegisters>();
    if (threadIdx.x == kProducer) block.load();
    if (takes) block.queue.take_others(taken);
  } else {
    if constexpr (Call::kConsumers > 1) ptx::setmaxnreg_inc<Call::kConsumerRegisters>();
    QueryGradientConsumer<Config>(block, group).consume();
  }
}

}  // namespace jaxdnn
