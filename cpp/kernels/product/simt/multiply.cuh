// What a thread of product/simt.cuh computes: `FmaTile`, with ordinary arithmetic; product/simt/tensor.cuh has others.
//
// All have: fetch(a, b, step, buffer), which loads the factors of kStep rows of K from a pair of tiles in shared memory
// into one of two sets of registers, and multiply(buffer); kSubtiles, into which the accumulators are cut for the
// epilogue; put(subtile, to), which writes this thread's share of a subtile as rows of a result's tile, and
// row(subtile, i), which rows.
#pragma once

#include "core/vector.cuh"
#include "ptx/math.cuh"

namespace jaxdnn {

__device__ __forceinline__ float multiply_add(float a, float b, float c) { return ptx::fma_rn(a, b, c); }
__device__ __forceinline__ double multiply_add(double a, double b, double c) { return ptx::fma_rn(a, b, c); }
__device__ __forceinline__ int multiply_add(int a, int b, int c) {
  return static_cast<int>(static_cast<unsigned>(a) * static_cast<unsigned>(b) + static_cast<unsigned>(c));
}

/// kRows x kColumns accumulators a thread, in groups of 4 x 4. A warp's lanes are 8 x 4, which lie
///   row     4 x (bits 0, 3, 4 of the lane) within each 32 rows of a warp's tile, of 8 kRows rows
///   column  4 x (bits 1, 2) within each 16 columns of a warp's tile, of 4 kColumns columns
/// Lanes that differ in bit 1 (0) read the same 16 bytes of A (B): so half a warp is served at once.
template <class Config>
struct FmaTile {
  using Accumulator = typename Config::Accumulator;
  static constexpr int kRows = Config::kThreadM, kColumns = Config::kThreadN;
  static constexpr int kWarpRows = 8 * kRows, kWarpColumns = 4 * kColumns;
  static constexpr int kWarpsAcross = Config::kTileN / kWarpColumns;
  static constexpr int kSubtiles = kRows, kSubtileRows = Config::kTileM / kRows;
  static constexpr int kStep = 1;
  static_assert(sizeof(Accumulator) == 4, "a vector is four accumulators");

  Accumulator accumulators[kRows][kColumns] = {};
  Accumulator rows[2][kRows], columns[2][kColumns];
  int row0, column0;  // of this thread's first sum

  __device__ __forceinline__ FmaTile() {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    row0 = warp / kWarpsAcross * kWarpRows + lane_row() * 4;
    column0 = warp % kWarpsAcross * kWarpColumns + lane / 2 % 4 * 4;
  }

  static __device__ __forceinline__ int lane_row() { return (threadIdx.x & 1) | (threadIdx.x >> 2 & 6); }

  template <int kCount, int kStep>
  static __device__ __forceinline__ void load(const Accumulator* from, Accumulator (&to)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const Vector<Accumulator, 4> four = *reinterpret_cast<const Vector<Accumulator, 4>*>(from + i / 4 * kStep);
#pragma unroll
      for (int j = 0; j < 4; ++j) to[i + j] = four.get(j);
    }
  }

  template <class TileA, class TileB>
  __device__ __forceinline__ void fetch(const Accumulator* a, const Accumulator* b, int step, int buffer) {
    load<kRows, 32>(a + row0 + step * TileA::kPitch, rows[buffer]);
    load<kColumns, 16>(b + column0 + step * TileB::kPitch, columns[buffer]);
  }

  __device__ __forceinline__ void multiply(int buffer) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int row = j % 2 ? kRows - 1 - i : i;  // back and forth: the next product shares one factor
        accumulators[row][j] = multiply_add(rows[buffer][row], columns[buffer][j], accumulators[row][j]);
      }
    }
  }

  static __device__ __forceinline__ int row(int subtile, int i) {
    return i / 8 * kWarpRows + subtile / 4 * 32 + i % 8 * 4 + subtile % 4;
  }

  template <int kPitch>
  __device__ __forceinline__ void put(int subtile, Accumulator* to) const {
    to += (row0 / kWarpRows * 8 + lane_row()) * kPitch + column0;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (i == subtile) {
#pragma unroll
        for (int j = 0; j < kColumns; j += 4) {
          Vector<Accumulator, 4> four;
          four.pack({accumulators[i][j], accumulators[i][j + 1], accumulators[i][j + 2], accumulators[i][j + 3]});
          *reinterpret_cast<Vector<Accumulator, 4>*>(to + j * 4) = four;
        }
      }
    }
  }
};

}  // namespace jaxdnn
