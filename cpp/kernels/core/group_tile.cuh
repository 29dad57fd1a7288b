// Multiplies of groups whose K is 8 elements of 16 bits in a stage, of which a multiply of a warp group (core/tile.cuh)
// would have two at once. A warp has its own instructions, and A in registers, so that no group meets another's
// elements: zero times what is no number would be none.
//
//   a line of A           | group 0: 16 bytes | group 1 | ... | group 7 |
//   m16n8k16              a group's 8 elements and 8 zeros, by 8 of its columns
//   accumulators          as a multiply of a warp group leaves them: 16 rows of 64 a warp
//
// Bytes: for each 16 rows a warp reads 2 KiB of A and all of B's stage. Flops: twice what is wanted. What is loaded
// into shared memory bounds it.
#pragma once

#include "core/tile.cuh"
#include "ptx/mma.cuh"

namespace jaxdnn {

/// Shared address of 16 bytes of a tile with the 128-byte swizzle: of line `line`, number `chunk`.
__device__ __forceinline__ unsigned swizzled(unsigned tile, int line, int chunk) {
  return tile + line * 128 + ((chunk ^ (line & 7)) << 4);
}

/// Multiplies the tiles at shared addresses `a`, the warp's first row, and `b`. Unless it `accumulate`s, what is in the
/// accumulators is replaced.
template <class ATile, class BTile, int kBlocks, int kRegisters>
__device__ __forceinline__ void multiply_groups(float (&accumulators)[kBlocks][kRegisters], unsigned a, unsigned b,
                                                bool accumulate) {
  constexpr int kGroups = BTile::kGroups, kTiles = kRegisters / 4, kOwn = kTiles / kGroups;  // of 8 columns; a group's
  static_assert(kGroups == 8 && ATile::kBytesOfT == 2 && !ATile::kRunsAlongExtent, "a group is 16 bytes of a line");
  static_assert(kOwn > 0, "8 columns are of one group");
  const int lane = threadIdx.x % 32;
  if (!accumulate) {
#pragma unroll
    for (int i = 0; i < kBlocks * kRegisters; ++i) accumulators[i / kRegisters][i % kRegisters] = 0;
  }
  unsigned right[kTiles / 4][4];
#pragma unroll
  for (int i = 0; i < kTiles / 4; ++i) {
    const int tile = 4 * i + lane / 8, line = lane % 8;
    if constexpr (BTile::kRunsAlongExtent) {
      ptx::ldmatrix_x4<true>(right[i], swizzled(b + tile / 8 * BTile::kChunkBytes, line, tile % 8));
    } else {
      ptx::ldmatrix_x4<false>(right[i], swizzled(b, tile % kOwn * 8 + line, tile / kOwn));
    }
  }
#pragma unroll
  for (int rows = 0; rows < kBlocks; ++rows) {
#pragma unroll
    for (int pair = 0; pair < kGroups; pair += 2) {
      unsigned left[4];  // of both groups
      ptx::ldmatrix_x4<false>(left, swizzled(a + rows * 64 * 128, lane % 16, pair + lane / 16));
#pragma unroll
      for (int i = 0; i < 2 * kOwn; ++i) {
        const int tile = pair * kOwn + i, group = i / kOwn;
        auto& own = reinterpret_cast<float (&)[4]>(accumulators[rows][4 * tile]);
        const unsigned factors[4] = {left[2 * group], left[2 * group + 1], 0, 0};
        const unsigned others[2] = {right[tile / 4][tile % 4], 0};
        if constexpr (ATile::kType == ptx::WgmmaType::bf16) {
          ptx::mma_m16n8k16_bf16(own, factors, others);
        } else {
          ptx::mma_m16n8k16_f16(own, factors, others);
        }
      }
    }
  }
}

}  // namespace jaxdnn
