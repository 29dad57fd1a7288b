// What a warp of product/simt.cuh computes on tensor cores that compute capability 8.0 brought: `DoubleTile`, of
// float64, which round as ordinary arithmetic does, and `HalfTile`, of 16-bit floats.
//
// Both hold kThreadM x kThreadN accumulators a warp, in blocks of 16 x 8, of which lane 4 g + t has columns 2 t and
// 2 t + 1 of rows g and g + 8. Blocks of two sums of 16-bit floats take turns, so that a lane has the same elements of
// both. What else they have is in product/simt/multiply.cuh.
#pragma once

#include "core/vector.cuh"
#include "ptx/mma.cuh"

namespace jaxdnn {
/// The accumulators of a warp, of kSums sums in turn.
template <class Config, int kSums>
struct WarpAccumulators {
  using Accumulator = typename Config::Accumulator;
  static constexpr int kWarpRows = Config::kThreadM, kWarpColumns = Config::kThreadN;
  static constexpr int kWarpsAcross = Config::kTileN / kWarpColumns;
  static constexpr int kWarps = Config::kTileM / kWarpRows * kWarpsAcross;  // of a slice of K
  static constexpr int kBlocksTall = kWarpRows / 16, kBlocksWide = kWarpColumns / 8;
  static constexpr int kSubtiles = 2 * kBlocksTall, kSubtileRows = Config::kTileM / kSubtiles;
  static constexpr int kElementsWide = kBlocksWide / kSums, kElements = 4 * kBlocksTall * kElementsWide;  // of a lane
  static_assert(kBlocksWide % kSums == 0, "a warp has the same columns of all sums");

  Accumulator accumulators[kBlocksTall][kBlocksWide][4] = {};
  int row0, column0;  // of this warp's tile

  __device__ __forceinline__ WarpAccumulators() {
    const int warp = threadIdx.x / 32 % kWarps;
    row0 = warp / kWarpsAcross * kWarpRows;
    column0 = warp % kWarpsAcross * (kWarpColumns / kSums);
  }

  /// How far right of the first one a block lies, in the tiles of all sums.
  static constexpr __device__ __forceinline__ int block_column(int block) {
    return block % kSums * (Config::kTileN / kSums) + block / kSums * 8;
  }

  /// Where in its sums' tile element `i` of this lane lies, and its accumulator of sum `sum`.
  __device__ __forceinline__ int element_row(int i) const {
    return row0 + i / (4 * kElementsWide) * 16 + i % 4 / 2 * 8 + threadIdx.x % 32 / 4;
  }
  __device__ __forceinline__ int element_column(int i) const {
    return column0 + i / 4 % kElementsWide * 8 + threadIdx.x % 4 * 2 + i % 2;
  }
  __device__ __forceinline__ Accumulator element(int i, int sum) const {
    return accumulators[i / (4 * kElementsWide)][i / 4 % kElementsWide * kSums + sum][i % 4];
  }

  static __device__ __forceinline__ int row(int subtile, int i) { return i / 8 * kWarpRows + subtile * 8 + i % 8; }

  template <int kPitch>
  __device__ __forceinline__ void put(int subtile, Accumulator* to) const {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    to += (row0 / kWarpRows * 8 + g) * kPitch + column0 + 2 * t;
#pragma unroll
    for (int i = 0; i < kSubtiles; ++i) {
      if (i == subtile) {
#pragma unroll
        for (int j = 0; j < kBlocksWide; ++j) {
          to[block_column(j)] = accumulators[i / 2][j][i % 2 * 2];
          to[block_column(j) + 1] = accumulators[i / 2][j][i % 2 * 2 + 1];
        }
      }
    }
  }
};

template <class Config>
struct DoubleTile : WarpAccumulators<Config, 1> {
  static constexpr int kStep = 4;
  using Warp = WarpAccumulators<Config, 1>;

  double rows[2][Warp::kBlocksTall][2], columns[2][Warp::kBlocksWide];

  template <class TileA, class TileB>
  __device__ __forceinline__ void fetch(const double* a, const double* b, int step, int buffer) {
    const int g = threadIdx.x % 32 / 4, k = step * kStep + threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < Warp::kBlocksTall; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) rows[buffer][i][j] = a[TileA::offset_of(this->row0 + g + i * 16 + j * 8, k)];
    }
#pragma unroll
    for (int i = 0; i < Warp::kBlocksWide; ++i) columns[buffer][i] = b[TileB::offset_of(this->column0 + g + i * 8, k)];
  }

  __device__ __forceinline__ void multiply(int buffer) {
#pragma unroll
    for (int i = 0; i < Warp::kBlocksTall; ++i) {
#pragma unroll
      for (int j = 0; j < Warp::kBlocksWide; ++j) {
        ptx::mma_m16n8k4_f64(this->accumulators[i][j], rows[buffer][i], columns[buffer][j]);
      }
    }
  }
};

template <class Config>
struct HalfTile : WarpAccumulators<Config, Config::kAccumulators> {
  using T = typename Config::A;
  static constexpr int kStep = 16;
  using Warp = WarpAccumulators<Config, Config::kAccumulators>;
  static_assert(Warp::kBlocksWide % 2 == 0, "columns are loaded in pairs of blocks");

  unsigned rows[2][Warp::kBlocksTall][4], columns[2][Warp::kBlocksWide][2];
  unsigned first_a, first_b;  // bytes from where a tile begins to what this lane loads of it first

  /// Finds where this lane's loads begin, before anybody waits for a tile, of which its warp multiplies what follows k.
  template <class TileA, class TileB>
  __device__ __forceinline__ void place(int k = 0) {
    const int lane = threadIdx.x % 32;
    // Of a's four matrices, the second and fourth are the lower rows, the third and fourth the later k.
    const int row = this->row0 + (TileA::kAlongExtent ? lane / 8 % 2 * 8 : lane % 16);
    first_a = sizeof(T) * TileA::offset_of(row, k + lane / 16 * 8 + (TileA::kAlongExtent ? lane % 8 : 0));
    // Of b's, the second and fourth are the later k, the third and fourth the second block.
    const int column = this->column0 + lane / 16 * Warp::block_column(1) + (TileB::kAlongExtent ? 0 : lane % 8);
    first_b = sizeof(T) * TileB::offset_of(column, k + (TileB::kAlongExtent ? lane % 16 : lane / 8 % 2 * 8));
    asm volatile("" : "+r"(first_a), "+r"(first_b));
  }

  template <class TileA, class TileB>
  __device__ __forceinline__ void fetch(const T* a, const T* b, int step, int buffer) {
    // Sums of 32 bits: those of pointers would take twice as many instructions.
    const unsigned from_a = ptx::cvta_to_shared(a) + first_a, from_b = ptx::cvta_to_shared(b) + first_b;
    constexpr int kBytes = sizeof(T);
#pragma unroll
    for (int i = 0; i < Warp::kBlocksTall; ++i) {
      ptx::ldmatrix_x4<TileA::kAlongExtent>(rows[buffer][i], from_a + kBytes * TileA::offset_of(i * 16, step * kStep));
    }
#pragma unroll
    for (int i = 0; i < Warp::kBlocksWide; i += 2) {
      unsigned words[4];
      ptx::ldmatrix_x4<TileB::kAlongExtent>(words,
                                            from_b + kBytes * TileB::offset_of(Warp::block_column(i), step * kStep));
#pragma unroll
      for (int j = 0; j < 4; ++j) columns[buffer][i + j / 2][j % 2] = words[j];
    }
  }

  __device__ __forceinline__ void multiply(int buffer) {
#pragma unroll
    for (int i = 0; i < Warp::kBlocksTall; ++i) {
#pragma unroll
      for (int j = 0; j < Warp::kBlocksWide; ++j) {
        if constexpr (is_same<T, bfloat16>) {
          ptx::mma_m16n8k16_bf16(this->accumulators[i][j], rows[buffer][i], columns[buffer][j]);
        } else {
          ptx::mma_m16n8k16_f16(this->accumulators[i][j], rows[buffer][i], columns[buffer][j]);
        }
      }
    }
  }
};

}  // namespace jaxdnn
