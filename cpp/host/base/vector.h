// Vectors as wide as the instruction set's registers: loads and stores that convert, and sums over a row.
//
// Vectors are GCC's vector extension, which Clang has too. The loops below need rows of at least kLanes columns: the
// last vector of a row then overlaps the one before it instead of reaching past the row's end, and `keep` clears the
// lanes that have been seen already.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>

#include "floats.h"
#include "kernel.h"

JAXDNN_ISA_BEGIN

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

template <typename T, int bytes = kVectorBytes>
struct VectorType {
  typedef T type __attribute__((vector_size(bytes)));
};
template <typename T>
using Vector = typename VectorType<T>::type;

template <typename C>
constexpr int kLanes = kVectorBytes / int(sizeof(C));

// As many 16-bit integers as a vector has floats.
using HalfBits = VectorType<uint16_t, kVectorBytes / 2>::type;

template <typename T>
inline T load_bytes(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

inline Vector<double> load(const double* from) { return load_bytes<Vector<double>>(from); }
inline Vector<float> load(const float* from) { return load_bytes<Vector<float>>(from); }

// GCC 12 makes five instructions of the generic conversion where AVX has one.
inline Vector<uint32_t> widen_bits(HalfBits bits) {
#if defined(__AVX512F__)
  return (Vector<uint32_t>)_mm512_cvtepu16_epi32((__m256i)bits);
#elif defined(__AVX2__)
  return (Vector<uint32_t>)_mm256_cvtepu16_epi32((__m128i)bits);
#else
  return __builtin_convertvector(bits, Vector<uint32_t>);
#endif
}

// The upper halves of 32-bit integers.
inline HalfBits upper_bits(Vector<uint32_t> bits) {
#if defined(__AVX512F__)
  return (HalfBits)_mm512_cvtepi32_epi16((__m512i)(bits >> 16));
#elif defined(__AVX2__)
  const __m256i low = (__m256i)(bits >> 16);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, low), 0x08);
  return (HalfBits)_mm256_castsi256_si128(packed);
#else
  return __builtin_convertvector(bits >> 16, HalfBits);
#endif
}

inline Vector<float> load(const bfloat16* from) {
  return bit_cast<Vector<float>>(widen_bits(load_bytes<HalfBits>(from)) << 16);
}

inline Vector<float> load(const float16* from) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(load_bytes<__m256i>(from));
#elif defined(__F16C__)
  return _mm256_cvtph_ps(load_bytes<__m128i>(from));
#else
  Vector<float> values{};
  for (int lane = 0; lane < kLanes<float>; ++lane) values[lane] = widen(from[lane]);
  return values;
#endif
}

// a > b ? a : b and a < b ? a : b, of each lane, for which GCC 12 makes two instructions of the choice.
inline Vector<float> larger(Vector<float> a, Vector<float> b) {
#if defined(__AVX512F__)
  return _mm512_max_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}

inline Vector<double> larger(Vector<double> a, Vector<double> b) { return a > b ? a : b; }

inline Vector<float> smaller(Vector<float> a, Vector<float> b) {
#if defined(__AVX512F__)
  return _mm512_min_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_min_ps(a, b);
#else
  return a < b ? a : b;
#endif
}

inline void store(double* to, Vector<double> values) { std::memcpy(to, &values, sizeof(values)); }
inline void store(float* to, Vector<float> values) { std::memcpy(to, &values, sizeof(values)); }

inline void store(bfloat16* to, Vector<float> values) {
  const auto bits = bit_cast<Vector<uint32_t>>(values);
  const auto rounded = bits + 0x7fff + ((bits >> 16) & 1);
  const auto halves = upper_bits(values != values ? bits | 0x00400000 : rounded);
  std::memcpy(to, &halves, sizeof(halves));
}

inline void store(float16* to, Vector<float> values) {
#if defined(__AVX512F__)
  const auto halves = _mm512_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT);
  std::memcpy(to, &halves, sizeof(halves));
#elif defined(__F16C__)
  const auto halves = _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT);
  std::memcpy(to, &halves, sizeof(halves));
#else
  for (int lane = 0; lane < kLanes<float>; ++lane) to[lane] = narrow<float16>(values[lane]);
#endif
}

// All lanes of a vector are new.
struct AllLanes {};

// Only the lanes from `first` on are new; the others overlap the vector before.
struct LanesFrom {
  int first;
};

template <typename V>
inline V keep(V values, AllLanes) {
  return values;
}

inline Vector<float> keep(Vector<float> values, LanesFrom lanes) {
  Vector<int32_t> index{};
  for (int lane = 0; lane < kLanes<float>; ++lane) index[lane] = lane;
  return bit_cast<Vector<float>>((index >= lanes.first) & bit_cast<Vector<int32_t>>(values));
}

inline Vector<double> keep(Vector<double> values, LanesFrom lanes) {
  Vector<int64_t> index{};
  for (int lane = 0; lane < kLanes<double>; ++lane) index[lane] = lane;
  return bit_cast<Vector<double>>((index >= int64_t(lanes.first)) & bit_cast<Vector<int64_t>>(values));
}

// Calls body(column, lanes) for vectors that cover `columns` >= kLanes<C> columns.
template <typename C, typename Body>
inline void for_columns(int64_t columns, Body body) {
  constexpr int64_t lanes = kLanes<C>;
  int64_t column = 0;
  for (; column + lanes <= columns; column += lanes) body(column, AllLanes{});
  if (column < columns) body(columns - lanes, LanesFrom{int(column - (columns - lanes))});
}

template <typename C>
inline C sum_lanes(Vector<C> values) {
  std::array<C, kLanes<C>> lanes = bit_cast<std::array<C, kLanes<C>>>(values);
  for (int half = kLanes<C> / 2; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

// `count` sums over `columns` >= kLanes<C> columns: term(column, lanes, sums) adds its vectors to the `count` vectors
// of `sums`. Lanes add up at most kBlock columns and blocks add up in double, so that rounding does not grow with the
// row.
template <typename C, int count, typename Term>
inline std::array<double, count> sum_columns(int64_t columns, Term term) {
  constexpr int64_t kBlock = 2048;
  constexpr int64_t lanes = kLanes<C>;
  constexpr int chains = 4;  // independent additions in flight, to hide their latency
  std::array<double, count> totals{};
  for (int64_t begin = 0; begin < columns; begin += kBlock) {
    const int64_t end = std::min(begin + kBlock, columns);
    Vector<C> sums[chains][count] = {};
    int64_t column = begin;
    for (; column + chains * lanes <= end; column += chains * lanes) {
      term(column + 0 * lanes, AllLanes{}, sums[0]);
      term(column + 1 * lanes, AllLanes{}, sums[1]);
      term(column + 2 * lanes, AllLanes{}, sums[2]);
      term(column + 3 * lanes, AllLanes{}, sums[3]);
    }
    for (; column + lanes <= end; column += lanes) term(column, AllLanes{}, sums[0]);
    if (column < end) term(end - lanes, LanesFrom{int(column - (end - lanes))}, sums[1]);
    for (int i = 0; i < count; ++i) {
      totals[i] += double(sum_lanes<C>((sums[0][i] + sums[1][i]) + (sums[2][i] + sums[3][i])));
    }
  }
  return totals;
}

JAXDNN_ISA_END
