// Eight-bit floats in registers: pairs of them, by the instructions that compute capability 8.9 brought.
#pragma once

#include "core/math.cuh"

namespace jaxdnn {
namespace ptx {

__device__ __forceinline__ unsigned halves_of_e4m3s(unsigned pair) {
  unsigned bits;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(bits) : "h"(static_cast<unsigned short>(pair)));
  return bits;
}

__device__ __forceinline__ unsigned halves_of_e5m2s(unsigned pair) {
  unsigned bits;
  asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(bits) : "h"(static_cast<unsigned short>(pair)));
  return bits;
}

/// To nearest even; too large becomes the greatest number.
__device__ __forceinline__ unsigned e4m3s_of_floats(float low, float high) {
  unsigned short pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ __forceinline__ unsigned e5m2s_of_floats(float low, float high) {
  unsigned short pair;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}

}  // namespace ptx

template <class T>
inline constexpr bool is_float8 = is_same<T, float8_e4m3fn> || is_same<T, float8_e5m2>;

template <class T>
__device__ __forceinline__ float float_of_float8(unsigned bits) {
  return ptx::float_of_half(is_same<T, float8_e4m3fn> ? ptx::halves_of_e4m3s(bits) : ptx::halves_of_e5m2s(bits));
}

/// As JAX rounds: to nearest even, and what is too large becomes a NaN (e4m3fn) or an infinity (e5m2).
template <class T>
__device__ __forceinline__ unsigned float8s_of_floats(float low, float high) {
  if constexpr (is_same<T, float8_e4m3fn>) {
    // 464 lies between the greatest number, 448, which is even, and the next, which is none.
    const float nan = math::not_a_number<float>();
    return ptx::e4m3s_of_floats(math::abs(low) <= 464.0f ? low : nan, math::abs(high) <= 464.0f ? high : nan);
  } else {
    // 61440 lies between 57344, which is odd, and 2^16. The bits of an infinity follow those of the greatest number.
    const unsigned pair = ptx::e5m2s_of_floats(low, high);
    return pair + (math::abs(low) >= 61440.0f ? 1 : 0) + (math::abs(high) >= 61440.0f ? 0x100 : 0);
  }
}

}  // namespace jaxdnn
