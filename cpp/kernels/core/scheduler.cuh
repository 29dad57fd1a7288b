// The order in which persistent blocks (clusters of them) work through the tiles of a batch of matrices.
//
// Clusters that run at the same time work on a patch of tiles, `group` rows high, because such a patch shares its
// operands in the L2 cache:
//
//        columns ->               group = 2
//   rows  0  2  4  6
//    |    1  3  5  7
//    v    8 10 12 14
//         9 11 13 15
//
// Groups of 8 read least from memory (benchmarks/results/product_kernels.md).
#pragma once

namespace jaxdnn {

struct TilePosition {
  int row, column, batch;
};

struct TileOrder {
  unsigned rows, columns, group;  // in tiles (of a whole cluster)

  __device__ __forceinline__ TilePosition operator[](unsigned index) const {
    const unsigned matrix = rows * columns;
    const unsigned batch = index / matrix;
    index -= batch * matrix;
    const unsigned band = index / (group * columns);
    index -= band * group * columns;
    const unsigned left = rows - band * group;
    const unsigned height = left < group ? left : group;
    const unsigned column = index / height;
    return {static_cast<int>(band * group + index - column * height), static_cast<int>(column),
            static_cast<int>(batch)};
  }
};

}  // namespace jaxdnn
