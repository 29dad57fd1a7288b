// ptx/memory.cuh's accesses of global memory in plain C++.
#pragma once

#include "cuda.h"

namespace jaxdnn::ptx {

template <int kBytes>
void ld_global(unsigned* words, const void* address) {
  std::memcpy(words, address, kBytes);
}

template <int kBytes>
void st_global(void* address, const unsigned* words) {
  std::memcpy(address, words, kBytes);
}

}  // namespace jaxdnn::ptx
