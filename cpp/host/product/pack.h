// Panels of a and b, as product_multiply.h and matmul_dot.h want them, from arrays of any dtype and layout.
#pragma once

#include <cstring>
#include <type_traits>

#include "../pointwise/operations.h"
#include "dot.h"

JAXDNN_ISA_BEGIN

namespace product {

// Panels are packed from sources, which have the elements (line, k) of rows of a, or columns of b: "lines". In memory
// those of a line are neighbours if it runs `along_depth`, else those of a step; `row` is where so many neighbours lie
// from (line, k) on. A source that has to put them there puts them at `here`, for which steps have its `staging`.

// Of an element (line, k) the address is line * line_stride + k * depth_stride; one of the strides is 1.
struct Lines {
  const void* data;
  int64_t line_stride, depth_stride;

  template <typename S>
  const S* at(int64_t line, int64_t k) const {
    return static_cast<const S*>(data) + line * line_stride + k * depth_stride;
  }

  bool along_depth() const { return line_stride != 1 || depth_stride == 1; }
  template <typename S>
  const S* row(int64_t line, int64_t k, int64_t, S*) const {
    return at<S>(line, k);
  }
  template <typename S>
  S* staging(int64_t) const {
    return nullptr;
  }
  template <typename S>
  void prefetch(int64_t line, int64_t k) const {
    __builtin_prefetch(at<S>(line, k));
  }
};

// A block of Lines that becomes panels: `lines` lines and `depth` steps exist, and the others are zeros.
struct Block {
  int64_t line, k;
  int64_t lines, depth;
  int64_t units;        // that each panel has
  int64_t width, step;  // lines of a panel; the last one is padded to a multiple of `step`

  // Calls body(first, lines, padded) for each panel: its first line, how many exist, and with how many it is packed.
  template <typename Body>
  void for_panels(Body body) const {
    int64_t first = 0;
    for (; first + width <= lines; first += width) body(first, width, width);
    if (first < lines) body(first, lines - first, (lines - first + step - 1) / step * step);
  }
};

using Pack = void (*)(const Lines& source, const Block& block, void* panels);

constexpr int kMostLines =
    kPanelVectors * kVectorBytes / 4 > kTilePanelRows ? kPanelVectors * kVectorBytes / 4 : kTilePanelRows;

constexpr int64_t kChunk = 64;  // steps along k that are packed together

// ---- Rows of elements, as E -----------------------------------------------------------------------------------------

// bfloat16 holds every float8.
inline bfloat16 truncated(float value) { return {uint16_t(bit_cast<uint32_t>(value) >> 16)}; }

template <typename E, typename S>
inline E element(S value) {
  if constexpr (std::is_same_v<E, S>) {
    return value;
  } else if constexpr (std::is_same_v<E, bfloat16>) {
    return truncated(widen(value));
  } else {
    return pointwise::widened<E>(value);
  }
}

template <typename S, typename E>
inline void convert_row(const S* from, E* to, int64_t count) {
  int64_t i = 0;
  if constexpr (std::is_same_v<S, E>) {
    // For counts that the compiler knows; GCC 12 copies with vectors of 16 bytes.
    for (; i + kLanes<E> <= count; i += kLanes<E>) {
      const auto vector = load_bytes<Vector<uint8_t>>(from + i);
      std::memcpy(to + i, &vector, sizeof(vector));
    }
#if defined(__AVX512BW__)
    const auto rest = __mmask64((uint64_t(1) << (count - i) * int64_t(sizeof(E))) - 1);
    _mm512_mask_storeu_epi8(to + i, rest, _mm512_maskz_loadu_epi8(rest, from + i));
#else
    if (i < count) std::memcpy(to + i, from + i, size_t(count - i) * sizeof(E));
#endif
  } else {
    if constexpr (std::is_same_v<E, float> && sizeof(S) == 2) {
      for (; i + kLanes<float> <= count; i += kLanes<float>) store(to + i, load(from + i));
    }
    for (; i < count; ++i) to[i] = element<E>(from[i]);
  }
}

// ---- Lines that are neighbours in memory ----------------------------------------------------------------------------

// Unit i of a step is element i of each of the rows. By vectors, which GCC does not make of the loop at the end.
template <typename E, int unit_depth>
inline void interleave(const E* const (&rows)[unit_depth], void* to, int64_t width) {
  using Bits = std::conditional_t<sizeof(E) == 1, uint8_t, uint16_t>;
  using Elements = typename VectorType<Bits, int(sizeof(Bits)) * kLanes<uint32_t>>::type;
  constexpr int kBits = 8 * int(sizeof(E));
  uint32_t* units = static_cast<uint32_t*>(to);
  int64_t i = 0;
  for (; i + kLanes<uint32_t> <= width; i += kLanes<uint32_t>) {
    Vector<uint32_t> unit = {};
    for (int d = 0; d < unit_depth; ++d) {
      const auto elements = load_bytes<Elements>(rows[d] + i);
      if constexpr (sizeof(E) == 2) {
        unit |= widen_bits(elements) << d * kBits;
      } else {
        unit |= __builtin_convertvector(elements, Vector<uint32_t>) << d * kBits;
      }
    }
    std::memcpy(units + i, &unit, sizeof(unit));
  }
  for (; i < width; ++i) {
    uint32_t unit = 0;
    for (int d = 0; d < unit_depth; ++d) unit |= uint32_t(bit_cast<Bits>(rows[d][i])) << d * kBits;
    std::memcpy(units + i, &unit, sizeof(unit));
  }
}

// Packs one unit of `lines` lines of a panel, from the first one on, of which `depth` steps exist: `rows`.
template <typename S, typename E, int unit_depth, typename Width>
inline void pack_unit(const S* const (&rows)[unit_depth], int64_t first, int64_t depth, Width lines, char* to) {
  if constexpr (unit_depth == 1) {
    convert_row(rows[0] + first, reinterpret_cast<E*>(to), lines);
  } else if (std::is_same_v<S, E> && depth == unit_depth) {
    const E* pointers[unit_depth];
    for (int d = 0; d < unit_depth; ++d) pointers[d] = reinterpret_cast<const E*>(rows[d] + first);
    interleave<E, unit_depth>(pointers, to, lines);
  } else {
    E staged[unit_depth][kMostLines];
    const E* pointers[unit_depth];
    for (int d = 0; d < unit_depth; ++d) {
      if (d < depth) {
        convert_row(rows[d] + first, staged[d], lines);
      } else {
        std::memset(staged[d], 0, sizeof(staged[d]));
      }
      pointers[d] = staged[d];
    }
    interleave<E, unit_depth>(pointers, to, lines);
  }
}

// Row after row through all panels, for memory gives long rows faster than short ones: 512 bytes at 18 GB/s and 64 at
// 5, where the rows are 16 KiB apart (one Zen 3 core).
template <typename S, typename E, int unit_depth, typename Source>
void pack_steps(const Source& source, const Block& block, void* panels) {
  constexpr int64_t kUnitBytes = int64_t(sizeof(E)) * unit_depth, kAhead = 8;
  constexpr std::integral_constant<int64_t, kPanelVectors * kVectorBytes / kUnitBytes> kVectors;
  constexpr std::integral_constant<int64_t, kPanelRows> kRows;
  const int64_t used_units = (block.depth + unit_depth - 1) / unit_depth;
  for (int64_t unit = 0; unit < used_units; ++unit) {
    const int64_t k = unit * unit_depth, depth = std::min<int64_t>(unit_depth, block.depth - k);
    const S* rows[unit_depth];
    for (int d = 0; d < depth; ++d) {
      S* here = source.template staging<S>(d * block.lines);
      rows[d] = source.template row<S>(block.line, block.k + k + d, block.lines, here);
    }
    block.for_panels([&](int64_t first, int64_t lines, int64_t padded) {
      char* to = static_cast<char*>(panels) + (first * block.units + unit * padded) * kUnitBytes;
      for (int d = 0; d < unit_depth; ++d) source.template prefetch<S>(block.line + first, block.k + k + kAhead + d);
      if (lines == kVectors) {
        pack_unit<S, E, unit_depth>(rows, first, depth, kVectors, to);
      } else if (lines == kRows) {
        pack_unit<S, E, unit_depth>(rows, first, depth, kRows, to);
      } else {
        pack_unit<S, E, unit_depth>(rows, first, depth, lines, to);
      }
      std::memset(to + lines * kUnitBytes, 0, size_t((padded - lines) * kUnitBytes));
    });
  }
  block.for_panels([&](int64_t first, int64_t, int64_t padded) {
    char* to = static_cast<char*>(panels) + (first * block.units + used_units * padded) * kUnitBytes;
    std::memset(to, 0, size_t((block.units - used_units) * padded * kUnitBytes));
  });
}

// ---- Lines that run along k: a transpose of units -------------------------------------------------------------------

// Lines and units of 4 bytes that are transposed in registers.
#if defined(__AVX512F__)
constexpr int64_t kSquare = 16;
#else
constexpr int64_t kSquare = 4;
#endif

// to[unit][line] = rows[line][unit] for a square of at most kSquare lines and units; without AVX-512, exactly as many.
// Units lie in memory at any address, as the elements that they are made of do.
inline void transpose_square(const char* const* rows, [[maybe_unused]] int64_t lines, [[maybe_unused]] int64_t units,
                             int64_t from, char* to, int64_t stride) {
#if defined(__AVX512F__)
  const __m512i halves[2] = {_mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23),
                             _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)};
  const auto some_units = __mmask16((1u << units) - 1), some_lines = __mmask16((1u << lines) - 1);
  __m512i square[16], next[16];
  for (int i = 0; i < 16; ++i) {
    square[i] = i < lines ? _mm512_maskz_loadu_epi32(some_units, rows[i] + from) : _mm512_setzero_si512();
  }
  // Each round interleaves the rows of the upper half with those of the lower.
#pragma GCC unroll 4
  for (int round = 0; round < 4; ++round) {
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) next[i] = _mm512_permutex2var_epi32(square[i / 2], halves[i % 2], square[i / 2 + 8]);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) square[i] = next[i];
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    if (i < units) _mm512_mask_storeu_epi32(to + i * stride, some_lines, square[i]);
  }
#elif defined(__SSE2__)
  __m128 r0 = load_bytes<__m128>(rows[0] + from), r1 = load_bytes<__m128>(rows[1] + from);
  __m128 r2 = load_bytes<__m128>(rows[2] + from), r3 = load_bytes<__m128>(rows[3] + from);
  _MM_TRANSPOSE4_PS(r0, r1, r2, r3);
  std::memcpy(to, &r0, sizeof(r0));
  std::memcpy(to + stride, &r1, sizeof(r1));
  std::memcpy(to + 2 * stride, &r2, sizeof(r2));
  std::memcpy(to + 3 * stride, &r3, sizeof(r3));
#else
  for (int i = 0; i < 4; ++i) {
    for (int j = 0; j < 4; ++j) std::memcpy(to + i * stride + 4 * j, rows[j] + from + 4 * i, 4);
  }
#endif
}

// to[unit][line] = rows[line][unit]
template <int unit_bytes>
inline void transpose(const char* const* rows, int64_t lines, int64_t units, char* to) {
  const int64_t stride = lines * unit_bytes;
  const auto square = [&](int64_t line, int64_t unit) {
    transpose_square(rows + line, std::min(kSquare, lines - line), std::min(kSquare, units - unit), unit * 4,
                     to + unit * stride + line * 4, stride);
  };
  int64_t unit = 0;
#if defined(__AVX512F__)
  for (; unit_bytes == 4 && unit < units; unit += kSquare) {
    for (int64_t line = 0; line < lines; line += kSquare) square(line, unit);
  }
#else
  for (; unit_bytes == 4 && lines >= kSquare && unit + kSquare <= units; unit += kSquare) {
    int64_t line = 0;
    for (; line + kSquare <= lines; line += kSquare) square(line, unit);
    // The last ones overlap those before.
    if (line < lines) square(lines - kSquare, unit);
  }
#endif
  for (; unit < units; ++unit) {
    for (int64_t line = 0; line < lines; ++line) {
      std::memcpy(to + unit * stride + line * unit_bytes, rows[line] + unit * unit_bytes, unit_bytes);
    }
  }
}

// Calls body(rows, units, done) for chunks of the units of one panel, of which `done` come before: rows[line] is where
// the line's units lie in a row, zeros where there are none.
template <typename S, typename E, int unit_depth, typename Source, typename Body>
inline void for_chunks(const Source& source, const Block& block, int64_t first, int64_t lines, int64_t padded,
                       Body body) {
  alignas(64) static thread_local E staged[kMostLines][kChunk];
  alignas(64) static constexpr char zeros[kChunk * sizeof(E)] = {};
  const char* rows[kMostLines];
  for (int64_t begin = 0; begin < block.units * unit_depth; begin += kChunk) {
    const int64_t chunk = std::min(kChunk, block.units * unit_depth - begin);
    const int64_t depth = std::max<int64_t>(0, std::min(chunk, block.depth - begin));
    for (int64_t line = 0; line < padded; ++line) {
      if (line >= lines || depth == 0) {
        rows[line] = zeros;
        continue;
      }
      S gathered[kChunk];
      S* here = gathered;
      if constexpr (std::is_same_v<S, E>) here = staged[line];
      const S* from = source.template row<S>(block.line + first + line, block.k + begin, depth, here);
      if (std::is_same_v<S, E> && depth == chunk) {
        rows[line] = reinterpret_cast<const char*>(from);
        continue;
      }
      if (static_cast<const void*>(from) != staged[line]) convert_row(from, staged[line], depth);
      std::memset(static_cast<void*>(staged[line] + depth), 0, size_t(chunk - depth) * sizeof(E));
      rows[line] = reinterpret_cast<const char*>(staged[line]);
    }
    body(rows, chunk / unit_depth, begin / unit_depth);
  }
}

// Panels of b, or of a for the instructions on vectors.
template <typename S, typename E, int unit_depth, typename Source>
void pack(const Source& source, const Block& block, void* panels) {
  if (!source.along_depth()) return pack_steps<S, E, unit_depth>(source, block, panels);
  constexpr int kUnitBytes = int(sizeof(E)) * unit_depth;
  block.for_panels([&](int64_t first, int64_t lines, int64_t padded) {
    char* panel = static_cast<char*>(panels) + first * block.units * kUnitBytes;
    for_chunks<S, E, unit_depth>(source, block, first, lines, padded,
                                 [&](const char* const* rows, int64_t units, int64_t done) {
                                   transpose<kUnitBytes>(rows, padded, units, panel + done * padded * kUnitBytes);
                                 });
  });
}

// Panels of a in tiles: a tile holds kTileUnits units of each of kTileRows lines, one line after the other.
template <typename S, typename E, int unit_depth, typename Source>
void pack_tiles(const Source& source, const Block& block, void* panels) {
  constexpr int kRowBytes = kTileUnits * 4;
  block.for_panels([&](int64_t first, int64_t lines, int64_t padded) {
    char* to = static_cast<char*>(panels) + first * block.units * 4;
    if (source.along_depth()) {
      for_chunks<S, E, unit_depth>(source, block, first, lines, padded,
                                   [&](const char* const* rows, int64_t units, int64_t) {
                                     for (int64_t unit = 0; unit < units; unit += kTileUnits) {
                                       for (int64_t line = 0; line < padded; ++line, to += kRowBytes) {
                                         std::memcpy(to, rows[line] + unit * 4, kRowBytes);
                                       }
                                     }
                                   });
      return;
    }
    for (int64_t unit = 0; unit < block.units; unit += kTileUnits) {
      alignas(64) char steps[kRowBytes * kTilePanelRows];
      const int64_t k = unit * unit_depth;
      const int64_t depth = std::max<int64_t>(0, std::min<int64_t>(block.depth - k, kTileUnits * unit_depth));
      const Block part{block.line + first, block.k + k, lines, depth, kTileUnits, padded, padded};
      pack_steps<S, E, unit_depth>(source, part, steps);
      for (int64_t line = 0; line < padded; line += kTileRows, to += kRowBytes * kTileRows) {
        const char* rows[kTileUnits];
        for (int i = 0; i < kTileUnits; ++i) rows[i] = steps + (i * padded + line) * 4;
        for (int row = 0; row < kTileRows; row += kSquare) {
          for (int i = 0; i < kTileUnits; i += kSquare)
            transpose_square(rows + i, kSquare, kSquare, row * 4, to + row * kRowBytes + i * 4, kRowBytes);
        }
      }
    }
  });
}

}  // namespace product

JAXDNN_ISA_END
