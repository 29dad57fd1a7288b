// Clusters of blocks: how they meet, and which of them share what they load.
#pragma once

#include "ptx/cluster.cuh"

namespace jaxdnn {

/// Waits for all threads of a cluster of `kBlocks`; a block alone has nobody to wait for.
template <int kBlocks>
__device__ __forceinline__ void cluster_sync() {
  if constexpr (kBlocks > 1) {
    ptx::barrier_cluster_arrive();
    ptx::barrier_cluster_wait();
  }
}

/// A block's coordinate in a cluster of kM x kN that takes neighbouring tiles. Blocks of a row load the same rows of M
/// together, blocks of a column the same rows of N: each loads a part, and multicasts it to the others.
///
///              column 0   column 1
///   row 0      rank 0     rank 2                kM = 2, kN = 2
///   row 1      rank 1     rank 3
template <int kM, int kN>
struct ClusterCoordinate {
  static constexpr int kBlocks = kM * kN;
  static constexpr int kSharers = kM + kN - 1;  // blocks of a row and a column: those that a block shares loads with

  int row = 0, column = 0;

  __device__ __forceinline__ ClusterCoordinate() {
    if constexpr (kBlocks > 1) {
      const int rank = static_cast<int>(ptx::cluster_ctarank());
      row = rank % kM;
      column = rank / kM;
    }
  }

  /// A bit for each block of this one's row, and of its column, as multicast wants them.
  __device__ __forceinline__ unsigned short row_mask() const {
    unsigned short mask = 0;
#pragma unroll
    for (int i = 0; i < kN; ++i) mask |= 1 << (row + i * kM);
    return mask;
  }
  __device__ __forceinline__ unsigned short column_mask() const { return ((1 << kM) - 1) << (column * kM); }

  /// The ranks of the `kSharers`: those of the row, then the others of the column.
  __device__ __forceinline__ int sharer(int index) const {
    const int other = index - kN;
    return index < kN ? row + index * kM : column * kM + other + (other >= row ? 1 : 0);
  }
};

}  // namespace jaxdnn
