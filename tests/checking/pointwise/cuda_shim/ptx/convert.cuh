// ptx/convert.cuh in plain C++.
#pragma once

#include "cuda.h"

namespace jaxdnn::ptx {

inline float mov_f32(unsigned bits) { return __int_as_float(static_cast<int>(bits)); }
inline unsigned mov_b32(float value) { return static_cast<unsigned>(__float_as_int(value)); }

inline double mov_f64(unsigned low, unsigned high) {
  return __longlong_as_double(static_cast<long long>(low | static_cast<unsigned long long>(high) << 32));
}

inline void mov_b64(unsigned& low, unsigned& high, double value) {
  unsigned long long bits;
  std::memcpy(&bits, &value, sizeof(bits));
  low = static_cast<unsigned>(bits);
  high = static_cast<unsigned>(bits >> 32);
}

inline float cvt_f32_f16(unsigned bits) {
  unsigned short half = static_cast<unsigned short>(bits);
  _Float16 value;
  std::memcpy(&value, &half, sizeof(value));
  return static_cast<float>(value);
}

template <class Float>
unsigned half_bits(Float value) {
  const _Float16 half = static_cast<_Float16>(value);
  unsigned short bits;
  std::memcpy(&bits, &half, sizeof(bits));
  return bits;
}

inline unsigned cvt_rn_f16_f32(float value) { return half_bits(value); }
inline unsigned cvt_rn_f16_f64(double value) { return half_bits(value); }

inline unsigned cvt_rn_bf16_f32(float value) {
  const unsigned bits = mov_b32(value);
  return value != value ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

inline unsigned cvt_rn_f16x2_f32(float low, float high) { return cvt_rn_f16_f32(low) | cvt_rn_f16_f32(high) << 16; }
inline unsigned cvt_rn_bf16x2_f32(float low, float high) { return cvt_rn_bf16_f32(low) | cvt_rn_bf16_f32(high) << 16; }

inline float cvt_rz_f32_f64(double value) {
  const float nearest = static_cast<float>(value);
  if (std::fabs(static_cast<double>(nearest)) <= std::fabs(value) || value != value) return nearest;
  return ::nextafterf(nearest, 0.0f);
}

}  // namespace jaxdnn::ptx
