// core/ptx.cuh's accesses of memory, and its conversions, in plain C++.
#pragma once

#include "cuda.h"

namespace jaxdnn::ptx {

#define JAXDNN_ACCESS(bytes)                                                                        \
  inline void load_##bytes(unsigned* words, const void* address) { std::memcpy(words, address, bytes); } \
  inline void store_##bytes(void* address, const unsigned* words) { std::memcpy(address, words, bytes); }
JAXDNN_ACCESS(1)
JAXDNN_ACCESS(2)
JAXDNN_ACCESS(4)
JAXDNN_ACCESS(8)
JAXDNN_ACCESS(16)
#undef JAXDNN_ACCESS

inline unsigned half_of_float(float value) {
  const _Float16 half = static_cast<_Float16>(value);
  unsigned short bits;
  std::memcpy(&bits, &half, sizeof(bits));
  return bits;
}

}  // namespace jaxdnn::ptx
