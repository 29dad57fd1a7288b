// What a thread of product/simt.cuh computes: `FmaTile`, with ordinary arithmetic; product/simt/tensor.cuh has others.
//
// All have: fetch(a, b, step, buffer), which loads the factors of kStep rows of K from a pair of tiles in shared memory
// into one of two sets of registers, and multiply(buffer); kPieces, into which the sums are cut for the epilogue;
// put(piece, to), which writes this thread's share of a piece as rows of a result's tile, and row(piece, i), which
// rows.
#pragma once

#include "core/vector.cuh"
#include "ptx/math.cuh"

namespace jaxdnn {

__device__ __forceinline__ float multiply_add(float a, float b, float c) { return ptx::fma_rn(a, b, c); }
__device__ __forceinline__ int multiply_add(int a, int b, int c) {
  return static_cast<int>(static_cast<unsigned>(a) * static_cast<unsigned>(b) + static_cast<unsigned>(c));
}

/// kRows x kColumns sums a thread, in groups of 4 x 4. A warp's lanes are 8 x 4, which lie
///   row     4 x (bits 0, 3, 4 of the lane) within each 32 rows of a warp's tile, of 8 kRows rows
///   column  4 x (bits 1, 2) within each 16 columns of a warp's tile, of 4 kColumns columns
/// Lanes that differ in bit 1 (0) read the same 16 bytes of A (B): so half a warp is served at once.
template <class Config>
struct FmaTile {
  using Sum = typename Config::Sum;
  static constexpr int kRows = Config::kThreadM, kColumns = Config::kThreadN;
  static constexpr int kWarpRows = 8 * kRows, kWarpColumns = 4 * kColumns;
  static constexpr int kWarpsAcross = Config::kTileN / kWarpColumns;
  static constexpr int kPieces = kRows, kPieceRows = Config::kTileM / kRows;
  static constexpr int kStep = 1;
  static_assert(sizeof(Sum) == 4, "a vector is four sums");

  Sum sums[kRows][kColumns] = {};
  Sum rows[2][kRows], columns[2][kColumns];
  int row0, column0;  // of this thread's first sum

  __device__ __forceinline__ FmaTile() {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    row0 = warp / kWarpsAcross * kWarpRows + lane_row() * 4;
    column0 = warp % kWarpsAcross * kWarpColumns + lane / 2 % 4 * 4;
  }

  static __device__ __forceinline__ int lane_row() { return (threadIdx.x & 1) | (threadIdx.x >> 2 & 6); }

  template <int kCount, int kStep>
  static __device__ __forceinline__ void load(const Sum* from, Sum (&to)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const Vector<Sum, 4> four = *reinterpret_cast<const Vector<Sum, 4>*>(from + i / 4 * kStep);
#pragma unroll
      for (int j = 0; j < 4; ++j) to[i + j] = four.get(j);
    }
  }

  template <class TileA, class TileB>
  __device__ __forceinline__ void fetch(const Sum* a, const Sum* b, int step, int buffer) {
    load<kRows, 32>(a + row0 + step * TileA::kPitch, rows[buffer]);
    load<kColumns, 16>(b + column0 + step * TileB::kPitch, columns[buffer]);
  }

  __device__ __forceinline__ void multiply(int buffer) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int row = j % 2 ? kRows - 1 - i : i;  // back and forth: the next product shares one factor
        sums[row][j] = multiply_add(rows[buffer][row], columns[buffer][j], sums[row][j]);
      }
    }
  }

  static __device__ __forceinline__ int row(int piece, int i) {
    return i / 8 * kWarpRows + piece / 4 * 32 + i % 8 * 4 + piece % 4;
  }

  template <int kPitch>
  __device__ __forceinline__ void put(int piece, Sum* to) const {
    to += (row0 / kWarpRows * 8 + lane_row()) * kPitch + column0;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (i == piece) {
#pragma unroll
        for (int j = 0; j < kColumns; j += 4) {
          Vector<Sum, 4> four;
          four.pack({sums[i][j], sums[i][j + 1], sums[i][j + 2], sums[i][j + 3]});
          *reinterpret_cast<Vector<Sum, 4>*>(to + j * 4) = four;
        }
      }
    }
  }
};

}  // namespace jaxdnn
