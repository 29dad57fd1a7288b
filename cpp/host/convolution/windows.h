// What windows see of an image, as a matrix that is nowhere in memory: a row is a place of a result, and has the
// channels of all taps of its window, one tap after the other.
//
//     place (image)      runs of its row
//     +-----------+
//     | a b c     |      [ a b c | d e f | g h i ]    each of some taps whose channels are neighbours in memory, or of
//     | d e f     |                                   one; elements outside of the image are zeros
//     | g h i     |
//     +-----------+
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "../product/format.h"

JAXDNN_ISA_BEGIN

namespace convolution {

constexpr int kAxes = 3;  // depth, row, column

// Where something is: a place's window in the image, or a run's first tap in the window. The offset is in elements.
struct Where {
  int64_t offset = 0;
  int64_t at[kAxes] = {};
};

// A source of panels (cpp/host/product/pack.h): lines are places and k is the element of a row, or the other way round.
struct Windows {
  const void* data;
  const Where* places;
  const Where* runs;
  int64_t length;      // of a run, in elements
  int64_t tap_length;  // and of one of its taps
  int64_t image[kAxes];
  bool transposed;  // whether places are steps
  void* steps;      // memory for as many rows as a unit has steps

  bool along_depth() const { return !transposed; }
  template <typename S>
  const S* row(int64_t line, int64_t k, int64_t count, S* here) const {
    return transposed ? gather(places[k], line, count, here) : gather(places[line], k, count, here);
  }
  template <typename S>
  S* staging(int64_t element) const {
    return static_cast<S*>(steps) + element;
  }
  template <typename S>
  void prefetch(int64_t, int64_t) const {}

 private:
  // Where a place's elements from `begin` on lie, `count` of them; at `here`, unless they are neighbours.
  template <typename S>
  const S* gather(const Where& place, int64_t begin, int64_t count, S* here) const {
    const Where* run = runs;
    if (begin >= length) {
      run += begin / length;
      begin %= length;
    }
    S* to = here;
    for (;; ++run, begin = 0) {
      const int64_t end = std::min(length, begin + count), column = place.at[2] + run->at[2];
      int64_t low = end, high = end;  // which exist
      if (inside(place, *run, 0) && inside(place, *run, 1)) {
        low = std::min(std::max(begin, -column * tap_length), end);
        high = std::max(low, std::min(end, (image[2] - column) * tap_length));
      }
      const S* from = static_cast<const S*>(data) + (place.offset + run->offset);
      if (low == begin && high == end) {
        if (to == here && end == begin + count) return from + begin;
        product::convert_row(from + begin, to, end - begin);
      } else {
        std::fill(to, to + (low - begin), S{});
        product::convert_row(from + low, to + (low - begin), high - low);
        std::fill(to + (high - begin), to + (end - begin), S{});
      }
      to += end - begin;
      count -= end - begin;
      if (count == 0) return here;
    }
  }

  bool inside(const Where& place, const Where& run, int axis) const {
    return uint64_t(place.at[axis] + run.at[axis]) < uint64_t(image[axis]);
  }
};

// Rows of a, `stride` bytes apart.
struct Spaced {
  const char* data;
  int64_t stride;
};

// Where so many lines lie from k on, `depth` elements each: in the image, where they are equally far apart, or else at
// `here`, which has room for one more.
template <typename S, typename E, int unit_depth>
Spaced gather_rows(const Windows& source, int64_t line, int64_t lines, int64_t k, int64_t depth, void* here) {
  constexpr bool kSame = std::is_same_v<S, E>;
  const int64_t length = (depth + unit_depth - 1) / unit_depth * unit_depth;
  E* const staged = static_cast<E*>(here);
  S* const converted = reinterpret_cast<S*>(staged + lines * length);
  const E* rows[product::kPanelRows];
  bool spaced = length == depth;
  for (int64_t i = 0; i < lines; ++i) {
    E* const own = staged + i * length;
    if constexpr (kSame) {
      rows[i] = source.row<S>(line + i, k, depth, own);
    } else {
      product::convert_row(source.row<S>(line + i, k, depth, converted), own, depth);
      rows[i] = own;
    }
    spaced = spaced && (i == 0 || rows[i] - rows[i - 1] == rows[1] - rows[0]);
  }
  if (spaced) return {reinterpret_cast<const char*>(rows[0]), lines > 1 ? (rows[1] - rows[0]) * int64_t(sizeof(E)) : 0};
  for (int64_t i = 0; i < lines; ++i) {
    E* const own = staged + i * length;
    if (rows[i] != own) product::convert_row(rows[i], own, depth);
    std::fill(own + depth, own + length, E{});
  }
  return {reinterpret_cast<const char*>(staged), length * int64_t(sizeof(E))};
}

// How windows become panels of a, rows of a, and panels of b.
struct Gathers {
  void (*a)(const Windows& source, const product::Block& block, void* panels);
  Spaced (*rows)(const Windows& source, int64_t line, int64_t lines, int64_t k, int64_t depth, void* here);
  void (*b)(const Windows& source, const product::Block& block, void* panels);
};

template <typename S, typename E, int unit_depth>
constexpr Gathers gathers() {
  return {product::pack<S, E, unit_depth>, gather_rows<S, E, unit_depth>, product::pack<S, E, unit_depth>};
}

inline Gathers find_gathers(product::Dtype dtype, const product::Format& format) {
  using product::Dtype;
  switch (dtype) {
    case Dtype::float64:
      return gathers<double, double, 1>();
    case Dtype::float16:
      return gathers<float16, float, 1>();
    case Dtype::bfloat16:
      if (format.tiles)
        return {product::pack_tiles<bfloat16, bfloat16, 2>, nullptr, product::pack<bfloat16, bfloat16, 2>};
      return format.unit_depth == 2 ? gathers<bfloat16, bfloat16, 2>() : gathers<bfloat16, float, 1>();
    default:
      return gathers<float, float, 1>();
  }
}

}  // namespace convolution

JAXDNN_ISA_END
