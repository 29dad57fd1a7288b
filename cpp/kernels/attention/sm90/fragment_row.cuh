// Rows of accumulators to global memory.
#pragma once

#include "core/fragment.cuh"

namespace jaxdnn {

/// Stores `columns`, a multiple of 8, of one of the two rows that a thread has of an accumulator (ptx/wgmma.cuh), times
/// `factor`; by whole warps, and where the row is `there`. Each lane has pairs of columns: of 16 bits, after an
/// exchange with the other three of its row, 8 columns of 32.
template <class T, int kCount>
__device__ __forceinline__ void store_fragment_row(T* row, const float (&sums)[kCount], int r, float factor,
                                                   int columns, bool there) {
  const int lane = threadIdx.x % 4;
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
      const unsigned words[2] = {ptx::mov_b32(sums[4 * i + 2 * r] * factor),
                                 ptx::mov_b32(sums[4 * i + 2 * r + 1] * factor)};
      const int column = i * 8 + lane * 2;
      if (there && column < columns) ptx::st_global<8>(row + column, words);
    }
  } else {
#pragma unroll
    for (int strip = 0; strip < kCount / 16; ++strip) {
      unsigned words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* const pair = sums + (strip * 4 + i) * 4 + 2 * r;
        const float scaled[2] = {pair[0] * factor, pair[1] * factor};
        Vector<T, 2> rounded;
        rounded.pack(scaled);
        words[i] = rounded.words[0];
      }
      transpose_words<1>(words);
      const int column = strip * 32 + lane * 8;
      if (there && column < columns) ptx::st_global<16>(row + column, words);
    }
  }
}

}  // namespace jaxdnn
