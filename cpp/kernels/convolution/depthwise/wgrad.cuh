// The gradient of a depthwise convolution in its filter, on the tensor cores: of a channel and a row of the window, the
// places of 16 strips are multiplied by each other, and the sums of diagonals are the taps' gradients.
//
//     sums [x', x] += image [strip, x'] * output [strip, x]
//
// With stride 1 a tap is x' - x: its sum is that of a diagonal of 8 elements, and the others are never used.
//
// A row of the image is multiplied by the rows of the output that its taps are of, which stay in registers for as many
// steps; the sums stay there all the time. fprop.cuh has the walk, with rows of the image in place of the source's.
//
//        row of the image    0  1  2  3  4 ...        3 taps: with row m of the image comes row m of the output, which
//        slot 0              0  1  2  3  4            it meets at the filter's row 0; with each step rows of the output
//        slot 1                 0  1  2  3            move on by a slot
//        slot 2                    0  1  2
//
//   grid             slabs of channels x parts of the rows of all strips, whose sums product/split.cuh adds
//   a warp           kSlab / kWarps channels
//   shared memory    | ring of the image | of the output | planes of the image, twice | of the output, twice |
//                    and in the end in its place | diagonals, a warp's own | sums [tap][channel] |
//
// Places that are past an edge are zeros, and meet what may be no number. So a tap's sum that is no number is summed
// again from memory, place by place.
//
// Bytes: image and output, once each. Flops: as of fprop.cuh.
#pragma once

#include "convolution/depthwise/strips.cuh"
#include "ptx/warp.cuh"

namespace jaxdnn {

template <class ConfigOf>
struct DepthwiseWgrad : StripCall<ConfigOf> {
  using Self = DepthwiseWgrad;
  using Config = ConfigOf;
  using Strips = StripCall<Config>;
  using Rows = StripRows<Strips, Config::kStrideY, Config::kStrideX, Self::kBlocks>;
  using Outputs = StripRows<Strips, 1, 1, Self::kAcross>;
  static constexpr int kTaps = Config::kTapsY * Config::kTapsX;
  static constexpr int kOutputRingAt = Rows::kRingBytes, kPlanesAt = kOutputRingAt + Outputs::kRingBytes;
  static constexpr int kOutputPlanesAt = kPlanesAt + 2 * Rows::kPlanesBytes;
  static constexpr int kWalkBytes = kOutputPlanesAt + 2 * Outputs::kPlanesBytes;
  static constexpr int kDiagonalBytes = 16 * Self::kDepth * kStripPlaces * 4;  // of a warp
  static constexpr int kSumsAt = Self::kWarps * kDiagonalBytes, kEndBytes = kSumsAt + kTaps * Self::kSlab * 4;
  static constexpr int kSharedBytes = kWalkBytes > kEndBytes ? kWalkBytes : kEndBytes;

  StripArray<const typename Self::T> output;
  StripAxis output_x, output_y;
  float* accumulators = nullptr;                            // [part, tap, channel]
  int filter_first = 0, filter_row = 0, filter_column = 0;  // the filter's place at the first tap, and to the next ones
};

/// The sums of a warp's channels, and the rows of the output that they go on with.
template <class Call>
struct DepthwiseProducts {
  using Config = typename Call::Config;
  static constexpr int kChannels = Call::kChannels, kSlots = Call::kSlots, kDepth = Call::kDepth;
  static constexpr int kAll = Call::kAll;

  unsigned from, output_from;  // planes, where the thread's own part begins
  unsigned there[2];           // of the thread's pairs of strips, those that are not idle
  unsigned outputs[kChannels][kSlots][2] = {};
  float sums[kChannels][Config::kTapsY][kDepth][4] = {};

  __device__ __forceinline__ DepthwiseProducts(unsigned planes, unsigned output_planes) {
    // Of ldmatrix of the image lanes 0 to 7 have the places of strips 0 to 7, the next ones those that follow; and then
    // the other strips. Of the output they have the strips of a channel, and then the next channel's.
    const int lane = threadIdx.x % 32, strip = lane / 16 * 8 + lane % 8, of_output = lane % kStrips;
    from = planes + first_plane() * Call::Rows::kPitch +
           (Call::Rows::line_of(strip < kAll ? strip : 0) + lane / 8 % 2) * kLineBytes;
    output_from = output_planes + (first_plane() + lane / kStrips) * Call::Outputs::kPitch +
                  Call::Outputs::line_of(of_output < kAll ? of_output : 0) * kLineBytes;
    make_opaque(from);
    make_opaque(output_from);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int left = kAll - i * 8 - lane % 4 * 2;
      there[i] = left > 1 ? 0xffffffff : left > 0 ? 0xffff : 0;
    }
  }

  /// Multiplies the rows of a step, in one half of the planes.
  __device__ __forceinline__ void multiply(int half) {
#pragma unroll
    for (int channel = 0; channel < kChannels; channel += 2) {
      unsigned both[4];
      ptx::ldmatrix_x4<true>(both, output_from + half * Call::Outputs::kPlanesBytes + channel * Call::Outputs::kPitch);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        auto& rows = outputs[channel + i / 2];
#pragma unroll
        for (int slot = kSlots - 1; slot > 0; --slot) rows[slot][i % 2] = rows[slot - 1][i % 2];
        rows[0][i % 2] = kAll < kStrips ? both[i] & there[i % 2] : both[i];
      }
    }
#pragma unroll
    for (int channel = 0; channel < kChannels; ++channel) {
#pragma unroll
      for (int line = 0; line < Config::kStrideY; ++line) {
#pragma unroll
        for (int depth = 0; depth < kDepth; ++depth) {
          unsigned a[4];
          const int unit = line * (Call::Rows::kUnits / Config::kStrideY) + 2 * depth;
          ptx::ldmatrix_x4<true>(
              a, from + half * Call::Rows::kPlanesBytes + channel * Call::Rows::kPitch + unit * kLineBytes);
#pragma unroll
          for (int slot = 0; slot < kSlots; ++slot) {
            const int row = slot * Config::kStrideY + line;
            if (row < Config::kTapsY) {
              mma_m16n8k16<typename Call::T>(sums[channel][row][depth], a, outputs[channel][slot]);
            }
          }
        }
      }
    }
  }

  /// Adds up the diagonals, in shared memory that nobody else uses, and leaves the warp's sums in `to`.
  __device__ __forceinline__ void add_diagonals(unsigned diagonals, unsigned to) const {
    const int lane = threadIdx.x % 32;
    diagonals += threadIdx.x / 32 * Call::kDiagonalBytes;
#pragma unroll
    for (int channel = 0; channel < kChannels; ++channel) {
#pragma unroll
      for (int row = 0; row < Config::kTapsY; ++row) {
#pragma unroll
        for (int i = 0; i < 4 * kDepth; ++i) {
          const int place = i / 2 * 8 + lane / 4, x = lane % 4 * 2 + i % 2;
          ptx::st_shared(diagonals + (place * kStripPlaces + x) * 4, sums[channel][row][i / 4][i % 4]);
        }
        ptx::bar_warp_sync();
        for (int tap = lane; tap < Config::kTapsX; tap += 32) {
          float sum = 0;
#pragma unroll
          for (int x = 0; x < kStripPlaces; ++x) {
            float one;
            const int place = tap * Config::kDilationX + x * Config::kStrideX;
            ptx::ld_shared(one, diagonals + (place * kStripPlaces + x) * 4);
            sum += one;
          }
          const int own = plane_channel(first_plane() + channel);
          ptx::st_shared(to + ((row * Config::kTapsX + tap) * Call::kSlab + own) * 4, sum);
        }
        ptx::bar_warp_sync();
      }
    }
  }

 private:
  static __device__ __forceinline__ int first_plane() { return threadIdx.x / 32 * kChannels; }  // of the warp
};

/// The sum of one tap of a channel, place by place.
template <class Call>
__device__ __forceinline__ float sum_of_tap(const Call& call, int tap, int channel) {
  using Config = typename Call::Config;
  using T = typename Call::T;
  const int row_tap = tap / Config::kTapsX, column_tap = tap % Config::kTapsX;
  float sum = 0;
#pragma unroll 1
  for (StripWalk<typename Call::Strips> walk(call); walk.on(); walk.advance()) {
    const int row = Call::kLinear ? 0 : walk.row * call.classes + walk.row_class;
    const int image_row = row * Config::kStrideY + row_tap * call.classes - call.y.low;
    if (!walk.begins() || row >= call.y.result) continue;
    if (static_cast<unsigned>(image_row) >= static_cast<unsigned>(call.y.source)) continue;
#pragma unroll 1
    for (int i = 0; i < Call::kAll * kStripPlaces; ++i) {
      const int image = walk.image(i / kStripPlaces), column = walk.place(i / kStripPlaces) + i % kStripPlaces;
      const int image_column = column * Config::kStrideX + column_tap * Config::kDilationX - call.x.low;
      if (!walk.has(image) || column >= call.x.result) continue;
      if (static_cast<unsigned>(image_column) >= static_cast<unsigned>(call.x.source)) continue;
      const T a = call.source.data[image * call.source.image + static_cast<long long>(image_row) * call.source.row +
                                   static_cast<long long>(image_column) * call.source.column + channel];
      const T b = call.output.data[image * call.output.image + static_cast<long long>(row) * call.output.row +
                                   static_cast<long long>(column) * call.output.column + channel];
      sum += widen(a) * widen(b);
    }
  }
  return sum;
}

/// Stores the block's sums, of each tap by a warp.
template <class Call>
__device__ __forceinline__ void store_taps(const Call& call, unsigned sums) {
  using Config = typename Call::Config;
  const long long part = call.part() * static_cast<long long>(Call::kTaps);
#pragma unroll 1
  for (int i = threadIdx.x; i < Call::kTaps * Call::kSlab; i += Call::kThreads) {
    const int tap = i / Call::kSlab, channel = call.first_channel() + i % Call::kSlab;
    if (channel >= call.channels) continue;
    float sum;
    ptx::ld_shared(sum, sums + i * 4);
    if (!(0.0f * sum == 0.0f)) sum = sum_of_tap(call, tap, channel);
    const int of_filter =
        call.filter_first + tap / Config::kTapsX * call.filter_row + tap % Config::kTapsX * call.filter_column;
    call.accumulators[(part + of_filter) * call.channels + channel] = sum;
  }
}

template <class Config>
__device__ __forceinline__ void depthwise_wgrad(const DepthwiseWgrad<Config>& call) {
  using Call = DepthwiseWgrad<Config>;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  const unsigned shared = ptx::cvta_to_shared(shared_memory);
  const unsigned planes = shared + Call::kPlanesAt, output_planes = shared + Call::kOutputPlanesAt;

  StripWalk<typename Call::Strips> walk(call), ahead = walk;
  typename Call::Rows rows(call.source, call.x, call.y, ahead, shared, planes);
  typename Call::Outputs outputs(call.output, call.output_x, call.output_y, ahead, shared + Call::kOutputRingAt,
                                 output_planes);
  const auto copy = [&](int stage) {
    if (ahead.on()) {
      rows.copy(call, stage);
      outputs.copy(call, stage, ahead.begins());
      if (ahead.advance()) {
        rows.start(ahead);
        outputs.start(ahead);
      }
    }
    ptx::cp_async_commit_group();
  };
#pragma unroll 1
  for (int stage = 0; stage < Call::kStages; ++stage) copy(stage);
  DepthwiseProducts<Call> products(planes, output_planes);

  int stage = 0, half = 0;
  const auto bring = [&](int to, const auto& meanwhile) {
    typename Call::Rows::Words of_image;
    typename Call::Outputs::Words of_output;
    ptx::cp_async_wait_group<Call::kStages - 1>();
    rows.read(stage, of_image);
    outputs.read(stage, of_output);
    meanwhile();
    rows.write(of_image, to);
    outputs.write(of_output, to);
    copy(stage);
    stage = stage + 1 == Call::kStages ? 0 : stage + 1;
  };
  bring(0, [] {});
  __syncthreads();
#pragma unroll 1
  for (; walk.on(); walk.advance()) {
    bring(half ^ 1, [&] { products.multiply(half); });
    __syncthreads();
    half ^= 1;
  }
  ptx::cp_async_wait_group<0>();
  __syncthreads();
  products.add_diagonals(shared, shared + Call::kSumsAt);
  __syncthreads();
  store_taps(call, shared + Call::kSumsAt);
}

}  // namespace jaxdnn
