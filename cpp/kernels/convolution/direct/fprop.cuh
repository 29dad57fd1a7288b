// output = epilogue(a convolution of few channels a group), or its gradient in the image, which is the same sum with
// image and output exchanged: each place of the result is a sum over a window of the source. Depthwise convolutions, of
// one channel a group, above all.
//
//   grid             blocks of groups x parts of the tiles x phases of the stride x batches
//   block            kGroups groups' channels of the result, one a thread, times kStrips strips along a row
//   thread           kWidth neighbouring places of a row; its window slides down the tile. kSlots rows are summed at a
//                    time: a row of the source is added to each of them, by another row of the filter, and then they
//                    move on by one. So each element of the source is taken from shared memory once a tile and widened
//                    once, for kWidth * taps multiply-adds
//   shared memory    | kStages steps' rows of the source, as they lie in memory | filter [channel][tap], widened |
//   barriers         one __syncthreads a step: the next step's rows are there, and those before this step's are free
//
//        source row      0  1  2  3  4 ...             kStep = 1, 3 taps: slot s of step m is row m - s of the result
//        slot 0          0  1  2  3  4                 (taps of filter row s); row 2 - 2 = 0 has all taps after step 2
//        slot 1             0  1  2  3
//        slot 2                0  1  2
//
// Bytes: the source once, and what windows reach over the edges of tiles, mostly from L2; the result once. Flops: a
// multiply-add a tap, in the accumulator's type; of 16-bit elements too, since a packed multiply-add would round each
// partial sum to 16 bits. 7 x 7 taps of bfloat16: 49 FFMA an element, 4 bytes. An H200 issues 128 of them a cycle and
// multiprocessor, and moves 4.3 TB/s: those take 1.6 times as long as the bytes. Up to 25 taps memory bounds it.
#pragma once

#include "convolution/direct/tiles.cuh"
#include "core/epilogue_element.cuh"
#include "product/simt/multiply.cuh"

namespace jaxdnn {

/// Moves the addresses of results to an element.
template <class Results, int kIndex = 0>
__device__ __forceinline__ void move_to(ResultAddress* addresses, const Coordinate& at) {
  if constexpr (kIndex < Results::kCount) {
    ResultAddress& address = addresses[kIndex];
    address.data = static_cast<TypeAt<kIndex, Results>*>(address.data) + address.offset(at);
    move_to<Results, kIndex + 1>(addresses, at);
  }
}

/// The epilogue of places that lie kPeriod rows apart, from `at` on, the first `left` of which there are.
template <class Config, int kPeriod, class Accumulator, int kWidth>
__device__ __forceinline__ void strip_epilogue(const OperandAddress (&operands)[Config::Operands::kArray],
                                               const ResultAddress (&results)[Config::Results::kCount],
                                               const Coordinate& at, int left, const Accumulator (&sums)[kWidth]) {
  ResultAddress moved[Config::Results::kCount];
#pragma unroll
  for (int i = 0; i < Config::Results::kCount; ++i) moved[i] = results[i];
  move_to<typename Config::Results>(moved, at);
#pragma unroll
  for (int i = 0; i < Config::Results::kCount; ++i) moved[i].row_stride = static_cast<int>(moved[i].row_stride);
  const auto one = [&](int x) {
    Register operand[Config::Operands::kArray], result[Config::Results::kCount];
    const Coordinate own{at.row + x * kPeriod, at.column, at.batch};
    const Accumulator accumulator[1] = {sums[x]};
    if (x < left) {
      load_elements<typename Config::Operands>(operands, own, operand);
      Config::Epilogue::apply(accumulator, operand, ElementContext<typename Config::Operands>{own, operands}, result);
      store_elements<0, typename Config::Results, typename Config::Registers>(moved, {x * kPeriod, 0, 0}, result);
    }
  };
  if constexpr (Config::kLongEpilogue) {
#pragma unroll 1
    for (int x = 0; x < kWidth; ++x) one(x);
  } else {
#pragma unroll
    for (int x = 0; x < kWidth; ++x) one(x);
  }
}

/// Config has: Source, Filter, Accumulator; Depth, Row, Column (of `WindowAxis`); kGroups of a block, kOwn channels of
/// the result and kOther of the source in a group; kWidth, kStrips, kStages; kVector elements that are copied at once;
/// kLongEpilogue (its code stands once, not for each place of a thread); and what `apply_epilogue` wants.
template <class Config>
struct ConvolutionFprop {
  using Source = typename Config::Source;
  using Filter = typename Config::Filter;
  using Accumulator = typename Config::Accumulator;
  using Depth = typename Config::Depth;
  using Row = typename Config::Row;
  using Column = typename Config::Column;

  DirectArray<Source> source;
  DirectArray<Filter> filter;  // of which n is unused
  long long filter_group = 0, filter_own = 0, filter_other = 0;
  OperandAddress operands[Config::Operands::kArray];
  ResultAddress results[Config::Results::kCount];
  Depth depths;
  Row rows;
  Column columns;
  int groups = 1;
  int blocks = 1, parts = 1;      // of groups, and of the tiles
  int count = 1, part_tiles = 1;  // tiles in all, and of a part
  DirectTiles tiles;

  static constexpr int kChannels = Config::kGroups * Config::kOwn, kSources = Config::kGroups * Config::kOther;
  static constexpr int kThreads = kChannels * Config::kStrips;
  static constexpr int kPlaces = Config::kStrips * Config::kWidth;  // of the result in a row of a tile
  static constexpr int kSlots = (Row::kTaps + Row::kStep - 1) / Row::kStep;
  static constexpr int kReach = (Config::kWidth - 1) * Column::kStep + (Column::kTaps - 1) * Column::kSpread + 1;
  static constexpr int kRowPlaces = (Config::kStrips - 1) * Config::kWidth * Column::kStep + kReach;
  static constexpr int kPhases = Depth::kPeriod * Row::kPeriod * Column::kPeriod;
  using Rows = DirectRows<Source, Depth::kTaps, Row::kStep, kRowPlaces, kSources, Config::kVector, kThreads>;
  using Cursor = DirectCursor<Row::kSpread, kSlots - 1>;

  // Taps of a plane of the window, in whole vectors; a channel's lie an odd number of vectors apart.
  using Lane = Vector<Accumulator, 16 / sizeof(Accumulator)>;
  static constexpr int kLane = 16 / static_cast<int>(sizeof(Accumulator));
  static constexpr int kPlane = (Row::kTaps * Column::kTaps + kLane - 1) / kLane * kLane;
  static constexpr int kPitch = (Config::kOther * Depth::kTaps * kPlane / kLane | 1) * kLane;

  static constexpr int kTapBytes = kChannels * kPitch * static_cast<int>(sizeof(Accumulator));
  static constexpr int kSharedBytes = Config::kStages * Rows::kStageBytes + kTapBytes;
};

template <class Config>
__device__ __forceinline__ void convolution_fprop(const ConvolutionFprop<Config>& call) {
  using Call = ConvolutionFprop<Config>;
  using Source = typename Call::Source;
  using Accumulator = typename Call::Accumulator;
  using Depth = typename Call::Depth;
  using Row = typename Call::Row;
  using Column = typename Call::Column;
  using Lane = typename Call::Lane;
  constexpr int kWidth = Config::kWidth, kSlots = Call::kSlots;
  extern __shared__ __align__(16) unsigned char shared_memory[];
  Accumulator* const taps = reinterpret_cast<Accumulator*>(shared_memory + Config::kStages * Call::Rows::kStageBytes);
  const auto stage = [&](int slot) {
    return reinterpret_cast<Source*>(shared_memory + slot * Call::Rows::kStageBytes);
  };

  unsigned index = blockIdx.x;
  const int group0 = index % call.blocks * Config::kGroups;
  index /= call.blocks;
  const int part = index % call.parts;
  index /= call.parts;
  const int batch = index / Call::kPhases;
  index %= Call::kPhases;
  const WindowPhase depths = call.depths.phase(index / (Row::kPeriod * Column::kPeriod));
  const WindowPhase rows = call.rows.phase(index / Column::kPeriod % Row::kPeriod);
  const WindowPhase columns = call.columns.phase(index % Column::kPeriod);

  const int first = part * call.part_tiles;
  const int count = call.count - first < call.part_tiles ? call.count - first : call.part_tiles;
  typename Call::Cursor tile(call.tiles, rows.places, first, count), copied = tile;
  DirectArray<Source> array = call.source;
  DirectBox box{0, 0, 0, call.depths.source, call.rows.source, call.columns.source};
  const auto copy = [&](int slot) {
    if (copied.left > 0) {
      if (copied.step == 0) {
        array.data = call.source.data + batch * array.batch + copied.n * array.n +
                     static_cast<long long>(group0) * Config::kOther;
        box.depth = copied.depth * Depth::kStep - depths.low;
        box.row = copied.first_row() * Row::kStep - rows.low;
        box.column = copied.column * Call::kPlaces * Column::kStep - columns.low;
      }
      Call::Rows::start(stage(slot), array, (call.groups - group0) * Config::kOther, box, Depth::kSpread, Row::kSpread);
      box.row += Row::kStep * Row::kSpread;
      ++copied.step;
      if (!copied.more_steps()) copied.next_tile();
    }
    ptx::cp_async_commit_group();
  };
#pragma unroll 1
  for (int slot = 0; slot < Config::kStages - 1; ++slot) copy(slot);

  // The filter: neighbouring threads have neighbouring channels.
  const typename Call::Filter* const filter = call.filter.data + batch * call.filter.batch + group0 * call.filter_group;
  constexpr int kTaps = Config::kOther * Depth::kTaps * Row::kTaps * Column::kTaps;
  constexpr int kAtOnce = 4;  // loads of a thread in flight
#pragma unroll 1
  for (int first = threadIdx.x; first < kTaps * Call::kChannels; first += kAtOnce * Call::kThreads) {
    Accumulator values[kAtOnce];
    int places[kAtOnce];  // in shared memory
#pragma unroll
    for (int one = 0; one < kAtOnce; ++one) {
      const int i = first + one * Call::kThreads, channel = i % Call::kChannels, tap = i / Call::kChannels;
      const int column = tap % Column::kTaps, row = tap / Column::kTaps % Row::kTaps;
      const int depth = tap / (Column::kTaps * Row::kTaps) % Depth::kTaps;
      const int other = tap / (Column::kTaps * Row::kTaps * Depth::kTaps);
      values[one] = 0;
      places[one] =
          channel * Call::kPitch + (other * Depth::kTaps + depth) * Call::kPlane + row * Column::kTaps + column;
      if (other < Config::kOther && group0 + channel / Config::kOwn < call.groups && column < columns.taps &&
          row < rows.taps && depth < depths.taps) {
        values[one] = static_cast<Accumulator>(
            widen(filter[channel / Config::kOwn * call.filter_group + channel % Config::kOwn * call.filter_own +
                         other * call.filter_other + Depth::filter_place(depths, depth) * call.filter.depth +
                         Row::filter_place(rows, row) * call.filter.row +
                         Column::filter_place(columns, column) * call.filter.column]));
      }
    }
#pragma unroll
    for (int one = 0; one < kAtOnce; ++one) {
      if (first + one * Call::kThreads < kTaps * Call::kChannels) taps[places[one]] = values[one];
    }
  }

  const int channel = threadIdx.x % Call::kChannels, strip = threadIdx.x / Call::kChannels;
  const bool active = group0 + channel / Config::kOwn < call.groups;
  const Accumulator* const own_taps = taps + channel * Call::kPitch;
  const int source0 =
      strip * kWidth * Column::kStep * Call::kSources + channel / Config::kOwn * Config::kOther;  // in a row
  Accumulator sums[kSlots][kWidth] = {};

  const auto accumulate = [&](const Source* from, auto slots) {
#pragma unroll 1
    for (int plane = 0; plane < Config::kOther * Depth::kTaps; ++plane) {
      const int depth = plane % Depth::kTaps;
      if (Depth::kPhased && depth >= depths.taps) continue;
      const Source* const place = from + depth * Row::kStep * Call::kRowPlaces * Call::kSources + plane / Depth::kTaps;
      const Accumulator* const plane_taps = own_taps + plane * Call::kPlane;
#pragma unroll
      for (int line = 0; line < Row::kStep; ++line) {
        Accumulator values[Call::kReach];
#pragma unroll
        for (int x = 0; x < Call::kReach; ++x) {
          values[x] = static_cast<Accumulator>(widen(place[(line * Call::kRowPlaces + x) * Call::kSources]));
        }
#pragma unroll
        for (int slot = kSlots - 1; slot >= 0; --slot) {
          const int row = slot * Row::kStep + line;
          if (row >= Row::kTaps) continue;
          if (!slots.has(slot)) continue;
          if (Row::kPhased && row >= rows.taps) continue;
#pragma unroll
          for (int column = 0; column < Column::kTaps; ++column) {
            const int tap = row * Column::kTaps + column;
            const Lane four = *reinterpret_cast<const Lane*>(plane_taps + tap / Call::kLane * Call::kLane);
            const Accumulator weight = four.get(tap % Call::kLane);
            if (Column::kPhased && column >= columns.taps) continue;
#pragma unroll
            for (int x = 0; x < kWidth; ++x) {
              sums[slot][x] = multiply_add(values[x * Column::kStep + column * Column::kSpread], weight, sums[slot][x]);
            }
          }
        }
      }
    }
  };

  int slot = 0;
#pragma unroll 1
  for (; tile.left > 0; tile.next_tile()) {
    // This thread's first place, of `left` ones.
    const int depth = depths.first_place + tile.depth * Depth::kPeriod;
    const int row0 = rows.first_place + tile.first_row() * Row::kPeriod;
    const int strip0 = tile.column * Call::kPlaces + strip * kWidth;
    const int left = active && tile.depth < depths.places ? columns.places - strip0 : 0;  // places of the strip
    Coordinate at{((tile.n * call.depths.result + depth) * call.rows.result + row0) * call.columns.result +
                      columns.first_place + strip0 * Column::kPeriod,
                  group0 * Config::kOwn + channel, batch};
    const int next_row = Row::kPeriod * Row::kSpread * call.columns.result;
    const auto advance = [&](auto slots, bool finishes) {
      ptx::cp_async_wait_group<Config::kStages - 2>();
      __syncthreads();
      copy(slot == 0 ? Config::kStages - 1 : slot - 1);
#pragma unroll
      for (int s = kSlots - 1; s > 0; --s) {
#pragma unroll
        for (int x = 0; x < kWidth; ++x) sums[s][x] = sums[s - 1][x];
      }
#pragma unroll
      for (int x = 0; x < kWidth; ++x) sums[0][x] = 0;
      accumulate(stage(slot) + source0, slots);
      slot = slot + 1 == Config::kStages ? 0 : slot + 1;
      ++tile.step;
      if (finishes) {
        strip_epilogue<Config, Column::kPeriod>(call.operands, call.results, at, left, sums[kSlots - 1]);
        at.row += next_row;
      }
    };
    // Until the first row has all its taps; while all slots are rows of the tile; and after the last one has begun.
#pragma unroll 1
    while (tile.step < kSlots - 1 && tile.more_steps())
      advance(DirectSome{tile.step - tile.rows + 1, tile.step}, false);
#pragma unroll 1
    while (tile.step < tile.rows) advance(DirectEvery{}, true);
#pragma unroll 1
    while (tile.more_steps()) advance(DirectSome{tile.step - tile.rows + 1, tile.step}, true);
  }
}

}  // namespace jaxdnn
