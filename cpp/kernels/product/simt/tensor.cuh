// What a warp of product/simt.cuh computes on tensor cores that compute capability 8.0 brought: `DoubleTile`, of
// float64, which round as ordinary arithmetic does, and `HalfTile`, of 16-bit floats.
//
// Both hold kThreadM x kThreadN sums a warp, in blocks of 16 x 8, of which lane 4 g + t has columns 2 t and 2 t + 1 of
// rows g and g + 8. What else they have is in product/simt/multiply.cuh.
#pragma once

#include "core/vector.cuh"

namespace jaxdnn {
namespace ptx {

/// 16 x 8 += 16 x 4 times 4 x 8. Lane 4 g + t has a: rows g and g + 8 of column t; b: row t of column g; c: columns 2 t
/// and 2 t + 1 of row g, then of g + 8.
__device__ __forceinline__ void multiply_16x8x4(double (&c)[4], const double (&a)[2], double b) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mma.sync.aligned.m16n8k4.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
               : "+d"(c[0]), "+d"(c[1]), "+d"(c[2]), "+d"(c[3])
               : "d"(a[0]), "d"(a[1]), "d"(b));
#else
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
                 : "+d"(c[2 * i]), "+d"(c[2 * i + 1])
                 : "d"(a[i]), "d"(b));
  }
#endif
}

/// 16 x 8 += 16 x 16 times 16 x 8. Lane 4 g + t has pairs of neighbours along K: of a, columns 2 t of rows g and g + 8,
/// then columns 2 t + 8; of b, rows 2 t and 2 t + 8 of column g.
template <class T>
__device__ __forceinline__ void multiply_16x8x16(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  if constexpr (is_same<T, bfloat16>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
}

/// Four 8 x 8 matrices of 16-bit elements; lane i's `address` is row i % 8 of matrix i / 8. Lane 4 g + t gets columns 2
/// t and 2 t + 1 of row g, or of the transposed matrix.
template <bool kTransposed>
__device__ __forceinline__ void load_matrices(unsigned (&words)[4], unsigned address) {
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(address)
                 : "memory");
  }
}

}  // namespace ptx

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
        ptx::multiply_16x8x4(this->sums[i][j], rows[buffer][i], columns[buffer][j]);
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
      ptx::load_matrices<TileA::kAlongExtent>(rows[buffer][i], ptx::shared_address(a + place));
    }
    // Of b's, the second and fourth are the later k, the third and fourth the right columns.
    const int column = this->column0 + lane % 8 + lane / 16 * 8, column_k = first + lane / 8 % 2 * 8;
    const int trans_column = this->column0 + lane / 16 * 8, trans_column_k = first + lane % 8 + lane / 8 % 2 * 8;
#pragma unroll
    for (int i = 0; i < Sums::kWide; i += 2) {
      const int place = TileB::kAlongExtent ? TileB::place_of(trans_column + i * 8, trans_column_k)
                                            : TileB::place_of(column + i * 8, column_k);
      unsigned words[4];
      ptx::load_matrices<TileB::kAlongExtent>(words, ptx::shared_address(b + place));
#pragma unroll
      for (int j = 0; j < 4; ++j) columns[buffer][i + j / 2][j % 2] = words[j];
    }
  }

  __device__ __forceinline__ void multiply(int buffer) {
#pragma unroll
    for (int i = 0; i < Sums::kTall; ++i) {
#pragma unroll
      for (int j = 0; j < Sums::kWide; ++j) {
        ptx::multiply_16x8x16<T>(this->sums[i][j], rows[buffer][i], columns[buffer][j]);
      }
    }
  }
};

}  // namespace jaxdnn
