// An epilogue's results on their way to memory: rounded, and through a warp's stages of shared memory and TMA, or
// straight from registers; and what TMA loads of its operands, which lies in those stages before.
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

/// All of a fragment, rounded to 16 bits, as stmatrix takes it.
template <class T>
__device__ __forceinline__ void rounded_words(const Fragment& fragment, unsigned (&words)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = rounded_pair<T>(fragment, i).words[0];
}

/// A subtile of 16 rows in shared memory, of a result or an operand, swizzled as its tensor map says, by the length of
/// its rows; or, swapped, of 64 rows of a group's four warps, which are its columns. The pattern repeats every 1024
/// bytes at most, to which stages are aligned.
template <class T, int kColumns, bool kSwapped = false>
struct Subtile {
  static constexpr int kRows = kSwapped ? 64 : 16;
  static constexpr int kRowBytes = (kSwapped ? kRows : kColumns) * static_cast<int>(sizeof(T));
  static constexpr int kBoxBytes = kRows * kColumns * static_cast<int>(sizeof(T)),
                       kBytes = kBoxBytes < 1024 ? 1024 : kBoxBytes;
  static_assert(kRowBytes == 128 || kRowBytes == 64 || kRowBytes == 32, "a row of a stage is as long as a swizzle's");
  static_assert(!kSwapped || sizeof(T) == 2, "16-bit elements are transposed on their way");

  static __device__ __forceinline__ unsigned offset(int row, int chunk) {
    const int exchange = kRowBytes == 128 ? row & 7 : kRowBytes == 64 ? row >> 1 & 3 : row >> 2 & 1;
    return row * kRowBytes + (chunk ^ exchange) * 16;
  }

  /// Writes fragment `number` of the subtile.
  static __device__ __forceinline__ void put(unsigned stage, int number, const Fragment& fragment) {
    const int lane = threadIdx.x % 32;
    if constexpr (sizeof(T) == 2) {
      unsigned words[4];
      rounded_words<T>(fragment, words);
      ptx::stmatrix_x4<kSwapped>(stage + piece(number), words);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const Vector<T, 2> rounded = rounded_pair<T>(fragment, i);
        if constexpr (sizeof(T) == 4) {
          ptx::st_shared<8>(pair(stage, number, i), rounded.words);
        } else {
          const unsigned line = stage + offset(lane / 4 + i % 2 * 8, number);
          ptx::st_shared<2>(line + i / 2 * 8 + lane % 4 * 2, rounded.words);
        }
      }
    }
  }

  /// Reads fragment `number`: what a warp has read of it, it may write over.
  static __device__ __forceinline__ void get(unsigned stage, int number, unsigned (&words)[2 * sizeof(T)]) {
    static_assert(sizeof(T) == 2 || sizeof(T) == 4, "operands of other sizes are loaded by the threads");
    if constexpr (sizeof(T) == 2) {
      ptx::ldmatrix_x4<kSwapped>(words, stage + piece(number));
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        ptx::ld_shared<8>(words + 2 * i, pair(stage, number, i));
      }
    }
  }

 private:
  /// Where the 16 bytes of a fragment of 16-bit elements are whose address the lane gives.
  static __device__ __forceinline__ unsigned piece(int number) {
    const int lane = threadIdx.x % 32;
    const int row = kSwapped ? 16 * number + lane / 16 * 8 + lane % 8 : lane % 16;
    return offset(row, kSwapped ? threadIdx.x / 32 % 4 * 2 + lane / 8 % 2 : 2 * number + lane / 16);
  }

  /// Where the thread's pair `i` of 32-bit elements of a fragment is.
  static __device__ __forceinline__ unsigned pair(unsigned stage, int number, int i) {
    const int lane = threadIdx.x % 32, row = lane / 4 + i % 2 * 8;
    return stage + offset(row, 4 * number + i / 2 * 2 + lane % 4 / 2) + lane % 2 * 8;
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
