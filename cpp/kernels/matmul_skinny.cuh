// D[b] = epilogue(A[b] * B[b]) where A has few rows (or B few columns), on Hopper's tensor cores, at the speed at which
// memory delivers the other operand; also epilogue(A * B, A * B').
//
// The operand with few rows along M (N) is called narrow, the other one wide. What is multiplied is
// wide (kTile x K) * narrow (kNarrow x K)^T: so the tensor cores' 64 rows are full, and their columns as few as can be.
//
//   grid             a block for each kTile rows of wide and each of kSplits parts of K, all of them at once on the
//                    device, so that all stream to the end; the parts of one tile are a cluster
//   warps            0 to 3 multiply; 4 starts the copies, by one thread, as far ahead as there are stages
//   epilogue         the sums go to shared memory; the blocks of a cluster read each other's, add them in the order of
//                    the parts, and finish an equal share of the elements each, neighbours in neighbouring columns
//   barriers         full[stage]   1 arrival (the producer's, which announces the bytes)
//                    empty[stage]  4 arrivals, a lane of each multiplying warp
//                    the cluster's, for the exchange of sums, and before any block leaves
//   shared memory    | stages of (wide tile, one for each sum | narrow tile) | barriers |, then in the stages' place the
//                    sums, kNarrow rows of kSums x kTile
//   promotion        the tensor cores add 8-bit floats with 14 bits: each stage's sums are added to others in float32
//
// Bytes: wide once from memory, and narrow once a tile, from L2. Memory bounds it.
#pragma once

#include "core/barrier.cuh"
#include "core/epilogue_element.cuh"
#include "core/tile.cuh"
#include "core/wgmma_narrow.cuh"

namespace jaxdnn {
namespace ptx {

/// A word of the shared memory of any block of the cluster (`address_in_block`).
__device__ __forceinline__ void load_cluster(float& value, unsigned address) {
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
}

__device__ __forceinline__ void load_cluster(int& value, unsigned address) {
  asm volatile("ld.shared::cluster.s32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
}

}  // namespace ptx

template <class Config>
struct MatmulSkinny {
  const TensorMap* wide[Config::kSums] = {};
  const TensorMap* narrow = nullptr;
  ElementOperand operands[kElementOperands<Config>];
  ElementResult results[Config::Results::kCount];
  int rows = 0;       // of wide
  int columns = 0;    // of narrow
  int k = 0;
  int tiles = 1;      // of wide
  int wide_batched = 1, narrow_batched = 1;  // 0 when one matrix serves the whole batch

  using Sum = typename Config::Sum;
  using WideTile = OperandTile<typename Config::Wide, Config::kTile, Config::kAlongWide, 1>;
  using NarrowTile = OperandTile<typename Config::Narrow, Config::kNarrow, Config::kAlongNarrow, 1>;
  using Barriers = StageBarriers<Config::kStages>;
  static constexpr int kThreads = 160, kMultiplying = 128;
  static constexpr int kBlocks = Config::kTile / 64 * Config::kSums;  // of 64 rows, that are multiplied
  static constexpr int kStageBytes = Config::kSums * WideTile::kBytes + NarrowTile::kBytes;
  // Four words more than the rows have: the lanes of a warp that put their sums there hit different banks.
  static constexpr int kPitch = Config::kSums * Config::kTile + 4;
  static constexpr int kSumBytes = Config::kNarrow * kPitch * 4;
  static constexpr int kRingBytes = Config::kStages * kStageBytes;
  static constexpr int kBarriersAt = kRingBytes > kSumBytes ? kRingBytes : (kSumBytes + 1023) / 1024 * 1024;
  static constexpr int kSharedBytes = kBarriersAt + Barriers::kSharedBytes;
  static constexpr bool kPromotes = sizeof(typename Config::Wide) == 1 && is_same<Sum, float>;
  static_assert(sizeof(Sum) == 4 && Config::kTile % 64 == 0, "sums are words, in blocks of 64 rows");
};

/// By one thread: starts the copies of the parts of K from `first` to `last`.
template <class Config>
__device__ __forceinline__ void skinny_produce(const MatmulSkinny<Config>& call, unsigned shared, int row, int batch,
                                               int first, int last) {
  using Call = MatmulSkinny<Config>;
  const typename Call::Barriers barriers{shared + Call::kBarriersAt};
  StagePosition<Config::kStages> position;
  for (int block = first; block < last; ++block) {
    const unsigned full = barriers.full(position.stage), stage = shared + position.stage * Call::kStageBytes;
    const int k = block * Call::WideTile::kDepth;
    mbarrier_wait(barriers.empty(position.stage), position.parity ^ 1);
    ptx::mbarrier_arrive_expect(full, Call::kStageBytes);
#ifdef EXP_HINT
    unsigned long long policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    for (int i = 0; i < Config::kSums; ++i) {
      for (int c = 0; c < (Config::kAlongWide ? Config::kTile / 64 : 1); ++c) {
        asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(stage + i * Call::WideTile::kBytes + c * 8192), "l"(call.wide[i]), "r"(full), "r"(Config::kAlongWide ? row + c * 64 : k), "r"(Config::kAlongWide ? k : row), "r"(batch * call.wide_batched), "l"(policy) : "memory");
      }
    }
#else
#pragma unroll
    for (int i = 0; i < Config::kSums; ++i) {
      Call::WideTile::load(call.wide[i], stage + i * Call::WideTile::kBytes, full, 0, 1, k, row,
                           batch * call.wide_batched);
    }
#endif
    Call::NarrowTile::load(call.narrow, stage + Config::kSums * Call::WideTile::kBytes, full, 0, 1, k, 0,
                           batch * call.narrow_batched);
    position.advance();
  }
}

/// By a warp group: multiplies `blocks` parts of K, and leaves the sums in shared memory.
template <class Config>
__device__ __forceinline__ void skinny_multiply(unsigned shared, typename Config::Sum* to, int blocks) {
  using Call = MatmulSkinny<Config>;
  using Sum = typename Call::Sum;
  const typename Call::Barriers barriers{shared + Call::kBarriersAt};
  const unsigned long long wide = Call::WideTile::descriptor(shared);
  const unsigned long long narrow = Call::NarrowTile::descriptor(shared + Config::kSums * Call::WideTile::kBytes);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  constexpr int kRegisters = Config::kNarrow / 2;
  Sum sums[Call::kBlocks][kRegisters] = {};
  Sum promoted[Call::kPromotes ? Call::kBlocks : 1][kRegisters] = {};

  StagePosition<Config::kStages> position;
  int previous = 0;
  for (int block = 0; block < blocks; ++block) {
    mbarrier_wait(barriers.full(position.stage), position.parity);
    const unsigned offset = position.stage * (Call::kStageBytes / 16);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
#pragma unroll
      for (int i = 0; i < Call::kBlocks; ++i) {
        Wgmma<Config::kNarrow>::template multiply<typename Config::Wide, typename Config::Narrow, Config::kAlongWide,
                                                  Config::kAlongNarrow>(
            sums[i], wide + (offset + Call::WideTile::block(i) + Call::WideTile::step(step)),
            narrow + (offset + Call::NarrowTile::step(step)), (!Call::kPromotes && block > 0) || step > 0);
      }
    }
    ptx::wgmma_commit();
    if constexpr (Call::kPromotes) {
      ptx::wgmma_wait<0>();
      if (lane == 0) ptx::mbarrier_arrive(barriers.empty(position.stage));
#pragma unroll
      for (int i = 0; i < Call::kBlocks; ++i) {
        ptx::keep_in_place(sums[i]);
#pragma unroll
        for (int j = 0; j < kRegisters; ++j) promoted[i][j] += sums[i][j];
      }
    } else {
      ptx::wgmma_wait<1>();
      if (block > 0 && lane == 0) ptx::mbarrier_arrive(barriers.empty(previous));
      previous = position.stage;
    }
    position.advance();
  }
  ptx::wgmma_wait<0>();
#pragma unroll
  for (int i = 0; i < Call::kBlocks; ++i) ptx::keep_in_place(sums[i]);

  ptx::barrier(1, Call::kMultiplying);  // nobody reads the stages any more
#pragma unroll
  for (int i = 0; i < Call::kBlocks; ++i) {
#pragma unroll
    for (int j = 0; j < kRegisters; ++j) {
      const int row = i * 64 + warp * 16 + lane / 4 + j % 4 / 2 * 8, column = j / 4 * 8 + lane % 4 * 2 + j % 2;
      to[column * Call::kPitch + row] = Call::kPromotes ? promoted[Call::kPromotes ? i : 0][j] : sums[i][j];
    }
  }
}

/// The sums of one element, of all parts of K.
template <class Config>
__device__ __forceinline__ void skinny_sums(const typename Config::Sum* from, typename Config::Sum (&sums)[Config::kSums],
                                            int place) {
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
        ptx::load_cluster(parts[split], ptx::address_in_block(ptx::shared_address(own), split));
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
__device__ __forceinline__ void matmul_skinny(const MatmulSkinny<Config>& call) {
  using Call = MatmulSkinny<Config>;
  using Sum = typename Call::Sum;
#ifndef EXP_TOGETHER
#define EXP_TOGETHER 4
#endif
  constexpr int kTogether = EXP_TOGETHER;  // elements of a thread whose memory accesses overlap
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const unsigned shared = ptx::shared_address(shared_memory);
  Sum* const sums = reinterpret_cast<Sum*>(shared_memory);
  if (threadIdx.x == 0) typename Call::Barriers{shared + Call::kBarriersAt}.init(4);
  __syncthreads();

  const int split = blockIdx.x % Config::kSplits, index = blockIdx.x / Config::kSplits;
  const int batch = index / call.tiles, row = (index - batch * call.tiles) * Config::kTile;
  const long long parts = (call.k + Call::WideTile::kDepth - 1) / Call::WideTile::kDepth;
  const int first = static_cast<int>(parts * split / Config::kSplits);
  const int last = static_cast<int>(parts * (split + 1) / Config::kSplits);
  const bool multiplies = ptx::uniform(threadIdx.x / 32) < 4;
  if (multiplies) {
    skinny_multiply<Config>(shared, sums, last - first);
  } else if (threadIdx.x == Call::kMultiplying) {
    skinny_produce(call, shared, row, batch, first, last);
  }
  if constexpr (Config::kSplits > 1) {
    ptx::warp_sync();
    ptx::cluster_arrive();
    ptx::cluster_wait();
  } else if (multiplies) {
    ptx::barrier(1, Call::kMultiplying);
  }

  if (multiplies) {
    const int count = (Config::kSwapped ? Config::kNarrow : call.columns) * Config::kTile;
    constexpr int kStep = Config::kSplits * Call::kMultiplying;
#pragma unroll 1
    for (int start = split * Call::kMultiplying + threadIdx.x; start < count; start += kTogether * kStep) {
      ElementPlace places[kTogether];
      bool inside[kTogether];
      Sum totals[kTogether][Config::kSums];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int element = start + i * kStep;
        const int wide = Config::kSwapped ? element / Config::kNarrow : element % Config::kTile;
        const int narrow = Config::kSwapped ? element % Config::kNarrow : element / Config::kTile;
        places[i] = Config::kSwapped ? ElementPlace{row + wide, narrow, batch} : ElementPlace{narrow, row + wide, batch};
        inside[i] = element < count && narrow < call.columns && row + wide < call.rows;
        if (inside[i]) skinny_sums<Config>(sums, totals[i], narrow * Call::kPitch + wide);
      }
      apply_epilogue<Config>(call.operands, call.results, places, inside, totals);
    }
  }
  // No block leaves while others of its cluster may still read its sums.
  if constexpr (Config::kSplits > 1) {
    ptx::cluster_arrive();
    ptx::cluster_wait();
  }
}

}  // namespace jaxdnn
