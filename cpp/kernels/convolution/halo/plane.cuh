// What both ways to cut a convolution's output into rows of tiles have in common (convolution/sm90_halo.cuh): where
// taps are in a patch of the image, and what a stage of K is of.
#pragma once

#include "convolution/sm90.cuh"

namespace jaxdnn {

/// A plane of the window in a patch of the image, whose lines are kPitchOf places apart. Config has kTapsX and kTapsY,
/// kStepX and kStepY, places from one tap to the next, and kFlippedX and kFlippedY, whether the window meets the filter
/// from its end on.
template <class Config, int kPitchOf>
struct PlaneTaps {
  static constexpr int kTaps = Config::kTapsX * Config::kTapsY;

  /// Bytes from where a place meets the plane's first tap to where it meets the filter's tap number `tap`.
  static constexpr int shift(int tap) {
    const int x = tap % Config::kTapsX, y = tap / Config::kTapsX;
    const int column = (Config::kFlippedX ? Config::kTapsX - 1 - x : x) * Config::kStepX;
    const int line = (Config::kFlippedY ? Config::kTapsY - 1 - y : y) * Config::kStepY;
    return (line * kPitchOf + column) * Config::kLine;
  }
};

/// Where in the image and the filter a stage of K begins.
template <class Call>
struct HaloDepth {
  int channel;  // of a group
  int plane;    // of the window

  __device__ __forceinline__ HaloDepth(const Call& call, int index) {
    const int line = index / call.axes[2].filter;
    plane = index - line * call.axes[2].filter;
    channel = line * Call::Stage::kLineElements;
  }
};

/// What the copies of a tile's boxes have in common, wherever these are.
template <class Call>
struct HaloLoads {
  const Call& call;
  int first_channel, first_image;

  __device__ __forceinline__ HaloLoads(const Call& call, int column, int batch)
      : call(call), first_channel(column / call.group_columns * call.channels), first_image(batch * call.image_batch) {}

  /// Loads what the windows meet, in stage `index` of K, from the place (x, y, z) of an image on.
  __device__ __forceinline__ void load_box(int index, unsigned to, unsigned full, int x, int y, int z,
                                           int image) const {
    const HaloDepth<Call> depth(call, index);
    const auto& [width, height, planes] = call.axes;
    ptx::cp_async_bulk_tensor_load(to, call.a, full, first_channel + depth.channel, x + width.start, y + height.start,
                                   z + planes.start + depth.plane * planes.step, first_image + image);
  }
};

/// The result's row that a place of it is; none past the end of a line, or of an image.
template <class Call>
__device__ __forceinline__ int row_of_place(const Call& call, int x, int y, int z, int image) {
  const auto& [width, height, depth] = call.axes;
  if (x >= width.result || y >= height.result) return PhaseRows<Call>::kNoRow;
  return ((image * depth.result + z) * height.result + y) * width.result + x;
}

}  // namespace jaxdnn
