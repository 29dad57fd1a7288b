// layer_norm and rms_norm, forward.
//
// X is the type of x and y, S that of the residual and of the sum: X, or float where X has 16 bits.
// A task owns whole rows. A row is read once from memory and stays in cache for two more passes:
//
//     x (+ residual -> sum) --sum--> mean --sum of squares--> rstd --(s - mean) * rstd * (scale + offset) + bias--> y
//
// Bytes: x, y (and residual, sum) once. Flops: about 8 an element.
#include <algorithm>
#include <cmath>

#include "../base/kernel.h"
#include "../base/vector.h"
#include "norm.h"

JAXDNN_ISA_BEGIN

template <typename X, typename S>
struct Forward {
  using C = Compute<X>;

  Geometry geometry;
  bool centered;
  double epsilon;
  C scale_offset;
  Groups<const X> x;
  Groups<const S> residual;
  ParameterGroups<X> scale, bias;
  Groups<X> y;
  Groups<S> sum;
  Groups<C> mean, rstd;

  explicit Forward(Arguments arguments)
      : geometry(arguments),
        centered(arguments.scalar<int64_t>() != 0),
        epsilon(arguments.scalar<double>()),
        scale_offset(C(arguments.scalar<double>())),
        x(arguments.groups<const X>()),
        residual(arguments.groups<const S>()),
        scale(arguments.parameter<X>()),
        bias(arguments.parameter<X>()),
        y(arguments.groups<X>()),
        sum(arguments.groups<S>()),
        mean(arguments.groups<C>()),
        rstd(arguments.groups<C>()) {}

  void wide_rows(int64_t group, int64_t row, int64_t row_end) const {
    for (; row < row_end; ++row) {
      const int64_t offset = row * geometry.columns;
      const X* from = x.group(group) + offset;
      if (residual) {
        S* to = sum.group(group) + offset;
        add(from, residual.group(group) + offset, to);
        wide_row<S>(group, row, to);
      } else {
        wide_row<X>(group, row, from);
      }
    }
  }

  template <typename T>
  void wide_row(int64_t group, int64_t row, const T* s) const {
    const int64_t columns = geometry.columns;
    const C offset = scale_offset;
    C center = 0;
    if (centered) {
      const auto total = sum_columns<C, 1>(
          columns, [&](int64_t column, auto lanes, Vector<C>* sums) { sums[0] += keep(load(s + column), lanes); });
      center = C(total[0] / double(columns));
    }
    const auto squares = sum_columns<C, 1>(columns, [&](int64_t column, auto lanes, Vector<C>* sums) {
      const Vector<C> centered_s = keep(load(s + column) - center, lanes);
      sums[0] += centered_s * centered_s;
    });
    double variance = squares[0] / double(columns);
    // Where numbers are nearly equal, what rounding has left of their mean is much of what they differ from it by.
    constexpr double kNearlyEqual = 1. / 256;
    if (centered && variance < kNearlyEqual * double(center) * double(center)) {
      const auto rest = sum_columns<C, 1>(columns, [&](int64_t column, auto lanes, Vector<C>* sums) {
        sums[0] += keep(load(s + column) - center, lanes);
      });
      const double error = rest[0] / double(columns);
      center = C(double(center) + error);
      variance = std::max(variance - error * error, 0.0);
    }
    const C inverse = C(1 / std::sqrt(variance + epsilon));
    if (mean) mean.group(group)[row] = center;
    if (rstd) rstd.group(group)[row] = inverse;

    X* to = y.group(group) + row * columns;
    visit(scale.group(group), [&](auto weight) {
      visit(bias.group(group), [&](auto shift) {
        for_columns<C>(columns, [&](int64_t column, auto) {
          const Vector<C> xhat = (load(s + column) - center) * inverse;
          store(to + column, plus(times(xhat, weight, offset, column), shift, column));
        });
      });
    });
  }

  void add(const X* a, const S* b, S* to) const {
    for_columns<C>(geometry.columns,
                   [&](int64_t column, auto) { store(to + column, load(a + column) + load(b + column)); });
  }

  void narrow_rows(int64_t group, int64_t row, int64_t row_end) const {
    const int64_t columns = geometry.columns;
    C weight[kNarrow], shift[kNarrow];
    for (int64_t column = 0; column < columns; ++column) {
      weight[column] = scale.group(group).at(column, 1) + (scale.bytes ? scale_offset : C(0));
      shift[column] = bias.group(group).at(column, 0);
    }
    for (; row < row_end; row += kTileRows) {
      narrow_tile(group, row, std::min<int64_t>(kTileRows, row_end - row), weight, shift);
    }
  }

  void narrow_tile(int64_t group, int64_t first, int64_t rows, const C* weight, const C* shift) const {
    const int64_t columns = geometry.columns;
    const int64_t offset = first * columns;
    C s[kNarrow][kTileRows];
    clear_missing_rows(s, columns, rows);
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t column = 0; column < columns; ++column) {
        const int64_t i = offset + row * columns + column;
        s[column][row] = widen(x.group(group)[i]);
        if (residual) {
          const S rounded = narrow<S>(s[column][row] + widen(residual.group(group)[i]));
          sum.group(group)[i] = rounded;
          s[column][row] = widen(rounded);
        }
      }
    }
    C center[kTileRows] = {}, inverse[kTileRows] = {};
    if (centered) {
      // Twice: what rounding has left of the mean is much of what nearly equal numbers differ from it by.
      for (int pass = 0; pass < 2; ++pass) subtract_means(s, columns, center);
    }
    for (int64_t column = 0; column < columns; ++column) {
      for (int row = 0; row < kTileRows; ++row) inverse[row] += s[column][row] * s[column][row];
    }
    for (int row = 0; row < kTileRows; ++row) {
      inverse[row] = 1 / std::sqrt(inverse[row] / C(columns) + C(epsilon));
    }
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t column = 0; column < columns; ++column) {
        y.group(group)[offset + row * columns + column] =
            narrow<X>(s[column][row] * inverse[row] * weight[column] + shift[column]);
      }
    }
    if (mean) std::copy_n(center, rows, mean.group(group) + first);
    if (rstd) std::copy_n(inverse, rows, rstd.group(group) + first);
  }

  // Subtracts from each row of a tile its mean, and adds that to the row's `center`.
  static void subtract_means(C (&s)[kNarrow][kTileRows], int64_t columns, C (&center)[kTileRows]) {
    C means[kTileRows] = {};
    for (int64_t column = 0; column < columns; ++column) {
      for (int row = 0; row < kTileRows; ++row) means[row] += s[column][row];
    }
    for (int row = 0; row < kTileRows; ++row) {
      means[row] /= C(columns);
      center[row] += means[row];
    }
    for (int64_t column = 0; column < columns; ++column) {
      for (int row = 0; row < kTileRows; ++row) s[column][row] -= means[row];
    }
  }
};

template <typename X, typename S = X>
void norm_forward(const void* const* arguments, int64_t task) {
  const Forward<X, S> call{Arguments(arguments)};
  call.geometry.for_chunks(task, [&](int64_t, int64_t group, int64_t row, int64_t row_end) {
    if (call.geometry.columns < kNarrow) {
      call.narrow_rows(group, row, row_end);
    } else {
      call.wide_rows(group, row, row_end);
    }
  });
}

JAXDNN_ISA_END

JAXDNN_HOST_KERNELS({"norm_forward_float64", norm_forward<double>},                  //
                    {"norm_forward_float32", norm_forward<float>},                   //
                    {"norm_forward_float16", norm_forward<float16>},                 //
                    {"norm_forward_bfloat16", norm_forward<bfloat16>},               //
                    {"norm_forward_float16_float32", norm_forward<float16, float>},  //
                    {"norm_forward_bfloat16_float32", norm_forward<bfloat16, float>})
