// How a product's operands are packed and multiplied, which depends on their dtypes and on the processor.
#pragma once

#include <algorithm>

#include "pack.h"

JAXDNN_ISA_BEGIN

namespace product {

using pointwise::Dtype;

struct Format {
  int64_t unit_depth;  // elements along k that make a unit
  int64_t unit_bytes;
  int64_t sum_bytes;
  int64_t a_width, b_width;  // lines of a panel
  int64_t a_step;            // the last panel of a is padded to a multiple of this many lines
  int64_t unit_step;         // and a block along k to one of this many units
  bool tiles;
  const Multiply* multiply;                 // by steps in the panel of a, less one
  const MultiplyRows* multiply_rows;        // by rows, less one; null for tiles, whose rows are packed
  const MultiplyPacking* multiply_packing;  // likewise; null where panels of b are more than a copy of its rows
  Pack pack_a, pack_b;

  // Rows of the panels of a block of `rows` rows: as even as can be, for panels of few rows are slow.
  int64_t panel_rows(int64_t rows) const {
    if (tiles) return a_width;
    const int64_t panels = (rows + a_width - 1) / a_width;
    return (rows + panels - 1) / panels;
  }
  int64_t padded_rows(int64_t rows) const { return (rows + a_step - 1) / a_step * a_step; }
  int64_t padded_columns(int64_t columns) const { return (columns + b_width - 1) / b_width * b_width; }
  int64_t units(int64_t depth) const {
    const int64_t unit = unit_depth * unit_step;
    return (depth + unit - 1) / unit * unit_step;
  }

  // The products of panels of a, of `rows` rows in all, and one of b.
  void multiply_panels(int64_t units, const char* a, int64_t rows, int64_t panel_rows, const char* b, char* to,
                       int64_t stride, bool adds, Ahead ahead) const {
    for (int64_t row = 0; row < rows; row += panel_rows) {
      const int64_t steps = (std::min(panel_rows, rows - row) + a_step - 1) / a_step;
      multiply[steps - 1](units, a, b, to, stride, adds, ahead);
      ahead.data += units / ahead.every * ahead.stride;
      a += steps * a_step * units * unit_bytes;
      to += panel_rows * stride * sum_bytes;
    }
  }
};

inline bool fits_bfloat16(Dtype dtype) {
  return dtype == Dtype::bfloat16 || dtype == Dtype::float8_e4m3fn || dtype == Dtype::float8_e5m2;
}

inline Pack pack_floats(Dtype dtype) {
  switch (dtype) {
    case Dtype::bfloat16:
      return pack<bfloat16, float, 1>;
    case Dtype::float16:
      return pack<float16, float, 1>;
    case Dtype::float8_e4m3fn:
      return pack<float8_e4m3fn, float, 1>;
    case Dtype::float8_e5m2:
      return pack<float8_e5m2, float, 1>;
    default:
      return pack<float, float, 1>;
  }
}

template <typename T>
constexpr Format vector_format(int64_t unit_depth, const MultiplyPacking* multiply_packing, Pack pack_a, Pack pack_b) {
  return {unit_depth,
          sizeof(T),
          sizeof(T),
          kPanelRows,
          kPanelVectors * kLanes<T>,
          1,
          1,
          false,
          kMultiply<T>.data(),
          kMultiplyRows<T>.data(),
          multiply_packing,
          pack_a,
          pack_b};
}

#if JAXDNN_MATMUL_DOT
inline Pack pack_pairs(Dtype dtype) {
  switch (dtype) {
    case Dtype::float8_e4m3fn:
      return pack<float8_e4m3fn, bfloat16, 2>;
    case Dtype::float8_e5m2:
      return pack<float8_e5m2, bfloat16, 2>;
    default:
      return pack<bfloat16, bfloat16, 2>;
  }
}

inline Pack pack_pair_tiles(Dtype dtype) {
  switch (dtype) {
    case Dtype::float8_e4m3fn:
      return pack_tiles<float8_e4m3fn, bfloat16, 2>;
    case Dtype::float8_e5m2:
      return pack_tiles<float8_e5m2, bfloat16, 2>;
    default:
      return pack_tiles<bfloat16, bfloat16, 2>;
  }
}

template <bool integers>
constexpr Format tile_format(int64_t unit_depth, Pack pack_a, Pack pack_b) {
  return {unit_depth,
          4,
          4,
          kTilePanelRows,
          2 * kTileUnits,
          kTileRows,
          kTileUnits,
          true,
          kMultiplyTiles<integers>.data(),
          nullptr,
          nullptr,
          pack_a,
          pack_b};
}
#endif

// a and b are both of float64, both of int8, or both of floats of at most 32 bits.
inline Format find_format(Dtype a, Dtype b) {
  if (a == Dtype::float64) {
    const Pack copy = pack<double, double, 1>;
    return vector_format<double>(1, kMultiplyPacking<double>.data(), copy, copy);
  }
#if JAXDNN_MATMUL_DOT
  if (a == Dtype::int8 && features().tiles) {
    return tile_format<true>(4, pack_tiles<int8_t, int8_t, 4>, pack<int8_t, int8_t, 4>);
  }
  if (fits_bfloat16(a) && fits_bfloat16(b)) {
    if (features().tiles) return tile_format<false>(2, pack_pair_tiles(a), pack_pairs(b));
    if (features().dots) {
      return {2,
              4,
              4,
              kPanelRows,
              kPanelVectors * kLanes<float>,
              1,
              1,
              false,
              kMultiplyDots.data(),
              kMultiplyDotRows.data(),
              nullptr,
              pack_pairs(a),
              pack_pairs(b)};
    }
  }
#endif
  if (a == Dtype::int8) return vector_format<int32_t>(2, nullptr, pack<int8_t, int16_t, 2>, pack<int8_t, int16_t, 2>);
  const MultiplyPacking* multiply_packing = b == Dtype::float32 ? kMultiplyPacking<float>.data() : nullptr;
  return vector_format<float>(1, multiply_packing, pack_floats(a), pack_floats(b));
}

}  // namespace product

JAXDNN_ISA_END
