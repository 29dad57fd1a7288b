// Products of packed panels by the instructions that multiply 16- and 8-bit numbers: AVX-512's dot products and the
// tiles of AMX. They are compiled where the compiler knows them, and used where the processor has them.
#pragma once

#include "multiply.h"

#if defined(__AVX512F__) && JAXDNN_COMPILES_AMX
#define JAXDNN_MATMUL_DOT 1
#include <immintrin.h>
#else
#define JAXDNN_MATMUL_DOT 0
#endif

JAXDNN_ISA_BEGIN

namespace product {

// Rows of a tile, and units in one of them: a tile has 16 rows of 64 bytes.
constexpr int kTileRows = 16;
constexpr int kTileUnits = 16;
constexpr int kTilePanelRows = 2 * kTileRows;

struct Features {
  bool dots;   // AVX512-BF16
  bool tiles;  // AMX, with bfloat16 and int8
};

#if JAXDNN_MATMUL_DOT

inline const Features& features() {
  static const Features found{isa_usable("avx512_bf16"), isa_usable("amx")};
  return found;
}

template <int rows, typename Rows>
__attribute__((target("avx512bf16"))) inline void dot_steps(int64_t units, Rows a, const void* b_panel, void* sums_tile,
                                                            int64_t stride, bool adds) {
  const float* b = static_cast<const float*>(b_panel);
  float* to = static_cast<float*>(sums_tile);
  __m512 accumulators[rows][kPanelVectors];
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < kPanelVectors; ++j) accumulators[i][j] = _mm512_setzero_ps();
  }
  for (int64_t unit = 0; unit < units; ++unit, a.next(), b += kPanelVectors * 16) {
    __m512bh columns[kPanelVectors];
    for (int j = 0; j < kPanelVectors; ++j) columns[j] = (__m512bh)_mm512_loadu_ps(b + j * 16);
#pragma GCC unroll 16
    for (int i = 0; i < rows; ++i) {
      const __m512bh row = (__m512bh)_mm512_set1_epi32(a[i]);
      for (int j = 0; j < kPanelVectors; ++j)
        accumulators[i][j] = _mm512_dpbf16_ps(accumulators[i][j], row, columns[j]);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < rows; ++i, to += stride) {
    for (int j = 0; j < kPanelVectors; ++j) {
      const __m512 sum = adds ? _mm512_add_ps(accumulators[i][j], _mm512_loadu_ps(to + j * 16)) : accumulators[i][j];
      _mm512_storeu_ps(to + j * 16, sum);
    }
  }
}

template <int rows>
__attribute__((target("avx512bf16"))) void multiply_dots(int64_t units, const void* a, const void* b,
                                                         void* accumulators, int64_t stride, bool adds, const Ahead&) {
  dot_steps<rows>(units, PackedRows<int32_t, rows>{static_cast<const int32_t*>(a)}, b, accumulators, stride, adds);
}

template <int rows>
__attribute__((target("avx512bf16"))) void multiply_dot_rows(int64_t units, const void* a, int64_t a_stride,
                                                             const void* b, void* accumulators, int64_t stride,
                                                             bool adds) {
  dot_steps<rows>(units, SpacedRows<int32_t, rows>(a, a_stride), b, accumulators, stride, adds);
}

template <int... rows>
constexpr std::array<Multiply, sizeof...(rows)> dots_table(std::integer_sequence<int, rows...>) {
  return {multiply_dots<rows + 1>...};
}

template <int... rows>
constexpr std::array<MultiplyRows, sizeof...(rows)> dot_rows_table(std::integer_sequence<int, rows...>) {
  return {multiply_dot_rows<rows + 1>...};
}

constexpr std::array<Multiply, kPanelRows> kMultiplyDots = dots_table(std::make_integer_sequence<int, kPanelRows>());
constexpr std::array<MultiplyRows, kPanelRows> kMultiplyDotRows =
    dot_rows_table(std::make_integer_sequence<int, kPanelRows>());

// Tiles are configured for as long as this lives.
class TileScope {
 public:
  explicit TileScope(bool used) : used_(used) {
    if (used_) configure();
  }
  ~TileScope() {
    if (used_) release();
  }
  TileScope(const TileScope&) = delete;
  TileScope& operator=(const TileScope&) = delete;

 private:
  __attribute__((target("amx-tile"))) static void configure() {
    struct Configuration {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    };
    // In memory before the program begins: to compilers the instruction reads no more than its first bytes.
    alignas(64) static constexpr Configuration configuration;
    _tile_loadconfig(&configuration);
  }
  __attribute__((target("amx-tile"))) static void release() { _tile_release(); }

  const bool used_;
};

// Two by two tiles of accumulators, or one by two. The panel of a is made of tiles itself: for each 16 steps one for
// each 16 rows.
template <bool integers, int tile_rows>
__attribute__((target("amx-tile,amx-bf16,amx-int8"))) void multiply_tiles(int64_t units, const void* a_panel,
                                                                          const void* b_panel, void* sums_tile,
                                                                          int64_t stride, bool adds, const Ahead&) {
  const char* a = static_cast<const char*>(a_panel);
  const char* b = static_cast<const char*>(b_panel);
  constexpr int64_t kTileBytes = 1024, kColumnsBytes = 128;
  const int64_t row_bytes = 4 * stride;
  char* upper = static_cast<char*>(sums_tile);
  char* lower = upper + kTileRows * row_bytes;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  if (adds) {
    _tile_loadd(0, upper, row_bytes);
    _tile_loadd(1, upper + 64, row_bytes);
    if (tile_rows == 2) {
      _tile_loadd(2, lower, row_bytes);
      _tile_loadd(3, lower + 64, row_bytes);
    }
  }
  for (int64_t unit = 0; unit < units; unit += kTileUnits) {
    _tile_loadd(6, b, kColumnsBytes);
    _tile_loadd(7, b + 64, kColumnsBytes);
    _tile_loadd(4, a, 64);
    if (tile_rows == 2) _tile_loadd(5, a + kTileBytes, 64);
    if constexpr (integers) {
      _tile_dpbssd(0, 4, 6);
      _tile_dpbssd(1, 4, 7);
      if (tile_rows == 2) {
        _tile_dpbssd(2, 5, 6);
        _tile_dpbssd(3, 5, 7);
      }
    } else {
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      if (tile_rows == 2) {
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    a += tile_rows * kTileBytes;
    b += kTileUnits * kColumnsBytes;
  }
  _tile_stored(0, upper, row_bytes);
  _tile_stored(1, upper + 64, row_bytes);
  if (tile_rows == 2) {
    _tile_stored(2, lower, row_bytes);
    _tile_stored(3, lower + 64, row_bytes);
  }
}

// By the number of tiles above each other, less one.
template <bool integers>
constexpr std::array<Multiply, 2> kMultiplyTiles = {multiply_tiles<integers, 1>, multiply_tiles<integers, 2>};

#else

inline Features features() { return {}; }

struct TileScope {
  explicit TileScope(bool) {}
};

#endif

}  // namespace product

JAXDNN_ISA_END
