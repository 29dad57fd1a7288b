// Arrays that an epilogue looks up by integers.
#pragma once

#include "core/number.cuh"

namespace jaxdnn {

/// What an index adds to an offset: it is brought to 0 .. bound, so that nothing is read out of bounds.
struct TableIndex {
  long long stride = 0, bound = 0;

  template <class Index>
  __device__ __forceinline__ long long offset(Index index) const {
    if constexpr (static_cast<Index>(-1) < static_cast<Index>(0)) {
      const long long value = index;
      return (value < 0 ? 0 : value < bound ? value : bound) * stride;
    } else {
      const uint64 value = index, last = static_cast<uint64>(bound);
      return static_cast<long long>(value < last ? value : last) * stride;
    }
  }
};

constexpr int kMostIndices = 3;  // of a table; `MAX_INDICES` in jaxdnn/engines/product/affine.py

/// The elements that `kIndices` integers choose from, for one element of the result.
template <class T, int kIndices>
struct Table {
  const T* data;  // where all indices are zero
  TableIndex indices[kIndices];

  template <class... Indices>
  __device__ __forceinline__ T at(Indices... values) const {
    static_assert(sizeof...(Indices) == kIndices, "one value for each index");
    long long offset = 0;
    int i = 0;
    ((offset += indices[i++].offset(values)), ...);
    return data[offset];
  }
};

}  // namespace jaxdnn
