// D[b] = epilogue(A[b] * B[b]) on Hopper's tensor cores; also epilogue(A * B, A * B'): both sums in one pass over A.
//
//   grid             at most one block a multiprocessor, in clusters of kClusterM x kClusterN. Each works through tiles
//                    in the order of core/scheduler.cuh. The blocks of a cluster take neighbouring tiles, and share
//                    operands by multicast
//   warp groups      kConsumers that multiply, then one producer, of which one thread works: it starts the copies
//   cooperative      the consumers share a tile, 64 or 128 rows each:
//                        producer   | copy tile 0 | copy tile 1 | ...            as far ahead as there are stages
//                        consumers  | multiply tile 0 | epilogue 0 | multiply tile 1 | ...
//                    With kStagger they start some stages apart, and stay so: while one is in its epilogue, the other
//                    still multiplies
//   ping-pong        each of two consumers takes every other tile, and takes turns at the tensor cores, so that one's
//                    epilogue runs behind the other's multiplies:
//                        consumer 0 | multiply tile 0 | epilogue 0      | multiply tile 2 | ...
//                        consumer 1 |                 | multiply tile 1 | epilogue 1      | ...
//
//   barriers         full[stage]   1 arrival (the producer's, which announces the bytes of A's and B's tile)
//                    empty[stage]  a lane of each consuming warp, of each block that this one's copies write to:
//                                  4 x (kPingpong ? 1 : kConsumers) x (kClusterM + kClusterN - 1)
//                    named 1, 2    ping-pong's turns, 256 threads: one warp group waits, the other arrives
//   shared memory    | stages of (A tile | B tile) | the warps' slots for results | barriers |
//   registers        a consumer holds its sums: 64 x kTileN / 128 a thread for each 64 rows
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
#include "core/scheduler.cuh"
#include "core/tile.cuh"
#include "ptx/cluster.cuh"
#include "ptx/memory.cuh"

namespace jaxdnn {

/// What a `Config` has besides A, B, Epilogue, Operands, Results, Sum, kTileM and kTileN: jaxdnn/engines/product/sm90/
/// states only what differs, and holds the same table.
struct ProductSm90Defaults {
  static constexpr bool kMMajorA = false, kNMajorB = true;  // how the operands' rows run in memory; else K-major
  static constexpr bool kPingpong = false;                  // else cooperative
  static constexpr bool kTensorStore = true;                // by TMA, else straight from registers
  static constexpr bool kPairedStore = true;                // pairs of columns are aligned
  static constexpr bool kLongEpilogue = false;              // its code stands once for 8 elements
  static constexpr int kSums = 1;                           // 2: A * B and A * B'
  static constexpr int kStages = 4, kClusterM = 1, kClusterN = 1, kConsumers = 2, kStagger = 0, kPromotion = 0;
  static constexpr int kStoreColumns = 32, kSlots = 2;  // of a piece of results; pieces that wait for TMA
};

template <class Config>
struct ProductSm90 {
  const TensorMap* a = nullptr;
  const TensorMap* b[Config::kSums] = {};
  OperandAddress operands[ResultWriter<Config>::kOperands];
  ResultAddress results[ResultWriter<Config>::kResults];
  int m = 0, n = 0, k = 0, batches = 1;
  int a_batched = 1, b_batched = 1;  // 0 when one matrix serves the whole batch
  int group = 8;                     // rows of clusters' tiles in a band (core/scheduler.cuh)
  int splits = 1;                    // of K; each split's sums are a matrix of their own (product/split.cuh)

  static constexpr int kWidth = Config::kTileN / Config::kSums;                        // columns of a result's tile
  static constexpr int kLoaded = Config::kNMajorB ? (kWidth + 63) / 64 * 64 : kWidth;  // of B's, in whole chunks
  using ATile = OperandTile<typename Config::A, Config::kTileM, Config::kMMajorA, Config::kClusterN>;
  using BTile = OperandTile<typename Config::B, kLoaded, Config::kNMajorB, Config::kClusterM>;
  using Barriers = StageBarriers<Config::kStages>;
  static constexpr int kThreads = 128 * (Config::kConsumers + 1);
  static constexpr int kCluster = Config::kClusterM * Config::kClusterN;
  static constexpr int kPeers = Config::kClusterM + Config::kClusterN - 1;  // blocks that a stage is shared with
  static constexpr int kStageBytes = ATile::kBytes + Config::kSums * BTile::kBytes;
  static constexpr int kSlotsAt = Config::kStages * kStageBytes;
  static constexpr int kBarriersAt = kSlotsAt + 4 * Config::kConsumers * ResultWriter<Config>::kSharedBytes;
  static constexpr int kSharedBytes = kBarriersAt + Barriers::kSharedBytes;
  // Registers of a thread. A block gets an even share of 64 Ki, of which the producer leaves what the consumers take:
  // one that asks for more than there is left waits forever.
  static constexpr int kShare = 65536 / kThreads / 8 * 8, kProducerRegisters = 24;
  static constexpr int kConsumerRegisters =
      ((Config::kConsumers + 1) * kShare - kProducerRegisters) / Config::kConsumers / 8 * 8;
  static constexpr int kRows =
      Config::kPingpong ? Config::kTileM : Config::kTileM / Config::kConsumers;  // of a consumer
  static_assert(kRows % 64 == 0, "a warp group multiplies 64 rows at a time");
  static_assert(Config::kSums == 1 || kLoaded == kWidth, "one multiply reads both matrices, one behind the other");
  static_assert(!Config::kPingpong || (Config::kConsumers == 2 && Config::kStagger == 0), "two take turns");
  static_assert(Config::kStagger < Config::kStages, "the stages that one waits for are all in flight");
};

/// The work of one block: which tiles, and its place in the cluster.
template <class Config>
struct ProductBlock {
  using Call = ProductSm90<Config>;

  const Call& call;
  typename Call::Barriers barriers;
  unsigned shared;
  TileOrder order;
  unsigned tiles, first, stride;  // of clusters
  int depth_blocks;               // stages that one tile takes; past the end of K the copy engine fills in zeros
  int cluster_row, cluster_column;

  __device__ __forceinline__ explicit ProductBlock(const Call& call, unsigned shared)
      : call(call), barriers{shared + Call::kBarriersAt}, shared(shared) {
    constexpr int kTallest = Config::kTileM * Config::kClusterM, kWidest = Call::kWidth * Config::kClusterN;
    order = {static_cast<unsigned>((call.m + kTallest - 1) / kTallest),
             static_cast<unsigned>((call.n + kWidest - 1) / kWidest), static_cast<unsigned>(call.group)};
    tiles = order.rows * order.columns * call.batches * call.splits;
    first = blockIdx.x / Call::kCluster;
    stride = gridDim.x / Call::kCluster;
    const int depth = Call::ATile::kDepth * call.splits;
    depth_blocks = (call.k + depth - 1) / depth;
    const int rank = Call::kCluster > 1 ? static_cast<int>(ptx::cluster_ctarank()) : 0;
    cluster_row = rank % Config::kClusterM;
    cluster_column = rank / Config::kClusterM;
  }

  __device__ __forceinline__ int row(const TilePosition& tile) const {
    return (tile.row * Config::kClusterM + cluster_row) * Config::kTileM;
  }

  __device__ __forceinline__ int column(const TilePosition& tile) const {
    return (tile.column * Config::kClusterN + cluster_column) * Call::kWidth;
  }

  /// Starts the copies of all stages of all tiles; by one thread.
  __device__ __forceinline__ void produce() const {
    unsigned short a_blocks = 0;
#pragma unroll
    for (int i = 0; i < Config::kClusterN; ++i) a_blocks |= 1 << (cluster_row + i * Config::kClusterM);
    ptx::prefetch_tensormap(call.a);
#pragma unroll
    for (int i = 0; i < Config::kSums; ++i) ptx::prefetch_tensormap(call.b[i]);
    const unsigned short b_blocks = ((1 << Config::kClusterM) - 1) << (cluster_column * Config::kClusterM);
    StagePosition<Config::kStages> position;
    for (unsigned index = first; index < tiles; index += stride) {
      const TilePosition tile = order[index];
      const int row = this->row(tile), column = this->column(tile);
      const int batch = tile.batch / call.splits;
      const int k_first = (tile.batch - batch * call.splits) * depth_blocks * Call::ATile::kDepth;
      for (int block = 0; block < depth_blocks; ++block) {
        const unsigned full = barriers.full(position.stage);
        const unsigned stage = shared + position.stage * Call::kStageBytes;
        const int k = k_first + block * Call::ATile::kDepth;
        mbarrier_wait(barriers.empty(position.stage), position.parity ^ 1);
        ptx::mbarrier_arrive_expect_tx(full, Call::kStageBytes);
        Call::ATile::load(call.a, stage, full, cluster_column, a_blocks, k, row, batch * call.a_batched);
#pragma unroll
        for (int i = 0; i < Config::kSums; ++i) {
          Call::BTile::load(call.b[i], stage + Call::ATile::kBytes + i * Call::BTile::kBytes, full, cluster_row,
                            b_blocks, k, column, batch * call.b_batched);
        }
        position.advance();
      }
    }
  }

  /// Lets go of a stage, in every block that wrote to it; by a warp.
  __device__ __forceinline__ void release(int stage) const {
    const int lane = threadIdx.x % 32;
    if constexpr (Call::kCluster == 1) {
      if (lane == 0) ptx::mbarrier_arrive(barriers.empty(stage));
    } else if (lane < Call::kPeers) {
      const int other = lane - Config::kClusterN;
      const int rank = lane < Config::kClusterN
                           ? cluster_row + lane * Config::kClusterM
                           : cluster_column * Config::kClusterM + other + (other >= cluster_row ? 1 : 0);
      ptx::mbarrier_arrive_cluster(barriers.empty(stage), rank);
    }
  }

  /// Prefetches what the epilogue of a tile reads; by each warp, of which `first_row` is the first row in the tile.
  __device__ __forceinline__ void prefetch(const ResultWriter<Config>& writer, int first_row,
                                           const TilePosition& tile) const {
#pragma unroll
    for (int rows = 0; rows < Call::kRows; rows += 64) {
      writer.template prefetch<Call::kWidth>(row(tile) + first_row + rows, column(tile), tile.batch);
    }
  }

  /// to += from.
  template <int kRegisters>
  static __device__ __forceinline__ void promote(float (&to)[kRegisters], float (&from)[kRegisters]) {
    ptx::warpgroup_fence_operand(from);
#pragma unroll
    for (int i = 0; i < kRegisters; ++i) to[i] += from[i];
  }

  /// Multiplies and writes this consumer's tiles.
  __device__ __forceinline__ void consume(int consumer) const {
    constexpr int kBlocks = Call::kRows / 64;
    constexpr bool kPromotes = Config::kPromotion > 0;
    static_assert(!kPromotes || kBlocks == 1, "there are registers for 64 rows of sums twice");
    using Multiply = ptx::Wgmma<Config::kTileN>;
    using Sum = typename Config::Sum;
    const int warp = ptx::shfl_sync_idx(threadIdx.x / 32 % 4);
    ResultWriter<Config> writer{call.operands, call.results, call.m, call.n,
                                shared + Call::kSlotsAt + (consumer * 4 + warp) * ResultWriter<Config>::kSharedBytes};
    const int own_rows = Config::kPingpong ? 0 : consumer * Call::kRows;
    const unsigned long long a_first = Call::ATile::descriptor(shared) + own_rows * 128 / 16;
    const unsigned long long b_first = Call::BTile::descriptor(shared + Call::ATile::kBytes);

    StagePosition<Config::kStages> position;
    unsigned step = stride, index = first;
    if constexpr (Config::kPingpong) {
      step = 2 * stride;
      index += consumer * stride;
      position.advance(consumer * depth_blocks);
      if (consumer == 1) ptx::barrier_arrive(1, 256);  // the first turn is consumer 0's
    }
    if constexpr (Config::kStagger > 0) {
      if (consumer > 0 && depth_blocks > Config::kStagger) mbarrier_wait(barriers.full(Config::kStagger), 0);
    }
    for (; index < tiles; index += step) {
      Sum sums[kBlocks][Config::kTileN / 2];
      Sum promoted[kPromotes ? Config::kTileN / 2 : 1] = {};
      if constexpr (Config::kPingpong) ptx::barrier_sync(1 + consumer, 256);
      int previous = 0;
      int starts = 0;  // the first block of K in `sums`
      int promotion = Config::kPromotion - consumer * Config::kPromotion / Config::kConsumers;  // the first block after
      for (int block = 0; block < depth_blocks; ++block) {
        mbarrier_wait(barriers.full(position.stage), position.parity);
        const unsigned offset = position.stage * (Call::kStageBytes / 16);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < Call::ATile::kSteps; ++i) {
#pragma unroll
          for (int rows = 0; rows < kBlocks; ++rows) {
            Multiply::template mma_async<Call::ATile::kType, Call::BTile::kType, Config::kMMajorA, Config::kNMajorB>(
                sums[rows], a_first + (offset + Call::ATile::block(rows) + Call::ATile::step(i)),
                b_first + (offset + Call::BTile::step(i)), block > starts || i > 0);
          }
        }
        ptx::wgmma_commit_group();
        if constexpr (Config::Operands::kCount > 0) {
          if (block == 0) prefetch(writer, own_rows + warp * 16, order[index]);
        }
        ptx::wgmma_wait_group<1>();
        if (block > starts) release(previous);
        previous = position.stage;
        position.advance();
        if constexpr (kPromotes) {
          if (block + 1 == promotion && promotion < depth_blocks) {
            ptx::wgmma_wait_group<0>();
            release(previous);
            promote(promoted, sums[0]);
            starts = promotion;
            promotion += Config::kPromotion;
          }
        }
      }
      if constexpr (Config::kPingpong) {
        ptx::barrier_arrive(2 - consumer, 256);
        position.advance(depth_blocks);
      }
      ptx::wgmma_wait_group<0>();
#pragma unroll
      for (int rows = 0; rows < kBlocks; ++rows) ptx::warpgroup_fence_operand(sums[rows]);
      release(previous);
      if constexpr (kPromotes) promote(sums[0], promoted);

      const TilePosition tile = order[index];
#pragma unroll
      for (int rows = 0; rows < kBlocks; ++rows) {
        writer.write(sums[rows], row(tile) + own_rows + rows * 64 + warp * 16, column(tile), tile.batch);
      }
    }
    writer.finish();
  }
};

template <class Config>
__device__ __forceinline__ void product_sm90(const ProductSm90<Config>& call) {
  using Call = ProductSm90<Config>;
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const ProductBlock<Config> block(call, ptx::cvta_to_shared(shared_memory));
  if (threadIdx.x == 0) block.barriers.init(4 * (Config::kPingpong ? 1 : Config::kConsumers) * Call::kPeers);
  __syncthreads();
  if constexpr (Call::kCluster > 1) {
    ptx::barrier_cluster_arrive();
    ptx::barrier_cluster_wait();
  }

  const int group = ptx::shfl_sync_idx(threadIdx.x / 128);
  if (group == Config::kConsumers) {
    if constexpr (Config::kConsumers > 1) ptx::setmaxnreg_dec<Call::kProducerRegisters>();
    if (threadIdx.x == Config::kConsumers * 128) block.produce();
  } else {
    if constexpr (Config::kConsumers > 1) ptx::setmaxnreg_inc<Call::kConsumerRegisters>();
    block.consume(group);
  }
  // No block leaves while others of its cluster may still arrive at its barriers.
  if constexpr (Call::kCluster > 1) {
    ptx::barrier_cluster_arrive();
    ptx::barrier_cluster_wait();
  }
}

}  // namespace jaxdnn
