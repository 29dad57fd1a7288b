// The order in which persistent blocks (clusters of them) work through the tiles of a batch of matrices.
//
// Clusters that run at the same time work on a band of tiles, `swizzle` rows high, because those of a band share
// their operands in the L2 cache:
//
//        columns ->               swizzle = 2
//   rows  0  2  4  6
//    |    1  3  5  7
//    v    8 10 12 14
//         9 11 13 15
//
// Bands of 8 rows read least from memory (benchmarks/results/product_kernels.md).
#pragma once

namespace jaxdnn {

struct TilePosition {
  int row, column, batch;
};

struct TileOrder {
  unsigned rows, columns, swizzle;  // in tiles (of a whole cluster)

  __device__ __forceinline__ TilePosition operator[](unsigned index) const {
    const unsigned matrix = rows * columns;
    const unsigned batch = index / matrix;
    index -= batch * matrix;
    const unsigned band = index / (swizzle * columns);
    index -= band * swizzle * columns;
    return in_band(index, band, batch);
  }

  /// The same, but those of one matrix, one band or one column without its division: what is copied first waits for
  /// them, and tiles whose sums are kept.
  __device__ __forceinline__ TilePosition quickly(unsigned index) const {
    const unsigned matrix = rows * columns;
    unsigned batch = 0, band = 0;
    if (index >= matrix) {
      batch = index / matrix;
      index -= batch * matrix;
    }
    if (columns == 1) return {static_cast<int>(index), 0, static_cast<int>(batch)};
    if (index >= swizzle * columns) {
      band = index / (swizzle * columns);
      index -= band * swizzle * columns;
    }
    return in_band(index, band, batch);
  }

 private:
  /// Tile `index` of a band.
  __device__ __forceinline__ TilePosition in_band(unsigned index, unsigned band, unsigned batch) const {
    const unsigned left = rows - band * swizzle;
    const unsigned height = left < swizzle ? left : swizzle;
    const unsigned column = index / height;
    return {static_cast<int>(band * swizzle + index - column * height), static_cast<int>(column),
            static_cast<int>(batch)};
  }
};

}  // namespace jaxdnn
