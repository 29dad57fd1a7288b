// output = epilogue(a depthwise convolution of short windows), or its gradient in the image, with stride 1, of whole
// lines: by ordinary arithmetic, and bound by memory.
//
//   grid             parts of the rows of all images
//   a thread         two channels of kWidth places: the taps of these channels, in registers, and kTapsY rows of sums.
//                    A row of the source is added to each of them, by another row of the filter. They lie in a ring:
//                    so many steps stand one after the other in the code, and nothing moves
//   shared memory    | kStages lines of the source | barriers |     lines.cuh
//
//        source row      0  1  2  3  4 ...             3 taps: slot s of step m is row m - s of the result
//        slot 0          0  1  2  3  4
//        slot 1             0  1  2  3
//        slot 2                0  1  2 -> the epilogue, and 4 bytes a place, neighbouring threads' side by side
//
// Bytes: source and result, once each, but for kWarmUp rows that parts share. Instructions of 14 elements (7 places),
// of 3 x 3 taps: 126 multiply-adds, 9 loads, 18 that widen, 7 that round and 7 stores. 256 x 56 x 56 x 144: 108 us of
// memory; 45 us if each scheduler issues one a cycle, at 1.75 GHz.
#pragma once

#include "convolution/lines/lines.cuh"
#include "convolution/pairs.cuh"
#include "ptx/math.cuh"

namespace jaxdnn {

/// Config has, besides what `LineCall` wants, Operands, Results, Epilogue and Registers of the epilogue.
template <class ConfigOf>
struct LinesFprop : LineCall<ConfigOf> {
  using Self = LinesFprop;
  using Config = ConfigOf;
  using Lines = LineCall<Config>;
  using Ring = LineRing<Lines, Self::kLineBytes>;
  static constexpr int kSharedBytes = Ring::kBytes, kResults = Config::Results::kCount;

  const typename Self::T* filter = nullptr;  // at the first tap of both dimensions; strides count elements
  int filter_row = 0, filter_column = 0, filter_channel = 0;
  OperandAddress operands[Config::Operands::kArray];
  ResultAddress results[kResults];  // of 16 bits, and of the same strides

  __device__ __forceinline__ float tap(int channel, int row, int column) const {
    return widen(filter[row * filter_row + column * filter_column + static_cast<long long>(channel) * filter_channel]);
  }
};

/// The taps of a thread's channels, and its sums.
template <class Call>
struct LineSums {
  using Config = typename Call::Config;
  using T = typename Call::T;
  static constexpr int kWidth = Call::kWidth, kSlots = Config::kTapsY;
  using Row = float[kWidth][2];

  float taps[Config::kTapsY][Config::kTapsX][2];
  bool unbounded = false;  // whether one of the taps is infinite, or no number
  Row sums[kSlots];

  __device__ __forceinline__ LineSums(const Call& call, int channel) {
#pragma unroll
    for (int i = 0; i < Config::kTapsY * Config::kTapsX * 2; ++i) {
      const int row = i / 2 / Config::kTapsX, column = i / 2 % Config::kTapsX;
      const float tap = call.tap(channel + i % 2, row, column);
      taps[row][column][i % 2] = tap;
      unbounded = unbounded || !(0.0f * tap == 0.0f);
    }
  }

  /// Before the first step of a run.
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int row = 0; row < kSlots; ++row) clear_places(sums[row]);
  }

  /// Adds a line of the source, of which the thread's first place lies at `from`, or none. The row that begins with it
  /// has slot `kNewest`.
  template <int kNewest>
  __device__ __forceinline__ void add(unsigned from, bool there) {
    if (!there) {
      clear_places(sums[kNewest]);
      return;
    }
#pragma unroll
    for (int at = 0; at < Call::kReach; ++at) {
      float values[2];
      load_pair<T>(values, from + at * Call::kPlaceBytes);
#pragma unroll
      for (int row = kSlots - 1; row >= 0; --row) {
        Row& own = sums[slot(kNewest, row)];
#pragma unroll
        for (int column = 0; column < Config::kTapsX; ++column) {
          const int place = at - column;
          if (place < 0 || place >= kWidth) continue;
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const float tap = taps[row][column][i];
            own[place][i] = row == 0 && column == 0 ? values[i] * tap : ptx::fma_rn(values[i], tap, own[place][i]);
          }
        }
      }
    }
  }

  /// The row of sums that began `steps` steps before the newest one.
  static constexpr int slot(int newest, int steps) { return (newest - steps + kSlots) % kSlots; }
};

/// The epilogue of so many of a thread's places, of all results, `to` bytes from their beginnings.
template <class Call, int kPlaces>
__device__ __forceinline__ void store_places(const Call& call, const float (&sums)[kPlaces][2],
                                             const Register (&operands)[2][Call::Config::Operands::kArray],
                                             long long to) {
  using Config = typename Call::Config;
  unsigned words[kPlaces][Call::kResults];
#pragma unroll
  for (int place = 0; place < kPlaces; ++place) {
    Register results[2][Call::kResults];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float sum[1] = {sums[place][i]};
      Config::Epilogue::apply(sum, operands[i], ElementContext<typename Config::Operands>{{0, 0, 0}, call.operands},
                              results[i]);
    }
    pack_results<Config>(results, words[place]);
  }
#pragma unroll
  for (int k = 0; k < Call::kResults; ++k) {
    char* const line = static_cast<char*>(call.results[k].data) + to;
#pragma unroll
    for (int place = 0; place < kPlaces; ++place) {
      ptx::st_global<4>(line + place * Call::kPlaceBytes, words[place] + k);
    }
  }
}

/// Sums and stores all places of a thread again, tap by tap, of the source's elements alone.
template <class Call>
__device__ __forceinline__ void store_again(const Call& call, const LineThread<typename Call::Lines>& own,
                                            const Register (&operands)[2][Call::Config::Operands::kArray]) {
  using Config = typename Call::Config;
#pragma unroll 1
  for (int i = 0; i < call.own_rows() * Call::kWidth; ++i) {
    const int of_all = call.first() + i / Call::kWidth, image = of_all / call.rows, row = of_all % call.rows;
    const int place = own.place + i % Call::kWidth;
    float sums[1][2] = {};
#pragma unroll 1
    for (int tap = 0; tap < Config::kTapsY * Config::kTapsX; ++tap) {
      const int tap_row = tap / Config::kTapsX, tap_column = tap % Config::kTapsX;
      if (!call.source.has(row + tap_row - call.low, place + tap_column, Call::kChannels)) continue;
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int channel = own.channel + k;
        sums[0][k] += call.source.value(image, row + tap_row - call.low, place + tap_column, channel, Call::kChannels) *
                      call.tap(channel, tap_row, tap_column);
      }
    }
    const long long line = static_cast<long long>(of_all) * Call::kPlaces + place;
    store_places(call, sums, operands, line * Call::kPlaceBytes + own.channel * 2);
  }
}

/// Steps of a run until it ends, from the one whose row begins in slot `kNewest` on, once around the slots.
/// `finish(sums)` has the row that a step finishes.
template <int kNewest, class Call, class Ring, class Copy, class Finish>
__device__ __forceinline__ void add_lines(LineSums<Call>& sums, LineWalk<typename Call::Lines>& walk, Ring& ring,
                                          unsigned own, const Copy& copy, const Finish& finish) {
  if constexpr (kNewest < LineSums<Call>::kSlots) {
    if (!walk.on()) return;
    const unsigned stage = ring.wait(copy);
    sums.template add<kNewest>(stage + own, walk.has_source());
    ring.release();
    if (walk.finishes()) finish(sums.sums[LineSums<Call>::slot(kNewest, Call::kWarmUp)]);
    ++walk.row;
    add_lines<kNewest + 1>(sums, walk, ring, own, copy, finish);
  }
}

template <class Config>
__device__ __forceinline__ void lines_fprop(const LinesFprop<Config>& call) {
  using Call = LinesFprop<Config>;
  using Lines = typename Call::Lines;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  typename Call::Ring ring(call, ptx::cvta_to_shared(shared_memory));
  const auto copy = [&](const LineWalk<Lines>& step, unsigned stage, unsigned barrier) {
    const bool there = step.has_source();
    ptx::mbarrier_arrive_expect_tx(barrier, there ? call.source.bytes : 0);
    if (there) copy_line(call.source, step.image, step.source_row(), stage, Call::kPlaceBytes, barrier);
  };
  ring.begin(copy);

  const LineThread<Lines> own;
  LineSums<Call> sums(call, own.channel);
  Register operands[2][Config::Operands::kArray];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    load_elements<typename Config::Operands>(call.operands, {0, own.channel + i, 0}, operands[i]);
  }

  LineWalk<Lines> walk(call);
  do {
    long long to =
        2 * ((static_cast<long long>(walk.image) * call.rows + walk.begin) * Call::kPlaces * Call::kChannels) +
        own.offset();
    sums.clear();
    const auto finish = [&](const auto& row) {
      if (own.active) store_places(call, row, operands, to);
      to += Call::kPlaces * Call::kPlaceBytes;
    };
#pragma unroll 1
    while (walk.on()) add_lines<0>(sums, walk, ring, own.offset(), copy, finish);
  } while (walk.next_run());
  if (sums.unbounded && own.active) store_again(call, own, operands);
}

}  // namespace jaxdnn
