// The last step of d_scale and d_bias: adds the blocks' shares and rounds once.
//
//   grid             x: group, then tiles of 32 columns; y: the gradients asked for
//   block            32 columns x kShareLanes warps; warp w adds shares w, w + kShareLanes, ... of its 32 columns
//   barriers         one block barrier, after which warp 0 adds the warps' sums
//   shared memory    kShareLanes x 32 sums
//
// Every sum has a fixed order, so the result is the same bits on every run.
// Bytes: the shares, just written and so mostly in the L2 cache. Flops: one a share.
#pragma once

#include "core/vector.cuh"

namespace jaxdnn {

constexpr int kShareLanes = 32;

/// out[group, column] = the sum over blocks of partial[group, block, column].
template <class T, class Compute>
__device__ __forceinline__ void sum_shares(const Compute* partial, T* out, int columns, int blocks_per_group) {
    __shared__ Compute sums[kShareLanes][32];
    const int tiles = (columns + 31) / 32;
    const long long group = blockIdx.x / tiles;
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int column = static_cast<int>(blockIdx.x % tiles) * 32 + lane;
    Compute total = 0;
    if (column < columns) {
        const Compute* shares = partial + group * blocks_per_group * columns + column;
#pragma unroll 8
        for (int block = warp; block < blocks_per_group; block += kShareLanes) {
            total += shares[static_cast<long long>(block) * columns];
        }
    }
    sums[warp][lane] = total;
    __syncthreads();
    if (warp == 0 && column < columns) {
        Compute all[kShareLanes];
#pragma unroll
        for (int i = 0; i < kShareLanes; ++i) all[i] = sums[i][lane];
        const Compute rounded[1] = {tree_sum(all)};
        Vector<T, 1> vector;
        vector.pack(rounded);
        vector.store(out + group * columns + column);
    }
}

}  // namespace jaxdnn
