// The 16-bit floating-point types as storage, and their exact conversions to and from float, one value at a time.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "kernel.h"

JAXDNN_ISA_BEGIN

struct float16 {
  uint16_t bits;
};
struct bfloat16 {
  uint16_t bits;
};

// The type that arithmetic on X is done in.
template <typename X>
struct ComputeType {
  using type = float;
};
template <>
struct ComputeType<double> {
  using type = double;
};
template <typename X>
using Compute = typename ComputeType<X>::type;

template <typename To, typename From>
inline To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast keeps the size");
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

inline double widen(double value) { return value; }
inline float widen(float value) { return value; }
inline float widen(bfloat16 value) { return bit_cast<float>(uint32_t(value.bits) << 16); }

inline float widen(float16 value) {
#if defined(__F16C__)
  return _cvtsh_ss(value.bits);
#else
  const uint32_t sign = uint32_t(value.bits & 0x8000) << 16;
  const uint32_t magnitude = value.bits & 0x7fff;
  uint32_t bits;
  if (magnitude < 0x0400) {  // zero or subnormal: a multiple of 2^-24, and a normal float
    bits = bit_cast<uint32_t>(float(magnitude) * 0x1p-24f);
  } else if (magnitude < 0x7c00) {
    bits = (magnitude << 13) + ((127 - 15) << 23);
  } else {  // infinity or NaN, kept quiet
    bits = 0x7f800000 | (magnitude << 13) | (magnitude > 0x7c00 ? 0x00400000 : 0);
  }
  return bit_cast<float>(bits | sign);
#endif
}

// Rounds to nearest, ties to even; a NaN stays a quiet NaN.
template <typename X>
X narrow(Compute<X> value);

template <>
inline double narrow<double>(double value) {
  return value;
}

template <>
inline float narrow<float>(float value) {
  return value;
}

template <>
inline bfloat16 narrow<bfloat16>(float value) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  const uint32_t rounded = bits + 0x7fff + ((bits >> 16) & 1);
  return {uint16_t((value != value ? bits | 0x00400000 : rounded) >> 16)};
}

template <>
inline float16 narrow<float16>(float value) {
#if defined(__F16C__)
  return {_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT)};
#else
  const uint32_t bits = bit_cast<uint32_t>(value);
  const uint16_t sign = uint16_t((bits >> 16) & 0x8000);
  const uint32_t magnitude = bits & 0x7fffffff;
  uint16_t half;
  if (magnitude > 0x7f800000) {
    half = uint16_t(0x7e00 | ((magnitude >> 13) & 0x03ff));
  } else if (magnitude >= 0x477ff000) {  // rounds to 2^16 or more
    half = 0x7c00;
  } else if (magnitude < 0x38800000) {  // below 2^-14: adding 0.5 makes the hardware round to a multiple of 2^-24
    half = uint16_t(bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3f000000);
  } else {
    const uint32_t odd = (magnitude >> 13) & 1;
    half = uint16_t((magnitude - ((127 - 15) << 23) + 0x0fff + odd) >> 13);
  }
  return {uint16_t(half | sign)};
#endif
}

JAXDNN_ISA_END
