// An epilogue's results on their way to memory: rounded, and through a warp's stages of shared memory and TMA, or
// straight from registers.
#pragma once

#include "core/fragment.cuh"
#include "ptx/mma.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"

namespace jaxdnn {

/// Elements 2 `pair` and 2 `pair` + 1 of a fragment, which are neighbours, rounded.
template <class T>
__device__ __forceinline__ Vector<T, 2> rounded_pair(const Fragment& fragment, int pair) {
  const Held<T> values[2] = {fragment[2 * pair], fragment[2 * pair + 1]};
  Vector<T, 2> vector;
  vector.pack(values);
  return vector;
}

/// One result's subtile of 16 rows in shared memory, swizzled as its tensor map says: by the length of its rows. The
/// pattern repeats every 1024 bytes at most, to which stages are aligned.
template <class T, int kColumns>
struct ResultStage {
  static constexpr int kRowBytes = kColumns * static_cast<int>(sizeof(T));
  static constexpr int kBytes = 16 * kRowBytes < 1024 ? 1024 : 16 * kRowBytes;
  static_assert(kRowBytes == 128 || kRowBytes == 64 || kRowBytes == 32, "a row of a stage is as long as a swizzle's");

  static __device__ __forceinline__ unsigned offset(int row, int chunk) {
    const int exchange = kRowBytes == 128 ? row & 7 : kRowBytes == 64 ? row >> 1 & 3 : row >> 2 & 1;
    return row * kRowBytes + (chunk ^ exchange) * 16;
  }

  /// Writes fragment `number` of the subtile.
  static __device__ __forceinline__ void put(unsigned stage, int number, const Fragment& fragment) {
    const int lane = threadIdx.x % 32;
    if constexpr (sizeof(T) == 2) {
      unsigned words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = rounded_pair<T>(fragment, i).words[0];
      ptx::stmatrix_x4(stage + offset(lane % 16, 2 * number + lane / 16), words);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const Vector<T, 2> rounded = rounded_pair<T>(fragment, i);
        const int row = lane / 4 + i % 2 * 8, half = i / 2;
        if constexpr (sizeof(T) == 4) {
          const unsigned address = stage + offset(row, 4 * number + 2 * half + lane % 4 / 2);
          ptx::st_shared<8>(address + lane % 2 * 8, rounded.words);
        } else {
          ptx::st_shared<2>(stage + offset(row, number) + 8 * half + lane % 4 * 2, rounded.words);
        }
      }
    }
  }
};

/// Writes a fragment without TMA; `kPairs` says that pairs of columns are aligned.
template <class T, bool kPairs>
__device__ __forceinline__ void store_direct(T* matrix, const FragmentCoordinate& at, const Fragment& fragment) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = at.row + at.below * r;
    T* const line = matrix + static_cast<long long>(row) * at.columns;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int first = at.column + 8 * half;
      const Vector<T, 2> rounded = rounded_pair<T>(fragment, half * 2 + r);
      if (row >= at.rows || first >= at.columns) continue;
      if constexpr (kPairs) {
        rounded.store(line + first);
      } else {
        Vector<T, 1> left, right;
        left.set(0, rounded.get(0));
        right.set(0, rounded.get(1));
        left.store(line + first);
        if (first + 1 < at.columns) right.store(line + first + 1);
      }
    }
  }
}

}  // namespace jaxdnn
