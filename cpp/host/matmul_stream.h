// Products of few rows of a: b, which is read once, is multiplied where it lies, at the speed of memory.
#pragma once

#include "matmul_format.h"

JAXDNN_ISA_BEGIN

namespace matmul {

// Sums are dense rows, `stride` apart. `a` holds the rows of a from step `k` on, `depth` elements apart.
template <typename C>
struct Stream {
  const C* a;
  int64_t rows;
  C* sums;
  int64_t stride;
};

constexpr int kSteps = 4;  // rows of b that are added together

// Where the columns of b are neighbours: sums[i][:] += a[i][k] b[k][:], for kSteps steps at once and two vectors, whose
// sums are loaded and stored once for all steps.
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
      C* to = out.sums + i * out.stride + column;
      Vector<C> s0 = load(to), s1 = load(to + kLanes<C>);
      for (int d = 0; d < steps; ++d) {
        const Vector<C> factor = a[i * depth + d] - Vector<C>{};
        s0 = multiply_add(factor, b0[d], s0);
        s1 = multiply_add(factor, b1[d], s1);
      }
      store(to, s0);
      store(to + kLanes<C>, s1);
    }
  }
  for (; column < columns; ++column) {
    for (int64_t i = 0; i < out.rows; ++i) {
      C sum = out.sums[i * out.stride + column];
      for (int d = 0; d < steps; ++d) sum += a[i * depth + d] * widen(b[d * depth_stride + column]);
      out.sums[i * out.stride + column] = sum;
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
inline void add_dots(const S* b, int64_t line_stride, const C* a, int64_t depth, C* sums, int64_t stride) {
  Vector<C> dots[rows][columns] = {};
  int64_t k = 0;
  for (; k + kLanes<C> <= depth; k += kLanes<C>) {
    Vector<C> row[rows];
    for (int i = 0; i < rows; ++i) row[i] = load(a + i * depth + k);
    for (int j = 0; j < columns; ++j) {
      const Vector<C> line = load(b + j * line_stride + k);
      for (int i = 0; i < rows; ++i) dots[i][j] = multiply_add(row[i], line, dots[i][j]);
    }
  }
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < columns; ++j) {
      C sum = sum_lanes<C>(dots[i][j]);
      for (int64_t rest = k; rest < depth; ++rest) sum += a[i * depth + rest] * widen(b[j * line_stride + rest]);
      sums[i * stride + j] += sum;
    }
  }
}

template <int columns, typename S, typename C>
inline void add_lines(const S* b, int64_t line_stride, int64_t depth, int64_t column, const Stream<C>& out) {
  int64_t i = 0;
  for (; i + 2 <= out.rows; i += 2) {
    C* sums = out.sums + i * out.stride + column;
    add_dots<2, columns>(b + column * line_stride, line_stride, out.a + i * depth, depth, sums, out.stride);
  }
  if (i < out.rows) {
    C* sums = out.sums + i * out.stride + column;
    add_dots<1, columns>(b + column * line_stride, line_stride, out.a + i * depth, depth, sums, out.stride);
  }
}

template <typename S, typename C>
void stream_lines(const S* b, int64_t line_stride, int64_t columns, int64_t depth, const Stream<C>& out) {
  int64_t column = 0;
  for (; column + 4 <= columns; column += 4) add_lines<4>(b, line_stride, depth, column, out);
  for (; column < columns; ++column) add_lines<1>(b, line_stride, depth, column, out);
}

// Adds a block of b, `columns` columns from `line` on and `depth` steps from `k` on, to the sums.
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

}  // namespace matmul

JAXDNN_ISA_END
