// The weight gradient of a convolution of few channels a group, as parts that product/reduce.cuh adds:
//
//   filter[tap, c, k] = the sum of image[place + tap, c] * output[place, k] over a part of all places
//
// or with image and output exchanged, where the image is the one that has zeros between its places: the array that
// windows slide over is the source, the other one the still one.
//
//   grid             blocks of groups x parts of the tiles x tiles of taps x batches
//   block            kGroups groups' pairs of channels, one a thread, times kStrips strips along a row
//   thread           the sums of kTapRows x kTapColumns taps, over kWidth neighbouring places of the still array's
//   rows.
//                    kSlots rows of that stay in registers while a row of the source is multiplied by each of them;
//                    then they move on by one. So an element of either array is taken from shared memory once a tile
//   shared memory    | kStages steps' rows of the source | and of the still array |, then sums of all strips
//   barriers         one __syncthreads a step, and two a row of taps at the end
//
// Bytes: both arrays once, and what windows reach over the edges of tiles, mostly from L2; the parts are few. Flops: a
// multiply-add a tap and place, in the accumulator's type, and a move a place and row of taps. 7 x 7 taps of bfloat16
// are bound by the multiply-adds, as direct/fprop.cuh says.
#pragma once

#include "convolution/direct/tiles.cuh"
#include "core/reduction.cuh"
#include "product/simt/multiply.cuh"

namespace jaxdnn {

/// Config has: Source, Still, Accumulator; Depth, Row, Column (of `WindowAxis`, without phases); kGroups of a block,
/// kSources and kStills channels of a group; kExchanged, if the source is the output; kTapRows, kTapColumns, kWidth,
/// kStrips, kStages; kVectorSource and kVectorStill elements that are copied at once.
template <class Config>
struct ConvolutionWgrad {
  using Source = typename Config::Source;
  using Still = typename Config::Still;
  using Accumulator = typename Config::Accumulator;
  using Depth = typename Config::Depth;
  using Row = typename Config::Row;
  using Column = typename Config::Column;

  DirectArray<Source> source;
  DirectArray<Still> still;
  Accumulator* sums = nullptr;  // [batch, part, depth, row, column, c, groups * k]
  Depth depths;
  Row rows;
  Column columns;
  int groups = 1;
  int blocks = 1, parts = 1;      // of groups, and of the tiles
  int count = 1, part_tiles = 1;  // tiles in all, and of a part
  DirectTiles tiles;

  static constexpr int kPairs = Config::kGroups * Config::kSources * Config::kStills;
  static constexpr int kThreads = kPairs * Config::kStrips;
  static constexpr int kPlaces = Config::kStrips * Config::kWidth;  // of the still array in a row of a tile
  static constexpr int kSlots = (Config::kTapRows + Row::kStep - 1) / Row::kStep;
  static constexpr int kReach = (Config::kWidth - 1) * Column::kStep + (Config::kTapColumns - 1) * Column::kSpread + 1;
  static constexpr int kRowPlaces = (Config::kStrips - 1) * Config::kWidth * Column::kStep + kReach;
  static constexpr int kRowTiles = (Row::kTaps + Config::kTapRows - 1) / Config::kTapRows;
  static constexpr int kColumnTiles = (Column::kTaps + Config::kTapColumns - 1) / Config::kTapColumns;
  using SourceRows = DirectRows<Source, 1, Row::kStep, kRowPlaces, Config::kGroups * Config::kSources,
                                Config::kVectorSource, kThreads>;
  using StillRows = DirectRows<Still, 1, 1, kPlaces, Config::kGroups * Config::kStills, Config::kVectorStill, kThreads>;
  using Cursor = DirectCursor<Row::kSpread, kSlots - 1>;
  static_assert(!Depth::kPhased && !Row::kPhased && !Column::kPhased, "the source has no zeros between its places");

  static constexpr int kStageBytes = SourceRows::kStageBytes + StillRows::kStageBytes;
  static constexpr int kRingBytes = Config::kStages * kStageBytes;
  static constexpr int kSumBytes = kThreads * Config::kTapColumns * static_cast<int>(sizeof(Accumulator));
  static constexpr int kSharedBytes = kRingBytes > kSumBytes ? kRingBytes : kSumBytes;
};

template <class Config>
__device__ __forceinline__ void convolution_wgrad(const ConvolutionWgrad<Config>& call) {
  using Call = ConvolutionWgrad<Config>;
  using Source = typename Call::Source;
  using Still = typename Call::Still;
  using Accumulator = typename Call::Accumulator;
  using Depth = typename Call::Depth;
  using Row = typename Call::Row;
  using Column = typename Call::Column;
  constexpr int kWidth = Config::kWidth, kSlots = Call::kSlots;
  constexpr int kTapRows = Config::kTapRows, kTapColumns = Config::kTapColumns;
  extern __shared__ __align__(16) unsigned char shared_memory[];
  const auto stage = [&](int slot) { return shared_memory + slot * Call::kStageBytes; };

  unsigned index = blockIdx.x;
  const int group0 = index % call.blocks * Config::kGroups;
  index /= call.blocks;
  const int part = index % call.parts;
  index /= call.parts;
  const int column_tap0 = index % Call::kColumnTiles * kTapColumns;
  index /= Call::kColumnTiles;
  const int row_tap0 = index % Call::kRowTiles * kTapRows;
  index /= Call::kRowTiles;
  const int depth_tap = index % Depth::kTaps, batch = index / Depth::kTaps;

  const int first = part * call.part_tiles;
  const int count = call.count - first < call.part_tiles ? call.count - first : call.part_tiles;
  typename Call::Cursor tile(call.tiles, call.rows.result, first, count), copied = tile;
  DirectArray<Source> source = call.source;
  DirectArray<Still> still = call.still;
  DirectBox source_box{0, 0, 0, call.depths.source, call.rows.source, call.columns.source};
  DirectBox still_box{0, 0, 0, call.depths.result, call.rows.result, call.columns.result};
  const auto copy = [&](int slot) {
    if (copied.left > 0) {
      if (copied.step == 0) {
        source.data = call.source.data + batch * source.batch + copied.n * source.n +
                      static_cast<long long>(group0) * Config::kSources;
        still.data = call.still.data + batch * still.batch + copied.n * still.n +
                     static_cast<long long>(group0) * Config::kStills;
        source_box.depth = copied.depth * Depth::kStep + depth_tap * Depth::kSpread - call.depths.low;
        source_box.row = copied.first_row() * Row::kStep + row_tap0 * Row::kSpread - call.rows.low;
        source_box.column =
            copied.column * Call::kPlaces * Column::kStep + column_tap0 * Column::kSpread - call.columns.low;
        still_box.depth = copied.depth;
        still_box.row = copied.first_row();
        still_box.column = copied.column * Call::kPlaces;
      }
      const int left = call.groups - group0;
      Call::SourceRows::start(reinterpret_cast<Source*>(stage(slot)), source, left * Config::kSources, source_box, 1,
                              Row::kSpread);
      Call::StillRows::start(reinterpret_cast<Still*>(stage(slot) + Call::SourceRows::kStageBytes), still,
                             left * Config::kStills, still_box, 1, 1);
      source_box.row += Row::kStep * Row::kSpread;
      still_box.row += Row::kSpread;
      ++copied.step;
      if (!copied.more_steps()) copied.next_tile();
    }
    ptx::cp_async_commit_group();
  };
#pragma unroll 1
  for (int slot = 0; slot < Config::kStages - 1; ++slot) copy(slot);

  // Neighbouring threads have neighbouring channels k of a filter's row, then its channels c.
  constexpr int kOutputs = Config::kGroups * (Config::kExchanged ? Config::kSources : Config::kStills);
  constexpr int kC = Config::kExchanged ? Config::kStills : Config::kSources, kK = kOutputs / Config::kGroups;
  const int pair = threadIdx.x % Call::kPairs, strip = threadIdx.x / Call::kPairs;
  const int group = pair % kOutputs / kK, k = pair % kK, c = pair / kOutputs;
  const int source0 = strip * kWidth * Column::kStep * Config::kGroups * Config::kSources + group * Config::kSources +
                      (Config::kExchanged ? k : c);
  const int still0 =
      strip * kWidth * Config::kGroups * Config::kStills + group * Config::kStills + (Config::kExchanged ? c : k);
  Accumulator sums[kTapRows][kTapColumns] = {};
  Accumulator stills[kSlots][kWidth] = {};

  // Multiplies a step's rows of the source by the rows of the still array that are in the slots, up to place `left`.
  const auto accumulate = [&](const Source* from, auto slots, auto places) {
#pragma unroll
    for (int line = 0; line < Row::kStep; ++line) {
      Accumulator values[Call::kReach];
#pragma unroll
      for (int x = 0; x < Call::kReach; ++x) {
        values[x] =
            static_cast<Accumulator>(widen(from[(line * Call::kRowPlaces + x) * Config::kGroups * Config::kSources]));
      }
#pragma unroll
      for (int slot = kSlots - 1; slot >= 0; --slot) {
        const int row = slot * Row::kStep + line;
        if (row >= kTapRows || !slots.has(slot)) continue;
#pragma unroll
        for (int x = 0; x < kWidth; ++x) {
          if (!places.has(x)) continue;
#pragma unroll
          for (int column = 0; column < kTapColumns; ++column) {
            sums[row][column] =
                multiply_add(stills[slot][x], values[x * Column::kStep + column * Column::kSpread], sums[row][column]);
          }
        }
      }
    }
  };

  int slot = 0;
#pragma unroll 1
  for (; tile.left > 0; tile.next_tile()) {
    const int left = call.columns.result - tile.column * Call::kPlaces - strip * kWidth;
    const DirectSome places{0, left - 1};
    const auto advance = [&](auto slots) {
      ptx::cp_async_wait_group<Config::kStages - 2>();
      __syncthreads();
      copy(slot == 0 ? Config::kStages - 1 : slot - 1);
#pragma unroll
      for (int s = kSlots - 1; s > 0; --s) {
#pragma unroll
        for (int x = 0; x < kWidth; ++x) stills[s][x] = stills[s - 1][x];
      }
      const Still* const next = reinterpret_cast<const Still*>(stage(slot) + Call::SourceRows::kStageBytes) + still0;
#pragma unroll
      for (int x = 0; x < kWidth; ++x) {
        stills[0][x] = static_cast<Accumulator>(widen(next[x * Config::kGroups * Config::kStills]));
      }
      const Source* const from = reinterpret_cast<const Source*>(stage(slot)) + source0;
      if (left >= kWidth) {
        accumulate(from, slots, DirectEvery{});
      } else {
        accumulate(from, slots, places);
      }
      slot = slot + 1 == Config::kStages ? 0 : slot + 1;
      ++tile.step;
    };
#pragma unroll 1
    while (tile.step < kSlots - 1 && tile.more_steps()) advance(DirectSome{tile.step - tile.rows + 1, tile.step});
#pragma unroll 1
    while (tile.step < tile.rows) advance(DirectEvery{});
#pragma unroll 1
    while (tile.more_steps()) advance(DirectSome{tile.step - tile.rows + 1, tile.step});
  }

  // The sums of all strips, always in the same order.
  Accumulator* const shared = reinterpret_cast<Accumulator*>(shared_memory);
  const int outputs = call.groups * kK;
  const long long filter = static_cast<long long>(Depth::kTaps) * Row::kTaps * Column::kTaps * kC * outputs;
  Accumulator* const to = call.sums + (static_cast<long long>(batch) * call.parts + part) * filter;
#pragma unroll
  for (int row = 0; row < kTapRows; ++row) {
    __syncthreads();
#pragma unroll
    for (int column = 0; column < kTapColumns; ++column) {
      shared[(strip * kTapColumns + column) * Call::kPairs + pair] = sums[row][column];
    }
    __syncthreads();
    if (row_tap0 + row >= Row::kTaps) continue;
#pragma unroll 1
    for (int column = strip; column < kTapColumns; column += Config::kStrips) {
      if (column_tap0 + column >= Column::kTaps || group0 + group >= call.groups) continue;
      Accumulator sum = shared[column * Call::kPairs + pair];
#pragma unroll 1
      for (int other = 1; other < Config::kStrips; ++other) {
        sum = ReductionOf<Reduction::sum, Accumulator>::combine(
            sum, shared[(other * kTapColumns + column) * Call::kPairs + pair]);
      }
      const int depth_place = Depth::filter_place({}, depth_tap);
      const int row_place = Row::filter_place({}, row_tap0 + row);
      const int column_place = Column::filter_place({}, column_tap0 + column);
      to[(static_cast<long long>((depth_place * Row::kTaps + row_place) * Column::kTaps + column_place) * kC + c) *
             outputs +
         (group0 + group) * kK + k] = sum;
    }
  }
}

}  // namespace jaxdnn
