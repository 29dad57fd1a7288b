// d_value = p^T * d_out and d_key = scale * d_s^T * query on Hopper's tensor cores, where p, the probabilities, and
// d_s, the scores' gradients, are computed anew (attention/sm90/gradient_call.cuh), in one pass over Q and dO.
//
//   grid             at most one block a multiprocessor. Each works through tiles of 64 keys of one head, dealt or
//                    taken (core/tile_queue.cuh). A tile's queries are those of all heads that share its keys, one
//                    head after the other, or of a share of these (attention/sm90/backward_shares.cuh). The kCluster
//                    blocks of a cluster have neighbouring tiles, and share what they load of queries: all that see one
//                    of their keys
//   warp groups      two, with a product of queries each, then one producer, of which one thread starts the copies, and
//                    one of another warp takes tiles. All is transposed: rows are keys, columns queries
//
//                        producer      | K | V | Q[0] | dO[0] | Q[1] | dO[1] | ...                   as there is room
//                        warp group 0  | S[0] = K Q^T  | p[0]: exp | dV += p[0] dO,  S[1]  | p[1] | ...
//                        warp group 1  | dP[0] = V dO^T     | dS[0] = p[0] (dP[0] - delta) | dK += dS[0] Q, dP[1] | ...
//
//                    The first hands probabilities, in 16 bits, to the second, which has the same part of the same
//                    accumulator in each thread: both compute each number once. While one does arithmetic, the tensor
//                    cores have the other's multiplies.
//   queries          from the first block to the last, of those that one of the keys sees; or those of a list, of all
//                    keys of the cluster
//   scores           as in attention/sm90_backward.cuh: where a function has a derivative, warp group 0 hands over its
//                    products with probabilities. Both know which weights are dropped
//
//   barriers         full[stage]   of each of the rings of K, V (1 stage each), Q and dO: 1 arrival (the producer's)
//                    empty[stage]  a lane of each consuming warp: 4 of K (warp group 0's) and V (1's); of Q and dO 8
//                                  of each block of a cluster
//                    named 1, ...  probabilities of a stage are there: 128 threads arrive, 128 wait
//   shared memory    | K | V | Q stages | dO stages | probabilities of each stage | barriers | tiles |
//                    tiles of vectors as attention/sm90.cuh's; probabilities as their threads have them, 16 bytes each
//   registers        of a consumer's thread: kTileM / 2 for S or dP, kTileM / 4 for p or dS, as many for the numbers
//                    of queries, and kValueSize / 2 for dV or kHeadSize / 2 for dK: 192 with 64 queries of 256 elements
//
// Bytes: those of Q, K, V, dO and the results, once; for each tile again those of Q and dO, from the L2 cache: with 64
// queries of 256 elements, 64 KiB in the 2048 clocks of their multiplies, 32 of them a clock, which is more than it
// gives to all multiprocessors at once; so clusters. Flops: 4 (d + dv) for each query and key that it sees. Shared
// memory gives 128 bytes a clock, of which multiplies, copies and probabilities take 272 KiB in those clocks: 6 % more
// than there are.
#pragma once

#include "attention/sm90/key_gradient_call.cuh"

namespace jaxdnn {

/// The work of one block: which tiles, and its rings.
template <class Config>
struct KeyGradientBlock {
  using Call = AttentionSm90KeyGradient<Config>;

  const Call& call;
  unsigned shared;
  typename Call::Keys keys;
  typename Call::Values values;
  typename Call::Queries queries;
  typename Call::DOuts outs;
  TileOrder order;
  typename Call::Queue queue;

  __device__ __forceinline__ KeyGradientBlock(const Call& call, unsigned shared)
      : call(call),
        shared(shared),
        keys(shared, shared + Call::kKeyBarriersAt),
        values(shared + Call::kValuesAt, shared + Call::kValueBarriersAt),
        queries(shared + Call::kQueriesAt, shared + Call::kQueryBarriersAt),
        outs(shared + Call::kDOutsAt, shared + Call::kDOutBarriersAt),
        order{static_cast<unsigned>(call.batches * call.key_heads * call.shares),
              static_cast<unsigned>((call.key_length + Config::kCluster * Call::kTileN - 1) /
                                    (Config::kCluster * Call::kTileN)),
              static_cast<unsigned>(call.swizzle)},
        queue{shared + Call::kQueueAt, tile_counter(call.counter), order.rows * order.columns} {}

  template <bool kWarp>
  __device__ __forceinline__ TileWalk<typename Call::Queue, kWarp> tiles() const {
    return {queue, blockIdx.x / Config::kCluster};
  }

  __device__ __forceinline__ KeyTileWalk<Config> tile(unsigned index) const {
    return {call, order, index, queries.cluster.row};
  }

  /// Starts the copies of all tiles; by one thread.
  __device__ __forceinline__ void load() const {
    ptx::prefetch_tensormap(call.key);
    ptx::prefetch_tensormap(call.value);
    ptx::prefetch_tensormap(call.query);
    ptx::prefetch_tensormap(call.d_out);
    StageWriter<typename Call::Keys> to_keys{keys};
    StageWriter<typename Call::Values> to_values{values};
    StageWriter<typename Call::Queries> to_queries{queries};
    StageWriter<typename Call::DOuts> to_outs{outs};
    for (auto walk = tiles<false>(); walk.on_a_tile(); walk.advance()) {
      queue.ask();
      KeyTileWalk<Config> tile = this->tile(walk.index);
      to_keys.fill([&](unsigned stage, unsigned full) {
        Call::KeyTile::load(call.key, stage, full, tile.first_key, tile.key_head(), tile.element * call.key_batched);
      });
      to_values.fill([&](unsigned stage, unsigned full) {
        Call::ValueTile::load(call.value, stage, full, tile.first_key, tile.key_head(),
                              tile.element * call.value_batched);
      });
      for (; tile.on_a_block(); tile.advance()) {
        to_queries.fill([&](unsigned stage, unsigned full) {
          Call::QueryTile::load(call.query, stage, full, tile.first_query(), tile.head,
                                tile.element * call.query_batched, queries.cluster);
          if constexpr (Call::kByFeature) {
            Call::QuerySumTile::load(call.query_features, stage + Call::kQuerySumsAt, full, tile.first_query(),
                                     tile.head, tile.element * call.query_batched, queries.cluster);
          }
        });
        to_outs.fill([&](unsigned stage, unsigned full) {
          Call::DOutTile::load(call.d_out, stage, full, tile.first_query(), tile.head,
                               tile.element * call.d_out_batched, outs.cluster);
          if constexpr (Call::kByFeature) {
            Call::DOutSumTile::load(call.d_out_features, stage + Call::kDOutSumsAt, full, tile.first_query(), tile.head,
                                    tile.element * call.d_out_batched, outs.cluster);
          }
        });
      }
    }
  }
};

/// The probabilities of the blocks of queries that are in flight, which one warp group writes, and the other one reads.
/// Those of a stage are overwritten when a later block has taken its place: the reader's warps arrive, having read, at
/// the stage's `empty` barrier; the producer waits there, and arrives at its `full` one; the writer waits there. Each
/// arrival releases, and each wait acquires, so that reads come before the next writes.
template <class T, int kSteps>
struct ProbabilityExchange {
  using Operand = Vector<T, 16 / static_cast<int>(sizeof(T))>;  // a thread's, of a multiply

  unsigned at;  // shared address

  __device__ __forceinline__ unsigned address(int stage, int step) const {
    return at + ((stage * kSteps + step) * 128 + threadIdx.x % 128) * 16;
  }

  __device__ __forceinline__ void write(int stage, int step, const Operand& found) const {
    ptx::st_shared<16>(address(stage, step), found.words);
  }
  /// All are written.
  __device__ __forceinline__ void hand_over(int stage) const { ptx::barrier_arrive(1 + stage, 256); }

  __device__ __forceinline__ void read(int stage, Operand (&found)[kSteps]) const {
    ptx::barrier_sync(1 + stage, 256);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) ptx::ld_shared<16>(found[i].words, address(stage, i));
  }
};

/// What a warp group multiplies. For d_value: the tile's keys by queries, and what comes of it by cotangents. For
/// d_key: the tile's values by cotangents, and what comes of it by queries.
template <class Config, bool kValues>
struct KeyGradientRole;

template <class Config>
struct KeyGradientRole<Config, true> {
  using Call = AttentionSm90KeyGradient<Config>;
  using HeldTile = typename Call::KeyTile;
  using FactorTile = typename Call::QueryTile;
  using AddendTile = typename Call::DOutSumTile;
  using Held = typename Call::Keys;
  using Factors = typename Call::Queries;
  using Addends = typename Call::DOuts;
  using Gradient = typename Config::DValue;
  static constexpr int kDepth = Config::kHeadSize, kSize = Config::kValueSize;
  static constexpr int kNumber = 0;  // of a query's: the log-sum-exp
  static constexpr int kAddendsAt = Call::kDOutSumsAt;

  static __device__ __forceinline__ const Held& held(const KeyGradientBlock<Config>& block) { return block.keys; }
  static __device__ __forceinline__ const Factors& factors(const KeyGradientBlock<Config>& block) {
    return block.queries;
  }
  static __device__ __forceinline__ const Addends& addends(const KeyGradientBlock<Config>& block) { return block.outs; }
  static __device__ __forceinline__ const HeadsAddress<Gradient>& result(const Call& call) { return call.d_value; }
  static __device__ __forceinline__ float factor(const Call& call) { return Call::kDropped ? call.kept : 1; }
  static __device__ __forceinline__ int size(const Call& call) { return call.value_size; }
};

template <class Config>
struct KeyGradientRole<Config, false> {
  using Call = AttentionSm90KeyGradient<Config>;
  using HeldTile = typename Call::ValueTile;
  using FactorTile = typename Call::DOutTile;
  using AddendTile = typename Call::QuerySumTile;
  using Held = typename Call::Values;
  using Factors = typename Call::DOuts;
  using Addends = typename Call::Queries;
  using Gradient = typename Config::DKey;
  static constexpr int kDepth = Config::kValueSize, kSize = Config::kHeadSize;
  static constexpr int kNumber = 1;  // of a query's: delta
  static constexpr int kAddendsAt = Call::kQuerySumsAt;

  static __device__ __forceinline__ const Held& held(const KeyGradientBlock<Config>& block) { return block.values; }
  static __device__ __forceinline__ const Factors& factors(const KeyGradientBlock<Config>& block) { return block.outs; }
  static __device__ __forceinline__ const Addends& addends(const KeyGradientBlock<Config>& block) {
    return block.queries;
  }
  static __device__ __forceinline__ const HeadsAddress<Gradient>& result(const Call& call) { return call.d_key; }
  static __device__ __forceinline__ float factor(const Call& call) { return call.scale; }
  static __device__ __forceinline__ int size(const Call& call) { return call.head_size; }
};

/// The work of one warp group that multiplies. A thread has two rows, keys, as ptx/wgmma.cuh says, and of each block
/// of queries the columns 8 j + 2 (lane % 4) and the next.
template <class Config, bool kValues>
struct KeyGradientConsumer {
  using Call = AttentionSm90KeyGradient<Config>;
  using Role = KeyGradientRole<Config, kValues>;
  using T = typename Config::T;
  static constexpr int kProducts = Config::kTileM / 2, kSums = Role::kSize / 2;
  static constexpr int kHeld = 16 / static_cast<int>(sizeof(T)), kSteps = kProducts / kHeld;  // of a multiply's operand
  static constexpr bool kScored = Call::kScored, kDropped = Call::kDropped;
  static constexpr ptx::WgmmaType kType = wgmma_type<T>();

  const KeyGradientBlock<Config>& block;
  int first_row, lane;                                     // of the thread, in the tile; and in its warp
  float scale;                                             // to the base of 2
  unsigned long long held_tile, factor_tile, addend_tile;  // descriptors of the first stages
  StageReader<typename Role::Held> held;
  StageReader<typename Role::Factors> factors;
  StageReader<typename Role::Addends> addends;
  const ProbabilityExchange<T, kSteps> exchange;

  float products[kProducts], sums[kSums];
  float numbers[kProducts / 2];      // of queries
  Vector<T, kHeld> weights[kSteps];  // by which vectors are summed
  StripFunction<typename Config::Score, kFragmentColumns> score;

  __device__ __forceinline__ explicit KeyGradientConsumer(const KeyGradientBlock<Config>& block)
      : block(block),
        first_row(ptx::shfl_sync_idx(threadIdx.x / 32 % 4) * 16 + threadIdx.x % 32 / 4),
        lane(threadIdx.x % 32),
        scale(block.call.scale_to_base_2()),
        held_tile(Role::HeldTile::descriptor(Role::held(block).stages)),
        factor_tile(Role::FactorTile::descriptor(Role::factors(block).stages)),
        addend_tile(Role::AddendTile::descriptor(Role::addends(block).stages + Role::kAddendsAt)),
        held{Role::held(block)},
        factors{Role::factors(block)},
        addends{Role::addends(block)},
        exchange{block.shared + Call::kProbabilitiesAt} {}

  /// Computes and writes all tiles.
  __device__ __forceinline__ void consume() {
    for (auto walk = block.template tiles<true>(); walk.on_a_tile(); walk.advance()) {
      KeyTileWalk<Config> tile = block.tile(walk.index);
      compute(tile);
      store(tile);
    }
  }

 private:
  __device__ __forceinline__ void compute(KeyTileWalk<Config>& tile) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i] = 0;
    held.wait();
    start_products(tile);
    finish_products();
    weigh(tile);
    for (tile.advance(); tile.on_a_block(); tile.advance()) {
      start_sums();
      start_products(tile);
      finish_sums<1>();
      finish_products();
      weigh(tile);
    }
    held.release();
    held.advance();
    start_sums();
    finish_sums<0>();
  }

  /// S or dP of a block of queries.
  __device__ __forceinline__ void start_products(const KeyTileWalk<Config>& tile) {
    const float* const found = block.call.numbers_of_row(tile.batch, tile.first_query() + lane % 4 * 2) + Role::kNumber;
#pragma unroll
    for (int i = 0; i < kProducts / 2; ++i) {
      Vector<float, 1> number;
      number.load(found + 2 * (i / 2 * 8 + i % 2));
      numbers[i] = ptx::mov_f32(number.words[0]);
    }
    factors.wait();
    const unsigned stage = stage_offset(factors.position.stage, Role::Factors::kStageBytes);
    ptx::warpgroup_fence_operand(products);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < Role::FactorTile::kSteps; ++i) {
      ptx::Wgmma<Config::kTileM>::template mma_async<kType, kType, false, false>(
          products, held_tile + Role::HeldTile::elements(i), factor_tile + (stage + Role::FactorTile::elements(i)),
          i > 0);
    }
    ptx::wgmma_commit_group();
  }

  __device__ __forceinline__ void finish_products() {
    ptx::wgmma_wait_group<0>();
    ptx::warpgroup_fence_operand(products);
    factors.release();
    factors.advance();
  }

  /// Of the block whose weights are in the registers.
  __device__ __forceinline__ void start_sums() {
    addends.wait();
    const unsigned stage = stage_offset(addends.position.stage, Role::Addends::kStageBytes);
    ptx::warpgroup_fence_operand(sums);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      ptx::WgmmaRs<Role::kSize>::template mma_async<kType, !Call::kByFeature>(
          sums, weights[i].words, addend_tile + (stage + Role::AddendTile::positions(i)), true);
    }
    ptx::wgmma_commit_group();
  }

  /// With so many later multiplies left unfinished.
  template <int kPending>
  __device__ __forceinline__ void finish_sums() {
    ptx::wgmma_wait_group<kPending>();
    ptx::warpgroup_fence_operand(sums);
    if constexpr (!kValues) __syncwarp();  // all lanes have read the stage's probabilities
    addends.release();
    addends.advance();
  }

  /// Of the thread's first score.
  __device__ __forceinline__ FragmentCoordinate first_score(const KeyTileWalk<Config>& tile) const {
    return {tile.first_key + first_row, tile.first_query() + lane % 4 * 2, tile.batch, block.call.key_length,
            block.call.query_length};
  }

  /// Makes probabilities, or the scores' gradients, of a block's products.
  __device__ __forceinline__ void weigh(const KeyTileWalk<Config>& tile) {
    ScoreSetOf<kProducts> dropped;
    if constexpr (kDropped) {
      block.call.dropout(tile.batch).template each_dropped_key<kProducts>(first_score(tile), [&](int i) {
        dropped.add(i);
      });
    }
    if constexpr (!kValues) {
      differentiate(dropped);
    } else if constexpr (kScored) {
      weigh_with_slopes(tile, dropped);
    } else {
#pragma unroll
      for (int i = 0; i < kProducts; ++i) products[i] = probability(i, products[i]);
      if (tile.masked()) {
        each_hidden_key(tile, block.call, products, first_score(tile), [&](int i) { products[i] = 0; });
      }
      pack();
#pragma unroll
      for (int i = 0; i < kSteps; ++i) exchange.write(factors.previous, i, weights[i]);
      exchange.hand_over(factors.previous);
      if constexpr (kDropped) pack(dropped);
    }
  }

  __device__ __forceinline__ float probability(int i, float score) const {
    return ptx::ex2_approx_ftz(ptx::fma_rn(score, scale, -numbers[i / 4 * 2 + i % 2]));
  }

  /// Hands over the products of probabilities and the derivatives of the function of scores, if these aren't one.
  __device__ __forceinline__ void weigh_with_slopes(const KeyTileWalk<Config>& tile,
                                                    const ScoreSetOf<kProducts>& dropped) {
    const FragmentCoordinate at = first_score(tile);
    ScoreSetOf<kProducts> hidden;
    if (tile.masked()) each_hidden_key(tile, block.call, products, at, [&](int i) { hidden.add(i); });
#pragma unroll
    for (int i = 0; i < kProducts; ++i) products[i] *= block.call.scale;
    float own[kHeld], handed[kHeld];
    score.fetch(block.call.score_operands, at);
    score.apply(products, block.call.score_operands, at, [&](int i, float score, auto... slope) {
      const float found = probability(i, score);
      own[i % kHeld] = hidden.has(i) || dropped.has(i) ? 0 : found;
      handed[i % kHeld] = hidden.has(i) ? 0 : (found * ... * static_cast<float>(slope));
      if (i % kHeld < kHeld - 1) return;
      weights[i / kHeld] = operand_of<T>(own);
      exchange.write(factors.previous, i / kHeld, operand_of<T>(handed));
    });
    exchange.hand_over(factors.previous);
  }

  __device__ __forceinline__ void differentiate(const ScoreSetOf<kProducts>& dropped) {
    Vector<T, kHeld> probabilities[kSteps];
    exchange.read(factors.previous, probabilities);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      float values[kHeld];
      sums_of(probabilities[step], values);
#pragma unroll
      for (int j = 0; j < kHeld; ++j) {
        const int i = step * kHeld + j;
        float product = dropped.has(i) ? 0 : products[i];
        if constexpr (kDropped) product *= block.call.kept;
        products[i] = values[j] * (product - numbers[i / 4 * 2 + i % 2]);
      }
    }
    pack();
  }

  /// Those that are dropped are zero.
  __device__ __forceinline__ void pack(const ScoreSetOf<kProducts>& dropped = {}) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      float values[kHeld];
#pragma unroll
      for (int j = 0; j < kHeld; ++j) values[j] = dropped.has(kHeld * i + j) ? 0 : products[kHeld * i + j];
      weights[i] = operand_of<T>(values);
    }
  }

  __device__ __forceinline__ void store(const KeyTileWalk<Config>& tile) const {
    const Call& call = block.call;
    const HeadsAddress<typename Role::Gradient>& to = Role::result(call);
    if (to.data == nullptr) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int key = tile.first_key + first_row + 8 * r;
      store_fragment_row(to.vector(tile.element, tile.share, key), sums, r, Role::factor(call), Role::size(call),
                         key < call.key_length);
    }
  }
};

template <class Config>
__device__ __forceinline__ void attention_sm90_key_gradient(const AttentionSm90KeyGradient<Config>& call) {
  using Call = AttentionSm90KeyGradient<Config>;
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const KeyGradientBlock<Config> block(call, ptx::cvta_to_shared(shared_memory));
  constexpr unsigned kProducer = 256;
  const bool takes = threadIdx.x == kProducer + 32 && block.queries.cluster.row == 0 && block.queue.taken();
  const unsigned taken = takes ? block.queue.take() : 0;
  if (threadIdx.x == 0) {
    block.queue.init();
    block.keys.init(4);
    block.values.init(4);
    block.queries.init(8);
    block.outs.init(8);
  }
  block.queries.open();

  const int group = ptx::shfl_sync_idx(threadIdx.x / 128);
  if (group == 2) {
    ptx::setmaxnreg_dec<Call::kProducerRegisters>();
    if (threadIdx.x == kProducer) block.load();
    if (takes) block.queue.take_others(taken);
  } else {
    ptx::setmaxnreg_inc<Call::kConsumerRegisters>();
    if (group == 0) {
      KeyGradientConsumer<Config, true>(block).consume();
    } else {
      KeyGradientConsumer<Config, false>(block).consume();
    }
  }
  block.queries.close();
}

}  // namespace jaxdnn
