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

}  // namespace jaxdnn
