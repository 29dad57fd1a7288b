// Convolutions of images with few channels on Hopper's tensor cores: what one line of a window covers lies together in
// memory, taps by channels, so lines of the image are loaded as they are, and a warp group picks its operand from them.
// All but that is product/sm90.cuh. Fewer channels than 16 bytes are no line that im2col could load.
//
//   an output       rows are its places, in segments of 16 of one line; columns are its channels. All of K is a stage:
//                   the lines of a window, the elements of each padded to groups of 8
//                       A            a segment, which is a warp's rows: the lines of the image that its windows cover
//                       B's tile     the filter, with zeros where K is padded
//   a filter        rows are lines of the window and their elements, padded likewise; columns are channels of the
//                   output. K runs through segments of places, kSegments a stage
//                       A            a segment: the lines of the image that its windows cover
//                       B's tile     the same places of the output
//
//   a segment, 3 channels, stride 2, a window of 7     | x x x|x x x|x x x|... one line of 15 strides and a window
//                                           place 0    |<--- 21 elements --->|
//                                           place 1            |<--- 21 elements --->|
//
// The tensor cores take A from registers. Of an output a register is a pair of neighbours of a line, so one load where
// places are an even number of elements apart, and two where they are not. Of a filter the pair is of two places, and
// two loads. Neighbouring threads read neighbouring words, or the same.
//
// TMA starts at multiples of 16 bytes, so a segment is loaded from up to 7 elements before its first window on;
// segments are whole multiples apart. Where that has windows begin in the middle of a word, one element more leads each
// line.
//
// Where K is padded, an element of the image may be no number that zero times is zero. So it is not used: padding of
// lines is cut off of the registers, and so are the places past the end of a line.
//
//   shared memory   a stage is | B's tile | segment 0: line 0, line 1, ... | segment 1 | ...
//
// Bytes: image, filter and output, once each, from memory, which bounds it; from L2 a tile's lines, and for every tile
// the filter. Flops: 2 a place, column and padded element of a window.
#pragma once

#include "convolution/sm90.cuh"

namespace jaxdnn {

/// The lines of the image that the windows of 16 neighbouring places cover. Config has kLines and kElements of a
/// window, kPlaceStep, the elements from one place's to the next one's, kEarly, those that are loaded before the first
/// window, and kLead, those before each window that count as its own.
template <class Config>
struct Segment {
  static constexpr int kPlaces = 16;
  static constexpr int kOfLine = Config::kLead + Config::kElements;         // of a window, elements
  static constexpr int kGroups = (kOfLine + 7) / 8, kPadded = 8 * kGroups;  // of a window's line
  static constexpr int kFirst = Config::kEarly - Config::kLead;             // element of a line
  // From line to line, elements: boxes are whole multiples of 128 bytes.
  static constexpr int kPitch =
      (Config::kEarly + (kPlaces - 1) * Config::kPlaceStep + Config::kElements + 63) / 64 * 64;
  static constexpr int kBytes = Config::kLines * kPitch * 2;
};

/// Where a segment is. Each lane of the producer's warp finds one of its own, since one thread that went from one to
/// the next would not keep up with the tensor cores.
template <class Call>
struct SegmentPlace {
  const Call& call;
  int place[3], image;
  int line;  // of places, in all images

  /// That begins at place `index` of all images, the first of which is `first_image`.
  __device__ __forceinline__ SegmentPlace(const Call& call, int index, int first_image) : call(call) {
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      const int quotient = static_cast<int>(call.axes[i].divisor.quotient(index));
      place[i] = index - quotient * call.axes[i].places;
      index = quotient;
      if (i == 0) line = quotient;
    }
    image = first_image + index;
  }

  /// Starts the copy of the segment's lines of an image.
  __device__ __forceinline__ void load(unsigned destination, unsigned full, int image) const {
    int at[3];
#pragma unroll
    for (int i = 0; i < 3; ++i) at[i] = place[i] * call.axes[i].stride + call.axes[i].start;
    ptx::cp_async_bulk_tensor_load(destination, call.a, full, at[0] * call.channels - Call::Config::kEarly, at[1],
                                   at[2], image);
  }
};

/// A pair of neighbouring elements.
template <bool kWord>
__device__ __forceinline__ unsigned load_pair(unsigned address) {
  if constexpr (kWord) {
    unsigned pair;
    ptx::ld_shared<4>(&pair, address);
    return pair;
  } else {
    unsigned short low, high;
    ptx::ld_shared(low, address);
    ptx::ld_shared(high, address + 2);
    return low | static_cast<unsigned>(high) << 16;
  }
}

/// The stage of an output's tile.
template <class Config>
struct WindowStage {
  using Lines = Segment<Config>;
  static constexpr int kGroups = Config::kLines * Lines::kGroups;
  static constexpr int kSteps = (kGroups + 1) / 2, kDepth = 16 * kSteps;
  static constexpr bool kWords = Config::kPlaceStep % 2 == 0 && Lines::kFirst % 2 == 0;  // pairs are
  // A step is two groups, so an odd one is followed by a line of zeros.
  static constexpr int kFilterLines = Config::kLines + kGroups % 2;
  using BTile = RowsOfB<typename Config::B, Config::kTileN, kFilterLines * Lines::kPadded>;
  static constexpr int kBytes = BTile::kBytes + Config::kTileM / Lines::kPlaces * Lines::kBytes;
  static constexpr int kStride = (kBytes + 1023) / 1024 * 1024;

  unsigned long long b;
  unsigned lines;        // where the thread's first pair is
  unsigned first, last;  // what there is of its pair in a line's first group, and in its last

  template <class Call>
  __device__ __forceinline__ WindowStage(const Call&, unsigned stages, int first_row) : b(BTile::descriptor(stages)) {
    const int warp = threadIdx.x / 32 % 4, row = threadIdx.x % 32 / 4, pair = 2 * (threadIdx.x % 4);
    const int left = Lines::kOfLine - 8 * (Lines::kGroups - 1) - pair;
    const int segment = first_row / Lines::kPlaces + warp;
    lines = stages + BTile::kBytes + segment * Lines::kBytes + 2 * (Lines::kFirst + row * Config::kPlaceStep + pair);
    first = pair < Config::kLead ? 0xffff0000 : 0xffffffff;
    last = left > 1 ? 0xffffffff : left > 0 ? 0xffff : 0;
  }

  template <class Accumulator, int kBlocks, int kRegisters>
  __device__ __forceinline__ void multiply(Accumulator (&accumulators)[kBlocks][kRegisters], int stage, int,
                                           bool) const {
#pragma unroll
    for (int rows = 0; rows < kBlocks; ++rows) {
      const unsigned from = lines + stage * kStride + rows * 4 * Lines::kBytes;
      unsigned a[kSteps][4];
#pragma unroll
      for (int group = 0; group < 2 * kSteps; ++group) {
        const int line = group / Lines::kGroups, of_line = group % Lines::kGroups;
        unsigned* const pairs = a[group / 2] + group % 2 * 2;
#pragma unroll
        for (int half = 0; half < 2; ++half) {  // rows 0 to 7 of the warp's 16, and the others
          if (group >= kGroups) {
            pairs[half] = 0;
            continue;
          }
          const int element = line * Lines::kPitch + of_line * 8 + half * 8 * Config::kPlaceStep;
          pairs[half] = load_pair<kWords>(from + 2 * element);
          if (Config::kLead > 0 && of_line == 0) pairs[half] &= first;
          if (of_line == Lines::kGroups - 1) pairs[half] &= last;
        }
      }
      multiply_registers<BTile>(accumulators[rows], a, b + stage_offset(stage, kStride), false);
    }
    ptx::wgmma_commit_group();
  }
};

/// The copies of one tile of an output; by the lanes of a warp.
template <class Call>
struct WindowLoads {
  using Stage = typename Call::Stage;
  using Lines = typename Stage::Lines;
  static constexpr int kSegments = Call::Config::kTileM / Lines::kPlaces;
  static constexpr int kChunks = (Call::Config::kTileN + kChunk - 1) / kChunk;
  static_assert(kSegments + kChunks <= 32, "each lane starts one copy");

  const Call& call;
  int row, column, batch;

  __device__ __forceinline__ WindowLoads(const Call& call, const typename Call::Cluster&, int row, int column,
                                         int batch, int)
      : call(call), row(row), column(column), batch(batch) {}

  __device__ __forceinline__ void load(int, unsigned stage, unsigned full) const {
    const int lane = threadIdx.x % 32, chunk = lane - kSegments;
    if (lane < kSegments) {
      const SegmentPlace<Call> segment(call, row + lane * Lines::kPlaces, batch * call.image_batch);
      segment.load(stage + Stage::BTile::kBytes + lane * Lines::kBytes, full, segment.image);
    } else if (chunk < kChunks) {
      ptx::cp_async_bulk_tensor_load(stage + chunk * Stage::BTile::kChunkBytes, call.b[0], full,
                                     column + chunk * kChunk, -Call::Config::kLead, 0, batch * call.b_batched);
    }
  }
};

/// The stage of a filter's tile, which has all of the filter's rows.
template <class Config>
struct PlacesStage {
  using Lines = Segment<Config>;
  static constexpr int kSegments = Config::kSegments, kDepth = kSegments * Lines::kPlaces;
  using BTile = RowsOfB<typename Config::B, Config::kTileN, kDepth>;
  static constexpr int kBytes = BTile::kBytes + kSegments * Lines::kBytes;
  static constexpr int kStride = (kBytes + 1023) / 1024 * 1024;
  static constexpr int kRows = Config::kTileM / Config::kConsumers;  // of a warp group

  const ConvolutionAxis<1>& axis;  // of a line
  unsigned long long b;
  unsigned rows[kRows / 64][2];  // where the thread's two rows are, in a segment

  template <class Call>
  __device__ __forceinline__ PlacesStage(const Call& call, unsigned stages, int first_row)
      : axis(call.axes[0]), b(BTile::descriptor(stages)) {
#pragma unroll
    for (int i = 0; i < kRows / 64; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = first_row + i * 64 + threadIdx.x / 32 % 4 * 16 + half * 8 + threadIdx.x % 32 / 4;
        const int line = row / Lines::kPadded, element = row - line * Lines::kPadded;
        // Rows past the last one are not stored; they read what there is.
        const int at = Lines::kFirst + (line < Config::kLines ? line * Lines::kPitch + element : 0);
        rows[i][half] = stages + BTile::kBytes + 2 * (at + threadIdx.x % 4 * 2 * Config::kPlaceStep);
      }
    }
  }

  template <class Accumulator, int kBlocks, int kRegisters>
  __device__ __forceinline__ void multiply(Accumulator (&accumulators)[kBlocks][kRegisters], int stage, int index,
                                           bool accumulate) const {
    ptx::wgmma_wait_group<0>();  // of the stage before, which read these registers
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      unsigned a[kSegments][4];
#pragma unroll
      for (int segment = 0; segment < kSegments; ++segment) {
        unsigned selectors[2];
        select_places((index * kSegments + segment) * Lines::kPlaces, selectors);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const unsigned from =
              rows[block][i % 2] + stage * kStride + segment * Lines::kBytes + 2 * (i / 2 * 8 * Config::kPlaceStep);
          unsigned short low, high;
          ptx::ld_shared(low, from);
          ptx::ld_shared(high, from + 2 * Config::kPlaceStep);
          a[segment][i] = __byte_perm(low, high, selectors[i / 2]);
        }
      }
      multiply_registers<BTile>(accumulators[block], a, b + stage_offset(stage, kStride), accumulate);
    }
    ptx::wgmma_commit_group();
  }

 private:
  /// How two places of 16 bits become a pair, with zeros for those past the end of a line: the segment begins at
  /// `place`.
  __device__ __forceinline__ void select_places(int place, unsigned (&selectors)[2]) const {
    constexpr unsigned kBoth = 0x5410, kLow = 0x3210, kNone = 0x3232;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      selectors[i] = kBoth;
      if constexpr (!Config::kWholeLines) {
        const int line = static_cast<int>(axis.divisor.quotient(place));
        const int left = axis.result - (place - line * axis.places) - i * 8 - threadIdx.x % 4 * 2;
        selectors[i] = left > 1 ? kBoth : left > 0 ? kLow : kNone;
      }
    }
  }
};

/// The copies of one tile of a filter; by the lanes of a warp.
template <class Call>
struct PlacesLoads {
  using Stage = typename Call::Stage;
  using Lines = typename Stage::Lines;
  static constexpr int kChunks = (Call::Config::kTileN + kChunk - 1) / kChunk;
  static_assert(Stage::kSegments * (1 + kChunks) <= 32, "each lane starts one copy");

  const Call& call;
  int column, batch, first_place;

  __device__ __forceinline__ PlacesLoads(const Call& call, const typename Call::Cluster&, int, int column, int batch,
                                         int first_stage)
      : call(call), column(column), batch(batch), first_place(first_stage * Stage::kDepth) {}

  __device__ __forceinline__ void load(int index, unsigned stage, unsigned full) const {
    const int lane = threadIdx.x % 32, number = lane % Stage::kSegments, chunk = lane / Stage::kSegments - 1;
    const int place = first_place + index * Stage::kDepth + number * Lines::kPlaces;
    const SegmentPlace<Call> segment(call, place, batch * call.image_batch);
    const bool inside = segment.line < call.lines;  // another convolution's may follow
    if (chunk < 0) {
      segment.load(stage + Stage::BTile::kBytes + number * Lines::kBytes, full, inside ? segment.image : -1);
    } else if (chunk < kChunks) {
      ptx::cp_async_bulk_tensor_load(stage + chunk * Stage::BTile::kChunkBytes + number * Lines::kPlaces * 128,
                                     call.b[0], full, column + chunk * kChunk, segment.place[0],
                                     inside ? batch * call.b_batched * call.lines + segment.line : -1);
    }
  }
};

/// Rows of a filter's tiles are elements of a window's lines, padded.
template <class Call>
struct WindowRows : ScatteredRows {
  __device__ __forceinline__ int operator()(int row) const {
    constexpr int kPadded = Call::Stage::Lines::kPadded, kElements = Call::Config::kElements;
    const int line = row / kPadded, element = row - line * kPadded;
    return element < kElements ? line * kElements + element : PhaseRows<Call>::kNoRow;
  }
};

/// Config has kStraight, kSegments and kWholeLines (whether segments end where lines of places do) besides what a
/// product's and a `Segment`'s have. An M-major A is the image of a filter's gradient.
template <class Config>
struct ConvolutionSm90FewChannels
    : ProductSm90<Config, Select<Config::kMMajorA, PlacesStage<Config>, WindowStage<Config>>> {
  using Self = ConvolutionSm90FewChannels;
  using Loads = Select<Config::kMMajorA, PlacesLoads<Self>, WindowLoads<Self>>;
  static constexpr int kSpatial = 3;
  static constexpr int kProducerThreads = 32, kProducerRegisters = 40;  // registers as of ConvolutionSm90
  static_assert(!Config::kPingpong && Config::kClusterM * Config::kClusterN == 1, "blocks work alone");

  ConvolutionAxis<1> axes[kSpatial];  // the innermost first, of which places are whole segments
  int rows = 0;                       // of tiles
  int channels = 0;
  int lines = 0;        // of places, in all images of a convolution
  int image_batch = 0;  // images from one convolution to the next

  __device__ __forceinline__ int tiled_rows() const { return rows; }

  __device__ __forceinline__ auto result_rows(int) const {
    if constexpr (Config::kStraight) {
      return MatrixRows<Config>{};
    } else if constexpr (Config::kMMajorA) {
      return WindowRows<Self>{};
    } else {
      return PhaseRows<Self>{{}, *this, {}};
    }
  }
};

template <class Config>
__device__ __forceinline__ void convolution_sm90_few_channels(const ConvolutionSm90FewChannels<Config>& call) {
  product_sm90(call);
}

}  // namespace jaxdnn
