// The results of two neighbouring elements, as pairs of 16 bits.
#pragma once

#include "core/epilogue_element.cuh"
#include "core/vector.cuh"

namespace jaxdnn {

/// Rounds a pair of each result.
template <class Config, int kIndex = 0>
__device__ __forceinline__ void pack_results(const Register (&results)[2][Config::Results::kCount],
                                             unsigned (&words)[Config::Results::kCount]) {
  if constexpr (kIndex < Config::Results::kCount) {
    using Value = TypeAt<kIndex, typename Config::Registers>;
    const float values[2] = {static_cast<float>(static_cast<Value>(results[0][kIndex])),
                             static_cast<float>(static_cast<Value>(results[1][kIndex]))};
    Vector<TypeAt<kIndex, typename Config::Results>, 2> pair;
    pair.pack(values);
    words[kIndex] = pair.words[0];
    pack_results<Config, kIndex + 1>(results, words);
  }
}

}  // namespace jaxdnn
