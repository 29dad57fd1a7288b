// How values are reduced: to their sum, maximum or minimum.
#pragma once

#include "core/element.cuh"
#include "core/math.cuh"

namespace jaxdnn {

enum class Reduction { sum, max, min };

/// Of values of T. Integers wrap, and NaNs pass through.
template <Reduction kReduction, class T>
struct ReductionOf {
  using Type = T;

  /// What changes nothing that it is combined with.
  static __device__ __forceinline__ T identity() {
    if constexpr (kReduction == Reduction::sum) {
      return 0;
    } else if constexpr (is_floating<T>) {
      return kReduction == Reduction::max ? -math::infinity<T>() : math::infinity<T>();
    } else {
      return kReduction == Reduction::max ? math::kLowest<T> : math::kHighest<T>;
    }
  }

  static __device__ __forceinline__ T combine(T a, T b) {
    if constexpr (kReduction == Reduction::max) {
      return math::maximum(a, b);
    } else if constexpr (kReduction == Reduction::min) {
      return math::minimum(a, b);
    } else if constexpr (is_floating<T>) {
      return a + b;
    } else {
      return math::add(a, b);
    }
  }
};

}  // namespace jaxdnn
