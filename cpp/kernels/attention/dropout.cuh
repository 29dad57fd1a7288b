// Which weights of a warp's strip of 16 rows, or of 16 keys, are kept (jaxdnn/engines/attention/problem.py says by
// which bits).
#pragma once

#include "core/fragment.cuh"
#include "core/philox.cuh"

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

  /// Calls `drop` with the number of each weight that is not kept. `first` is the thread's first element, in a column
  /// that is a multiple of 4 for the first lane of a row. Four columns share a counter, of which two lanes have two
  /// each, in two rows: each lane computes the bits of one of the rows, and they exchange halves.
  template <int kWeights, class Drop>
  __device__ __forceinline__ void each_dropped(const FragmentCoordinate& first, const Drop& drop) const {
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
        if ((odd ? other : own) < threshold) drop(4 * pair + i);
        if ((odd ? own : other) < threshold) drop(4 * pair + 2 + i);
      }
    }
  }

  /// The same of a strip of which rows are keys. `first` is as
  /// above, its row a multiple of 4 for the first lane of a column. Four rows share a counter, of which four lanes have
  /// one each. A lane has four elements, of four counters: it computes the bits of one, and all exchange them.
  template <int kWeights, class Drop>
  __device__ __forceinline__ void each_dropped_key(const FragmentCoordinate& first, const Drop& drop) const {
    const int counter = threadIdx.x / 4 % 4;
#pragma unroll
    for (int pair = 0; pair < kWeights / 4; ++pair) {
      unsigned words[4] = {static_cast<unsigned>(first.row) / 4 + counter % 2 * 2,
                           static_cast<unsigned>(first.column) + 8 * pair + counter / 2, 0, 0};
      philox(key, words);
      transpose_words<4>(words);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (words[i] < threshold) drop(4 * pair + i % 2 * 2 + i / 2);
      }
    }
  }
};

}  // namespace jaxdnn
