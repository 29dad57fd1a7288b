// What a warp of product/simt.cuh computes on tensor cores that compute capability 8.0 brought: `DoubleTile`, of
// float64, which round as ordinary arithmetic does, and `HalfTile`, of 16-bit floats.
//
// Both hold kThreadM x kThreadN sums a warp, in blocks of 16 x 8, of which lane 4 g + t has columns 2 t and 2 t + 1 of
// rows g and g + 8. What else they have is in product/simt/multiply.cuh.
#pragma once

#include "core/vector.cuh"
#include "ptx/mma.cuh"

namespace jaxdnn {
/// The sums of a warp.
template <class Config>
struct WarpSums {
  using Sum = typename Config::Sum;
  static constexpr int kWarpRows = Config::kThreadM, kWarpColumns = Config::kThreadN;
  static constexpr int kWarpsAcross = Config::kTileN / kWarpColumns;
  static constexpr int kTall = kWarpRows / 16, kWide = kWarpColumns / 8;
  static constexpr int kPieces = 2 * kTall, kPieceRows = Config::kTileM / kPieces;

  Sum sums[kTall][kWide][4] = {};
  int row0, column0;  // of this warp's tile

  __device__ __forceinline__ WarpSums() {
    const int warp = threadIdx.x / 32;
    row0 = warp / kWarpsAcross * kWarpRows;
    column0 = warp % kWarpsAcross * kWarpColumns;
  }

  static __device__ __forceinline__ int row(int piece, int i) { return i / 8 * kWarpRows + piece * 8 + i % 8; }

  template <int kPitch>
  __device__ __forceinline__ void put(int piece, Sum* to) const {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    to += (row0 / kWarpRows * 8 + g) * kPitch + column0 + 2 * t;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      if (i == piece) {
#pragma unroll
        for (int j = 0; j < kWide; ++j) {
          to[j * 8] = sums[i / 2][j][i % 2 * 2];
          to[j * 8 + 1] = sums[i / 2][j][i % 2 * 2 + 1];
        }
      }
    }
  }
};

template <class Config>
struct DoubleTile : WarpSums<Config> {
  static constexpr int kStep = 4;
  using Sums = WarpSums<Config>;

  double rows[2][Sums::kTall][2], columns[2][Sums::kWide];

  template <class TileA, class TileB>
  __device__ __forceinline__ void fetch(const double* a, const double* b, int step, int buffer) {
    const int g = threadIdx.x % 32 / 4, k = step * kStep + threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < Sums::kTall; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) rows[buffer][i][j] = a[TileA::place_of(this->row0 + g + i * 16 + j * 8, k)];
    }
#pragma unroll
    for (int i = 0; i < Sums::kWide; ++i) columns[buffer][i] = b[TileB::place_of(this->column0 + g + i * 8, k)];
  }

  __device__ __forceinline__ void multiply(int buffer) {
#pragma unroll
    for (int i = 0; i < Sums::kTall; ++i) {
#pragma unroll
      for (int j = 0; j < Sums::kWide; ++j) {
        ptx::mma_m16n8k4_f64(this->sums[i][j], rows[buffer][i], columns[buffer][j]);
      }
    }
  }
};

template <class Config>
struct HalfTile : WarpSums<Config> {
  using T = typename Config::A;
  static constexpr int kStep = 16;
  using Sums = WarpSums<Config>;
  static_assert(Sums::kWide % 2 == 0, "columns are loaded in pairs of blocks");

  unsigned rows[2][Sums::kTall][4], columns[2][Sums::kWide][2];

  template <class TileA, class TileB>
  __device__ __forceinline__ void fetch(const T* a, const T* b, int step, int buffer) {
    const int lane = threadIdx.x % 32, first = step * kStep;
    // Of a's four matrices, the second and fourth are the lower rows, the third and fourth the later k.
    const int row = this->row0 + lane % 8 + lane / 8 % 2 * 8, row_k = first + lane / 16 * 8;
    const int trans_row = this->row0 + lane / 8 % 2 * 8, trans_row_k = first + lane % 8 + lane / 16 * 8;
#pragma unroll
    for (int i = 0; i < Sums::kTall; ++i) {
      const int place =
          TileA::kAlongExtent ? TileA::place_of(trans_row + i * 16, trans_row_k) : TileA::place_of(row + i * 16, row_k);
      ptx::ldmatrix_x4<TileA::kAlongExtent>(rows[buffer][i], ptx::cvta_to_shared(a + place));
    }
    // Of b's, the second and fourth are the later k, the third and fourth the right columns.
    const int column = this->column0 + lane % 8 + lane / 16 * 8, column_k = first + lane / 8 % 2 * 8;
    const int trans_column = this->column0 + lane / 16 * 8, trans_column_k = first + lane % 8 + lane / 8 % 2 * 8;
#pragma unroll
    for (int i = 0; i < Sums::kWide; i += 2) {
      const int place = TileB::kAlongExtent ? TileB::place_of(trans_column + i * 8, trans_column_k)
                                            : TileB::place_of(column + i * 8, column_k);
      unsigned words[4];
      ptx::ldmatrix_x4<TileB::kAlongExtent>(words, ptx::cvta_to_shared(b + place));
#pragma unroll
      for (int j = 0; j < 4; ++j) columns[buffer][i + j / 2][j % 2] = words[j];
    }
  }

  __device__ __forceinline__ void multiply(int buffer) {
#pragma unroll
    for (int i = 0; i < Sums::kTall; ++i) {
#pragma unroll
      for (int j = 0; j < Sums::kWide; ++j) {
        if constexpr (is_same<T, bfloat16>) {
          ptx::mma_m16n8k16_bf16(this->sums[i][j], rows[buffer][i], columns[buffer][j]);
        } else {
          ptx::mma_m16n8k16_f16(this->sums[i][j], rows[buffer][i], columns[buffer][j]);
        }
      }
    }
  }
};

}  // namespace jaxdnn
