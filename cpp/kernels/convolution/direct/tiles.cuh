// The tiles of a result that a block works through, row by row, and the rows of arrays that it copies for that.
//
// A row of a tile is some neighbouring places. Rows whose taps lie kSpread apart are classes, each of which has tiles
// of its own, as if the class were an image: so a row of the source is needed by neighbouring rows of a tile alone. The
// steps of a tile are its rows and kOverlap more, in which windows reach past it.
#pragma once

#include "convolution/axis.cuh"
#include "core/vector.cuh"
#include "ptx/async.cuh"

namespace jaxdnn {

/// How many tiles lie along each axis, from the innermost to the outermost one; and the rows of a tile.
struct DirectTiles {
  int columns = 1, rows = 1, depths = 1;
  int height = 1;
};

/// A tile, of `left` ones, and a step of it.
template <int kClasses, int kOverlap>
struct DirectCursor {
  DirectTiles tiles;
  int places;  // rows of the result
  int column, row, row_class, depth, n;
  int step = 0, left;
  int rows;  // of the result in this tile: none, if its class ends before

  __device__ __forceinline__ DirectCursor(const DirectTiles& tiles, int places, unsigned first, int count)
      : tiles(tiles), places(places), left(count) {
    column = first % tiles.columns;
    first /= tiles.columns;
    row = first % tiles.rows;
    first /= tiles.rows;
    row_class = first % kClasses;
    first /= kClasses;
    depth = first % tiles.depths;
    n = first / tiles.depths;
    count_rows();
    if (left > 0 && rows == 0) next_tile();
  }

  __device__ __forceinline__ void count_rows() {
    const int all = (places - row_class + kClasses - 1) / kClasses - row * tiles.height;
    rows = all < 0 ? 0 : all < tiles.height ? all : tiles.height;
  }

  /// The first row of this tile.
  __device__ __forceinline__ int first_row() const { return row_class + row * tiles.height * kClasses; }

  __device__ __forceinline__ bool more_steps() const { return rows > 0 && step < rows + kOverlap; }

  /// The next tile that has rows.
  __device__ __forceinline__ void next_tile() {
    step = 0;
    do {
      --left;
      if (++column != tiles.columns) continue;
      column = 0;
      if (++row == tiles.rows) {
        row = 0;
        if (++row_class == kClasses) {
          row_class = 0;
          if (++depth == tiles.depths) {
            depth = 0;
            ++n;
          }
        }
      }
      count_rows();
    } while (rows == 0 && left > 0);
  }
};

/// Which of the slots, or places, a step takes: all of them, which costs nothing, or some.
struct DirectEvery {
  static __device__ __forceinline__ bool has(int) { return true; }
};
struct DirectSome {
  int least, most;
  __device__ __forceinline__ bool has(int i) const { return i >= least && i <= most; }
};

/// An array whose channels are dense. Strides count elements.
template <class T>
struct DirectArray {
  const T* data = nullptr;
  long long batch = 0, n = 0, depth = 0, row = 0;
  int column = 0;
};

/// The places of an array that a step copies: some rows of some planes, from the first place on, of which those outside
/// of the array are zeros.
struct DirectBox {
  int depth, row, column;
  int depths, rows, columns;  // of the array
};

/// kPlanes x kRows x kColumns places, kChannels of each, as [place][channel] in shared memory. The block's threads copy
/// kVector neighbours at a time.
template <class T, int kPlanes, int kRows, int kColumns, int kChannels, int kVector, int kThreads>
struct DirectRows {
  static constexpr int kRow = kColumns * kChannels, kSize = kPlanes * kRows * kRow;
  static constexpr int kStageBytes = (kSize * static_cast<int>(sizeof(T)) + 15) / 16 * 16;
  static constexpr int kBytes = kVector * static_cast<int>(sizeof(T));
  static constexpr int kAlong = kChannels / kVector, kOfRow = kRow / kVector, kOfAll = kSize / kVector;
  static constexpr int kPasses = (kOfRow + kThreads - 1) / kThreads;
  // Of a thread: what is less than 4 bytes passes through registers, so many at a time, whose loads are in flight
  // together.
  static constexpr int kBatch = kOfAll < 8 * kThreads ? (kOfAll + kThreads - 1) / kThreads : 8;
  static_assert(kChannels % kVector == 0, "a place is whole vectors");

  /// `array` is the block's first channel, of `channels` that are left, at place 0 of an image. Planes and rows of the
  /// box lie `plane_step` and `row_step` apart.
  static __device__ __forceinline__ void start(T* to, const DirectArray<T>& array, int channels, const DirectBox& box,
                                               int plane_step, int row_step) {
    const auto row_there = [&](int depth, int row) {
      return static_cast<unsigned>(row) < static_cast<unsigned>(box.rows) &&
             static_cast<unsigned>(depth) < static_cast<unsigned>(box.depths);
    };
    const auto in_row = [&](int column, int channel) {
      return static_cast<unsigned>(column) < static_cast<unsigned>(box.columns) && channel < channels;
    };
    if constexpr (kBytes >= 4) {
      const unsigned shared = ptx::cvta_to_shared(to);
#pragma unroll 1
      for (int line = 0; line < kPlanes * kRows; ++line) {
        const int depth = box.depth + line / kRows * plane_step, row = box.row + line % kRows * row_step;
        const bool there = row_there(depth, row);
        const T* const from = array.data + depth * array.depth + row * array.row;
#pragma unroll(kPasses <= 4 ? kPasses : 1)
        for (int pass = 0; pass < kPasses; ++pass) {
          const int i = pass * kThreads + threadIdx.x;
          if (kOfRow % kThreads != 0 && i >= kOfRow) break;
          const int channel = i % kAlong * kVector, column = box.column + i / kAlong;
          ptx::cp_async<kBytes>(shared + (line * kRow + i * kVector) * static_cast<int>(sizeof(T)),
                                from + (static_cast<long long>(column) * array.column + channel),
                                there && in_row(column, channel) ? kBytes : 0);
        }
      }
    } else {
#pragma unroll 1
      for (int first = threadIdx.x; first < kOfAll; first += kBatch * kThreads) {
        Vector<T, kVector> values[kBatch];
#pragma unroll
        for (int one = 0; one < kBatch; ++one) {
          const int i = first + one * kThreads, line = i / kOfRow, of_row = i % kOfRow;
          const int depth = box.depth + line / kRows * plane_step, row = box.row + line % kRows * row_step;
          const int channel = of_row % kAlong * kVector, column = box.column + of_row / kAlong;
          values[one].clear();
          if (i < kOfAll && row_there(depth, row) && in_row(column, channel)) {
            values[one].load(array.data + (depth * array.depth + row * array.row +
                                           static_cast<long long>(column) * array.column + channel));
          }
        }
#pragma unroll
        for (int one = 0; one < kBatch; ++one) {
          const int i = first + one * kThreads;
          if (i >= kOfAll) break;
#pragma unroll
          for (int j = 0; j < kVector; ++j) to[i * kVector + j] = values[one].get(j);
        }
      }
    }
  }
};

}  // namespace jaxdnn
