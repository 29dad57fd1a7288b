// A matrix whose rows run along N, as far apart as TMA refuses, loaded as it lies.
//
// Of its rows every so-many-th one (kViews: 2, 4 or 8) is a multiple of 16 bytes from the next: a view, which has a
// tensor map of its own. A view's first row begins some elements behind a multiple of 16 bytes, where the map begins,
// and so do boxes have to: a tile of the view lies that far to the right. So K is worked through view by view, the one
// farthest to the right first. From one to the next the accumulators move 8 / kViews columns to the left; the last
// one's tiles, and with them the accumulators, are where they belong. Of four views:
//
//   rows 3, 7, 11, ...   | . . . . . . 0 1 2 3 4 5 6 7 ...
//   rows 2, 6, 10, ...   | . . . . 0 1 2 3 4 5 6 7 ...
//   rows 1, 5, 9, ...    | . . 0 1 2 3 4 5 6 7 ...
//   rows 0, 4, 8, ...    | 0 1 2 3 4 5 6 7 ...
//
// What comes in from the right is nothing: the last 8 columns of a tile are the next one's. The other operand is a copy
// whose K is in the views' order, each of whole stages (product/copy.cuh).
#pragma once

#include "ptx/warp.cuh"

namespace jaxdnn {

constexpr int kViewOverlap = 8;  // columns

/// Moves an accumulator of 64 rows so many columns to the left: in each 8 of a row a lane of four has two.
template <int kColumns, int kRegisters>
__device__ __forceinline__ void move_left(float* accumulator) {
  static_assert(kColumns == 1 || kColumns == 2 || kColumns == 4, "by lanes, or half of one's columns");
  constexpr int kLanes = kColumns == 1 ? 1 : kColumns / 2;
  const int lane = threadIdx.x % 32, from = lane / 4 * 4 + (lane + kLanes) % 4;
  const bool first = lane % 4 < kLanes;  // whose columns of the next 8 go to the last lanes
#pragma unroll
  for (int i = 0; i < kRegisters; ++i) {
    if (kColumns == 1 && i % 2) continue;
    const float mine = accumulator[i], next = i + 4 < kRegisters ? accumulator[i + 4] : 0.0f;
    const float got = ptx::shfl_sync_idx(first ? next : mine, from);
    if constexpr (kColumns == 1) {
      accumulator[i] = accumulator[i + 1];
      accumulator[i + 1] = got;
    } else {
      accumulator[i] = got;
    }
  }
}

}  // namespace jaxdnn
