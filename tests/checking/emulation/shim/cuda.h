// What CUDA C++ has built in and emitted functors use, so that a C++ compiler for the CPU takes them too.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#define __device__
#define __forceinline__ inline

inline float __int_as_float(int bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline int __float_as_int(float value) {
  int bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline double __longlong_as_double(long long bits) {
  double value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline float __fadd_rn(float a, float b) { return a + b; }
inline int __popcll(unsigned long long bits) { return __builtin_popcountll(bits); }
inline int __clzll(long long bits) { return bits == 0 ? 64 : __builtin_clzll(bits); }
inline float rsqrtf(float x) { return 1 / sqrtf(x); }
inline double rsqrt(double x) { return 1 / sqrt(x); }

/// Bytes of the two words, the first one's first, by the digits of `selector`.
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const unsigned long long both = low | static_cast<unsigned long long>(high) << 32;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= static_cast<unsigned>(both >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return result;
}
