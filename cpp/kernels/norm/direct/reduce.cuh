// The last step of d_scale and d_bias: adds the blocks' partials and rounds once.
//
//   grid             x: group, then tiles of columns; y: the gradients asked for
//   block            kReduceThreads threads: `lanes` of them for each of kReduceThreads / lanes columns. Lane l adds
//                    partials l, l + lanes, ... of its column, kAtOnce of them in flight; `lanes` is a power of two,
//                    at most 32 and the partials, and no more than fill the device: each block costs its start and
//                    the latency of a load
//   barriers         log2(lanes) + 1 block barriers, between which the lanes add pairwise
//   shared memory    kReduceThreads sums
//
// Every sum has a fixed order, so the result is the same bits on every run.
// Bytes: the partials, just written and so mostly in the L2 cache. Flops: one a partial. Memory bounds it.
#pragma once

#include "core/reduce.cuh"
#include "core/vector.cuh"

namespace jaxdnn {

constexpr int kReduceThreads = 1024;

/// out[group, column] = the sum over blocks of partial[group, block, column].
template <class T, class Compute>
__device__ __forceinline__ void sum_partials(const Compute* partial, T* out, int columns, int blocks_per_group,
                                             int lanes) {
  __shared__ Compute sums[kReduceThreads];
  const int width = kReduceThreads / lanes;
  const int tiles = (columns + width - 1) / width;
  const long long group = blockIdx.x / tiles;
  const int lane = threadIdx.x / width;
  const int column = static_cast<int>(blockIdx.x % tiles) * width + static_cast<int>(threadIdx.x) % width;
  Compute total = 0;
  if (column < columns) {
    constexpr int kAtOnce = 8;
    const Compute* partials = partial + group * blocks_per_group * columns + column;
    for (int first = lane; first < blocks_per_group; first += kAtOnce * lanes) {
      Compute values[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int block = first + i * lanes;
        values[i] = block < blocks_per_group ? partials[static_cast<long long>(block) * columns] : 0;
      }
      total += tree_sum(values);
    }
  }
  sums[threadIdx.x] = total;
  for (int half = lanes / 2; half > 0; half /= 2) {
    __syncthreads();
    if (lane < half) sums[threadIdx.x] += sums[threadIdx.x + half * width];
  }
  if (lane == 0 && column < columns) {
    const Compute rounded[1] = {sums[threadIdx.x]};
    Vector<T, 1> vector;
    vector.pack(rounded);
    vector.store(out + group * columns + column);
  }
}

}  // namespace jaxdnn
