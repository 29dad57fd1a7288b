// output = epilogue(a depthwise convolution), or its gradient in the image with stride 1, on the tensor cores: of a
// channel and a row of the window, 16 strips are multiplied by the band that the row's taps are.
//
//     sums [strip, x] += image [strip, x'] * band [x', x]
//
//           x   0  1  2  3 ... 7        the band of a row of three taps, w0 w1 w2: place x of a strip meets place
//     x'  0    w0                       x' = x + tap of the source, from the strip's first one on. Outside of the band
//         1    w1 w0                    are zeros
//         2    w2 w1 w0
//        ...
//
// A row of the source is multiplied by the bands of all rows of the window, each into the sums of another row of the
// result. These move on by a row with each step, which costs nothing, since a multiply adds to what another register
// held: slot 0 begins with zeros, and the last slot has all taps.
//
//        source row      0  1  2  3  4 ...             kStride = 1, 3 taps: slot s of step m is row m - s of the result
//        slot 0          0  1  2  3  4
//        slot 1             0  1  2  3
//        slot 2                0  1  2 -> results
//
//   grid             slabs of channels x parts of the rows of all strips
//   a warp           the bands of kSlab / kWarps channels, in registers, and their sums
//   a step           1. the next step's rows, which have arrived, go to one half of the planes, and copies of a later
//                       step's start
//                    2. this step's rows, in the other half, are multiplied; what is finished goes to one half of the
//                       planes of results
//                    3. __syncthreads
//                    4. these planes, transposed, go to memory, 16 bytes a thread; the next step's are the other half
//   shared memory    | ring of kStages | planes of the source, twice | planes of the result, twice |
//
// Zero times what is no number is none, and would reach all places of a strip. So sums that are no numbers are summed
// again, tap by tap, from memory: results are infinite, or no number, where they have to be.
//
// Bytes: image and result, once each, but for kWarmUp rows that parts share; and lines of the source that neighbouring
// ranges share. Flops: 128 places of a channel are one multiply of 16 x 8 x 16 for each row of the window and 16 places
// of its reach. 7 x 7 of 128 x 56 x 56 x 96: 36 us of memory, 27 us of multiplies, of 8 cycles each.
#pragma once

#include "convolution/depthwise/strips.cuh"
#include "convolution/pairs.cuh"
#include "ptx/warp.cuh"

namespace jaxdnn {

/// Config has, besides what `StripCall` wants, Operands, Results, Epilogue and Registers of the epilogue.
template <class ConfigOf>
struct DepthwiseFprop : StripCall<ConfigOf> {
  using Self = DepthwiseFprop;
  using Config = ConfigOf;
  using Strips = StripCall<Config>;
  using Rows = StripRows<Strips, Config::kStrideY, Config::kStrideX, Self::kBlocks>;
  static constexpr int kResults = Config::Results::kCount;
  static constexpr int kResultPitch = (kStrips | 1) * kLineBytes, kResultBytes = Self::kSlab * kResultPitch;
  static constexpr int kHalfBytes = kResults * kResultBytes;  // of the planes of results
  static constexpr int kPlanesAt = Rows::kRingBytes, kResultsAt = kPlanesAt + 2 * Rows::kPlanesBytes;
  static constexpr int kSharedBytes = kResultsAt + 2 * kHalfBytes;

  const typename Self::T* filter = nullptr;  // at the first tap of both dimensions; strides count elements
  int filter_row = 0, filter_column = 0, filter_channel = 0;
  OperandAddress operands[Config::Operands::kArray];
  ResultAddress results[kResults];  // of 16 bits, and of the same strides
  int result_step = 0;              // bytes from a step's places to the next one's
};

/// The bands of a warp's channels and the sums of its strips.
template <class Call>
struct DepthwiseSums {
  using Config = typename Call::Config;
  using T = typename Call::T;
  using Walk = StripWalk<typename Call::Strips>;
  static constexpr int kChannels = Call::kChannels, kSlots = Call::kSlots, kDepth = Call::kDepth;

  using Finished = float[kChannels][4];

  const Call& call;
  unsigned from, to;  // the planes of the source, and of the result, where the thread's own part begins
  unsigned bands[kChannels][Config::kTapsY][kDepth][2];
  float sums[kChannels][kSlots > 1 ? kSlots - 1 : 1][4] = {};
  Register operands[kChannels][Config::Operands::kArray];

  __device__ __forceinline__ DepthwiseSums(const Call& call, unsigned planes, unsigned results) : call(call) {
    // Of ldmatrix lanes 0 to 7 have strips 0 to 7, the next ones the others, and then both the places that follow.
    const int lane = threadIdx.x % 32, strip = lane % kStrips, idle = strip >= Call::kAll;
    from = planes + first_plane() * Call::Rows::kPitch +
           (Call::Rows::line_of(idle ? 0 : strip) + lane / kStrips) * kLineBytes;
    to = results + (first_plane() + lane / kStrips) * Call::kResultPitch + strip * kLineBytes;
    make_opaque(from);
    make_opaque(to);
#pragma unroll
    for (int depth = 0; depth < kDepth; ++depth) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // of both pairs of the thread's column
        const int place = depth * 16 + i / 2 * 8 + lane % 4 * 2 + i % 2 - lane / 4 * Config::kStrideX;
        const bool in_band =
            place >= 0 && place % Config::kDilationX == 0 && place < Config::kTapsX * Config::kDilationX;
#pragma unroll
        for (int channel = 0; channel < kChannels; ++channel) {
          const bool there = in_band && channel_of(channel) < call.channels;
#pragma unroll
          for (int row = 0; row < Config::kTapsY; ++row) {
            const unsigned bits = there ? tap(channel_of(channel), row, place / Config::kDilationX).bits : 0;
            unsigned& pair = bands[channel][row][depth][i / 2];
            pair = i % 2 == 0 ? bits : pair | bits << 16;
          }
        }
      }
    }
#pragma unroll
    for (int channel = 0; channel < kChannels; ++channel) {
      if (channel_of(channel) < call.channels) {
        load_elements<typename Config::Operands>(call.operands, {0, channel_of(channel), 0}, operands[channel]);
      }
    }
  }

  /// Before the first step of other strips. Of zeros that the compiler knows it would make a selection for each sum,
  /// with every step.
  __device__ __forceinline__ void start() {
    unsigned zero = 0;
    make_opaque(zero);
#pragma unroll
    for (int channel = 0; channel < kChannels; ++channel) {
#pragma unroll
      for (int i = 0; i < 4 * Call::kWarmUp; ++i) sums[channel][i / 4][i % 4] = ptx::mov_f32(zero);
    }
  }

  /// Multiplies the rows of a step, in one half of the planes.
  __device__ __forceinline__ void multiply(int half, Finished& finished) {
#pragma unroll
    for (int channel = 0; channel < kChannels; ++channel) {
#pragma unroll
      for (int line = 0; line < Config::kStrideY; ++line) {
#pragma unroll
        for (int depth = 0; depth < kDepth; ++depth) {
          unsigned a[4];
          const int unit = line * (Call::Rows::kUnits / Config::kStrideY) + 2 * depth;
          ptx::ldmatrix_x4<false>(
              a, from + half * Call::Rows::kPlanesBytes + channel * Call::Rows::kPitch + unit * kLineBytes);
#pragma unroll
          for (int slot = kSlots - 1; slot >= 0; --slot) {
            const int row = slot * Config::kStrideY + line;
            if (row >= Config::kTapsY) continue;
            float (&own)[4] = slot == Call::kWarmUp ? finished[channel] : sums[channel][slot];
            if (line == 0 && depth == 0) {
#pragma unroll
              for (int i = 0; i < 4; ++i) own[i] = slot > 0 ? sums[channel][slot > 0 ? slot - 1 : 0][i] : 0.0f;
            }
            mma_m16n8k16<T>(own, a, bands[channel][row][depth]);
          }
        }
      }
    }
  }

  /// Leaves the results of the row that the step finishes in one half of their planes.
  __device__ __forceinline__ void finish(const Walk& walk, int half, Finished& finished) const {
    sum_again(walk, finished);
#pragma unroll
    for (int channel = 0; channel < kChannels; channel += 2) {
      unsigned words[Call::kResults][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // both strips of a channel, and of the next one
        unsigned pairs[Call::kResults];
        apply(channel + i / 2, finished[channel + i / 2] + i % 2 * 2, pairs);
#pragma unroll
        for (int k = 0; k < Call::kResults; ++k) words[k][i] = pairs[k];
      }
#pragma unroll
      for (int k = 0; k < Call::kResults; ++k) {
        ptx::stmatrix_x4<false>(to + half * Call::kHalfBytes + k * Call::kResultBytes + channel * Call::kResultPitch,
                                words[k]);
      }
    }
  }

 private:
  static __device__ __forceinline__ int first_plane() { return threadIdx.x / 32 * kChannels; }  // of the warp
  __device__ __forceinline__ int channel_of(int channel) const {
    return call.first_channel() + plane_channel(first_plane() + channel);
  }

  __device__ __forceinline__ T tap(int channel, int row, int column) const {
    return call.filter[row * call.filter_row + column * call.filter_column +
                       static_cast<long long>(channel) * call.filter_channel];
  }

  /// The epilogue of two neighbouring places.
  __device__ __forceinline__ void apply(int channel, const float* finished, unsigned (&pairs)[Call::kResults]) const {
    Register results[2][Call::kResults];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float sum[1] = {finished[i]};
      Config::Epilogue::apply(sum, operands[channel],
                              ElementContext<typename Config::Operands>{{0, 0, 0}, call.operands}, results[i]);
    }
    pack_results<Config>(results, pairs);
  }

  /// Sums those again that are no numbers.
  __device__ __forceinline__ void sum_again(const Walk& walk, Finished& finished) const {
    float zeros[kChannels] = {}, zero = 0;
#pragma unroll
    for (int i = 0; i < 4 * kChannels; ++i) zeros[i / 4] += 0.0f * finished[i / 4][i % 4];
#pragma unroll
    for (int channel = 0; channel < kChannels; ++channel) zero += zeros[channel];
    if (!ptx::vote_sync_any(zero != 0.0f)) return;
#pragma unroll 1
    for (int i = 0; i < 4 * kChannels; ++i) {
      const float again = sum_of(walk, channel_of(i / 4), i % 4);
#pragma unroll
      for (int k = 0; k < 4 * kChannels; ++k) {
        float& sum = finished[k / 4][k % 4];
        if (k == i && !(0.0f * sum == 0.0f)) sum = again;
      }
    }
    ptx::bar_warp_sync();
  }

  /// The sum of the thread's element `i` of a channel.
  __device__ __forceinline__ float sum_of(const Walk& walk, int channel, int i) const {
    const int strip = threadIdx.x % 32 / 4 + i / 2 * 8, image = walk.image(strip);
    if (strip >= Call::kAll || !walk.has(image) || channel >= call.channels) return 0;
    const int first_row = (Call::kLinear ? 0 : walk.finished() * Config::kStrideY) - call.y.low;
    const int first_column = (walk.place(strip) + threadIdx.x % 4 * 2 + i % 2) * Config::kStrideX - call.x.low;
    const T* const source = call.source.data + image * call.source.image + channel;
    float sum = 0;
#pragma unroll 1
    for (int tap_of = 0; tap_of < Config::kTapsY * Config::kTapsX; ++tap_of) {
      const int row = tap_of / Config::kTapsX, column = tap_of % Config::kTapsX;
      const int at_row = first_row + row * call.classes, at_column = first_column + column * Config::kDilationX;
      if (static_cast<unsigned>(at_row) < static_cast<unsigned>(call.y.source) &&
          static_cast<unsigned>(at_column) < static_cast<unsigned>(call.x.source)) {
        const T value = source[at_row * call.source.row + static_cast<long long>(at_column) * call.source.column];
        sum += widen(value) * widen(tap(channel, row, column));
      }
    }
    return sum;
  }
};

/// Stores the planes of rows that are finished.
template <class Call>
struct DepthwiseStores {
  using Walk = StripWalk<typename Call::Strips>;
  static constexpr int kGroups = Call::Rows::kGroups, kTeam = Call::Rows::kTeam,
                       kOwn = (Call::kAll + kTeam - 1) / kTeam;
  using Words = unsigned[kOwn][Call::kResults][4];

  const Call& call;
  unsigned planes;     // where the thread's own part begins
  int at;              // the row that is stored next, or in one dimension its first place
  long long to[kOwn];  // bytes
  bool inside[kOwn];   // but for what `at` says

  __device__ __forceinline__ DepthwiseStores(const Call& call, const Walk& walk, unsigned results) : call(call) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    planes = results + (warp % kGroups * kPlaneGroup + lane) * Call::kResultPitch + warp / kGroups * kLineBytes;
    make_opaque(planes);
    start(walk);
  }

  /// Before the first step of other strips.
  __device__ __forceinline__ void start(const Walk& walk) {
    const int lane = threadIdx.x % 32, group = threadIdx.x / 32 % kGroups;
    const int channel = call.first_channel() + group * kPlaneGroup + lane % 4 * 8;
    const int row = Call::kLinear ? 0 : walk.begin * call.classes + walk.row_class;
    at = Call::kLinear ? walk.place(0) + lane / 4 : row;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int image = walk.image(strip(i)), column = walk.place(strip(i)) + lane / 4;
      inside[i] = strip(i) < Call::kAll && walk.has(image) && channel < call.channels &&
                  (Call::kLinear || column < call.x.result);
      const long long place = (static_cast<long long>(image) * call.y.result + row) * call.x.result + column;
      to[i] = 2 * (place * call.results[0].row_stride + channel);
    }
  }

  /// Reads what is stored next from one half of the planes.
  __device__ __forceinline__ void read(int half, Words& words) const {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
#pragma unroll
      for (int k = 0; k < Call::kResults; ++k) {
        ptx::ldmatrix_x4<true>(words[i][k],
                               planes + half * Call::kHalfBytes + k * Call::kResultBytes + i * kTeam * kLineBytes);
      }
    }
  }

  __device__ __forceinline__ void write(const Words& words) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int own = at + (Call::kLinear ? strip(i) % Call::kAcross * kStripPlaces : 0);
      if (inside[i] && own < (Call::kLinear ? call.x.result : call.y.result)) {
#pragma unroll
        for (int k = 0; k < Call::kResults; ++k) {
          ptx::st_global<kLineBytes>(static_cast<char*>(call.results[k].data) + to[i], words[i][k]);
        }
      }
      to[i] += call.result_step;
    }
    at += Call::kLinear ? Call::kAcross * kStripPlaces : call.classes;
  }

 private:
  static __device__ __forceinline__ int strip(int i) { return threadIdx.x / 32 / kGroups + i * kTeam; }
};

template <class Config>
__device__ __forceinline__ void depthwise_fprop(const DepthwiseFprop<Config>& call) {
  using Call = DepthwiseFprop<Config>;
  using Rows = typename Call::Rows;
  using Sums = DepthwiseSums<Call>;
  using Stores = DepthwiseStores<Call>;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  const unsigned shared = ptx::cvta_to_shared(shared_memory);
  const unsigned planes = shared + Call::kPlanesAt, results = shared + Call::kResultsAt;

  typename Sums::Walk walk(call), ahead = walk;
  Rows rows(call.source, call.x, call.y, ahead, shared, planes);
  const auto copy = [&](int stage) {
    if (ahead.on()) {
      rows.copy(call, stage);
      if (ahead.advance()) rows.start(ahead);
    }
    ptx::cp_async_commit_group();
  };
#pragma unroll 1
  for (int stage = 0; stage < Call::kStages; ++stage) copy(stage);
  Sums sums(call, planes, results);
  Stores stores(call, walk, results);

  int stage = 0, half = 0;
  const auto bring = [&](int to) {
    typename Rows::Words words;
    ptx::cp_async_wait_group<Call::kStages - 1>();
    rows.read(stage, words);
    rows.write(words, to);
    copy(stage);
    stage = stage + 1 == Call::kStages ? 0 : stage + 1;
  };
  bring(0);
  __syncthreads();
#pragma unroll 1
  while (walk.on()) {
    typename Sums::Finished finished;
    bring(half ^ 1);
    sums.multiply(half, finished);
    const bool finishes = walk.finishes();
    if (finishes) sums.finish(walk, half, finished);
    __syncthreads();
    if (finishes) {
      typename Stores::Words words;
      stores.read(half, words);
      stores.write(words);
    }
    if (walk.advance()) {
      stores.start(walk);
      sums.start();
    }
    half ^= 1;
  }
}

}  // namespace jaxdnn
