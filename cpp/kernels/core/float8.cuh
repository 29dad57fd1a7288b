// Eight-bit floats in registers: pairs of them, by the instructions that compute capability 8.9 brought.
#pragma once

#include "core/math.cuh"

namespace jaxdnn {
template <class T>
inline constexpr bool is_float8 = is_same<T, float8_e4m3fn> || is_same<T, float8_e5m2>;

template <class T>
__device__ __forceinline__ float float_of_float8(unsigned bits) {
  return ptx::cvt_f32_f16(is_same<T, float8_e4m3fn> ? ptx::cvt_rn_f16x2_e4m3x2(bits) : ptx::cvt_rn_f16x2_e5m2x2(bits));
}

/// As JAX rounds: to nearest even, and what is too large becomes a NaN (e4m3fn) or an infinity (e5m2).
template <class T>
__device__ __forceinline__ unsigned float8s_of_floats(float low, float high) {
  if constexpr (is_same<T, float8_e4m3fn>) {
    // 464 lies between the greatest number, 448, which is even, and the next, which is none.
    const float nan = math::not_a_number<float>();
    return ptx::cvt_rn_satfinite_e4m3x2_f32(math::abs(low) <= 464.0f ? low : nan,
                                            math::abs(high) <= 464.0f ? high : nan);
  } else {
    // 61440 lies between 57344, which is odd, and 2^16. The bits of an infinity follow those of the greatest number.
    const unsigned pair = ptx::cvt_rn_satfinite_e5m2x2_f32(low, high);
    return pair + (math::abs(low) >= 61440.0f ? 1 : 0) + (math::abs(high) >= 61440.0f ? 0x100 : 0);
  }
}

}  // namespace jaxdnn
