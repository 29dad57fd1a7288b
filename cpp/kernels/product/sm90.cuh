// D[b] = epilogue(A[b] * B[b]) on Hopper's tensor cores; also epilogue(A * B, A * B'): both in one pass over A.
//
//   grid             at most one block a multiprocessor, in clusters of kClusterM x kClusterN. Each works through tiles
//                    in the order of core/scheduler.cuh, dealt or taken (core/tile_queue.cuh). The blocks of a cluster
//                    have neighbouring tiles, and share operands by multicast
//   warp groups      kConsumers that multiply, then one producer, of which one thread starts the copies, and one of
//                    another warp takes tiles for the cluster
//   cooperative      the consumers share a tile, 64 or 128 rows each:
//                        producer   | copy tile 0 | copy tile 1 | ...            as far ahead as there are stages
//                        consumers  | multiply tile 0 | epilogue 0 | multiply tile 1 | ...
//                    With kStagger they start some stages apart, and stay so: while one is in its epilogue, the other
//                    still multiplies
//   ping-pong        each of two consumers takes every other tile (of three every third), and takes turns at the tensor
//                    cores, so that one's epilogue runs behind the others' multiplies:
//                        consumer 0 | multiply tile 0 | epilogue 0      | multiply tile 2 | ...
//                        consumer 1 |                 | multiply tile 1 | epilogue 1      | ...
//
//   barriers         full[stage]   1 arrival (the producer's, which announces the bytes of A's and B's tile)
//                    empty[stage]  a lane of each consuming warp, of each block that this one's copies write to:
//                                  4 x (kPingpong ? 1 : kConsumers) x (kClusterM + kClusterN - 1)
//                    named 1, ...  ping-pong's turns, 256 threads: one warp group waits, the one before arrives
//                    and those of the epilogue's tiles (core/epilogue.cuh)
//                    named kConsumers + 1, where a block's warps leave a line of what is reduced: all that multiply
//                    named 8, ...   of the warps of a group that share stages of results, swapped: 128 threads
//   shared memory    | stages of (A tile | B tile) | the warps' epilogue stages | barriers | the cluster's tiles |
//   swapped          D^T = B^T * A^T: columns of tiles, which come in steps of 16, are rows of the result. A warp turns
//                    its 16 rows of a tile on the way to shared memory, where a group's are lines of 64 columns
//   registers        a consumer holds its accumulators: 64 x kTileN / 128 a thread for each 64 rows
//   promotion        the tensor cores add 8-bit floats with 14 bits, and cut off the rest. With kPromotion they sum so
//                    many stages only, in as many registers again, which are then added to the accumulator in float32.
//                    The consumers do that at different times, so that the tensor cores always have work
//                    (benchmarks/results/product_kernels.md)
//
// Bytes: m k + k n of operands, m n of results. Flops: 2 m n k. The tensor cores bound it, or the power limit. For each
// 128 bytes of k, a tile of kTileM x kTileN takes 128 (kTileM + kTileN) bytes from L2 into shared memory, and its
// multiplies read 128 kTileM / 64 (64 + kTileN) there, since every 64 rows read all columns. Shared memory moves 128
// bytes a clock. At 128 x 256 that takes the 1024 clocks of the multiplies, exactly; 8% more at 128 x 192 (the widest
// with promotion), 4% less at 256 x 192.
#pragma once

#include "core/epilogue.cuh"
#include "core/pipeline_tma.cuh"
#include "core/promotion.cuh"
#include "core/scheduler.cuh"
#include "core/tile_queue.cuh"
#include "core/turns.cuh"
#include "core/views.cuh"
#include "product/sm90/stage.cuh"
#include "ptx/memory.cuh"

namespace jaxdnn {

/// What a `Config` has besides A, B, Epilogue, Operands, Results and Accumulator: jaxdnn/engines/product/sm90/ states
/// only what differs, and holds the same table, of which the numbers are its knobs' defaults.
struct ProductSm90Defaults {
  static constexpr bool kMMajorA = false, kNMajorB = true;  // how the operands' rows run in memory; else K-major
  static constexpr bool kPingpong = false;                  // else cooperative
  static constexpr bool kTensorStore = true;                // through shared memory, else straight from registers
  static constexpr bool kPairedStore = true;                // pairs of columns are aligned
  static constexpr int kPieceBytes = 0;         // of rows that leave in pieces; of none where they are boxes
  static constexpr bool kStoreLines = false;    // of memory, which a tile and the next one have parts of
  static constexpr bool kEvictFirst = false;    // results leave the L2 cache before what else is there
  static constexpr bool kSwapped = false;       // results lie by columns
  static constexpr bool kLongEpilogue = false;  // its code stands once for 8 elements
  static constexpr bool kOwnLines = false;      // of each warp, of what is reduced over rows
  static constexpr bool kBlockLines = false;    // or of each block
  static constexpr bool kEdgeA = false;         // a tile of rows along K may have boxes of its own, if it is the last
  static constexpr bool kEdgeB = false;         // likewise of columns
  static constexpr int kAccumulators = 1;       // 2: A * B and A * B'
  static constexpr int kSteps = 4;              // of a stage that are multiplied
  static constexpr int kGroups = 1;             // of columns, each of its own part of a stage's K
  static constexpr int kLine = 128;             // bytes of A's that lie together; and of B's, if K-major
  static constexpr int kViews = 1;              // of each B, whose rows TMA refuses (core/views.cuh)
  static constexpr int kStoreColumns = 32;      // of a subtile of results
  static constexpr int kTileM = 128, kTileN = 256, kStages = 4, kClusterM = 2, kClusterN = 1, kConsumers = 2;
  static constexpr int kStagger = 0, kPromotion = 0, kEpilogueStages = 2;
  static constexpr int kStationary = 0;  // tiles of B's columns that stay, which a tile's rows meet in turn
};

/// The call. One that derives from it may state other `Loads`, of what is no matrix in memory, into stages that hold
/// other than tiles; and other rows that tiles are cut from than those of the result, whose matrices may differ in how
/// many stages they take.
template <class ConfigOf, class StageOf = TileStage<ConfigOf>>
struct ProductSm90 {
  using Config = ConfigOf;
  using Stage = StageOf;
  using Loads = MatrixLoads<ProductSm90>;

  const TensorMap* a = nullptr;
  const TensorMap* b[Config::kAccumulators * Config::kViews] = {};
  const TensorMap* a_edge = nullptr;  // of a block's share of a tile that is not all there
  const TensorMap* b_edge[Config::kAccumulators] = {};
  int a_edge_less = 0, b_edge_less = 0;  // bytes that its box is smaller by
  OperandAddress operands[TileEpilogue<Config>::kOperands];
  ResultAddress results[TileEpilogue<Config>::kResults];
  int m = 0, n = 0, k = 0, batches = 1;
  int a_batched = 1, b_batched = 1;  // 0 when one matrix serves the whole batch
  int swizzle = 8;                   // rows of clusters' tiles in a band (core/scheduler.cuh)
  int counter = -1;                  // of the tiles that are taken; none where they are dealt
  int view_stages = 0;               // of each view
  int splits = 1;                    // of K; each split's accumulators are a matrix of their own (product/split.cuh)

  static constexpr int kAccumulators = Config::kAccumulators;
  static constexpr int kWidth = Config::kTileN / kAccumulators;                       // columns of a result's tile
  static constexpr int kApart = Config::kViews > 1 ? kWidth - kViewOverlap : kWidth;  // from a tile to the next
  static constexpr int kThreads = 128 * (Config::kConsumers + 1);
  static constexpr int kProducerThreads = 1;  // that start copies: one, or a warp
  using Cluster = ClusterCoordinate<Config::kClusterM, Config::kClusterN>;
  using Pipeline = TmaPipeline<Config::kStages, Stage::kBytes, Cluster>;
  static constexpr int kEpilogueAt = Config::kStages * Pipeline::kStageStride;
  static constexpr int kWarps = 4 * Config::kConsumers;
  static constexpr int kBarriersAt = kEpilogueAt + kWarps * TileEpilogue<Config>::kSharedBytes;
  static constexpr int kEpilogueBarriersAt = kBarriersAt + Pipeline::kBarrierBytes;
  using Queue = TileQueue<Cluster::kBlocks, 16>;  // tiles may have one stage, of eight
  static constexpr int kQueueAt = kEpilogueBarriersAt + kWarps * TileEpilogue<Config>::kBarrierBytes;
  static constexpr int kSharedBytes = kQueueAt + Queue::kSharedBytes;
  // Registers of a thread. A block gets an even share of 64 Ki, of which the producer leaves what the consumers take:
  // one that asks for more than there is left waits forever.
  static constexpr int kShare = 65536 / kThreads / 8 * 8,
                       kProducerRegisters = Config::kEdgeA || Config::kEdgeB ? 40 : 24;
  /// Of a consumer's, where one of the producer's has so many.
  static constexpr int consumer_registers(int producer) {
    return ((Config::kConsumers + 1) * kShare - producer) / Config::kConsumers / 8 * 8;
  }
  static constexpr int kRows =
      Config::kPingpong ? Config::kTileM : Config::kTileM / Config::kConsumers;  // of a consumer
  static_assert(kRows % 64 == 0, "a warp group multiplies 64 rows at a time");
  static_assert(!Config::kPingpong || (Config::kConsumers > 1 && Config::kStagger == 0), "several take turns");
  static_assert(Config::kStagger < Config::kStages, "the stages that one waits for are all in flight");

  __device__ __forceinline__ int tiled_rows() const { return m; }
  __device__ __forceinline__ int tiled_matrices() const { return batches * splits; }

  /// Of a tile of this matrix, if one takes `most`.
  __device__ __forceinline__ int stages(int, int most) const { return most; }

  /// Of a stage of the tile that begins at this row.
  __device__ __forceinline__ unsigned stage_bytes(int) const { return Stage::kBytes; }

  /// By who starts the copies of a stage of the tile that begins at this row, before that: writes what they leave out.
  __device__ __forceinline__ void store_rest(unsigned, int, int) const {}

  /// By one thread, at once: the first copy waits for its map, and then for what that says where to find.
  __device__ __forceinline__ void prefetch_maps() const {
    ptx::prefetch_tensormap(a);
#pragma unroll
    for (int i = 0; i < Config::kAccumulators * Config::kViews; ++i) ptx::prefetch_tensormap(b[i]);
    if constexpr (Config::kEdgeA) ptx::prefetch_tensormap(a_edge);
    if constexpr (Config::kEdgeB) ptx::prefetch_tensormap(b_edge[0]);
  }

  /// By one thread, where it has barriers of its own: makes them.
  __device__ __forceinline__ void init(unsigned) const {}

  /// By a thread of the producer's: starts the copies of what else is loaded than stages.
  template <class Block>
  __device__ __forceinline__ void load_others(const Block&) const {}

  /// Of a tile's rows, the result's; and of this matrix, the result's.
  __device__ __forceinline__ MatrixRows<Config> result_rows(int) const { return {}; }
  __device__ __forceinline__ int result_matrix(int matrix) const { return matrix; }
};

/// The work of one block: which tiles, and its pipeline.
template <class Call>
struct ProductBlock {
  using Config = typename Call::Config;

  const Call& call;
  typename Call::Pipeline pipeline;
  TileOrder order;
  typename Call::Queue queue;
  int most_stages;  // that a tile takes; past the end of K TMA fills in zeros

  __device__ __forceinline__ ProductBlock(const Call& call, unsigned shared)
      : call(call),
        pipeline(shared, shared + Call::kBarriersAt),
        order{clusters(call.tiled_rows(), Config::kTileM * Config::kClusterM),
              clusters(call.n, Call::kApart * Config::kClusterN), static_cast<unsigned>(call.swizzle)},
        queue{shared + Call::kQueueAt, tile_counter(call.counter), order.rows * order.columns * call.tiled_matrices()} {
    const int depth = Call::Stage::kDepth * call.splits;
    most_stages = (call.k + depth - 1) / depth;
  }

  __device__ __forceinline__ int depth_blocks(const TilePosition& tile) const {
    return call.stages(tile.batch, most_stages);
  }

  /// Of a tile's matrix, the number of the first stage that the tile takes.
  __device__ __forceinline__ int first_stage(const TilePosition& tile) const {
    return tile.batch % call.splits * most_stages;
  }

  static __device__ __forceinline__ unsigned clusters(int extent, int tile) { return (extent + tile - 1) / tile; }

  template <bool kWarp>
  __device__ __forceinline__ TileWalk<typename Call::Queue, kWarp> tiles() const {
    return {queue, blockIdx.x / Call::Cluster::kBlocks};
  }

  __device__ __forceinline__ int row(const TilePosition& tile) const {
    return (tile.row * Config::kClusterM + pipeline.cluster.row) * Config::kTileM;
  }

  __device__ __forceinline__ int column(const TilePosition& tile) const {
    return (tile.column * Config::kClusterN + pipeline.cluster.column) * Call::kApart;
  }

  /// Where all of a block's tiles are of the same columns, or rows if columns are reduced: the first of these; and of
  /// the blocks that have the same, each with a line, the block's.
  __device__ __forceinline__ int own_begin() const {
    const int place = static_cast<int>(blockIdx.x / Call::Cluster::kBlocks % side_by_side());
    return TileEpilogue<Config>::kOverRows ? column({0, place, 0}) : row({place, 0, 0});
  }
  __device__ __forceinline__ OwnLines own_line() const {
    const int place = static_cast<int>(blockIdx.x / Call::Cluster::kBlocks / side_by_side());
    const auto& cluster = pipeline.cluster;
    return {TileEpilogue<Config>::kOverRows ? place * Config::kClusterM + cluster.row
                                            : place * Config::kClusterN + cluster.column};
  }
  __device__ __forceinline__ unsigned side_by_side() const {
    return TileEpilogue<Config>::kOverRows ? order.columns : order.rows;
  }

  /// Starts the copies of all stages of all tiles; by one thread, or a warp.
  __device__ __forceinline__ void load() const {
    StageWriter<typename Call::Pipeline, Call::kProducerThreads> stages{pipeline};
    for (auto walk = tiles<false>(); walk.on_a_tile(); walk.advance()) {
      if (stages.first()) queue.ask();
      const TilePosition tile = order.quickly(walk.index);
      const int depth_blocks = this->depth_blocks(tile);
      typename Call::Loads loads(call, pipeline.cluster, row(tile), column(tile), tile.batch / call.splits,
                                 first_stage(tile));
      for (int block = 0; block < depth_blocks; ++block) {
        stages.fill([&](unsigned stage, unsigned full) { loads.load(block, stage, full); }, call.stage_bytes(row(tile)),
                    [&](unsigned stage) { call.store_rest(stage, row(tile), tile.batch / call.splits); });
      }
    }
  }
};

/// The work of one warp group that multiplies.
template <class Call>
struct ProductConsumer {
  using Config = typename Call::Config;
  using Accumulator = typename Config::Accumulator;
  static constexpr int kBlocks = Call::kRows / 64, kRegisters = Config::kTileN / 2;
  using Accumulators = Accumulator[kBlocks][kRegisters];
  using Promoted = Promotion<Config::kPromotion, Config::kConsumers, Accumulator, kRegisters>;
  static constexpr int kTiles = Config::kPingpong ? Config::kConsumers : 1;  // of a round; each consumer has one
  static_assert(Config::kPromotion == 0 || kBlocks == 1, "there are registers for 64 rows of accumulators twice");

  const ProductBlock<Call>& block;
  int consumer, warp;
  int first_row;  // in the tile
  typename Call::Stage operands;
  StageReader<typename Call::Pipeline> stages;

  __device__ __forceinline__ ProductConsumer(const ProductBlock<Call>& block, int consumer)
      : block(block),
        consumer(consumer),
        warp(ptx::shfl_sync_idx(threadIdx.x / 32 % 4)),
        first_row(Config::kPingpong ? 0 : consumer * Call::kRows),
        operands(block.call, block.pipeline.stages, first_row),
        stages{block.pipeline} {}

  /// Multiplies and writes all of this consumer's tiles.
  __device__ __forceinline__ void consume() {
    using Epilogue = TileEpilogue<Config>;
    const unsigned shared = block.pipeline.stages, number = consumer * 4 + warp;
    Epilogue epilogue{block.call.operands,
                      block.call.results,
                      block.call.m,
                      block.call.n,
                      Epilogue::stages_of(number, shared + Call::kEpilogueAt),
                      Epilogue::barriers_of(number, shared + Call::kEpilogueBarriersAt),
                      Config::kBlockLines ? block.own_line() : warps_line(number)};
    epilogue.open();
    const ConsumerTurns<Config::kPingpong, Config::kConsumers> turns{consumer};
    const int first = Config::kPingpong ? consumer : 0;
    turns.start();
    auto walk = block.template tiles<true>();
    if (walk.on_a_tile()) stagger(block.depth_blocks(block.order[walk.index]));
    skip(first);
    for (int passed = 0; passed < first; ++passed) walk.advance();
    while (walk.on_a_tile()) {
      if constexpr (Config::kStationary > 0) {
        compute_columns(epilogue, walk.index);
        for (int passed = 0; passed < kTiles; ++passed) walk.advance();
        continue;
      }
      Accumulators accumulators;
      Promoted promotion(consumer);
      turns.wait();
      multiply_tile(accumulators, promotion, epilogue, walk.index);
      turns.pass_on();
      skip(kTiles - 1);
      finish_tile(accumulators, promotion);

      const TilePosition tile = block.order[walk.index];
      if constexpr (Config::kViews > 1) epilogue.edge = block.column(tile) + Call::kApart;
      epilogue.apply(accumulators, block.row(tile) + first_row + warp * 16, block.column(tile),
                     block.call.result_matrix(tile.batch), block.call.result_rows(tile.batch));
#pragma unroll
      for (int passed = 0; passed < kTiles; ++passed) walk.advance();
      if constexpr (Config::kOwnLines && !Config::kBlockLines) leave(epilogue, tile, walk);
    }
    if constexpr (Config::kBlockLines) {
      epilogue.leave_together(number, 1 + Config::kConsumers, block.own_begin());
    } else {
      epilogue.finish();
    }
  }

 private:
  /// Computes a tile whose rows are multiplied by columns of B that stay, one tile of these after the other.
  __device__ __forceinline__ void compute_columns(TileEpilogue<Config>& epilogue, unsigned index) {
    const TilePosition tile = block.order[index];
    const int row = block.row(tile) + first_row + warp * 16, batch = block.call.result_matrix(tile.batch);
    stages.wait();
    operands.take(stages.position.stage);
    ptx::bar_warp_sync();  // all lanes have theirs
    stages.release();
    stages.advance();
    skip(kTiles - 1);
    int column = block.column(tile);
    epilogue.begin = column;
#pragma unroll 1
    for (int i = 0; i < Config::kStationary && column < block.call.n; ++i, column += Call::kWidth) {
      Accumulators accumulators;
      operands.multiply_columns(accumulators, i);
      prefetch(epilogue, row, column, batch, tile.batch);
      finish_multiplies(accumulators);
      epilogue.apply(accumulators, row, column, batch, block.call.result_rows(tile.batch));
    }
    if constexpr (Config::kStoreLines) epilogue.store_rest(row, column, batch);
  }

  __device__ __forceinline__ OwnLines warps_line(unsigned number) const {
    return {static_cast<int>(blockIdx.x * Call::kWarps + number), static_cast<int>(gridDim.x * Call::kWarps),
            block.call.batches, block.call.n};
  }

  /// Has all consumers but the first start some stages later.
  __device__ __forceinline__ void stagger(int depth_blocks) const {
    if constexpr (Config::kStagger > 0) {
      if (consumer > 0 && depth_blocks > Config::kStagger) {
        mbarrier_wait(block.pipeline.full(Config::kStagger), 0);
      }
    }
  }

  /// Passes over the stages of so many tiles, which are the other consumers'.
  __device__ __forceinline__ void skip(int tiles) {
    if constexpr (Config::kPingpong) stages.position.advance(tiles * block.most_stages);
  }

  /// Starts all multiplies of a tile; those of the last stage still run at the end.
  __device__ __forceinline__ void multiply_tile(Accumulators& accumulators, Promoted& promotion,
                                                const TileEpilogue<Config>& epilogue, unsigned index) {
    const TilePosition tile = block.order[index];
    const int depth_blocks = block.depth_blocks(tile), first = block.first_stage(tile);
    int view_left = block.call.view_stages;
    bool released = true;
    for (int i = 0; i < depth_blocks; ++i) {
      stages.wait();
      operands.multiply(accumulators, stages.position.stage, first + i, i > promotion.starts);
      if (i == 0) prefetch(epilogue, index);
      ptx::wgmma_wait_group<1>();
      if (Config::kViews > 1 ? !released : i > promotion.starts) stages.release_previous();
      stages.advance();
      if constexpr (Config::kViews > 1) {
        released = --view_left == 0 && i + 1 < depth_blocks;
        if (released) {
          finish_stage(accumulators);
          next_view(accumulators);
          view_left = block.call.view_stages;
        }
      }
      if (promotion.due(i + 1, depth_blocks)) {
        ptx::wgmma_wait_group<0>();
        stages.release_previous();
        promotion.promote(accumulators[0]);
      }
    }
  }

  /// Waits for the last multiplies of a tile.
  __device__ __forceinline__ void finish_tile(Accumulators& accumulators, Promoted& promotion) const {
    finish_stage(accumulators);
    promotion.finish(accumulators[0]);
  }

  /// Waits for all multiplies that were started, the last ones of a stage.
  __device__ __forceinline__ void finish_stage(Accumulators& accumulators) const {
    finish_multiplies(accumulators);
    stages.release_previous();
  }

  __device__ __forceinline__ void finish_multiplies(Accumulators& accumulators) const {
    ptx::wgmma_wait_group<0>();
#pragma unroll
    for (int rows = 0; rows < kBlocks; ++rows) ptx::warpgroup_fence_operand(accumulators[rows]);
  }

  /// Moves the accumulators to where the next view of B lies.
  __device__ __forceinline__ void next_view(Accumulators& accumulators) const {
    constexpr int kOne = kRegisters / Config::kAccumulators;
#pragma unroll
    for (int rows = 0; rows < kBlocks; ++rows) {
#pragma unroll
      for (int i = 0; i < Config::kAccumulators; ++i) {
        move_left<kViewOverlap / Config::kViews, kOne>(accumulators[rows] + i * kOne);
      }
    }
  }

  /// Leaves what is reduced of `tile`, and those before, unless the next one is of the same columns and matrix.
  template <class Walk>
  __device__ __forceinline__ void leave(TileEpilogue<Config>& epilogue, const TilePosition& tile, const Walk& walk) {
    const TilePosition next = block.order.quickly(walk.index);
    const int batch = block.call.result_matrix(tile.batch);
    const bool stays = next.column == tile.column && block.call.result_matrix(next.batch) == batch;
    if (!walk.on_a_tile() || !stays) epilogue.leave(block.column(tile), batch);
  }

  /// Brings closer what the epilogue of a tile reads, while the tile is multiplied.
  __device__ __forceinline__ void prefetch(const TileEpilogue<Config>& epilogue, unsigned index) const {
    if constexpr (Config::Operands::kCount > 0) {
      const TilePosition tile = block.order[index];
      prefetch(epilogue, block.row(tile) + first_row + warp * 16, block.column(tile),
               block.call.result_matrix(tile.batch), tile.batch);
    }
  }
  __device__ __forceinline__ void prefetch(const TileEpilogue<Config>& epilogue, int row, int column, int batch,
                                           int matrix) const {
    if constexpr (Config::Operands::kCount > 0) {
      epilogue.template prefetch<kBlocks, Call::kWidth>(row, column, batch, block.call.result_rows(matrix));
    }
  }
};

template <class Call>
__device__ __forceinline__ void product_sm90(const Call& call) {
  using Config = typename Call::Config;
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const ProductBlock<Call> block(call, ptx::cvta_to_shared(shared_memory));
  const unsigned producer = Config::kConsumers * 128;
  const bool first_block = block.pipeline.cluster.row + block.pipeline.cluster.column == 0;
  const bool takes = threadIdx.x == producer + 32 && block.queue.taken() && first_block;
  const unsigned taken = takes ? block.queue.take() : 0;
  if (threadIdx.x == producer) call.prefetch_maps();
  if (threadIdx.x == 0) {
    if (block.queue.taken()) block.queue.init();
    TileEpilogue<Config>::init(block.pipeline.stages + Call::kEpilogueBarriersAt, Call::kWarps);
    call.init(block.pipeline.stages);
    block.pipeline.init(4 * (Config::kPingpong ? 1 : Config::kConsumers));
  }
  block.pipeline.open();

  const int group = ptx::shfl_sync_idx(threadIdx.x / 128);
  if (group == Config::kConsumers) {
    if constexpr (Config::kConsumers > 1) ptx::setmaxnreg_dec<Call::kProducerRegisters>();
    if (threadIdx.x - producer < Call::kProducerThreads) block.load();
    if (takes) block.queue.take_others(taken);
    if (threadIdx.x == producer + 64) call.load_others(block);
  } else {
    if constexpr (Config::kConsumers > 1) {
      ptx::setmaxnreg_inc<Call::consumer_registers(Call::kProducerRegisters)>();
    }
    ProductConsumer<Call>(block, group).consume();
  }
  block.pipeline.close();
}

}  // namespace jaxdnn
