// A convolution's arrays as matrices that no memory holds: their elements are gathered from where they lie.
//
//   result    rows of D              columns    summed over                       A of                B of
//   output    n, places              k          the filter's places, c            the image           the filter
//   image     n, places              c          the filter's places, k            the output          the filter
//   filter    the filter's places, c k          n, places of the output           the image           the output
//
// All are of one group. An index of n and places is a `Place`, one of the filter's places and a channel a `Tap`; a
// place and a tap together are an element of the array that windows slide over, or none.
#pragma once

#include "convolution/axis.cuh"
#include "core/affine.cuh"
#include "product/simt/tile.cuh"

namespace jaxdnn {

/// An array of which all dimensions have strides, in elements, but the channels of a group, which are dense.
template <class T>
struct ConvolutionArray {
  const T* data = nullptr;
  long long batch = 0, n = 0, depth = 0, row = 0, column = 0, group = 0;
};

/// One of n, and a place of the array that is walked through.
struct Place {
  int n, depth, row, column;
};

/// A place of the filter, and a channel of a group.
struct Tap {
  int depth, row, column, channel;
};

/// How indices are taken apart; axes are `WindowAxis`.
template <class Depth, class Row, class Column>
struct ConvolutionWindow {
  Depth depths;
  Row rows;
  Column columns;
  Divisor depth_divisor, row_divisor, column_divisor;  // by the places that are walked through
  Divisor channel_divisor;
  int channels = 1;  // of a tap
  static constexpr int kPlaces = Depth::kPlaces * Row::kPlaces * Column::kPlaces;

  __device__ __forceinline__ Place place(unsigned index) const {
    const unsigned rows_of = column_divisor.quotient(index), depths_of = row_divisor.quotient(rows_of);
    const unsigned n = depth_divisor.quotient(depths_of);
    return {static_cast<int>(n), static_cast<int>(depths_of - n * depths.result),
            static_cast<int>(rows_of - depths_of * rows.result), static_cast<int>(index - rows_of * columns.result)};
  }

  __device__ __forceinline__ Tap tap(unsigned index) const {
    const unsigned place = channel_divisor.quotient(index);
    return {static_cast<int>(place / (Row::kPlaces * Column::kPlaces)),
            static_cast<int>(place / Column::kPlaces % Row::kPlaces), static_cast<int>(place % Column::kPlaces),
            static_cast<int>(index - place * channels)};
  }

  /// The channel of the place that a place and a tap meet at, or null.
  template <class T>
  __device__ __forceinline__ const T* meeting(const ConvolutionArray<T>& array, const Place& place,
                                              const Tap& tap) const {
    const int depth = depths.meeting(place.depth, Depth::flip(tap.depth));
    const int row = rows.meeting(place.row, Row::flip(tap.row));
    const int column = columns.meeting(place.column, Column::flip(tap.column));
    if (depth < 0 || row < 0 || column < 0) return nullptr;
    return array.data + (place.n * array.n + depth * array.depth + row * array.row + column * array.column) +
           tap.channel;
  }
};

/// A tile of a gathered matrix, on its way through registers to shared memory.
template <class T, class Element, int kExtent, int kDepth, int kThreads, bool kAlong, int kVector>
struct GatheredTile : SimtLayout<T, Element, kExtent, kExtent, kDepth, kThreads, kAlong, kVector> {
  using Layout = SimtLayout<T, Element, kExtent, kExtent, kDepth, kThreads, kAlong, kVector>;

  Vector<T, kVector> waiting[Layout::kPasses];

  /// Starts to load what `locate(along, k)` points to: a vector of neighbours along M or N, or along K, or zeros.
  template <class Locate>
  __device__ __forceinline__ void start(const Locate& locate) {
#pragma unroll
    for (int i = 0; i < Layout::kPasses; ++i) {
      const int across = Layout::first_row() + i * Layout::kPassRows;
      const T* const from = kAlong ? locate(Layout::run(), across) : locate(across, Layout::run());
      waiting[i].clear();
      if (from != nullptr) waiting[i].load(from);
    }
  }

  __device__ __forceinline__ void finish(Element* tile) const {
    const int row = Layout::first_row(), run = Layout::run();
    Layout::put(waiting, tile, kAlong ? Layout::offset_of(run, row) : Layout::offset_of(row, run));
  }
};

}  // namespace jaxdnn
