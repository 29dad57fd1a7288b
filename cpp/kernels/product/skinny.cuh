// D[b] = epilogue(A[b] * B[b]) where A has few rows (or B few columns), on Hopper's tensor cores, at the speed at which
// memory delivers the other operand; also epilogue(A * B, A * B').
//
// The operand with few rows along M (N) is called stationary, the other one streamed. What is multiplied is
// streamed (kTile x K) * stationary (kStationary x K)^T: so the tensor cores' 64 rows are full, and their columns as
// few as can be.
//
//   grid             a block for each kTile rows of streamed and each of kSplits splits of K, all at once on the
//                    device, so that all stream to the end; the splits of one tile are a cluster
//   warp groups      each multiplies 64 rows of streamed. Of one more warp, a thread starts the copies, as far ahead as
//                    there are stages
//   epilogue         the accumulators go to shared memory; the blocks of a cluster read each other's, add them in the
//                    order of the splits, and finish an equal share of the elements each, neighbours in neighbouring
//                    columns
//   barriers         full[stage]   1 arrival (the producer's, which announces the bytes)
//                    empty[stage]  a lane of each multiplying warp
//                    named 1       the multiplying warps: before the accumulators take the stages' place, and after
//                    the cluster's, for the exchange of accumulators, and before any block leaves
//   shared memory    | stages of (streamed tile, one for each accumulator | stationary tile) | barriers |, then in the
//                    stages' place the accumulators, kStationary rows of kAccumulators x kTile
//   promotion        the tensor cores add 8-bit floats with 14 bits: each stage's accumulators are added to others in
//                    float32
//
// Bytes: streamed once from memory, and stationary once a tile, from L2. Flops: 2 m n k, at most 128 an element of
// streamed. Memory bounds it. kOnce says that nothing of streamed is read again, which the L2 cache is told
// (benchmarks/results/product_kernels.md).
#pragma once

#include "core/epilogue_element.cuh"
#include "core/pipeline_tma.cuh"
#include "core/reduction.cuh"
#include "core/tile.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"

namespace jaxdnn {
template <class Config>
struct ProductSkinny {
  const TensorMap* streamed[Config::kAccumulators] = {};
  const TensorMap* stationary = nullptr;
  OperandAddress operands[Config::Operands::kArray];
  ResultAddress results[Config::Results::kCount];
  int rows = 0;     // of streamed
  int columns = 0;  // of stationary
  int k = 0;
  int tiles = 1;                                     // of streamed
  int streamed_batched = 1, stationary_batched = 1;  // 0 when one matrix serves the whole batch

  using Accumulator = typename Config::Accumulator;
  using StreamedTile =
      OperandTile<typename Config::Streamed, Config::kTile, Config::kStreamedMnMajor, 1, Config::kOnce>;
  using StationaryTile = OperandTile<typename Config::Stationary, Config::kStationary, Config::kStationaryMnMajor, 1>;
  static constexpr int kGroups = Config::kTile / 64 * Config::kAccumulators;
  static constexpr int kMultiplying = 128 * kGroups;
  static constexpr int kThreads = kMultiplying + 32;
  static constexpr int kStageBytes = Config::kAccumulators * StreamedTile::kBytes + StationaryTile::kBytes;
  using Pipeline = TmaPipeline<Config::kStages, kStageBytes>;
  // Four words more than the rows have: the lanes of a warp that put their accumulators there hit different banks.
  static constexpr int kPitch = Config::kAccumulators * Config::kTile + 4;
  static constexpr int kSumBytes = Config::kStationary * kPitch * 4;
  static constexpr int kRingBytes = Config::kStages * kStageBytes;
  static constexpr int kBarriersAt = kRingBytes > kSumBytes ? kRingBytes : (kSumBytes + 1023) / 1024 * 1024;
  static constexpr int kSharedBytes = kBarriersAt + Pipeline::kBarrierBytes;
  static constexpr bool kPromotes = sizeof(typename Config::Streamed) == 1 && is_same<Accumulator, float>;
  static_assert(sizeof(Accumulator) == 4 && Config::kTile % 64 == 0, "accumulators are words, in blocks of 64 rows");
};

/// By one thread: starts the copies of the blocks of K from `first` to `last`, a stage each.
template <class Config>
__device__ __forceinline__ void skinny_produce(const ProductSkinny<Config>& call,
                                               const typename ProductSkinny<Config>::Pipeline& pipeline, int row,
                                               int batch, int first, int last) {
  using Call = ProductSkinny<Config>;
  StageWriter<typename Call::Pipeline> stages{pipeline};
  for (int block = first; block < last; ++block) {
    stages.fill([&](unsigned stage, unsigned full) {
      const int k = block * Call::StreamedTile::kDepth;
#pragma unroll
      for (int i = 0; i < Config::kAccumulators; ++i) {
        Call::StreamedTile::load(call.streamed[i], stage + i * Call::StreamedTile::kBytes, full, 0, 1, k, row,
                                 batch * call.streamed_batched);
      }
      Call::StationaryTile::load(call.stationary, stage + Config::kAccumulators * Call::StreamedTile::kBytes, full, 0,
                                 1, k, 0, batch * call.stationary_batched);
    });
  }
}

/// By a warp group: multiplies `blocks` blocks of K for its 64 rows of streamed, and leaves the accumulators in shared
/// memory.
template <class Config>
__device__ __forceinline__ void skinny_multiply(const typename ProductSkinny<Config>::Pipeline& pipeline,
                                                typename Config::Accumulator* to, int blocks) {
  using Call = ProductSkinny<Config>;
  using Accumulator = typename Call::Accumulator;
  using StreamedTile = typename Call::StreamedTile;
  using StationaryTile = typename Call::StationaryTile;
  const int warp = ptx::shfl_sync_idx(threadIdx.x / 32), lane = threadIdx.x % 32;
  const unsigned long long streamed = StreamedTile::descriptor(pipeline.stages) + StreamedTile::block(warp / 4);
  const unsigned long long stationary =
      StationaryTile::descriptor(pipeline.stages + Config::kAccumulators * StreamedTile::kBytes);
  constexpr int kRegisters = Config::kStationary / 2;
  Accumulator accumulators[1][kRegisters] = {};
  Accumulator promoted[kRegisters] = {};

  StageReader<typename Call::Pipeline> stages{pipeline};
  for (int block = 0; block < blocks; ++block) {
    stages.wait();
    ptx::wgmma_fence();
    multiply_tiles<StreamedTile, StationaryTile>(accumulators, streamed, stationary,
                                                 stage_offset(stages.position.stage, Call::kStageBytes),
                                                 !Call::kPromotes && block > 0);
    ptx::wgmma_commit_group();
    if constexpr (Call::kPromotes) {
      ptx::wgmma_wait_group<0>();
      stages.release();
      ptx::warpgroup_fence_operand(accumulators[0]);
#pragma unroll
      for (int i = 0; i < kRegisters; ++i) promoted[i] += accumulators[0][i];
    } else {
      ptx::wgmma_wait_group<1>();
      if (block > 0) stages.release_previous();
    }
    stages.advance();
  }
  ptx::wgmma_wait_group<0>();
  ptx::warpgroup_fence_operand(accumulators[0]);

  ptx::barrier_sync(1, Call::kMultiplying);  // nobody reads the stages any more
#pragma unroll
  for (int i = 0; i < kRegisters; ++i) {
    const int row = warp * 16 + lane / 4 + i % 4 / 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    to[column * Call::kPitch + row] = Call::kPromotes ? promoted[i] : accumulators[0][i];
  }
}

/// The accumulators of one element, of all splits of K.
template <class Config>
__device__ __forceinline__ void load_accumulators(const typename Config::Accumulator* from,
                                                  typename Config::Accumulator (&accumulators)[Config::kAccumulators],
                                                  int offset) {
  using Accumulator = typename Config::Accumulator;
#pragma unroll
  for (int s = 0; s < Config::kAccumulators; ++s) {
    const Accumulator* const own = from + offset + s * Config::kTile;
    if constexpr (Config::kSplits == 1) {
      accumulators[s] = *own;
    } else {
      Accumulator splits[Config::kSplits];
#pragma unroll
      for (int split = 0; split < Config::kSplits; ++split) {
        ptx::ld_shared_cluster(splits[split], ptx::mapa(ptx::cvta_to_shared(own), split));
      }
      accumulators[s] = splits[0];
#pragma unroll
      for (int split = 1; split < Config::kSplits; ++split) {
        accumulators[s] = ReductionOf<Reduction::sum, Accumulator>::combine(accumulators[s], splits[split]);
      }
    }
  }
}

template <class Config>
__device__ __forceinline__ void product_skinny(const ProductSkinny<Config>& call) {
  using Call = ProductSkinny<Config>;
  using Accumulator = typename Call::Accumulator;
  constexpr int kTogether = 4;  // elements of a thread whose memory accesses overlap
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const unsigned shared = ptx::cvta_to_shared(shared_memory);
  Accumulator* const accumulators = reinterpret_cast<Accumulator*>(shared_memory);
  const typename Call::Pipeline pipeline(shared, shared + Call::kBarriersAt);
  if (threadIdx.x == Call::kMultiplying) {
    ptx::prefetch_tensormap(call.stationary);
    pipeline.init(4 * Call::kGroups);
  }
  pipeline.open();

  const int split = blockIdx.x % Config::kSplits, index = blockIdx.x / Config::kSplits;
  const int batch = index / call.tiles, row = (index - batch * call.tiles) * Config::kTile;
  const long long blocks = (call.k + Call::StreamedTile::kDepth - 1) / Call::StreamedTile::kDepth;
  const int first = static_cast<int>(blocks * split / Config::kSplits);
  const int last = static_cast<int>(blocks * (split + 1) / Config::kSplits);
  const bool multiplies = ptx::shfl_sync_idx(threadIdx.x / 32) < 4 * Call::kGroups;
  if (multiplies) {
    skinny_multiply<Config>(pipeline, accumulators, last - first);
  } else if (threadIdx.x == Call::kMultiplying) {
    skinny_produce(call, pipeline, row, batch, first, last);
  }
  if constexpr (Config::kSplits > 1) {
    ptx::bar_warp_sync();
    cluster_sync<Config::kSplits>();
  } else if (multiplies) {
    ptx::barrier_sync(1, Call::kMultiplying);
  }

  if (multiplies) {
    const int count = (Config::kSwapped ? Config::kStationary : call.columns) * Config::kTile;
    constexpr int kStep = Config::kSplits * Call::kMultiplying;
#pragma unroll 1
    for (int start = split * Call::kMultiplying + threadIdx.x; start < count; start += kTogether * kStep) {
      Coordinate coordinates[kTogether];
      bool inside[kTogether];
      Accumulator totals[kTogether][Config::kAccumulators];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int element = start + i * kStep;
        const int streamed = Config::kSwapped ? element / Config::kStationary : element % Config::kTile;
        const int stationary = Config::kSwapped ? element % Config::kStationary : element / Config::kTile;
        coordinates[i] = Config::kSwapped ? Coordinate{row + streamed, stationary, batch}
                                          : Coordinate{stationary, row + streamed, batch};
        inside[i] = element < count && stationary < call.columns && row + streamed < call.rows;
        if (inside[i]) load_accumulators<Config>(accumulators, totals[i], stationary * Call::kPitch + streamed);
      }
      apply_epilogue<Config>(call.operands, call.results, coordinates, inside, totals);
    }
  }
  // No block leaves while others of its cluster may still read its accumulators.
  cluster_sync<Config::kSplits>();
}

}  // namespace jaxdnn
