// An epilogue's results on their way to memory: rounded, and through a warp's slots of shared memory and the copy
// engine, or straight from registers.
#pragma once

#include "core/epilogue_operands.cuh"
#include "ptx/mma.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"

namespace jaxdnn {

struct ResultAddress {
  const TensorMap* map = nullptr;  // of boxes of 16 rows x kColumns, when the copy engine stores
  void* data = nullptr;            // else
};

/// Rounds one element of each result.
template <int kIndex, class Results>
__device__ __forceinline__ void store_results(const ResultAddress* addresses, long long offset,
                                              const Register* values) {
  if constexpr (kIndex < Results::kCount) {
    using T = typename TypeAt<kIndex, Results>::Type;
    unsigned words[Packed<T>::kWords];
    Packed<T>::round(values[kIndex], values[kIndex], words);
    Packed<T>::store(static_cast<T*>(addresses[kIndex].data) + offset, words);
    store_results<kIndex + 1, Results>(addresses, offset, values);
  }
}

/// A thread's 2 x 2 x 2 values of 16 columns: two column pairs, two rows, two neighbours.
using Patch = Register[2][2][2];

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
      for (int i = 0; i < 4; ++i) {
        unsigned word[1];
        Packed<T>::round(values[i / 2][i % 2][0], values[i / 2][i % 2][1], word);
        words[i] = word[0];
      }
      ptx::stmatrix_x4(slot + place(lane % 16, 2 * step + lane / 16), words);
    } else {
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          unsigned words[Packed<T>::kWords];
          Packed<T>::round(values[pair][r][0], values[pair][r][1], words);
          const int row = lane / 4 + 8 * r;
          if constexpr (sizeof(T) == 4) {
            const unsigned address = slot + place(row, 4 * step + 2 * pair + lane % 4 / 2);
            ptx::st_shared<8>(address + lane % 2 * 8, words);
          } else {
            ptx::st_shared<2>(slot + place(row, step) + 8 * pair + lane % 4 * 2, words);
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
      unsigned words[Packed<T>::kWords];
      Packed<T>::round(values[pair][r][0], values[pair][r][1], words);
      if (row + 8 * r >= rows || first >= columns) continue;
      if constexpr (kPairs) {
        Packed<T>::store_pair(line + first, words);
      } else {
        Packed<T>::store(line + first, words);
        const unsigned right = Packed<T>::right(words);
        if (first + 1 < columns) Packed<T>::store(line + first + 1, &right);
      }
    }
  }
}

}  // namespace jaxdnn
