// The gradient of a depthwise convolution of short windows in its filter, with stride 1, of whole lines: by ordinary
// arithmetic, and bound by memory.
//
//   grid             parts of the rows of all images, whose sums product/split.cuh adds
//   a thread         the sums of all taps of two channels, over kWidth places of each line. A line of the image is
//                    multiplied by the rows of the output that its taps are of, which stay in registers for as many
//                    steps. They lie in a ring: so many steps stand one after the other in the code, and nothing moves
//   shared memory    | kStages of a line of the image and one of the output | barriers |     lines.cuh
//                    and in the end in its place | sums [strip][tap][channel] |
//
//        row of the image    0  1  2  3  4 ...        3 taps: with row m of the image comes row m of the output, which
//        newest row          0  1  2  3  4            it meets at the filter's row 0
//        the one before         0  1  2  3
//        the oldest                0  1  2
//
// Bytes: image and output, once each. Instructions: as of fprop.cuh, but for 7 loads and 14 that widen in place of what
// rounds and stores.
#pragma once

#include "convolution/lines/lines.cuh"
#include "ptx/math.cuh"

namespace jaxdnn {

template <class ConfigOf>
struct LinesWgrad : LineCall<ConfigOf> {
  using Self = LinesWgrad;
  using Config = ConfigOf;
  using Lines = LineCall<Config>;
  static constexpr int kOutputAt = Self::kLineBytes;
  static constexpr int kStageBytes = kOutputAt + (Self::kPlaces * Self::kPlaceBytes + 127) / 128 * 128;
  using Ring = LineRing<Lines, kStageBytes>;
  static constexpr int kTaps = Config::kTapsY * Config::kTapsX,
                       kSumBytes = Config::kStrips * kTaps * Self::kChannels * 4;
  static constexpr int kSharedBytes = Ring::kBytes > kSumBytes ? Ring::kBytes : kSumBytes;

  LineArray<typename Self::T> output;
  float* accumulators = nullptr;                            // [part, tap, channel]
  int filter_first = 0, filter_row = 0, filter_column = 0;  // the filter's place at the first tap, and to the next ones
};

/// The sums of a thread's taps, and the rows of the output that they go on with.
template <class Call>
struct LineProducts {
  using Config = typename Call::Config;
  using T = typename Call::T;
  static constexpr int kWidth = Call::kWidth, kSlots = Config::kTapsY;

  float sums[Config::kTapsY][Config::kTapsX][2] = {};
  float outputs[kSlots][kWidth][2];

  /// Before the first step of a run.
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int row = 0; row < kSlots; ++row) clear_places(outputs[row]);
  }

  /// Takes a row of the output, or none, into slot `kNewest`.
  template <int kNewest>
  __device__ __forceinline__ void take(unsigned from, bool there) {
    if (there) {
#pragma unroll
      for (int place = 0; place < kWidth; ++place) {
        load_pair<T>(outputs[kNewest][place], from + place * Call::kPlaceBytes);
      }
    } else {
      clear_places(outputs[kNewest]);
    }
  }

  /// Multiplies a line of the image by all rows of the output.
  template <int kNewest>
  __device__ __forceinline__ void add(unsigned from) {
#pragma unroll
    for (int at = 0; at < Call::kReach; ++at) {
      float values[2];
      load_pair<T>(values, from + at * Call::kPlaceBytes);
#pragma unroll
      for (int row = 0; row < Config::kTapsY; ++row) {
        const auto& output = outputs[(kNewest - row + kSlots) % kSlots];
#pragma unroll
        for (int column = 0; column < Config::kTapsX; ++column) {
          const int place = at - column;
          if (place < 0 || place >= kWidth) continue;
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            sums[row][column][i] = ptx::fma_rn(values[i], output[place][i], sums[row][column][i]);
          }
        }
      }
    }
  }
};

/// The sum of a tap and a channel over the block's part again, of elements alone, and of no zeros in their place.
template <class Call>
__device__ __forceinline__ float sum_again(const Call& call, int tap, int channel) {
  using Config = typename Call::Config;
  float sum = 0;
#pragma unroll 1
  for (int i = call.first(); i < call.first() + call.own_rows(); ++i) {
    const int image = i / call.rows, row = i % call.rows, of_row = row + tap / Config::kTapsX - call.low;
#pragma unroll 1
    for (int place = 0; place < Call::kPlaces; ++place) {
      const int at = place + tap % Config::kTapsX;
      if (!call.source.has(of_row, at, Call::kChannels)) continue;
      sum += call.source.value(image, of_row, at, channel, Call::kChannels) *
             call.output.value(image, row, place, channel, Call::kChannels);
    }
  }
  return sum;
}

/// Steps of a run until it ends, from the one whose row of the output goes to slot `kNewest` on, once around the ring.
template <int kNewest, class Call, class Ring, class Copy>
__device__ __forceinline__ void multiply_lines(LineProducts<Call>& products, LineWalk<typename Call::Lines>& walk,
                                               Ring& ring, unsigned own, const Copy& copy) {
  if constexpr (kNewest < LineProducts<Call>::kSlots) {
    if (!walk.on()) return;
    const unsigned stage = ring.wait(copy) + own;
    products.template take<kNewest>(stage + Call::kOutputAt, walk.begins());
    if (walk.has_source()) products.template add<kNewest>(stage);
    ring.release();
    ++walk.row;
    multiply_lines<kNewest + 1>(products, walk, ring, own, copy);
  }
}

template <class Config>
__device__ __forceinline__ void lines_wgrad(const LinesWgrad<Config>& call) {
  using Call = LinesWgrad<Config>;
  using Lines = typename Call::Lines;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  const unsigned shared = ptx::cvta_to_shared(shared_memory);
  typename Call::Ring ring(call, shared);
  const auto copy = [&](const LineWalk<Lines>& step, unsigned stage, unsigned barrier) {
    const bool of_image = step.has_source(), of_output = step.begins();
    ptx::mbarrier_arrive_expect_tx(barrier, (of_image ? call.source.bytes : 0) + (of_output ? call.output.bytes : 0));
    if (of_image) copy_line(call.source, step.image, step.source_row(), stage, Call::kPlaceBytes, barrier);
    if (of_output) copy_line(call.output, step.image, step.row, stage + Call::kOutputAt, Call::kPlaceBytes, barrier);
  };
  ring.begin(copy);

  const LineThread<Lines> own;
  LineProducts<Call> products;
  LineWalk<Lines> walk(call);
  do {
    products.clear();
#pragma unroll 1
    while (walk.on()) multiply_lines<0>(products, walk, ring, own.offset(), copy);
  } while (walk.next_run());

  // The sums of all strips, always in the same order.
  __syncthreads();
  const int strip = own.place / Call::kWidth;
#pragma unroll
  for (int tap = 0; tap < Call::kTaps; ++tap) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const unsigned at = ((strip * Call::kTaps + tap) * Call::kChannels + own.channel + i) * 4;
      if (own.active) ptx::st_shared(shared + at, products.sums[tap / Config::kTapsX][tap % Config::kTapsX][i]);
    }
  }
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < Call::kTaps * Call::kChannels; i += Call::kThreads) {
    const int tap = i / Call::kChannels;
    float sum = 0;
#pragma unroll 1
    for (int of = 0; of < Config::kStrips; ++of) {
      float one;
      ptx::ld_shared(one, shared + (of * Call::kTaps * Call::kChannels + i) * 4);
      sum += one;
    }
    if (!(0.0f * sum == 0.0f)) sum = sum_again(call, tap, i % Call::kChannels);
    const int of_filter =
        call.filter_first + tap / Config::kTapsX * call.filter_row + tap % Config::kTapsX * call.filter_column;
    const long long part = static_cast<long long>(blockIdx.x) * Call::kTaps;
    call.accumulators[(part + of_filter) * Call::kChannels + i % Call::kChannels] = sum;
  }
}

}  // namespace jaxdnn
