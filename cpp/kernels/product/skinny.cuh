// D[b] = epilogue(A[b] * B[b]) where A has few rows (or B few columns), on Hopper's tensor cores, at the speed at which
// memory delivers the other operand; also epilogue(A * B, A * B').
//
// The operand with few rows along M (N) is called narrow, the other one wide. What is multiplied is
// wide (kTile x K) * narrow (kNarrow x K)^T: so the tensor cores' 64 rows are full, and their columns as few as can be.
//
//   grid             a block for each kTile rows of wide and each of kSplits parts of K, all of them at once on the
//                    device, so that all stream to the end; the parts of one tile are a cluster
//   warp groups      each multiplies 64 rows of wide. Of one more warp, a thread starts the copies, as far ahead as
//                    there are stages
//   epilogue         the sums go to shared memory; the blocks of a cluster read each other's, add them in the order of
//                    the parts, and finish an equal share of the elements each, neighbours in neighbouring columns
//   barriers         full[stage]   1 arrival (the producer's, which announces the bytes)
//                    empty[stage]  a lane of each multiplying warp
//                    named 1       the multiplying warps: before the sums take the stages' place, and after
//                    the cluster's, for the exchange of sums, and before any block leaves
//   shared memory    | stages of (wide tile, one for each sum | narrow tile) | barriers |, then in the stages' place
//                    the sums, kNarrow rows of kSums x kTile
//   promotion        the tensor cores add 8-bit floats with 14 bits: each stage's sums are added to others in float32
//
// Bytes: wide once from memory, and narrow once a tile, from L2. Flops: 2 m n k, at most 128 an element of wide. Memory
// bounds it. kOnce says that nothing of wide is read again, which the L2 cache is told
// (benchmarks/results/product_kernels.md).
#pragma once

#include "core/epilogue_element.cuh"
#include "core/pipeline_tma.cuh"
#include "core/tile.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"

namespace jaxdnn {
template <class Config>
struct ProductSkinny {
  const TensorMap* wide[Config::kSums] = {};
  const TensorMap* narrow = nullptr;
  OperandAddress operands[Config::Operands::kArray];
  ResultAddress results[Config::Results::kCount];
  int rows = 0;     // of wide
  int columns = 0;  // of narrow
  int k = 0;
  int tiles = 1;                             // of wide
  int wide_batched = 1, narrow_batched = 1;  // 0 when one matrix serves the whole batch

  using Sum = typename Config::Sum;
  using WideTile = OperandTile<typename Config::Wide, Config::kTile, Config::kAlongWide, 1, Config::kOnce>;
  using NarrowTile = OperandTile<typename Config::Narrow, Config::kNarrow, Config::kAlongNarrow, 1>;
  static constexpr int kGroups = Config::kTile / 64 * Config::kSums;
  static constexpr int kMultiplying = 128 * kGroups;
  static constexpr int kThreads = kMultiplying + 32;
  static constexpr int kStageBytes = Config::kSums * WideTile::kBytes + NarrowTile::kBytes;
  using Pipeline = TmaPipeline<Config::kStages, kStageBytes>;
  // Four words more than the rows have: the lanes of a warp that put their sums there hit different banks.
  static constexpr int kPitch = Config::kSums * Config::kTile + 4;
  static constexpr int kSumBytes = Config::kNarrow * kPitch * 4;
  static constexpr int kRingBytes = Config::kStages * kStageBytes;
  static constexpr int kBarriersAt = kRingBytes > kSumBytes ? kRingBytes : (kSumBytes + 1023) / 1024 * 1024;
  static constexpr int kSharedBytes = kBarriersAt + Pipeline::kBarrierBytes;
  static constexpr bool kPromotes = sizeof(typename Config::Wide) == 1 && is_same<Sum, float>;
  static_assert(sizeof(Sum) == 4 && Config::kTile % 64 == 0, "sums are words, in blocks of 64 rows");
};

/// By one thread: starts the copies of the parts of K from `first` to `last`.
template <class Config>
__device__ __forceinline__ void skinny_produce(const ProductSkinny<Config>& call,
                                               const typename ProductSkinny<Config>::Pipeline& pipeline, int row,
                                               int batch, int first, int last) {
  using Call = ProductSkinny<Config>;
  StageWriter<typename Call::Pipeline> stages{pipeline};
  for (int block = first; block < last; ++block) {
    stages.fill([&](unsigned stage, unsigned full) {
      const int k = block * Call::WideTile::kDepth;
#pragma unroll
      for (int i = 0; i < Config::kSums; ++i) {
        Call::WideTile::load(call.wide[i], stage + i * Call::WideTile::kBytes, full, 0, 1, k, row,
                             batch * call.wide_batched);
      }
      Call::NarrowTile::load(call.narrow, stage + Config::kSums * Call::WideTile::kBytes, full, 0, 1, k, 0,
                             batch * call.narrow_batched);
    });
  }
}

/// By a warp group: multiplies `blocks` parts of K for its 64 rows of wide, and leaves the sums in shared memory.
template <class Config>
__device__ __forceinline__ void skinny_multiply(const typename ProductSkinny<Config>::Pipeline& pipeline,
                                                typename Config::Sum* to, int blocks) {
  using Call = ProductSkinny<Config>;
  using Sum = typename Call::Sum;
  using WideTile = typename Call::WideTile;
  using NarrowTile = typename Call::NarrowTile;
  const int warp = ptx::shfl_sync_idx(threadIdx.x / 32), lane = threadIdx.x % 32;
  const unsigned long long wide = WideTile::descriptor(pipeline.stages) + WideTile::block(warp / 4);
  const unsigned long long narrow = NarrowTile::descriptor(pipeline.stages + Config::kSums * WideTile::kBytes);
  constexpr int kRegisters = Config::kNarrow / 2;
  Sum sums[1][kRegisters] = {};
  Sum promoted[kRegisters] = {};

  StageReader<typename Call::Pipeline> stages{pipeline};
  for (int block = 0; block < blocks; ++block) {
    stages.wait();
    ptx::wgmma_fence();
    multiply_tiles<WideTile, NarrowTile>(sums, wide, narrow, stage_offset(stages.position.stage, Call::kStageBytes),
                                         !Call::kPromotes && block > 0);
    ptx::wgmma_commit_group();
    if constexpr (Call::kPromotes) {
      ptx::wgmma_wait_group<0>();
      stages.release();
      ptx::warpgroup_fence_operand(sums[0]);
#pragma unroll
      for (int i = 0; i < kRegisters; ++i) promoted[i] += sums[0][i];
    } else {
      ptx::wgmma_wait_group<1>();
      if (block > 0) stages.release_previous();
    }
    stages.advance();
  }
  ptx::wgmma_wait_group<0>();
  ptx::warpgroup_fence_operand(sums[0]);

  ptx::barrier_sync(1, Call::kMultiplying);  // nobody reads the stages any more
#pragma unroll
  for (int i = 0; i < kRegisters; ++i) {
    const int row = warp * 16 + lane / 4 + i % 4 / 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    to[column * Call::kPitch + row] = Call::kPromotes ? promoted[i] : sums[0][i];
  }
}

/// The sums of one element, of all parts of K.
template <class Config>
__device__ __forceinline__ void skinny_sums(const typename Config::Sum* from,
                                            typename Config::Sum (&sums)[Config::kSums], int place) {
  using Sum = typename Config::Sum;
#pragma unroll
  for (int s = 0; s < Config::kSums; ++s) {
    const Sum* const own = from + place + s * Config::kTile;
    if constexpr (Config::kSplits == 1) {
      sums[s] = *own;
    } else {
      Sum parts[Config::kSplits];
#pragma unroll
      for (int split = 0; split < Config::kSplits; ++split) {
        ptx::ld_shared_cluster(parts[split], ptx::mapa(ptx::cvta_to_shared(own), split));
      }
      sums[s] = parts[0];
#pragma unroll
      for (int split = 1; split < Config::kSplits; ++split) {
        if constexpr (is_same<Sum, float>) {
          sums[s] += parts[split];
        } else {
          sums[s] = math::add(sums[s], parts[split]);
        }
      }
    }
  }
}

template <class Config>
__device__ __forceinline__ void product_skinny(const ProductSkinny<Config>& call) {
  using Call = ProductSkinny<Config>;
  using Sum = typename Call::Sum;
  constexpr int kTogether = 4;  // elements of a thread whose memory accesses overlap
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const unsigned shared = ptx::cvta_to_shared(shared_memory);
  Sum* const sums = reinterpret_cast<Sum*>(shared_memory);
  const typename Call::Pipeline pipeline(shared, shared + Call::kBarriersAt);
  if (threadIdx.x == Call::kMultiplying) {
    ptx::prefetch_tensormap(call.narrow);
    pipeline.init(4 * Call::kGroups);
  }
  pipeline.open();

  const int split = blockIdx.x % Config::kSplits, index = blockIdx.x / Config::kSplits;
  const int batch = index / call.tiles, row = (index - batch * call.tiles) * Config::kTile;
  const long long parts = (call.k + Call::WideTile::kDepth - 1) / Call::WideTile::kDepth;
  const int first = static_cast<int>(parts * split / Config::kSplits);
  const int last = static_cast<int>(parts * (split + 1) / Config::kSplits);
  const bool multiplies = ptx::shfl_sync_idx(threadIdx.x / 32) < 4 * Call::kGroups;
  if (multiplies) {
    skinny_multiply<Config>(pipeline, sums, last - first);
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
    const int count = (Config::kSwapped ? Config::kNarrow : call.columns) * Config::kTile;
    constexpr int kStep = Config::kSplits * Call::kMultiplying;
#pragma unroll 1
    for (int start = split * Call::kMultiplying + threadIdx.x; start < count; start += kTogether * kStep) {
      Coordinate places[kTogether];
      bool inside[kTogether];
      Sum totals[kTogether][Config::kSums];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int element = start + i * kStep;
        const int wide = Config::kSwapped ? element / Config::kNarrow : element % Config::kTile;
        const int narrow = Config::kSwapped ? element % Config::kNarrow : element / Config::kTile;
        places[i] = Config::kSwapped ? Coordinate{row + wide, narrow, batch} : Coordinate{narrow, row + wide, batch};
        inside[i] = element < count && narrow < call.columns && row + wide < call.rows;
        if (inside[i]) skinny_sums<Config>(sums, totals[i], narrow * Call::kPitch + wide);
      }
      apply_epilogue<Config>(call.operands, call.results, places, inside, totals);
    }
  }
  // No block leaves while others of its cluster may still read its sums.
  cluster_sync<Config::kSplits>();
}

}  // namespace jaxdnn
