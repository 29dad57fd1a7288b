// Copies matrices into rows that TMA and the tensor cores take: aligned to 16 bytes, and transposed if they have to run
// along K. All operands of a product are copied by one launch. Where the other operand is loaded by views, K is in
// their order, and has zeros where a view ends (core/views.cuh).
//
//   grid             a block a tile, of 32 words x as many rows as 32 words hold elements; one matrix's after another's
//   block            32 x 8 threads, each with 4 squares of kSide x kSide elements (one word of each of kSide rows),
//                    which it transposes in registers; shared memory puts them where rows of the copy are written
//
// Bytes: each element read and written once. Flops: none. Memory bounds it.
#pragma once

#include "core/vector.cuh"

namespace jaxdnn {

/// One matrix of a batch of them. What says how to read and write it is a constant of the code.
template <int kBytes>
struct MatrixCopy {
  static constexpr int kSide = 4 / kBytes;  // elements of a word
  static constexpr int kTile = 32 * kSide;  // rows and columns of a tile

  const unsigned char* from = nullptr;
  unsigned char* to = nullptr;
  int rows = 0, columns = 0;               // of the source
  long long from_row = 0, from_batch = 0;  // bytes
  long long to_row = 0, to_batch = 0;      // bytes, of the copy; multiples of 16
  unsigned row_tiles = 1, column_tiles = 1, blocks = 1;
  bool transposes = false;
  bool words = false;  // the rows of the source are whole, aligned words
  int views = 1;       // in whose order the columns are (core/views.cuh)
  int view_step = 0;   // from a view's rows to the next one's, modulo `views`
  int to_columns = 0;  // of the copy, if it is not transposed

  /// The source's column that is the copy's column `column`.
  __device__ __forceinline__ int of_view(int column) const {
    if (views == 1) return column;
    const int of_one = to_columns / views, view = column / of_one;
    return column % of_one * views + (views - 1 - view) * view_step % views;
  }

  /// The words of four times kSide rows, `apart` rows from each of the four to the next, from the copy's column
  /// `column` on; the source's where it is transposed. What is not there is loaded from elsewhere: so that no load
  /// waits for another, whatever there is.
  __device__ __forceinline__ void load(const unsigned char* matrix, int row, int apart, int column,
                                       unsigned (&found)[4][kSide]) const {
    if (words) {
      load_pieces<4>(matrix, row, apart, [&](int) { return column; }, found);
    } else if (views == 1) {
      load_pieces<kBytes>(matrix, row, apart, [&](int i) { return column + i; }, found);
    } else {
      int of_views[kSide];
#pragma unroll
      for (int i = 0; i < kSide; ++i) of_views[i] = of_view(column + i);
      load_pieces<kBytes>(matrix, row, apart, [&](int i) { return of_views[i]; }, found);
    }
  }

 private:
  /// Likewise, in pieces of so many bytes, of which piece i of a row begins at the source's column `column(i)`.
  template <int kPiece, class Column>
  __device__ __forceinline__ void load_pieces(const unsigned char* matrix, int row, int apart, const Column& column,
                                              unsigned (&found)[4][kSide]) const {
    constexpr int kPieces = 4 / kPiece;
    unsigned pieces[4][kSide][kPieces];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < kSide; ++j) {
        const int line = row + i * apart + j;
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) {
          const bool present = line < rows && column(piece) < columns;
          const long long offset = line * from_row + static_cast<long long>(column(piece)) * kBytes;
          ptx::ld_global<kPiece>(&pieces[i][j][piece], matrix + (present ? offset : 0));
          if (!present) pieces[i][j][piece] = 0;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < kSide; ++j) {
        found[i][j] = 0;
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) found[i][j] |= pieces[i][j][piece] << 8 * kPiece * piece;
      }
    }
  }
};

/// Config has: kBytes (of an element: 1, 2 or 4), kCopies.
template <class Config>
struct ProductCopy {
  static constexpr int kThreads = 256;

  MatrixCopy<Config::kBytes> copies[Config::kCopies];
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

template <int kBytes>
__device__ __forceinline__ void copy_tile(const MatrixCopy<kBytes>& copy, unsigned block) {
  constexpr int kSide = MatrixCopy<kBytes>::kSide, kTile = MatrixCopy<kBytes>::kTile;
  const int x = threadIdx.x % 32, y = threadIdx.x / 32;
  const unsigned matrix = block / (copy.row_tiles * copy.column_tiles);
  const unsigned tile = block % (copy.row_tiles * copy.column_tiles);
  const int row = tile / copy.column_tiles * kTile, column = tile % copy.column_tiles * kTile;
  const unsigned char* const from = copy.from + matrix * copy.from_batch;
  unsigned char* const to = copy.to + matrix * copy.to_batch;
  unsigned words[4][kSide];
  copy.load(from, row + y * kSide, 8 * kSide, column + x * kSide, words);
  if (copy.transposes) {
    __shared__ unsigned shared[kSide][32][33];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      transpose_square(words[i]);
#pragma unroll
      for (int j = 0; j < kSide; ++j) shared[j][x][y + 8 * i] = words[i][j];
    }
    __syncthreads();
    if (row + x * kSide >= copy.rows) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < kSide; ++j) {
        const int line = column + (y + 8 * i) * kSide + j;
        if (line >= copy.columns) continue;
        ptx::st_global<4>(to + line * copy.to_row + static_cast<long long>(row + x * kSide) * kBytes,
                          &shared[j][y + 8 * i][x]);
      }
    }
  } else {
    if (column + x * kSide >= copy.to_columns) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < kSide; ++j) {
        const int line = row + (y + 8 * i) * kSide + j;
        if (line >= copy.rows) continue;
        ptx::st_global<4>(to + line * copy.to_row + static_cast<long long>(column + x * kSide) * kBytes, &words[i][j]);
      }
    }
  }
}

/// A block of this copy or of those behind it. No loop: what a copy is would be looked up in local memory.
template <int kCopy, class Config>
__device__ __forceinline__ void copy_from(const ProductCopy<Config>& call, unsigned block) {
  const auto& copy = call.copies[kCopy];
  if constexpr (kCopy + 1 < Config::kCopies) {
    if (block >= copy.blocks) return copy_from<kCopy + 1>(call, block - copy.blocks);
  }
  copy_tile(copy, block);
}

template <class Config>
__device__ __forceinline__ void product_copy(const ProductCopy<Config>& call) {
  copy_from<0>(call, blockIdx.x);
}

}  // namespace jaxdnn
