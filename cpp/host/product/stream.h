// Products of few rows of a: b, which is read once, is multiplied where it lies, at the speed of memory.
//
// C is what accumulators are in: float, double, or int32_t for the products of int8.
#pragma once

#include "format.h"

JAXDNN_ISA_BEGIN

namespace product {

// Rows of accumulators are `stride` apart; those of `a`, from step `k` on, `a_stride`.
template <typename C>
struct Stream {
  const C* a;
  int64_t a_stride;
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

// Calls body(S()) with the type of what may be streamed.
template <typename C, typename Body>
inline void with_streamed(Dtype dtype, Body body) {
  if constexpr (std::is_same_v<C, double>) {
    body(double());
  } else if constexpr (std::is_same_v<C, int32_t>) {
    body(int8_t());
  } else {
    switch (dtype) {
      case Dtype::bfloat16:
        return body(bfloat16());
      case Dtype::float16:
        return body(float16());
      default:
        return body(float());
    }
  }
}

// Where the columns of b are neighbours: accumulators[i][:] += a[i][k] b[k][:], for so many steps at once and so many
// vectors, whose accumulators are loaded and stored once for all steps.
template <int steps, int vectors, typename S, typename C>
inline void add_vectors(const S* b, int64_t depth_stride, int64_t column, const C* a, const Stream<C>& out) {
  Vector<C> columns[steps][vectors];
  for (int d = 0; d < steps; ++d) {
    const S* from = b + d * depth_stride + column;
    __builtin_prefetch(from + kSteps * depth_stride);
    for (int v = 0; v < vectors; ++v) columns[d][v] = load(from + v * kLanes<C>);
  }
  for (int64_t i = 0; i < out.rows; ++i) {
    C* to = out.accumulators + i * out.stride + column;
    Vector<C> sums[vectors];
    for (int v = 0; v < vectors; ++v) sums[v] = load(to + v * kLanes<C>);
    for (int d = 0; d < steps; ++d) {
      const Vector<C> by = factor(a[i * out.a_stride + d] - Vector<C>{});
      for (int v = 0; v < vectors; ++v) sums[v] = multiply_add(by, columns[d][v], sums[v]);
    }
    for (int v = 0; v < vectors; ++v) store_sums(to + v * kLanes<C>, sums[v]);
  }
}

template <int steps, typename S, typename C>
inline void add_steps(const S* b, int64_t depth_stride, int64_t columns, const C* a, const Stream<C>& out) {
  constexpr int64_t lanes = kLanes<C>;
  int64_t column = 0;
  for (; column + 2 * lanes <= columns; column += 2 * lanes) add_vectors<steps, 2>(b, depth_stride, column, a, out);
  for (; column + lanes <= columns; column += lanes) add_vectors<steps, 1>(b, depth_stride, column, a, out);
  for (; column < columns; ++column) {
    for (int64_t i = 0; i < out.rows; ++i) {
      C sum = out.accumulators[i * out.stride + column];
      for (int d = 0; d < steps; ++d) sum = added<C>(sum, a[i * out.a_stride + d], widen(b[d * depth_stride + column]));
      out.accumulators[i * out.stride + column] = sum;
    }
  }
}

template <typename S, typename C>
void stream_rows(const S* b, int64_t depth_stride, int64_t columns, int64_t depth, const Stream<C>& out) {
  int64_t k = 0;
  for (; k + kSteps <= depth; k += kSteps) {
    add_steps<kSteps>(b + k * depth_stride, depth_stride, columns, out.a + k, out);
  }
  for (; k < depth; ++k) add_steps<1>(b + k * depth_stride, depth_stride, columns, out.a + k, out);
}

// Where the columns of b run along memory: dot products, of as many rows and lines as registers hold.
constexpr int kLines = 4;
#if defined(__AVX512F__)
constexpr int kDotRows = 4;
#else
constexpr int kDotRows = 2;
#endif
constexpr int kLinesAhead = 2 * kLines;  // that are fetched ahead

// Lane by lane, a + b of neighbouring groups of `step` lanes: one of a's sums, then one of b's.
template <int step, typename V, size_t... lane>
inline V add_neighbours(V a, V b, std::index_sequence<lane...>) {
  constexpr size_t kCount = sizeof...(lane);
  return __builtin_shufflevector(a, b, (lane & step ? kCount + lane - step : lane)...) +
         __builtin_shufflevector(a, b, (lane & step ? kCount + lane : lane + step)...);
}

// The sum of the lanes of each of these vectors; of kLines together, with a quarter of the shuffles.
template <typename C, size_t lines>
inline std::array<C, lines> sum_vectors(const Vector<C> (&values)[lines]) {
  std::array<C, lines> sums;
  if constexpr (std::is_same_v<C, int32_t> || lines != kLines || kLanes<C> < kLines) {
    for (size_t j = 0; j < lines; ++j) sums[j] = sum_vector<C>(values[j]);
  } else {
    constexpr auto lanes = std::make_index_sequence<kLanes<C>>();
    const Vector<C> ab = add_neighbours<1>(values[0], values[1], lanes),
                    cd = add_neighbours<1>(values[2], values[3], lanes), all = add_neighbours<2>(ab, cd, lanes);
    const auto groups = bit_cast<std::array<typename VectorType<C, kLines * sizeof(C)>::type, kLanes<C> / kLines>>(all);
    auto sum = groups[0];
    for (size_t i = 1; i < groups.size(); ++i) sum += groups[i];
    std::memcpy(sums.data(), &sum, sizeof(sum));
  }
  return sums;
}

template <int rows, int lines, typename S, typename C>
inline void add_dots(const S* b, int64_t line_stride, int64_t depth, const C* a, int64_t a_stride, C* accumulators,
                     int64_t stride) {
  Vector<C> dots[rows][lines] = {};
  int64_t k = 0;
  for (; k + kLanes<C> <= depth; k += kLanes<C>) {
    Vector<C> row[rows];
    for (int i = 0; i < rows; ++i) row[i] = factor(load(a + i * a_stride + k));
    for (int j = 0; j < lines; ++j) {
      __builtin_prefetch(b + (j + kLinesAhead) * line_stride + k);
      const Vector<C> line = load(b + j * line_stride + k);
      for (int i = 0; i < rows; ++i) dots[i][j] = multiply_add(row[i], line, dots[i][j]);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < rows; ++i) {
    C* to = accumulators + i * stride;
    const auto sums = sum_vectors<C>(dots[i]);
    for (size_t j = 0; j < lines; ++j) to[j] = added<C>(to[j], sums[j], 1);
  }
  for (; k < depth; ++k) {
    for (int i = 0; i < rows; ++i) {
      for (int j = 0; j < lines; ++j) {
        C& sum = accumulators[i * stride + j];
        sum = added<C>(sum, a[i * a_stride + k], widen(b[j * line_stride + k]));
      }
    }
  }
}

template <int lines, typename S, typename C>
inline void add_lines(const S* b, int64_t line_stride, int64_t depth, int64_t column, const Stream<C>& out) {
  const S* first = b + column * line_stride;
  int64_t i = 0;
  for (; i + kDotRows <= out.rows; i += kDotRows) {
    C* to = out.accumulators + i * out.stride + column;
    add_dots<kDotRows, lines>(first, line_stride, depth, out.a + i * out.a_stride, out.a_stride, to, out.stride);
  }
  for (; i < out.rows; ++i) {
    C* to = out.accumulators + i * out.stride + column;
    add_dots<1, lines>(first, line_stride, depth, out.a + i * out.a_stride, out.a_stride, to, out.stride);
  }
}

template <typename S, typename C>
void stream_lines(const S* b, int64_t line_stride, int64_t columns, int64_t depth, const Stream<C>& out) {
  int64_t column = 0;
  for (; column + kLines <= columns; column += kLines) add_lines<kLines>(b, line_stride, depth, column, out);
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
