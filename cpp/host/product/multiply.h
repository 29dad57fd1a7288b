// Products of packed panels in registers:
//
//     accumulators[rows][columns] += (rows of a) x (columns of b), over `units` steps along k
//
// A unit is what one lane multiplies in one instruction: a float, a double, or a pair of 16-bit numbers that are
// neighbours along k. A panel of a holds, for each step, one unit of each of its rows; a panel of b one unit of each of
// its columns, which fill kPanelVectors vectors. The accumulators stay in registers over all of k. Rows of a that are
// dense along k, and equally far apart, are multiplied where they lie.
#pragma once

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include <array>
#include <cstdint>
#include <utility>

#include "../base/vector.h"

JAXDNN_ISA_BEGIN

namespace product {

// Rows of memory, each as long as one of a panel of b, that are wanted soon: a multiplication may fetch one of them for
// every `every` units.
struct Ahead {
  const char* data;
  int64_t stride;  // bytes
  int64_t every;
};

// Adds to what `accumulators` holds, or replaces it. The rows of accumulators are `stride` elements apart.
using Multiply = void (*)(int64_t units, const void* a, const void* b, void* accumulators, int64_t stride, bool adds,
                          const Ahead& ahead);

// The same, of columns of b that lie next to each other in memory, with steps `step` elements apart: leaves their panel
// in `packed` for the rows that come after. The loads and stores hide behind the multiplications.
using MultiplyPacking = void (*)(int64_t units, const void* a, const void* b, int64_t step, void* packed,
                                 void* accumulators, int64_t stride, bool adds);

// Of rows of a that lie `a_stride` bytes apart.
using MultiplyRows = void (*)(int64_t units, const void* a, int64_t a_stride, const void* b, void* accumulators,
                              int64_t stride, bool adds);

constexpr int kPanelVectors = 2;
constexpr int kLineBytes = 64, kL2 = 2;  // a line of cache; the cache that prefetches go to

// Sums in registers, beside two vectors of b, one of a and what an instruction needs on the way: AVX-512 has 32
// registers, AVX2 and SSE2 16, and without FMA a product takes one too.
#if defined(__AVX512F__)
constexpr int kPanelRows = 14;
#elif defined(__FMA__)
constexpr int kPanelRows = 6;
#else
constexpr int kPanelRows = 4;
#endif

// Units of a that are fetched ahead, for panels of a come from the L2 cache. 1024 x 1024 x 1024 in float32, two cores
// with AVX-512, multiplications alone: 378 GFLOP/s without, 403 with 16, 365 with 32; with AVX2, half as fast, no
// difference.
#if defined(__AVX512F__)
constexpr int kUnitsAhead = 16;
#else
constexpr int kUnitsAhead = 0;
#endif

// Steps of b that are fetched ahead where it lies, into L1. Rows a multiple of 4 KiB apart share the few ways of one
// set of that cache, so it cannot be many: 64 x 4096 x 4096 in float32, two Zen cores with AVX-512: 12.1 ms with
// 4, 12.3 with 8, 13.0 with 16, 13.5 with 32 and where packing comes before. That is too late for what the L2 cache
// does not have: the rows before fetch it there (`Ahead`). 1024 x 1024 x 1024, one core, the speed of multiplications
// that pack in parts of that of others, with Ahead and without: Zen 4 0.92 and 0.68, Sapphire Rapids 0.83 and 0.63.
constexpr int kStepsAhead = 8;

inline Vector<float> multiply_add(Vector<float> a, Vector<float> b, Vector<float> c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}

inline Vector<double> multiply_add(Vector<double> a, Vector<double> b, Vector<double> c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_pd(a, b, c);
#elif defined(__FMA__)
  return _mm256_fmadd_pd(a, b, c);
#else
  return a * b + c;
#endif
}

// Products of pairs of 16-bit integers; those of numbers from -128 to 127 are exact, and their accumulators wrap.
inline Vector<int32_t> multiply_add(Vector<int32_t> a, Vector<int32_t> b, Vector<int32_t> c) {
#if defined(__AVX512F__)
  const auto products = (Vector<uint32_t>)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  const auto products = (Vector<uint32_t>)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
  const auto products = (Vector<uint32_t>)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
  const auto lower = [](Vector<int32_t> pair) { return (pair << 16) >> 16; };
  const auto products = (Vector<uint32_t>)(lower(a) * lower(b) + (a >> 16) * (b >> 16));
#endif
  return (Vector<int32_t>)((Vector<uint32_t>)c + products);
}

// The rows of a at a step along k: of a panel, or where they lie.
template <typename T, int rows>
struct PackedRows {
  const T* step;

  T operator[](int row) const { return step[row]; }
  void next() { step += rows; }
  void prefetch() const {
    if constexpr (kUnitsAhead > 0) {
      for (int i = 0; i < rows; i += kLanes<T>) __builtin_prefetch(step + kUnitsAhead * rows + i);
    }
  }
};

template <typename T, int rows>
struct SpacedRows {
  // Of every third: one register for each row is more than there are, and an address may have one and two strides.
  static constexpr int kBases = (rows + 2) / 3;
  const char* bases[kBases];
  int64_t stride;

  SpacedRows(const void* a, int64_t stride) : stride(stride) {
    for (int i = 0; i < kBases; ++i) bases[i] = static_cast<const char*>(a) + 3 * i * stride;
  }
  T operator[](int row) const { return load_bytes<T>(bases[row / 3] + row % 3 * stride); }
  void next() {
#pragma GCC unroll 16
    for (int i = 0; i < kBases; ++i) bases[i] += sizeof(T);
  }
  void prefetch() const {}
};

// T: what a unit of vectors is loaded as, and the type of the accumulators.
template <typename T, int rows, bool packs, typename Rows>
inline void multiply_steps(int64_t units, Rows a, const T* b, int64_t step, T* packed, T* to, int64_t stride, bool adds,
                           Ahead ahead) {
  constexpr int kWidth = kLanes<T>;
  Vector<T> accumulators[rows][kPanelVectors] = {};
  for (int64_t unit = 0; unit < units;) {
    for (int i = 0; i < kPanelVectors * kVectorBytes; i += kLineBytes) __builtin_prefetch(ahead.data + i, 0, kL2);
    ahead.data += ahead.stride;
    for (const int64_t end = std::min(units, unit + ahead.every); unit < end; ++unit, a.next(), b += step) {
      Vector<T> columns[kPanelVectors];
      for (int j = 0; j < kPanelVectors; ++j) {
        columns[j] = load_bytes<Vector<T>>(b + j * kWidth);
        if constexpr (packs) {
          __builtin_prefetch(b + kStepsAhead * step + j * kWidth);
          std::memcpy(packed + (unit * kPanelVectors + j) * kWidth, &columns[j], sizeof(columns[j]));
        }
      }
      a.prefetch();
#pragma GCC unroll 16
      for (int i = 0; i < rows; ++i) {
        const Vector<T> row = a[i] - Vector<T>{};
        for (int j = 0; j < kPanelVectors; ++j) accumulators[i][j] = multiply_add(row, columns[j], accumulators[i][j]);
      }
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < rows; ++i, to += stride) {
    for (int j = 0; j < kPanelVectors; ++j) {
      Vector<T> sum = accumulators[i][j];
      if (adds) {
        if constexpr (std::is_same_v<T, int32_t>) {
          sum = (Vector<T>)((Vector<uint32_t>)sum + load_bytes<Vector<uint32_t>>(to + j * kWidth));
        } else {
          sum += load_bytes<Vector<T>>(to + j * kWidth);
        }
      }
      std::memcpy(to + j * kWidth, &sum, sizeof(sum));
    }
  }
}

template <typename T, int rows>
void multiply(int64_t units, const void* a, const void* b, void* accumulators, int64_t stride, bool adds,
              const Ahead& ahead) {
  multiply_steps<T, rows, false>(units, PackedRows<T, rows>{static_cast<const T*>(a)}, static_cast<const T*>(b),
                                 kPanelVectors * kLanes<T>, nullptr, static_cast<T*>(accumulators), stride, adds,
                                 ahead);
}

template <typename T, int rows>
void multiply_rows(int64_t units, const void* a, int64_t a_stride, const void* b, void* accumulators, int64_t stride,
                   bool adds) {
  multiply_steps<T, rows, false>(units, SpacedRows<T, rows>(a, a_stride), static_cast<const T*>(b),
                                 kPanelVectors * kLanes<T>, nullptr, static_cast<T*>(accumulators), stride, adds,
                                 {static_cast<const char*>(b), 0, units});
}

template <typename T, int rows>
void multiply_packing(int64_t units, const void* a, const void* b, int64_t step, void* packed, void* accumulators,
                      int64_t stride, bool adds) {
  multiply_steps<T, rows, true>(units, PackedRows<T, rows>{static_cast<const T*>(a)}, static_cast<const T*>(b), step,
                                static_cast<T*>(packed), static_cast<T*>(accumulators), stride, adds,
                                {static_cast<const char*>(b), 0, units});
}

template <typename T, int... rows>
constexpr std::array<Multiply, sizeof...(rows)> multiply_table(std::integer_sequence<int, rows...>) {
  return {multiply<T, rows + 1>...};
}

template <typename T, int... rows>
constexpr std::array<MultiplyRows, sizeof...(rows)> rows_table(std::integer_sequence<int, rows...>) {
  return {multiply_rows<T, rows + 1>...};
}

template <typename T, int... rows>
constexpr std::array<MultiplyPacking, sizeof...(rows)> packing_table(std::integer_sequence<int, rows...>) {
  return {multiply_packing<T, rows + 1>...};
}

// By the number of rows, less one.
template <typename T>
constexpr std::array<Multiply, kPanelRows> kMultiply = multiply_table<T>(std::make_integer_sequence<int, kPanelRows>());
template <typename T>
constexpr std::array<MultiplyRows, kPanelRows> kMultiplyRows =
    rows_table<T>(std::make_integer_sequence<int, kPanelRows>());
template <typename T>
constexpr std::array<MultiplyPacking, kPanelRows> kMultiplyPacking =
    packing_table<T>(std::make_integer_sequence<int, kPanelRows>());

}  // namespace product

JAXDNN_ISA_END
