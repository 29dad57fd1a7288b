// One dimension of a window, as the places of a result meet those of a source: the result's place o and the source's
// place i meet at tap r where
//
//   i * kBase + low == o * kStride + r * kDilation,      the filter's place being r, or its last one - r if kFlipped.
//
// If kBase is not one, only some taps meet any place, the same ones for all o that are kPeriod apart: a phase. In phase
// p are o = p + q kPeriod, whose taps are r = first + t kTapPeriod; and there i = q kStep + t kSpread - low', without
// a division. So zeros between the places of a source are never multiplied, nor looked at.
#pragma once

namespace jaxdnn {

constexpr __device__ int common_divisor(int a, int b) { return b == 0 ? a : common_divisor(b, a % b); }

/// The places of one phase, which has taps 0 to `taps`.
struct WindowPhase {
  int first_place, places;  // of the result
  int first_tap, taps;
  int low;
};

template <int kFilter, int kStride, int kDilation, int kBase, bool kFlipped>
struct WindowAxis {
  static constexpr int kPeriod = kBase / common_divisor(kStride, kBase);
  static constexpr int kTapPeriod = kBase / common_divisor(kDilation, kBase);
  static constexpr int kStep = kPeriod * kStride / kBase, kSpread = kTapPeriod * kDilation / kBase;
  static constexpr int kTaps = (kFilter + kTapPeriod - 1) / kTapPeriod;  // of a phase, at most
  static constexpr bool kPhased = kBase > 1;
  static constexpr int kPlaces = kFilter;

  int source = 1, result = 1, low = 0;

  __device__ __forceinline__ WindowPhase phase(int p) const {
    if constexpr (!kPhased) {
      return {0, result, 0, kFilter, low};
    } else {
      int first = 0;
      while (first < kTapPeriod && (p * kStride + first * kDilation - low) % kBase != 0) ++first;
      const int taps = first < kTapPeriod && first < kFilter ? (kFilter - 1 - first) / kTapPeriod + 1 : 0;
      const int places = p < result ? (result - 1 - p) / kPeriod + 1 : 0;
      return {p, places, first, taps, (low - p * kStride - first * kDilation) / kBase};
    }
  }

  /// The place of the filter at tap `tap`, or the other way round.
  static __device__ __forceinline__ int flip(int tap) { return kFlipped ? kFilter - 1 - tap : tap; }

  /// The place of the source that a place of the result meets at a tap; negative for none.
  __device__ __forceinline__ int meeting(int place, int tap) const {
    int at = place * kStride + tap * kDilation - low;
    if constexpr (kBase > 1) {
      if (at % kBase != 0) return -1;
      at /= kBase;
    }
    return at < source ? at : -1;
  }

  /// The place of the filter at tap `t` of a phase.
  static __device__ __forceinline__ int filter_place(const WindowPhase& phase, int t) {
    return flip(phase.first_tap + t * kTapPeriod);
  }
};

}  // namespace jaxdnn
