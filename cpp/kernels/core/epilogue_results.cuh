// An epilogue's results on their way to memory: rounded, and through a warp's slots of shared memory and the copy
// engine, or straight from registers.
#pragma once

#include "core/epilogue_operands.cuh"
#include "ptx/mma.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"

namespace jaxdnn {

/// A pair of neighbouring values of a result, rounded.
template <class T>
__device__ __forceinline__ Vector<T, 2> rounded_pair(const RegisterOf<4> (&pair)[2]) {
  const Held<T> values[2] = {pair[0], pair[1]};
  Vector<T, 2> vector;
  vector.pack(values);
  return vector;
}

/// A thread's 2 x 2 x 2 values of 16 columns: two column pairs, two rows, two neighbours.
using Patch = RegisterOf<4>[2][2][2];

/// One result's piece of 16 rows in shared memory, swizzled as its tensor map says: by the length of its rows. The
/// pattern repeats every 1024 bytes at most, to which slots are aligned.
template <class T, int kColumns>
struct ResultSlot {
  static constexpr int kRowBytes = kColumns * static_cast<int>(sizeof(T));
  static constexpr int kBytes = 16 * kRowBytes < 1024 ? 1024 : 16 * kRowBytes;
  static_assert(kRowBytes == 128 || kRowBytes == 64 || kRowBytes == 32, "a row of a slot is as long as a swizzle's");

  static __device__ __forceinline__ unsigned place(int row, int chunk) {
    const int exchange = kRowBytes == 128 ? row & 7 : kRowBytes == 64 ? row >> 1 & 3 : row >> 2 & 1;
    return row * kRowBytes + (chunk ^ exchange) * 16;
  }

  static __device__ __forceinline__ void put(unsigned slot, int step, const Patch& values) {
    const int lane = threadIdx.x % 32;
    if constexpr (sizeof(T) == 2) {
      unsigned words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = rounded_pair<T>(values[i / 2][i % 2]).words[0];
      ptx::stmatrix_x4(slot + place(lane % 16, 2 * step + lane / 16), words);
    } else {
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const Vector<T, 2> rounded = rounded_pair<T>(values[pair][r]);
          const int row = lane / 4 + 8 * r;
          if constexpr (sizeof(T) == 4) {
            const unsigned address = slot + place(row, 4 * step + 2 * pair + lane % 4 / 2);
            ptx::st_shared<8>(address + lane % 2 * 8, rounded.words);
          } else {
            ptx::st_shared<2>(slot + place(row, step) + 8 * pair + lane % 4 * 2, rounded.words);
          }
        }
      }
    }
  }
};

/// Writes 16 columns without the copy engine; `kPairs` says that pairs of columns are aligned.
template <class T, bool kPairs>
__device__ __forceinline__ void store_direct(T* matrix, int row, int column, int rows, int columns,
                                             const Patch& values) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    T* const line = matrix + static_cast<long long>(row + 8 * r) * columns;
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const int first = column + 8 * pair;
      const Vector<T, 2> rounded = rounded_pair<T>(values[pair][r]);
      if (row + 8 * r >= rows || first >= columns) continue;
      if constexpr (kPairs) {
        rounded.store(line + first);
      } else {
        Vector<T, 1> left, right;
        left.set(0, rounded.get(0));
        right.set(0, rounded.get(1));
        left.store(line + first);
        if (first + 1 < columns) right.store(line + first + 1);
      }
    }
  }
}

}  // namespace jaxdnn
