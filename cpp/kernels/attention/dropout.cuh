// Which weights of a warp's strip of 16 rows are kept (jaxdnn/engines/attention/problem.py says by which bits).
#pragma once

#include "core/fragment.cuh"
#include "core/philox.cuh"
#include "ptx/warp.cuh"

namespace jaxdnn {

struct Dropout {
  PhiloxKey key;
  unsigned threshold;

  /// Of a batch, whose seeds are two neighbouring words.
  template <class Operand>
  static __device__ __forceinline__ Dropout of_batch(const OperandAddress& seeds, int batch, unsigned threshold) {
    const auto* words =
        static_cast<const typename Operand::Type*>(seeds.data) + seeds.of_batch<Operand::kAffine>(batch);
    return {{words[0], words[1]}, threshold};
  }

  /// Makes zeros of what is not kept. `first` is the thread's first element, in a column that is a multiple of 4 for
  /// the first lane of a row. Four columns share a counter, of which two lanes have two each, in two rows: each lane
  /// computes the bits of one of the rows, and they exchange halves.
  template <int kWeights>
  __device__ __forceinline__ void drop(float (&weights)[kWeights], const FragmentCoordinate& first) const {
    const bool odd = threadIdx.x & 1;
    const unsigned row = first.row + (odd ? 8 : 0);
#pragma unroll
    for (int pair = 0; pair < kWeights / 4; ++pair) {
      unsigned words[4] = {static_cast<unsigned>(first.column) / 4 + 2 * pair, row, 0, 0};
      philox(key, words);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const unsigned own = odd ? words[2 + i] : words[i];
        const unsigned other = ptx::shfl_sync_bfly(odd ? words[i] : words[2 + i], 1);
        if ((odd ? other : own) < threshold) weights[4 * pair + i] = 0;
        if ((odd ? own : other) < threshold) weights[4 * pair + 2 + i] = 0;
      }
    }
  }
};

}  // namespace jaxdnn
