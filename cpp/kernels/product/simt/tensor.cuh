// What a warp of product/simt.cuh computes on tensor cores that compute capability 8.0 brought: `DoubleTile`, of
// float64, which round as ordinary arithmetic does, and `HalfTile`, of 16-bit floats.
//
// Both hold kThreadM x kThreadN accumulators a warp, in blocks of 16 x 8, of which lane 4 g + t has columns 2 t and
// 2 t + 1 of rows g and g + 8. What else they have is in product/simt/multiply.cuh.
#pragma once

#include "core/vector.cuh"
#include "ptx/mma.cuh"

namespace jaxdnn {
/// The accumulators of a warp.
template <class Config>
struct WarpAccumulators {
  using Accumulator = typename Config::Accumulator;
  static constexpr int kWarpRows = Config::kThreadM, kWarpColumns = Config::kThreadN;
  static constexpr int kWarpsAcross = Config::kTileN / kWarpColumns;
  static constexpr int kBlocksTall = kWarpRows / 16, kBlocksWide = kWarpColumns / 8;
  static constexpr int kSubtiles = 2 * kBlocksTall, kSubtileRows = Config::kTileM / kSubtiles;

  Accumulator accumulators[kBlocksTall][kBlocksWide][4] = {};
  int row0, column0;  // of this warp's tile

  __device__ __forceinline__ WarpAccumulators() {
    const int warp = threadIdx.x / 32;
    row0 = warp / kWarpsAcross * kWarpRows;
    column0 = warp % kWarpsAcross * kWarpColumns;
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
          to[j * 8] = accumulators[i / 2][j][i % 2 * 2];
          to[j * 8 + 1] = accumulators[i / 2][j][i % 2 * 2 + 1];
        }
      }
    }
  }
};

template <class Config>
struct DoubleTile : WarpAccumulators<Config> {
  static constexpr int kStep = 4;
  using Warp = WarpAccumulators<Config>;

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
struct HalfTile : WarpAccumulators<Config> {
  using T = typename Config::A;
  static constexpr int kStep = 16;
  using Warp = WarpAccumulators<Config>;
  static_assert(Warp::kBlocksWide % 2 == 0, "columns are loaded in pairs of blocks");

  unsigned rows[2][Warp::kBlocksTall][4], columns[2][Warp::kBlocksWide][2];

  template <class TileA, class TileB>
  __device__ __forceinline__ void fetch(const T* a, const T* b, int step, int buffer) {
    const int lane = threadIdx.x % 32, first = step * kStep;
    // Of a's four matrices, the second and fourth are the lower rows, the third and fourth the later k.
    const int row = this->row0 + lane % 8 + lane / 8 % 2 * 8, row_k = first + lane / 16 * 8;
    const int trans_row = this->row0 + lane / 8 % 2 * 8, trans_row_k = first + lane % 8 + lane / 16 * 8;
#pragma unroll
    for (int i = 0; i < Warp::kBlocksTall; ++i) {
      const int offset = TileA::kAlongExtent ? TileA::offset_of(trans_row + i * 16, trans_row_k)
                                             : TileA::offset_of(row + i * 16, row_k);
      ptx::ldmatrix_x4<TileA::kAlongExtent>(rows[buffer][i], ptx::cvta_to_shared(a + offset));
    }
    // Of b's, the second and fourth are the later k, the third and fourth the right columns.
    const int column = this->column0 + lane % 8 + lane / 16 * 8, column_k = first + lane / 8 % 2 * 8;
    const int trans_column = this->column0 + lane / 16 * 8, trans_column_k = first + lane % 8 + lane / 8 % 2 * 8;
#pragma unroll
    for (int i = 0; i < Warp::kBlocksWide; i += 2) {
      const int offset = TileB::kAlongExtent ? TileB::offset_of(trans_column + i * 8, trans_column_k)
                                             : TileB::offset_of(column + i * 8, column_k);
      unsigned words[4];
      ptx::ldmatrix_x4<TileB::kAlongExtent>(words, ptx::cvta_to_shared(b + offset));
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
