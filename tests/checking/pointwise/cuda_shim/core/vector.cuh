// The element types of core/vector.cuh, and what core/ptx.cuh does with them, in plain C++.
#pragma once

#include "core/ptx_memory.h"
#include "cuda.h"

namespace jaxdnn {

using float64 = double;
using float32 = float;

struct float16 {
  unsigned short bits;
};

struct bfloat16 {
  unsigned short bits;
};

template <class A, class B>
inline constexpr bool is_same = false;
template <class A>
inline constexpr bool is_same<A, A> = true;

namespace ptx {

inline float float_of_bits(unsigned bits) { return __int_as_float(static_cast<int>(bits)); }

inline float float_of_half(unsigned bits) {
  unsigned short half = static_cast<unsigned short>(bits);
  _Float16 value;
  std::memcpy(&value, &half, sizeof(value));
  return static_cast<float>(value);
}

}  // namespace ptx

template <class T, class Compute>
inline unsigned round_to_16_bits(Compute value) {
  if constexpr (is_same<T, float16>) {
    const _Float16 half = static_cast<_Float16>(value);
    unsigned short bits;
    std::memcpy(&bits, &half, sizeof(bits));
    return bits;
  } else {
    // A double's lost digits become the last bit of a float (see core/vector.cuh).
    float single = static_cast<float>(value);
    unsigned bits = static_cast<unsigned>(__float_as_int(single));
    if (!is_same<Compute, float> && static_cast<Compute>(single) != value && value == value && !std::isinf(single)) {
      if (std::fabs(static_cast<double>(single)) > std::fabs(static_cast<double>(value))) --bits;
      bits |= 1;
    }
    if (value != value) return bits >> 16 | 0x40;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  }
}

}  // namespace jaxdnn
