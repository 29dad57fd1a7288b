// Products of few rows of a: b, which is read once, is multiplied where it lies, at the speed of memory.
//
// C is what accumulators are in: float, double, or int32_t for the products of int8.
#pragma once

#include "format.h"

JAXDNN_ISA_BEGIN

namespace product {

// Sums are dense rows, `stride` apart. `a` holds the rows of a from step `k` on, `depth` elements apart.
template <typename C>
struct Stream {
  const C* a;
  int64_t rows;
  C* accumulators;
  int64_t stride;
};

inline int32_t widen(int8_t value) { return value; }

inline Vector<int32_t> load(const int32_t* from) { return load_bytes<Vector<int32_t>>(from); }
// GCC 12 converts such vectors element by element.
inline Vector<int32_t> load(const int8_t* from) {
#if defined(__AVX512F__)
  return (Vector<int32_t>)_mm512_cvtepi8_epi32(load_bytes<__m128i>(from));
#elif defined(__AVX2__)
  return (Vector<int32_t>)_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(load_bytes<int64_t>(from)));
#else
  Vector<int32_t> values{};
  for (int lane = 0; lane < kLanes<int32_t>; ++lane) values[lane] = from[lane];
  return values;
#endif
}
using jaxdnn::JAXDNN_ISA::load;
using jaxdnn::JAXDNN_ISA::widen;

template <typename T>
inline void store_sums(T* to, Vector<T> accumulators) {
  std::memcpy(to, &accumulators, sizeof(accumulators));
}

// What vectors of b are multiplied by. Pairs of 16-bit integers are multiplied together: of a widened int8 the upper
// one is its sign, which a zero must meet.
template <typename V>
inline V factor(V values) {
  if constexpr (std::is_same_v<V, Vector<int32_t>>) return values & 0xffff;
  return values;
}

// One product, added; accumulators of integers wrap.
template <typename C>
inline C added(C sum, C a, C b) {
  if constexpr (std::is_same_v<C, int32_t>) return pointwise::sum(sum, a * b);
  return sum + a * b;
}

template <typename C>
inline C sum_vector(Vector<C> values) {
  if constexpr (std::is_same_v<C, int32_t>) {
    return int32_t(sum_lanes<uint32_t>((Vector<uint32_t>)values));
  } else {
    return sum_lanes<C>(values);
  }
}

constexpr int kSteps = 4;  // rows of b that are added together

// Where the columns of b are neighbours: accumulators[i][:] += a[i][k] b[k][:], for kSteps steps at once and two
// vectors, whose accumulators are loaded and stored once for all steps.
template <int steps, typename S, typename C>
inline void add_steps(const S* b, int64_t depth_stride, int64_t columns, const C* a, int64_t depth,
                      const Stream<C>& out) {
  constexpr int64_t kWidth = 2 * kLanes<C>;
  int64_t column = 0;
  for (; column + kWidth <= columns; column += kWidth) {
    Vector<C> b0[steps], b1[steps];
    for (int d = 0; d < steps; ++d) {
      const S* from = b + d * depth_stride + column;
      __builtin_prefetch(from + kSteps * depth_stride);
      b0[d] = load(from);
      b1[d] = load(from + kLanes<C>);
    }
    for (int64_t i = 0; i < out.rows; ++i) {
      C* to = out.accumulators + i * out.stride + column;
      Vector<C> s0 = load(to), s1 = load(to + kLanes<C>);
      for (int d = 0; d < steps; ++d) {
        const Vector<C> by = factor(a[i * depth + d] - Vector<C>{});
        s0 = multiply_add(by, b0[d], s0);
        s1 = multiply_add(by, b1[d], s1);
      }
      store_sums(to, s0);
      store_sums(to + kLanes<C>, s1);
    }
  }
  for (; column < columns; ++column) {
    for (int64_t i = 0; i < out.rows; ++i) {
      C sum = out.accumulators[i * out.stride + column];
      for (int d = 0; d < steps; ++d) sum = added<C>(sum, a[i * depth + d], widen(b[d * depth_stride + column]));
      out.accumulators[i * out.stride + column] = sum;
    }
  }
}

template <typename S, typename C>
void stream_rows(const S* b, int64_t depth_stride, int64_t columns, int64_t depth, const Stream<C>& out) {
  int64_t k = 0;
  for (; k + kSteps <= depth; k += kSteps) {
    add_steps<kSteps>(b + k * depth_stride, depth_stride, columns, out.a + k, depth, out);
  }
  for (; k < depth; ++k) add_steps<1>(b + k * depth_stride, depth_stride, columns, out.a + k, depth, out);
}

// Where the columns of b run along memory: dot products, of `rows` rows and `columns` columns at once.
template <int rows, int columns, typename S, typename C>
inline void add_dots(const S* b, int64_t line_stride, const C* a, int64_t depth, C* accumulators, int64_t stride) {
  Vector<C> dots[rows][columns] = {};
  int64_t k = 0;
  for (; k + kLanes<C> <= depth; k += kLanes<C>) {
    Vector<C> row[rows];
    for (int i = 0; i < rows; ++i) row[i] = factor(load(a + i * depth + k));
    for (int j = 0; j < columns; ++j) {
      const Vector<C> line = load(b + j * line_stride + k);
      for (int i = 0; i < rows; ++i) dots[i][j] = multiply_add(row[i], line, dots[i][j]);
    }
  }
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < columns; ++j) {
      C& sum = accumulators[i * stride + j];
      sum = added<C>(sum, sum_vector<C>(dots[i][j]), 1);
      for (int64_t rest = k; rest < depth; ++rest) {
        sum = added<C>(sum, a[i * depth + rest], widen(b[j * line_stride + rest]));
      }
    }
  }
}

template <int columns, typename S, typename C>
inline void add_lines(const S* b, int64_t line_stride, int64_t depth, int64_t column, const Stream<C>& out) {
  int64_t i = 0;
  for (; i + 2 <= out.rows; i += 2) {
    C* accumulators = out.accumulators + i * out.stride + column;
    add_dots<2, columns>(b + column * line_stride, line_stride, out.a + i * depth, depth, accumulators, out.stride);
  }
  if (i < out.rows) {
    C* accumulators = out.accumulators + i * out.stride + column;
    add_dots<1, columns>(b + column * line_stride, line_stride, out.a + i * depth, depth, accumulators, out.stride);
  }
}

template <typename S, typename C>
void stream_lines(const S* b, int64_t line_stride, int64_t columns, int64_t depth, const Stream<C>& out) {
  int64_t column = 0;
  for (; column + 4 <= columns; column += 4) add_lines<4>(b, line_stride, depth, column, out);
  for (; column < columns; ++column) add_lines<1>(b, line_stride, depth, column, out);
}

// Adds a block of b, `columns` columns from `line` on and `depth` steps from `k` on, to the accumulators.
template <typename S, typename C>
void stream(const Lines& source, int64_t line, int64_t k, int64_t columns, int64_t depth, const Stream<C>& out) {
  const S* b = source.at<S>(line, k);
  if (source.line_stride == 1) {
    stream_rows(b, source.depth_stride, columns, depth, out);
  } else {
    stream_lines(b, source.line_stride, columns, depth, out);
  }
}

// The rows of a block of a, each dense, as C.
template <typename S, typename C>
void dense_rows(const Lines& source, int64_t line, int64_t k, int64_t rows, int64_t depth, C* to) {
  for (int64_t i = 0; i < rows; ++i, to += depth) {
    const S* from = source.at<S>(line + i, k);
    if (source.depth_stride == 1) {
      convert_row(from, to, depth);
    } else {
      for (int64_t d = 0; d < depth; ++d) to[d] = element<C>(from[d * source.depth_stride]);
    }
  }
}

}  // namespace product

JAXDNN_ISA_END
