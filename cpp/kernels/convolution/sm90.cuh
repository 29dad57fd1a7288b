// Convolutions on Hopper's tensor cores, as products of matrices that are nowhere in memory (implicit GEMM): the image
// is read by TMA's im2col mode, place by place of its windows. All but the copies is product/sm90.cuh.
//
//   an output       rows are its places, of all images one after the other; columns are its channels. K runs through
//                   the taps of the window, and at each through the image's channels, a stage (128 bytes) at a time:
//                       A's stage    rows' places of the image at one tap, each 128 bytes of channels: one im2col load
//                       B's stage    the filter's matrix [c, k] at that tap
//                   Of an image with fewer channels a stage has several taps, 64 or 32 bytes each; of groups with
//                   fewer, the channels of several, each of which is multiplied by its own columns (core/tile.cuh)
//   swapped         the transposed product: rows of tiles are channels, and their columns places. A's stage is the
//                   filter's, and B's the image's
//   an image        likewise. With kBlocks rows are blocks of an image's places on two lines: the columns are those of
//                   one line by their channels, and each line has a B of its own. A tap is a place of the output that a
//                   block meets, where B's columns are neighbouring rows of the filter, or zeros past its ends
//   a filter        rows are taps of the window and at each the image's channels, in chunks of 64 (or 32, 16); columns
//                   are the output's channels. K runs through the output's places:
//                       A's stage    a chunk: 64 places of the image at the chunk's tap, each 64 channels
//                       B's stage    the same places of the output
//                   Groups that share a chunk are multiplied by each other too, which product/split.cuh leaves out
//
// A window's place in the image is linear in the output's: o * stride + start; and each tap lies `step` further. So the
// input gradient of a convolution is an output too, of an image that is the output's gradient. With strides, places
// that are the same modulo `period` meet the same taps, every `period`th one: each such phase is an output by itself,
// of which a window has fewer taps, and all are one launch:
//
//   stride 2, window 3      output's gradient     a     b     c
//                           image's gradient    0  1  2  3  4         phase 0: taps 0 and 2, phase 1: tap 1
//
//   map of an image       | channels, places, images | between the places where the first window and the last one
//   begin: a column of places        o = 0 1 2 3 4
//                             | a b c d |           after the last of a line comes the first of the next one, after the
//                             | e f g h |           last line the first of the next image. What lies outside of the
//                                                   image is zero: padding takes no memory
//
// Bytes: image, filter and output, once each, from memory; from L2 every tile reads its part of the image once for each
// tap. Flops: 2 a place, tap, c and k. The tensor cores bound it with 128 channels and more; with fewer, L2 and memory.
#pragma once

#include "core/affine.cuh"
#include "product/sm90.cuh"

namespace jaxdnn {

/// Places that meet the same taps, in one dimension.
struct ConvolutionPhase {
  int taps = 1;
  int offset = 0;  // of the first in the image, from where the window begins
  int first = 0;   // which of the filter's it is
};

/// One dimension of places: of a phase's, that are rows, or of those that are summed over; and of the window.
template <int kPhases>
struct ConvolutionAxis {
  int places = 1;
  Divisor divisor;                      // by `places`
  int stride = 1, start = 0, step = 1;  // of windows and taps, in the image
  int filter = 1, filter_step = 1;      // how many taps a filter has, and from one of a phase to the next
  int result = 1, period = 1;           // how many places an output has, and of how many phases
  ConvolutionPhase phases[kPhases];

  __device__ __forceinline__ ConvolutionPhase phase(int index) const {
    ConvolutionPhase found = phases[0];
#pragma unroll
    for (int i = 1; i < kPhases; ++i) {
      if (i == index) found = phases[i];
    }
    return found;
  }
};

/// A column of places of an image, from one on.
template <int kSpatial>
struct ImagePlaces {
  int coordinate[kSpatial], image;

  /// Of place `index` of all images.
  template <class Axis>
  __device__ __forceinline__ ImagePlaces(const Axis (&axes)[kSpatial], int index, int first_image) {
#pragma unroll
    for (int i = 0; i < kSpatial; ++i) {
      const int quotient = static_cast<int>(axes[i].divisor.quotient(index));
      coordinate[i] = (index - quotient * axes[i].places) * axes[i].stride + axes[i].start;
      index = quotient;
    }
    image = first_image + index;
  }

  /// Loads the part of one of `kSharers` blocks: the places from this one on, `offset` further.
  template <int kSharers>
  __device__ __forceinline__ void load(const TensorMap* map, unsigned destination, unsigned barrier,
                                       unsigned short blocks, int channel,
                                       const unsigned short (&offset)[kSpatial]) const {
    if constexpr (kSharers > 1) {
      ptx::cp_async_bulk_tensor_load_im2col_multicast(destination, map, barrier, blocks, channel, coordinate, image,
                                                      offset);
    } else {
      ptx::cp_async_bulk_tensor_load_im2col(destination, map, barrier, channel, coordinate, image, offset);
    }
  }
};

/// Which phase of each dimension the phase `index` is.
template <int kSpatial, class Axis>
__device__ __forceinline__ void split_phase(const Axis (&axes)[kSpatial], int index, int (&phase)[kSpatial]) {
#pragma unroll
  for (int i = 0; i < kSpatial; ++i) {
    const int next = index / axes[i].period;
    phase[i] = index - next * axes[i].period;
    index = next;
  }
}

/// A line of channels at a tap: those of one tap come one after the other, then those of the next one.
template <int kSpatial, int kLineElements>
struct TapWalk {
  int channel = 0;  // past the last tap, one that no image has
  int tap[kSpatial];

  /// To line number `index`. `taps(i)` is how many there are in dimension i.
  template <class Taps>
  __device__ __forceinline__ void go_to(int index, int channels, const Taps& taps) {
    const int lines = (channels + kLineElements - 1) / kLineElements;
    int number = index / lines;
    channel = (index - number * lines) * kLineElements;
    bool none = false;
#pragma unroll
    for (int i = 0; i < kSpatial; ++i) {
      none |= taps(i) == 0;
      const int count = taps(i) == 0 ? 1 : taps(i), next = number / count;
      tap[i] = number - next * count;
      number = next;
    }
    if (none || number > 0) channel = -kLineElements;
  }

  template <class Taps>
  __device__ __forceinline__ void advance(int channels, const Taps& taps) {
    if (channel < 0) return;
    channel += kLineElements;
    if (channel < channels) return;
    channel = 0;
#pragma unroll
    for (int i = 0; i < kSpatial; ++i) {
      if (++tap[i] < taps(i)) return;
      tap[i] = 0;
    }
    channel = -kLineElements;
  }

  __device__ __forceinline__ bool inside() const { return channel >= 0; }
};

/// The copies of one tile of an output; by one thread.
template <class Call>
struct OutputLoads {
  using ATile = typename Call::Stage::ATile;
  using BTile = typename Call::Stage::BTile;
  static constexpr bool kSwapped = Call::Config::kSwapped;
  using ImageTile = Select<kSwapped, BTile, ATile>;
  using FilterTile = Select<kSwapped, ATile, BTile>;
  static constexpr int kImageAt = kSwapped ? ATile::kBytes : 0, kFilterAt = kSwapped ? 0 : ATile::kBytes;
  static constexpr int kSpatial = Call::kSpatial, kSharers = Call::Config::kClusterN;
  static_assert(!kSwapped || kSharers * Call::Config::kClusterM == 1, "blocks share what lies along their tiles' rows");

  const Call& call;
  const typename Call::Cluster& cluster;
  ImagePlaces<kSpatial> places;
  ConvolutionPhase phases[kSpatial];
  int first_channel;  // of the group, in the image; and where channels run along K in the filter, there too
  int column;         // of the filter
  int first_matrix;   // of the filter, at its first tap
  TapWalk<kSpatial, ImageTile::kLineElements> walk;

  __device__ __forceinline__ OutputLoads(const Call& call, const typename Call::Cluster& cluster, int tile_row,
                                         int tile_column, int matrix, int first_stage)
      : call(call),
        cluster(cluster),
        places(call.axes, (kSwapped ? tile_column : tile_row) + cluster.column * ImageTile::kLines,
               matrix / call.phases * call.image_batch),
        column(kSwapped ? tile_row : tile_column),
        first_matrix(matrix / call.phases * call.filter_batch) {
    const int group = column / call.group_columns;
    first_channel = group * call.channels;
    if constexpr (!FilterTile::kRunsAlongExtent) column -= group * call.group_columns;
    int phase[kSpatial];
    split_phase(call.axes, matrix % call.phases, phase);
#pragma unroll
    for (int i = 0; i < kSpatial; ++i) phases[i] = call.axes[i].phase(phase[i]);
    walk.go_to(first_stage * Call::kParts, call.channels, [&](int i) { return phases[i].taps; });
  }

  /// Starts those of the next stage, at shared address `stage`.
  __device__ __forceinline__ void load(int, unsigned stage, unsigned full) {
#pragma unroll
    for (int part = 0; part < Call::kParts; ++part) {
      unsigned short offset[kSpatial];
      int matrix = 0;
#pragma unroll
      for (int i = kSpatial - 1; i >= 0; --i) {
        offset[i] = static_cast<unsigned short>(phases[i].offset + walk.tap[i] * call.axes[i].step);
        matrix = matrix * call.axes[i].filter + phases[i].first + walk.tap[i] * call.axes[i].filter_step;
      }
      // Past the last tap all is zero: other images, or filters, may follow, with numbers that zero times is none.
      const int of_image = walk.inside() ? first_channel + walk.channel : walk.channel;
      int row = column;
      if constexpr (Call::Config::kBlocks) row += call.filter_row + walk.tap[0] * call.filter_row_step;
      const unsigned line = part * ImageTile::kPartBytes + cluster.column * ImageTile::kLines * ImageTile::kLine;
      places.template load<kSharers>(kSwapped ? call.b[0] : call.a, stage + kImageAt + line, full, cluster.row_mask(),
                                     of_image, offset);
#pragma unroll
      for (int i = 0; i < Call::kAccumulators; ++i) {
        const int before = i + part * (Call::kAccumulators - 1);  // parts of other matrices
        FilterTile::template load<Call::kParts>(
            kSwapped ? call.a : call.b[i], stage + kFilterAt + before * FilterTile::kPartBytes, full, cluster.row,
            cluster.column_mask(), FilterTile::kRunsAlongExtent ? walk.channel : of_image, row,
            walk.inside() ? first_matrix + matrix + i : -1, part);
      }
      walk.advance(call.channels, [&](int i) { return phases[i].taps; });
    }
  }
};

/// The copies of one tile of a filter; by one thread.
template <class Call>
struct FilterLoads {
  using ATile = typename Call::Stage::ATile;
  using BTile = typename Call::Stage::BTile;
  static constexpr int kSpatial = Call::kSpatial, kSharers = Call::Config::kClusterN;
  static constexpr int kWidth = ATile::kLineElements;

  const Call& call;
  const typename Call::Cluster& cluster;
  TapWalk<kSpatial, kWidth> first_chunk;
  int first_channel, column, batch, first_place;

  __device__ __forceinline__ FilterLoads(const Call& call, const typename Call::Cluster& cluster, int row, int column,
                                         int batch, int first_stage)
      : call(call),
        cluster(cluster),
        first_channel(column / call.group_columns * call.channels),
        column(column),
        batch(batch),
        first_place(first_stage * ATile::kDepth) {
    first_chunk.go_to(row / kWidth, call.channels, [&](int i) { return call.axes[i].filter; });
  }

  /// Starts those of stage `index`, at shared address `stage`.
  __device__ __forceinline__ void load(int index, unsigned stage, unsigned full) {
    const int first = first_place + index * ATile::kDepth, line = cluster.column * ATile::kLines;
    const ImagePlaces<kSpatial> places(call.axes, first + line, batch * call.image_batch);
    auto walk = first_chunk;
#pragma unroll 1  // the producer has few registers
    for (int chunk = 0; chunk < Call::Config::kTileM / kWidth; ++chunk) {
      unsigned short offset[kSpatial];
#pragma unroll
      for (int i = 0; i < kSpatial; ++i) {
        const auto& axis = call.axes[i];
        offset[i] = static_cast<unsigned short>((walk.tap[i] - axis.phases[0].first) * axis.filter_step * axis.step);
      }
      places.template load<kSharers>(call.a, stage + chunk * ATile::kChunkBytes + line * ATile::kLine, full,
                                     cluster.row_mask(), walk.inside() ? first_channel + walk.channel : walk.channel,
                                     offset);
      walk.advance(call.channels, [&](int i) { return call.axes[i].filter; });
    }
    BTile::load(call.b[0], stage + ATile::kBytes, full, cluster.row, cluster.column_mask(), first, column,
                batch * call.b_batched);
  }
};

/// Rows of a phase's tiles are places of that phase.
template <class Call>
struct PhaseRows : ScatteredRows {
  const Call& call;
  int phase[Call::kSpatial];

  __device__ __forceinline__ int operator()(int row) const {
    int place = 0, size = 1;
    bool outside = false;
#pragma unroll
    for (int i = 0; i < Call::kSpatial; ++i) {
      const auto& axis = call.axes[i];
      const int quotient = static_cast<int>(axis.divisor.quotient(row));
      const int own = (row - quotient * axis.places) * axis.period + phase[i];
      outside |= own >= axis.result;
      place += own * size;
      size *= axis.result;
      row = quotient;
    }
    return outside ? kNoRow : place + row * size;
  }

  static constexpr int kNoRow = 0x7fffffff;  // beyond the last one
};

/// Rows of a filter's tiles are channels in whole chunks.
template <class Call>
struct ChunkRows : ScatteredRows {
  const Call& call;

  __device__ __forceinline__ int operator()(int row) const {
    const int padded = call.lines() * Call::Stage::ATile::kLineElements, tap = row / padded,
              channel = row - tap * padded;
    return channel < call.channels ? tap * call.channels + channel : PhaseRows<Call>::kNoRow;
  }
};

/// A stage, of a tap's lines the last one of which has fewer multiplies: it ends with padding.
template <class Config>
struct TapStage : TileStage<Config> {
  using TileStage<Config>::TileStage;

  template <class Accumulators>
  __device__ __forceinline__ void multiply(Accumulators& accumulators, int stage, int index, bool accumulate) const {
    if (Config::kLines > 1 && index % Config::kLines == Config::kLines - 1) {
      TileStage<Config>::template multiply<Config::kLastSteps>(accumulators, stage, index, accumulate);
    } else {
      TileStage<Config>::multiply(accumulators, stage, index, accumulate);
    }
  }
};

/// Config has kSpatial, kPhases (of a dimension, at most), kStraight (whether the result's rows are those of tiles) and
/// kBlocks besides what a product's has; and kLines, of a tap, each a stage, if the last one has kLastSteps multiplies
/// and not kSteps, else 1. An M-major A is the image of a filter's gradient, or the filter of a swapped product, whose
/// columns are places.
template <class Config>
struct ConvolutionSm90 : ProductSm90<Config, TapStage<Config>> {
  static constexpr bool kToFilter = Config::kMMajorA && !Config::kSwapped;
  using Loads = Select<kToFilter, FilterLoads<ConvolutionSm90>, OutputLoads<ConvolutionSm90>>;
  static constexpr int kSpatial = Config::kSpatial;
  static constexpr int kParts = kToFilter ? 1 : kDepthBytes / Config::kLine;  // taps, or chunks, of a stage
  // A place in the image and in the window takes the producer more registers than a place in a matrix.
  static constexpr int kProducerRegisters = 40;

  ConvolutionAxis<Config::kPhases> axes[kSpatial];  // the innermost first
  int phases = 1;                                   // of all dimensions
  int rows = 0;                                     // of tiles, in a phase
  int channels = 0;                                 // of the image, in a group
  int group_columns = 0;
  int filter_row = 0,
      filter_row_step = 0;                // of a block's first column, at the first tap of a line, and to the next one
  int image_batch = 0, filter_batch = 0;  // images, and the filter's matrices, from one convolution to the next

  /// How many lines the channels of a group take.
  __device__ __forceinline__ int lines() const {
    constexpr int kChannels = ConvolutionSm90::Stage::ATile::kLineElements;
    return (channels + kChannels - 1) / kChannels;
  }

  __device__ __forceinline__ int tiled_rows() const { return rows; }
  __device__ __forceinline__ int tiled_matrices() const { return this->batches * phases * this->splits; }

  __device__ __forceinline__ int stages(int matrix, int most) const {
    if constexpr (Config::kPhases == 1) return most;
    int phase[kSpatial], found = lines();
    split_phase(axes, matrix % phases, phase);
#pragma unroll
    for (int i = 0; i < kSpatial; ++i) found *= axes[i].phase(phase[i]).taps;
    found = (found + kParts - 1) / kParts;
    return found > 0 ? found : 1;  // one of zeros, where no tap is met
  }

  __device__ __forceinline__ auto result_rows(int matrix) const {
    if constexpr (Config::kStraight) {
      return MatrixRows<Config>{};
    } else if constexpr (kToFilter) {
      return ChunkRows<ConvolutionSm90>{{}, *this};
    } else {
      PhaseRows<ConvolutionSm90> found{{}, *this, {}};
      split_phase(axes, matrix % phases, found.phase);
      return found;
    }
  }

  __device__ __forceinline__ int result_matrix(int matrix) const {
    return Config::kPhases == 1 ? matrix : matrix / phases;
  }
};

template <class Config>
__device__ __forceinline__ void convolution_sm90(const ConvolutionSm90<Config>& call) {
  product_sm90(call);
}

}  // namespace jaxdnn
