// Sums over the threads that share a row: lanes of a warp, warps of a block, blocks of a cluster.
//
//   lanes      butterfly shuffles; every lane ends with the same bits, because each step adds the same two numbers
//   warps      each warp's sum goes to a slot in shared memory; one barrier; every warp adds all slots
//   blocks     the same, but each warp writes its slot in the shared memory of every block of the cluster, by stores
//              that count their bytes at an mbarrier there. A barrier of the cluster would order more than the sums:
//              it waits until all that its threads have stored has arrived, rows of results among it.
//
// Slots exist twice and alternate, so one barrier a reduction is enough: a slot is written again two reductions later,
// and by then the barrier between has been passed only after everybody's reads.
// The order of additions depends on the launch's shape alone, so results are the same bits on every run.
#pragma once

#include "core/cluster.cuh"
#include "core/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"

namespace jaxdnn {

/// The sum of a register array, as a balanced tree: short dependence chains, and an error that grows logarithmically.
template <class Compute, int kCount>
__device__ __forceinline__ Compute tree_sum(const Compute (&values)[kCount]) {
  Compute partial[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) partial[i] = values[i];
#pragma unroll
  for (int step = 1; step < kCount; step *= 2) {
#pragma unroll
    for (int i = 0; i + step < kCount; i += 2 * step) partial[i] += partial[i + step];
  }
  return partial[0];
}

/// Sum over aligned runs of `kWidth` lanes (a power of two up to 32).
template <int kWidth, class Compute>
__device__ __forceinline__ Compute lanes_sum(Compute value) {
#pragma unroll
  for (int mask = kWidth / 2; mask > 0; mask /= 2) value += ptx::shfl_sync_bfly(value, mask);
  return value;
}

/// Sums over a row's `kThreads` threads in each of `kCluster` blocks; a block holds `kRows` rows.
/// All threads of a block call it together. With a cluster, `kRows` is 1 and `start` precedes the first sum.
template <class Compute, int kThreads, int kRows, int kCluster, int kValues>
struct RowSum {
  static constexpr int kLanes = kThreads < 32 ? kThreads : 32;
  static constexpr int kWarps = kThreads <= 32 ? 1 : kThreads / 32;
  static constexpr int kSlots = kWarps * kCluster;
  static constexpr int kBytes = static_cast<int>(sizeof(Compute));
  static constexpr int kValueBytes = kRows * kSlots * kBytes;
  static constexpr int kPhaseBytes = kSlots > 1 ? kValues * kValueBytes : 0;
  static constexpr int kBarrierBytes = kCluster > 1 ? 8 : 0;  // of a phase
  static constexpr int kSharedBytes = 2 * (kPhaseBytes + kBarrierBytes);
  static_assert(kCluster == 1 || kRows == 1, "the blocks of a cluster share one row");
  static_assert(kWarps == 1 || kRows <= 15, "each row of several warps has a barrier of its own");

  unsigned slots;     // shared address of this row's first slot
  unsigned barriers;  // and of the two phases' barriers
  unsigned turn = 0;

  __device__ __forceinline__ RowSum(unsigned shared, int row)
      : slots(shared + row * kSlots * kBytes), barriers(shared + 2 * kPhaseBytes) {}

  /// No block writes to another before that one runs, and its barriers are made.
  __device__ __forceinline__ void start() const {
#if __CUDA_ARCH__ >= 900
    if constexpr (kCluster > 1) {
      if (threadIdx.x == 0) {
        ptx::mbarrier_init(barriers, 1);
        ptx::mbarrier_init(barriers + kBarrierBytes, 1);
        ptx::fence_mbarrier_init();
      }
      cluster_sync<kCluster>();
    }
#endif
  }

  __device__ __forceinline__ void operator()(Compute (&values)[kValues]) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) values[i] = lanes_sum<kLanes>(values[i]);
    if constexpr (kSlots > 1) {
      const unsigned first = exchange(values);
      constexpr int kWidth = kSlots < 32 ? kSlots : 32;
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        const unsigned mine = first + i * kValueBytes + threadIdx.x % kWidth * kBytes;
        Compute sum, other;
        ptx::ld_shared(sum, mine);
#pragma unroll
        for (int slot = kWidth; slot < kSlots; slot += kWidth) {
          ptx::ld_shared(other, mine + slot * kBytes);
          sum += other;
        }
        values[i] = lanes_sum<kWidth>(sum);
      }
    }
  }

  /// Makes each warp's values known to all: afterwards value i of warp w is in slot w of [value][row][slot].
  /// Returns the shared address of this row's slots.
  __device__ __forceinline__ unsigned exchange(const Compute (&values)[kValues]) {
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x % kThreads / 32;
    const unsigned phase = turn % 2;
    const unsigned first = slots + phase * kPhaseBytes;
    if constexpr (kCluster == 1) {
      if (lane == 0) {
#pragma unroll
        for (int i = 0; i < kValues; ++i) ptx::st_shared(first + i * kValueBytes + warp * kBytes, values[i]);
      }
      ptx::barrier_sync(1 + threadIdx.x / kThreads, kThreads);
    } else {
#if __CUDA_ARCH__ >= 900
      const unsigned barrier = barriers + phase * kBarrierBytes;
      if (threadIdx.x == 0) ptx::mbarrier_arrive_expect_tx(barrier, kPhaseBytes);
      if (lane < kCluster) {
        const unsigned mine = first + (ptx::cluster_ctarank() * kWarps + warp) * kBytes;
#pragma unroll
        for (int i = 0; i < kValues; ++i) {
          ptx::st_async(ptx::mapa(mine + i * kValueBytes, lane), values[i], ptx::mapa(barrier, lane));
        }
      }
      mbarrier_wait(barrier, turn / 2 % 2);
#endif
    }
    ++turn;
    return first;
  }
};

/// Mean and sum of squared deviations over all numbers of a row, from those over the same count of numbers of each
/// thread, in one exchange. Pairs of equal count merge by Chan, Golub and LeVeque's formula (1983), which like two
/// passes over the numbers, and unlike the difference of sums of squares, does not cancel.
template <int kWidth, class Compute>
__device__ __forceinline__ void lanes_moments(Compute& mean, Compute& squares, Compute count) {
#pragma unroll
  for (int mask = kWidth / 2; mask > 0; mask /= 2) {
    const Compute other = ptx::shfl_sync_bfly(mean, mask);
    const Compute apart = other - mean;
    squares += ptx::shfl_sync_bfly(squares, mask);
    squares += apart * apart * (count * static_cast<Compute>(0.5));
    mean = (mean + other) * static_cast<Compute>(0.5);
    count += count;
  }
}

template <class Sum, class Compute>
__device__ __forceinline__ void row_moments(Sum& sum, Compute& mean, Compute& squares, int count) {
  static_assert(Sum::kSlots <= 32, "a lane merges the moments of one warp");
  lanes_moments<Sum::kLanes>(mean, squares, static_cast<Compute>(count));
  if constexpr (Sum::kSlots > 1) {
    const Compute values[2] = {mean, squares};
    const unsigned mine = sum.exchange(values) + threadIdx.x % Sum::kSlots * Sum::kBytes;
    ptx::ld_shared(mean, mine);
    ptx::ld_shared(squares, mine + Sum::kValueBytes);
    lanes_moments<Sum::kSlots>(mean, squares, static_cast<Compute>(count * Sum::kLanes));
  }
}

}  // namespace jaxdnn
