// The 8-bit floating-point types as storage, and their exact conversions to and from float.
#pragma once

#include <cmath>

#include "floats.h"

JAXDNN_ISA_BEGIN

// Four exponent bits and three of the mantissa; no infinity, and one NaN of either sign.
struct float8_e4m3fn {
  uint8_t bits;
};

// Five exponent bits and two of the mantissa: the upper half of a float16.
struct float8_e5m2 {
  uint8_t bits;
};

// XLA's threads flush subnormal floats to zero, so none may occur on the way.
inline float widen(float8_e4m3fn value) {
  const uint32_t sign = uint32_t(value.bits & 0x80) << 24, magnitude = value.bits & 0x7f;
  const uint32_t subnormal = bit_cast<uint32_t>(float(magnitude) * 0x1p-9f);
  const uint32_t normal = (magnitude << 20) + ((127 - 7) << 23);
  const uint32_t bits = magnitude == 0x7f ? 0x7fc00000 : magnitude < 8 ? subnormal : normal;
  return bit_cast<float>(bits | sign);
}

inline float widen(float8_e5m2 value) { return widen(float16{uint16_t(value.bits << 8)}); }

// The magnitude of `value`, rounded to nearest even to a float of `mantissa` bits whose least normal exponent is
// `least_exponent`.
inline float rounded_magnitude(float value, int mantissa, int least_exponent) {
  const float a = std::fabs(value) < 0x1p16f ? std::fabs(value) : 0x1p16f;
  const uint32_t exponent = bit_cast<uint32_t>(a) & 0x7f800000, least = uint32_t(least_exponent + 127) << 23;
  // Next to the anchor a float has as many digits as are asked for.
  const uint32_t anchor = ((exponent > least ? exponent : least) + (uint32_t(23 - mantissa) << 23)) | 0x400000;
  return (a + bit_cast<float>(anchor)) - bit_cast<float>(anchor);
}

// Beyond the greatest number lies NaN, of the same sign.
template <>
inline float8_e4m3fn narrow<float8_e4m3fn>(float value) {
  const float rounded = rounded_magnitude(value, 3, -6);
  const uint32_t normal = (bit_cast<uint32_t>(rounded) - ((127 - 7) << 23)) >> 20;
  const uint32_t finite = rounded < 0x1p-6f ? uint32_t(rounded * 0x1p9f) : normal;
  const uint32_t sign = bit_cast<uint32_t>(value) >> 24 & 0x80;
  return {uint8_t((rounded <= 448.0f && value == value ? finite : 0x7f) | sign)};
}

template <>
inline float8_e5m2 narrow<float8_e5m2>(float value) {
  const float rounded = rounded_magnitude(value, 2, -14);
  const uint32_t finite = rounded <= 57344.0f ? narrow<float16>(rounded).bits >> 8 : 0x7c;
  const uint32_t sign = bit_cast<uint32_t>(value) >> 24 & 0x80;
  return {uint8_t((value == value ? finite : 0x7e) | sign)};
}

// Rounding to a narrower type from here is rounding from the double itself: where anything is lost the last bit is set,
// which keeps a tie from appearing.
inline float rounded_to_odd(double value) {
  const float nearest = float(value);
  const double back = nearest;
  if (back == value || value != value || std::isinf(nearest)) return nearest;
  const uint32_t bits = bit_cast<uint32_t>(nearest);
  if (bits & 1) return nearest;
  // An even neighbour was nearer; the odd one is on the other side of the value.
  return bit_cast<float>(std::fabs(back) > std::fabs(value) ? bits - 1 : bits + 1);
}

JAXDNN_ISA_END
