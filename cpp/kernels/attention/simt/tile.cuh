// Tiles of attention's kernels for any GPU: vectors in shared memory, and accumulators in registers that sum products
// of them by ordinary arithmetic.
#pragma once

#include "core/vector.cuh"
#include "ptx/async.cuh"
#include "ptx/math.cuh"
#include "ptx/mma.cuh"
#include "ptx/warp.cuh"

namespace jaxdnn {

/// Rows of kSize elements in shared memory, kSkew times 16 bytes more than a multiple of all banks apart: 8 / kSkew
/// neighbours then lie in different banks.
template <class Element, int kRows, int kSize, int kSkew = 1>
struct SimtRows {
  static constexpr int kLine = 16 / static_cast<int>(sizeof(Element)), kBanks = 8 * kLine;
  static constexpr int kPitch = (kSize + kBanks - 1 - kSkew * kLine) / kBanks * kBanks + kSkew * kLine;
  static constexpr int kCount = kRows * kPitch;
};

/// Vectors of `size` elements of T, with zeros up to kSize, and after the last one.
///
///   kRounds   elements of float32 are rounded to tf32
template <class T, class Element, int kRows, int kSize, int kThreads, int kCopy, bool kRounds>
struct SimtVectors : SimtRows<Element, kRows, kSize> {
  using Rows = SimtRows<Element, kRows, kSize>;
  static constexpr int kRun = kSize / kCopy, kBytes = kCopy * static_cast<int>(sizeof(T));
  static constexpr bool kAsync = is_same<T, Element>;
  static_assert(kSize % kCopy == 0, "a row is so many copies");

  /// By all threads: starts to copy `there` vectors, `stride` apart, or copies them if they have to be converted.
  static __device__ __forceinline__ void start(Element* tile, const T* first, long long stride, long long feature,
                                               int there, int size) {
    each(tile, [&](Element* to, int row, int at) {
      const bool inside = row < there && at < size;
      const T* const from = inside ? first + row * stride + at * feature : first;
      if constexpr (kAsync) {
        ptx::cp_async<kBytes>(ptx::cvta_to_shared(to), from, inside ? kBytes : 0);
      } else {
        Vector<T, kCopy> copied;
        copied.clear();
        if (inside) copied.load(from);
#pragma unroll
        for (int j = 0; j < kCopy; ++j) to[j] = widen(copied.get(j));
      }
    });
  }

  /// By all threads, when its copies are there: each rounds its own.
  static __device__ __forceinline__ void finish(Element* tile) {
    if constexpr (kAsync && kRounds) {
      each(tile, [](Element* to, int, int) {
        auto& copied = *reinterpret_cast<Vector<Element, kCopy>*>(to);
        Element values[kCopy];
#pragma unroll
        for (int j = 0; j < kCopy; ++j) values[j] = ptx::cvt_rna_tf32_f32(copied.get(j));
        copied.pack(values);
      });
    }
  }

 private:
  template <class Body>
  static __device__ __forceinline__ void each(Element* tile, const Body& body) {
#pragma unroll 4
    for (int i = threadIdx.x; i < kRows * kRun; i += kThreads) {
      const int row = i / kRun, at = i % kRun * kCopy;
      body(tile + row * Rows::kPitch + at, row, at);
    }
  }
};

/// Where the accumulators of a thread are, for ordinary arithmetic: bits 0, 3 and 4 of the lane choose the row, 1 and 2
/// the column. Lanes that differ in bit 1 (0) read the same 16 bytes of A (B): so half a warp is served at once.
///
///   kQuads   columns of a thread are neighbours, four at a time: where columns of B are neighbours in memory.
///            Otherwise they are 4 apart
template <bool kQuads>
struct FmaLanes {
  static constexpr int kColumnBit = 2;  // the first of two

  static __device__ __forceinline__ int row() { return (threadIdx.x & 1) | (threadIdx.x >> 2 & 6); }
  static __device__ __forceinline__ int column() { return threadIdx.x >> 1 & 3; }
  static __device__ __forceinline__ int column(int j) {
    return kQuads ? j / 4 * 16 + column() * 4 + j % 4 : j * 4 + column();
  }
};

/// Likewise, as ptx/mma.cuh has them.
struct MmaLanes {
  static constexpr int kColumnBit = 1;

  static __device__ __forceinline__ int row() { return threadIdx.x >> 2 & 7; }
  static __device__ __forceinline__ int column() { return threadIdx.x & 3; }
  static __device__ __forceinline__ int column(int j) { return j / 2 * 8 + column() * 2 + j % 2; }
};

/// kTall x kWide accumulators of a block, kRows x kColumns of them a thread, of which 8 x 4 lanes share each 8 rows.
template <class Element, class Lanes, int kTall, int kWide, int kWarpsM, int kWarpsN>
struct Accumulators {
  static constexpr int kRows = kTall / kWarpsM / 8, kColumns = kWide / kWarpsN / 4;

  Element values[kRows][kColumns];

  static __device__ __forceinline__ int warp_column() { return threadIdx.x / 32 % kWarpsN; }
  static __device__ __forceinline__ int first_row() { return threadIdx.x / 32 / kWarpsN * (kTall / kWarpsM); }
  static __device__ __forceinline__ int first_column() { return warp_column() * (kWide / kWarpsN); }
  static __device__ __forceinline__ int row(int i) { return first_row() + i * 8 + Lanes::row(); }
  static __device__ __forceinline__ int column(int j) { return first_column() + Lanes::column(j); }
  /// Whether a row's value that several threads have is this one's to write, of all lanes; of all warps, too.
  static __device__ __forceinline__ bool leads_lanes() { return Lanes::column() == 0; }
  static __device__ __forceinline__ bool leads() { return leads_lanes() && warp_column() == 0; }

  __device__ __forceinline__ void clear() {
    each([&](int i, int j) { values[i][j] = 0; });
  }

  /// Calls body(i, j) for each accumulator.
  template <class Body>
  static __device__ __forceinline__ void each(const Body& body) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) body(i, j);
    }
  }

  /// Adds, or finds the largest of, a row's values of the lanes that have it.
  template <class Combine>
  static __device__ __forceinline__ Element of_lanes(Element value, const Combine& combine) {
    value = combine(value, ptx::shfl_sync_bfly(value, Lanes::kColumnBit));
    return combine(value, ptx::shfl_sync_bfly(value, 2 * Lanes::kColumnBit));
  }
};

/// Sums by ordinary arithmetic.
template <class Element, int kTall, int kWide, int kWarpsM, int kWarpsN, bool kQuads>
struct FmaAccumulators : Accumulators<Element, FmaLanes<kQuads>, kTall, kWide, kWarpsM, kWarpsN> {
  using Base = Accumulators<Element, FmaLanes<kQuads>, kTall, kWide, kWarpsM, kWarpsN>;
  static constexpr int kRows = Base::kRows, kColumns = Base::kColumns;
  static constexpr int kLine = 16 / static_cast<int>(sizeof(Element));
  static_assert(kTall % (8 * kWarpsM) == 0 && kWide % ((kQuads ? 16 : 4) * kWarpsN) == 0, "lanes share evenly");

  /// Adds a * b^T: both run along kDepth.
  template <int kDepth, int kPitchA, int kPitchB>
  __device__ __forceinline__ void add_dots(const Element* a, const Element* b) {
    static_assert(!kQuads, "neighbouring rows of b lie in the same banks");
    a += Base::row(0) * kPitchA;
    b += Base::column(0) * kPitchB;
#pragma unroll 2
    for (int k = 0; k < kDepth; k += kLine) {
      Element rows[kRows][kLine], of_column[kLine];
#pragma unroll
      for (int i = 0; i < kRows; ++i) load(a + i * 8 * kPitchA + k, rows[i]);
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        load(b + j * 4 * kPitchB + k, of_column);
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
#pragma unroll
          for (int s = 0; s < kLine; ++s) {
            this->values[i][j] = ptx::fma_rn(rows[i][s], of_column[s], this->values[i][j]);
          }
        }
      }
    }
  }

  /// Adds a * b: a runs along kDepth, b along the columns.
  template <int kDepth, int kPitchA, int kPitchB>
  __device__ __forceinline__ void add_product(const Element* a, const Element* b) {
    static_assert(kQuads, "columns are loaded in fours");
    a += Base::row(0) * kPitchA;
    b += Base::column(0);
#pragma unroll 1
    for (int k = 0; k < kDepth; k += kLine) {
      Element rows[kRows][kLine];
#pragma unroll
      for (int i = 0; i < kRows; ++i) load(a + i * 8 * kPitchA + k, rows[i]);
#pragma unroll
      for (int s = 0; s < kLine; ++s) {
#pragma unroll
        for (int j = 0; j < kColumns; j += kLine) {
          Element columns[kLine];
          load(b + (k + s) * kPitchB + j / 4 * 16 + j % 4, columns);
#pragma unroll
          for (int i = 0; i < kRows; ++i) {
#pragma unroll
            for (int c = 0; c < kLine; ++c) {
              this->values[i][j + c] = ptx::fma_rn(rows[i][s], columns[c], this->values[i][j + c]);
            }
          }
        }
      }
    }
  }

 private:
  static __device__ __forceinline__ void load(const Element* from, Element (&to)[kLine]) {
    const auto line = *reinterpret_cast<const Vector<Element, kLine>*>(from);
#pragma unroll
    for (int i = 0; i < kLine; ++i) to[i] = line.get(i);
  }
};

/// Sums of products of tf32, on the tensor cores that compute capability 8.0 brought.
template <int kTall, int kWide, int kWarpsM, int kWarpsN>
struct Tf32Accumulators : Accumulators<float, MmaLanes, kTall, kWide, kWarpsM, kWarpsN> {
  using Base = Accumulators<float, MmaLanes, kTall, kWide, kWarpsM, kWarpsN>;
  static constexpr int kRows = Base::kRows, kColumns = Base::kColumns;
  static_assert(kTall % (16 * kWarpsM) == 0 && kWide % (8 * kWarpsN) == 0, "a multiply is of 16 rows and 8 columns");

  /// Adds a * b^T: both run along kDepth.
  template <int kDepth, int kPitchA, int kPitchB>
  __device__ __forceinline__ void add_dots(const float* a, const float* b) {
    a += Base::row(0) * kPitchA + MmaLanes::column();
    b += (Base::first_column() + MmaLanes::row()) * kPitchB + MmaLanes::column();
#pragma unroll 2
    for (int k = 0; k < kDepth; k += 8) {
      float rows[kRows / 2][4];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        rows[i / 2][i % 2] = a[i * 8 * kPitchA + k];
        rows[i / 2][i % 2 + 2] = a[i * 8 * kPitchA + k + 4];
      }
#pragma unroll
      for (int j = 0; j < kColumns; j += 2) multiply(j, rows, b[j * 4 * kPitchB + k], b[j * 4 * kPitchB + k + 4]);
    }
  }

  /// Adds a * b: a runs along kDepth, b along the columns. What a lane multiplies first and last are neighbours along
  /// kDepth, of both: so lanes read from different banks.
  template <int kDepth, int kPitchA, int kPitchB>
  __device__ __forceinline__ void add_product(const float* a, const float* b) {
    a += Base::row(0) * kPitchA + 2 * MmaLanes::column();
    b += 2 * MmaLanes::column() * kPitchB + Base::first_column() + MmaLanes::row();
#pragma unroll 1
    for (int k = 0; k < kDepth; k += 8) {
      float rows[kRows / 2][4];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const auto pair = *reinterpret_cast<const Vector<float, 2>*>(a + i * 8 * kPitchA + k);
        rows[i / 2][i % 2] = pair.get(0);
        rows[i / 2][i % 2 + 2] = pair.get(1);
      }
#pragma unroll
      for (int j = 0; j < kColumns; j += 2) multiply(j, rows, b[k * kPitchB + j * 4], b[(k + 1) * kPitchB + j * 4]);
    }
  }

 private:
  __device__ __forceinline__ void multiply(int j, const float (&rows)[kRows / 2][4], float first, float second) {
    const float of_columns[2] = {first, second};
#pragma unroll
    for (int i = 0; i < kRows; i += 2) {
      float (&upper)[kColumns] = this->values[i], (&lower)[kColumns] = this->values[i + 1];
      float sums[4] = {upper[j], upper[j + 1], lower[j], lower[j + 1]};
      ptx::mma_m16n8k8_tf32(sums, rows[i / 2], of_columns);
      upper[j] = sums[0];
      upper[j + 1] = sums[1];
      lower[j] = sums[2];
      lower[j + 1] = sums[3];
    }
  }
};

/// What a `Config` multiplies with: kTileM rows that kWarpsM x kWarpsN warps share.
template <class Config>
struct SimtTiles {
  using Element = typename Config::Element;
  static constexpr int kTileM = Config::kTileM, kTileN = Config::kTileN;
  static constexpr int kWarpsM = Config::kWarpsM, kWarpsN = Config::kWarpsN, kThreads = 32 * kWarpsM * kWarpsN;
  static constexpr bool kTensor = Config::kTensor;

  template <class Operand, int kRows, int kSize, int kCopy>
  using Vectors = SimtVectors<typename Operand::Type, Element, kRows, kSize, kThreads, kCopy, kTensor>;
  using Products = Select<kTensor, Tf32Accumulators<kTileM, kTileN, kWarpsM, kWarpsN>,
                          FmaAccumulators<Element, kTileM, kTileN, kWarpsM, kWarpsN, false>>;
  template <int kSize>
  using Sums = Select<kTensor, Tf32Accumulators<kTileM, kSize, kWarpsM, kWarpsN>,
                      FmaAccumulators<Element, kTileM, kSize, kWarpsM, kWarpsN, true>>;
  /// Factors made of scores, on their way from the threads that have them to those that multiply by them.
  using Strip = SimtRows<Element, kTileM, kTileN, kTensor ? 2 : 1>;
  static_assert(Products::kRows * Products::kColumns <= 32, "a word has a bit for each score of a thread");

  static __device__ __forceinline__ void put(Element* strip, int i, int j, Element factor) {
    if constexpr (kTensor) factor = ptx::cvt_rna_tf32_f32(factor);
    strip[Products::row(i) * Strip::kPitch + Products::column(j)] = factor;
  }
};

}  // namespace jaxdnn
