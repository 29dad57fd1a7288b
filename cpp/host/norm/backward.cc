// layer_norm and rms_norm, backward.
//
// With w = scale + offset, xhat = (x - mean) * rstd and g = d_y * w:
//
//     d_x     = rstd * (g - mean(g) - xhat * mean(g * xhat))     mean(g) for layer_norm only
//     d_scale = sum of d_y * xhat over rows,   d_bias = sum of d_y over rows
//
// Y is the type of d_y, X that of x, d_sum and d_x: Y, or float where Y has 16 bits and x is a sum with a wider
// residual. A task owns whole rows, in chunks. It reads a row of x and d_y once from memory; the sums, d_x and the
// parameters' gradients are passes over the cached row. Each chunk sums its parameters' gradients into a row of its
// own, and `norm_reduce` adds those rows in order: the result depends on the shapes alone, never on the threads.
//
// Bytes: x, d_y, d_x once, and the chunks' sums. Flops: about 14 an element.
#include "../base/kernel.h"
#include "../base/vector.h"
#include "norm.h"

JAXDNN_ISA_BEGIN

template <typename Y, typename X>
struct Backward {
  using C = Compute<X>;

  Geometry geometry;
  bool centered;
  C scale_offset;
  Groups<const X> x;
  ParameterGroups<Y> scale;
  Groups<const C> mean, rstd;
  Groups<const Y> d_y;
  Groups<const X> d_sum;
  Groups<const C> d_mean, d_rstd;
  Groups<X> d_x;
  Groups<C> d_scale, d_bias;  // a row for each chunk

  explicit Backward(Arguments arguments)
      : geometry(arguments),
        centered(arguments.scalar<int64_t>() != 0),
        scale_offset(C(arguments.scalar<double>())),
        x(arguments.groups<const X>()),
        scale(arguments.parameter<Y>()),
        mean(arguments.groups<const C>()),
        rstd(arguments.groups<const C>()),
        d_y(arguments.groups<const Y>()),
        d_sum(arguments.groups<const X>()),
        d_mean(arguments.groups<const C>()),
        d_rstd(arguments.groups<const C>()),
        d_x(arguments.groups<X>()),
        d_scale(arguments.groups<C>()),
        d_bias(arguments.groups<C>()) {}

  C row_mean(int64_t group, int64_t row) const { return mean ? mean.group(group)[row] : C(0); }

  void wide_rows(int64_t chunk, int64_t group, int64_t row, int64_t row_end) const {
    constexpr int together = 4;  // rows whose parameter gradients are added in registers
    if (d_scale) std::fill_n(d_scale.group(chunk), geometry.columns, C(0));
    if (d_bias) std::fill_n(d_bias.group(chunk), geometry.columns, C(0));
    for (; row + together <= row_end; row += together) {
      for (int i = 0; i < together; ++i) input_gradient(group, row + i);
      parameter_gradients<together>(chunk, group, row);
    }
    for (; row < row_end; ++row) {
      input_gradient(group, row);
      parameter_gradients<1>(chunk, group, row);
    }
  }

  void input_gradient(int64_t group, int64_t row) const {
    if (!d_x) return;
    const int64_t columns = geometry.columns;
    const C offset = scale_offset;
    const C center = row_mean(group, row);
    const C inverse = rstd.group(group)[row];
    const X* s = x.group(group) + row * columns;
    const Y* dy = d_y.group(group) + row * columns;
    X* to = d_x.group(group) + row * columns;
    visit(scale.group(group), [&](auto weight) {
      const auto sums = sum_columns<C, 2>(columns, [&](int64_t column, auto lanes, Vector<C>* sums) {
        const Vector<C> g = keep(times(load(dy + column), weight, offset, column), lanes);
        sums[0] += g;
        sums[1] += g * ((load(s + column) - center) * inverse);
      });
      const Correction fix = correction(group, row, sums[0], sums[1]);
      const auto write = [&](auto other) {
        for_columns<C>(columns, [&](int64_t column, auto) {
          const Vector<C> g = times(load(dy + column), weight, offset, column);
          const Vector<C> xhat = (load(s + column) - center) * inverse;
          store(to + column, plus(inverse * (g - xhat * fix.slope) + fix.shift, other, column));
        });
      };
      if (d_sum) {
        write(d_sum.group(group) + row * columns);
      } else {
        write(Absent{});
      }
    });
  }

  // d_x = rstd * (g - xhat * slope) + shift, from the row's sums of g and of g * xhat.
  struct Correction {
    C shift, slope;
  };
  Correction correction(int64_t group, int64_t row, double sum_g, double sum_g_xhat) const {
    const double columns = double(geometry.columns);
    const double inverse = rstd.group(group)[row];
    double shift = centered ? -inverse * sum_g / columns : 0;
    double slope = sum_g_xhat / columns;
    if (d_mean) shift += d_mean.group(group)[row] / columns;
    if (d_rstd) slope += d_rstd.group(group)[row] * inverse / columns;
    return {C(shift), C(slope)};
  }

  template <int rows>
  void parameter_gradients(int64_t chunk, int64_t group, int64_t first) const {
    if (!d_scale && !d_bias) return;
    const int64_t columns = geometry.columns;
    const X* s = x.group(group) + first * columns;
    const Y* dy = d_y.group(group) + first * columns;
    C center[rows], inverse[rows];
    for (int row = 0; row < rows; ++row) {
      center[row] = row_mean(group, first + row);
      inverse[row] = rstd.group(group)[first + row];
    }
    const auto add = [&](auto to_scale, auto to_bias) {
      for_columns<C>(columns, [&](int64_t column, auto lanes) {
        Vector<C> scale_sum{}, bias_sum{};
        for (int row = 0; row < rows; ++row) {
          const Vector<C> gradient = load(dy + row * columns + column);
          scale_sum += gradient * ((load(s + row * columns + column) - center[row]) * inverse[row]);
          bias_sum += gradient;
        }
        accumulate(to_scale, column, keep(scale_sum, lanes));
        accumulate(to_bias, column, keep(bias_sum, lanes));
      });
    };
    if (d_scale && d_bias) {
      add(d_scale.group(chunk), d_bias.group(chunk));
    } else if (d_scale) {
      add(d_scale.group(chunk), Absent{});
    } else {
      add(Absent{}, d_bias.group(chunk));
    }
  }

  static void accumulate(Absent, int64_t, Vector<C>) {}
  static void accumulate(C* to, int64_t column, Vector<C> values) { store(to + column, load(to + column) + values); }

  void narrow_rows(int64_t chunk, int64_t group, int64_t row, int64_t row_end) const {
    const int64_t columns = geometry.columns;
    C weight[kNarrow];
    for (int64_t column = 0; column < columns; ++column) {
      weight[column] = scale.group(group).at(column, 1) + (scale.bytes ? scale_offset : C(0));
    }
    double scale_sum[kNarrow] = {}, bias_sum[kNarrow] = {};
    for (; row < row_end; row += kTileRows) {
      narrow_tile(group, row, std::min<int64_t>(kTileRows, row_end - row), weight, scale_sum, bias_sum);
    }
    if (d_scale) std::copy_n(scale_sum, columns, d_scale.group(chunk));
    if (d_bias) std::copy_n(bias_sum, columns, d_bias.group(chunk));
  }

  void narrow_tile(int64_t group, int64_t first, int64_t rows, const C* weight, double* scale_sum,
                   double* bias_sum) const {
    const int64_t columns = geometry.columns;
    const int64_t offset = first * columns;
    C xhat[kNarrow][kTileRows], dy[kNarrow][kTileRows];
    clear_missing_rows(xhat, columns, rows);
    clear_missing_rows(dy, columns, rows);
    for (int64_t row = 0; row < rows; ++row) {
      const C center = row_mean(group, first + row);
      const C inverse = rstd.group(group)[first + row];
      for (int64_t column = 0; column < columns; ++column) {
        const int64_t i = offset + row * columns + column;
        xhat[column][row] = (widen(x.group(group)[i]) - center) * inverse;
        dy[column][row] = widen(d_y.group(group)[i]);
      }
    }
    C sum_g[kTileRows] = {}, sum_g_xhat[kTileRows] = {};
    for (int64_t column = 0; column < columns; ++column) {
      C scale_lanes[kTileRows];
      for (int row = 0; row < kTileRows; ++row) {
        scale_lanes[row] = dy[column][row] * xhat[column][row];
        sum_g[row] += dy[column][row] * weight[column];
        sum_g_xhat[row] += scale_lanes[row] * weight[column];
      }
      scale_sum[column] += sum_tile(scale_lanes);
      bias_sum[column] += sum_tile(dy[column]);
    }
    if (!d_x) return;
    for (int64_t row = 0; row < rows; ++row) {
      const C inverse = rstd.group(group)[first + row];
      const Correction fix = correction(group, first + row, sum_g[row], sum_g_xhat[row]);
      for (int64_t column = 0; column < columns; ++column) {
        const int64_t i = offset + row * columns + column;
        C value = inverse * (dy[column][row] * weight[column] - xhat[column][row] * fix.slope) + fix.shift;
        if (d_sum) value += widen(d_sum.group(group)[i]);
        d_x.group(group)[i] = narrow<X>(value);
      }
    }
  }

  static C sum_tile(const C* values) {
    Vector<C> sums{};
    for (int row = 0; row < kTileRows; row += kLanes<C>) sums += load(values + row);
    return sum_lanes<C>(sums);
  }
};

template <typename Y, typename X = Y>
void norm_backward(const void* const* arguments, int64_t task) {
  const Backward<Y, X> call{Arguments(arguments)};
  call.geometry.for_chunks(task, [&](int64_t chunk, int64_t group, int64_t row, int64_t row_end) {
    if (call.geometry.columns < kNarrow) {
      call.narrow_rows(chunk, group, row, row_end);
    } else {
      call.wide_rows(chunk, group, row, row_end);
    }
  });
}

// Adds the chunks' sums of one parameter's gradient. A task owns kSpan consecutive elements of all groups' gradients.
template <typename C, typename P>
void reduce_chunks(const Geometry& geometry, const C* partial, P* gradient, int64_t task) {
  constexpr int64_t kSpan = 256;
  const int64_t columns = geometry.columns;
  const int64_t chunks = geometry.group_chunks();
  const int64_t end = std::min((task + 1) * kSpan, geometry.groups * columns);
  for (int64_t begin = task * kSpan; begin < end;) {
    const int64_t group = begin / columns;
    const int64_t count = std::min(end, (group + 1) * columns) - begin;
    const C* from = partial + group * chunks * columns + begin % columns;
    double sums[kSpan] = {};
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      for (int64_t i = 0; i < count; ++i) sums[i] += double(from[chunk * columns + i]);
    }
    for (int64_t i = 0; i < count; ++i) gradient[begin + i] = narrow<P>(Compute<P>(sums[i]));
    begin += count;
  }
}

template <typename X>
void norm_reduce(const void* const* arguments_, int64_t task) {
  using C = Compute<X>;
  Arguments arguments(arguments_);
  const Geometry geometry(arguments);
  for (int parameter = 0; parameter < 2; ++parameter) {
    const Groups<const C> partial = arguments.groups<const C>();
    const ParameterGroups<X> gradient = arguments.parameter<X>();
    if (!partial) continue;
    void* const to = const_cast<char*>(gradient.bytes.data);
    if (gradient.is_float) {
      if constexpr (!std::is_same<X, double>::value)
        reduce_chunks(geometry, partial.data, static_cast<float*>(to), task);
    } else {
      reduce_chunks(geometry, partial.data, static_cast<X*>(to), task);
    }
  }
}

JAXDNN_ISA_END

JAXDNN_HOST_KERNELS({"norm_backward_float64", norm_backward<double>},     //
                    {"norm_backward_float32", norm_backward<float>},      //
                    {"norm_backward_float16", norm_backward<float16>},    //
                    {"norm_backward_bfloat16", norm_backward<bfloat16>},  //
                    {"norm_backward_float16_float32", norm_backward<float16, float>},
                    {"norm_backward_bfloat16_float32", norm_backward<bfloat16, float>},
                    {"norm_reduce_float64", norm_reduce<double>},   //
                    {"norm_reduce_float32", norm_reduce<float>},    //
                    {"norm_reduce_float16", norm_reduce<float16>},  //
                    {"norm_reduce_bfloat16", norm_reduce<bfloat16>})
