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

inline float cvt_rna_tf32_f32(float value) {
  return value != value ? value : mov_f32((mov_b32(value) + 0x1000) & ~0x1fffu);
}

inline unsigned cvt_rn_f16x2_f32(float low, float high) { return cvt_rn_f16_f32(low) | cvt_rn_f16_f32(high) << 16; }
inline unsigned cvt_rn_bf16x2_f32(float low, float high) { return cvt_rn_bf16_f32(low) | cvt_rn_bf16_f32(high) << 16; }

inline float cvt_rz_f32_f64(double value) {
  const float nearest = static_cast<float>(value);
  if (std::fabs(static_cast<double>(nearest)) <= std::fabs(value) || value != value) return nearest;
  return ::nextafterf(nearest, 0.0f);
}

/// What the low 7 bits of an 8-bit float say, which is more for each next one.
template <int kMantissa, int kBias>
float magnitude(unsigned bits) {
  const int exponent = bits >> kMantissa & (0x7f >> kMantissa), mantissa = bits & ((1 << kMantissa) - 1);
  const int implied = exponent > 0 ? 1 << kMantissa : 0;
  return std::ldexp(static_cast<float>(mantissa + implied), (exponent > 0 ? exponent : 1) - kBias - kMantissa);
}

/// To nearest even, and no further than to `kGreatest`.
template <int kMantissa, int kBias, unsigned kGreatest>
unsigned cvt_rn_satfinite(float value) {
  if (value != value) return 0x7f;
  const float size = std::fabs(value);
  unsigned bits = 0;
  while (bits < kGreatest) {
    const float here = magnitude<kMantissa, kBias>(bits), next = magnitude<kMantissa, kBias>(bits + 1);
    const float half = here + (next - here) / 2;
    if (size < half || (size == half && bits % 2 == 0)) break;
    ++bits;
  }
  return bits | (std::signbit(value) ? 0x80 : 0);
}

inline unsigned cvt_rn_f16x2_e4m3x2(unsigned pair) {
  const auto half = [](unsigned bits) {
    const float value = (bits & 0x7f) == 0x7f ? NAN : magnitude<3, 7>(bits & 0x7f);
    return cvt_rn_f16_f32(bits & 0x80 ? -value : value);
  };
  return half(pair & 0xff) | half(pair >> 8 & 0xff) << 16;
}

inline unsigned cvt_rn_satfinite_e4m3x2_f32(float low, float high) {
  return cvt_rn_satfinite<3, 7, 0x7e>(low) | cvt_rn_satfinite<3, 7, 0x7e>(high) << 8;
}

inline unsigned cvt_rn_satfinite_e5m2x2_f32(float low, float high) {
  return cvt_rn_satfinite<2, 15, 0x7b>(low) | cvt_rn_satfinite<2, 15, 0x7b>(high) << 8;
}

}  // namespace jaxdnn::ptx
