// Copies a matrix into rows that TMA and the tensor cores take: aligned to 16 bytes, and transposed if it has to run
// along K.
//
//   grid             a block a tile, of 32 words x as many rows as 32 words hold elements
//   block            32 x 8 threads, each with 4 squares of kSide x kSide elements (one word of each of kSide rows),
//                    which it transposes in registers; shared memory puts them where rows of the copy are written
//
// Bytes: each element read and written once. Flops: none. Memory bounds it.
#pragma once

#include "core/vector.cuh"

namespace jaxdnn {

/// Config has: kBytes (of an element: 1, 2 or 4), kTransposes, kWords (the rows of the source are whole, aligned
/// words).
template <class Config>
struct ProductCopy {
  static constexpr int kThreads = 256;
  static constexpr int kSide = 4 / Config::kBytes;  // elements of a word
  static constexpr int kTile = 32 * kSide;          // rows and columns of a tile

  const unsigned char* from = nullptr;
  unsigned char* to = nullptr;
  int rows = 0, columns = 0;               // of the source
  long long from_row = 0, from_batch = 0;  // bytes
  long long to_row = 0, to_batch = 0;      // bytes, of the copy; multiples of 16
  unsigned row_tiles = 1, column_tiles = 1;

  /// The elements of row `row` from column `column` on, as one word.
  __device__ __forceinline__ unsigned word(const unsigned char* matrix, int row, int column) const {
    unsigned word = 0;
    if (row >= rows || column >= columns) return word;
    const unsigned char* const address = matrix + row * from_row + static_cast<long long>(column) * Config::kBytes;
    if constexpr (Config::kWords) {
      ptx::ld_global<4>(&word, address);
    } else {
#pragma unroll
      for (int i = 0; i < kSide; ++i) {
        unsigned element = 0;
        if (column + i < columns) {
          ptx::ld_global<Config::kBytes>(&element, address + Config::kBytes * i);
        }
        word |= element << 8 * Config::kBytes * i;
      }
    }
    return word;
  }
};

/// Exchanges rows and columns of a square of elements, a word a row.
__device__ __forceinline__ void transpose_square(unsigned (&words)[1]) { (void)words; }

__device__ __forceinline__ void transpose_square(unsigned (&words)[2]) {
  const unsigned first = __byte_perm(words[0], words[1], 0x5410);
  words[1] = __byte_perm(words[0], words[1], 0x7632);
  words[0] = first;
}

__device__ __forceinline__ void transpose_square(unsigned (&words)[4]) {
  const unsigned low01 = __byte_perm(words[0], words[1], 0x5140), high01 = __byte_perm(words[0], words[1], 0x7362);
  const unsigned low23 = __byte_perm(words[2], words[3], 0x5140), high23 = __byte_perm(words[2], words[3], 0x7362);
  words[0] = __byte_perm(low01, low23, 0x5410);
  words[1] = __byte_perm(low01, low23, 0x7632);
  words[2] = __byte_perm(high01, high23, 0x5410);
  words[3] = __byte_perm(high01, high23, 0x7632);
}

template <class Config>
__device__ __forceinline__ void product_copy(const ProductCopy<Config>& call) {
  using Call = ProductCopy<Config>;
  constexpr int kSide = Call::kSide;
  const int x = threadIdx.x % 32, y = threadIdx.x / 32;
  const unsigned matrix = blockIdx.x / (call.row_tiles * call.column_tiles);
  const unsigned tile = blockIdx.x % (call.row_tiles * call.column_tiles);
  const int row = tile / call.column_tiles * Call::kTile, column = tile % call.column_tiles * Call::kTile;
  const unsigned char* const from = call.from + matrix * call.from_batch;
  unsigned char* const to = call.to + matrix * call.to_batch;
  unsigned words[4][kSide];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < kSide; ++j) words[i][j] = call.word(from, row + (y + 8 * i) * kSide + j, column + x * kSide);
  }
  if constexpr (Config::kTransposes) {
    __shared__ unsigned shared[kSide][32][33];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      transpose_square(words[i]);
#pragma unroll
      for (int j = 0; j < kSide; ++j) shared[j][x][y + 8 * i] = words[i][j];
    }
    __syncthreads();
    if (row + x * kSide >= call.rows) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < kSide; ++j) {
        const int line = column + (y + 8 * i) * kSide + j;
        if (line >= call.columns) continue;
        ptx::st_global<4>(to + line * call.to_row + static_cast<long long>(row + x * kSide) * Config::kBytes,
                          &shared[j][y + 8 * i][x]);
      }
    }
  } else {
    if (column + x * kSide >= call.columns) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < kSide; ++j) {
        const int line = row + (y + 8 * i) * kSide + j;
        if (line >= call.rows) continue;
        ptx::st_global<4>(to + line * call.to_row + static_cast<long long>(column + x * kSide) * Config::kBytes,
                          &words[i][j]);
      }
    }
  }
}

}  // namespace jaxdnn
