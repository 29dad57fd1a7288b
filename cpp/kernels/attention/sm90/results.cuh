// What becomes of a tile's sums of values (attention/sm90.cuh): results, and their rows' log-sum-exps.
#pragma once

#include "attention/sm90/call.cuh"
#include "attention/sm90/fragment_row.cuh"
#include "ptx/math.cuh"
#include "ptx/warp.cuh"

namespace jaxdnn {

/// Divides by the weights' sums, and writes the rows `first_row` and `first_row` + 8 of a tile. Of a row there are the
/// largest product, about, of which `scale` makes an exponent of 2, and the sum of this thread's weights.
template <class Config, int kSums>
__device__ __forceinline__ void store_rows(const AttentionSm90<Config>& call, const AttentionTile<Config>& tile,
                                           int first_row, float scale, const float (&largest)[2],
                                           const float (&total)[2], float (&sums)[kSums]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = first_row + 8 * r, query = tile.query(row), batch = tile.batch_of(call, row);
    const bool written = query < call.query_length && tile.has_head(call, row);
    // Sums of rows past the end are of keys that they don't see.
    const bool there = query < tile.query_length;
    float sum = total[r] + ptx::shfl_sync_bfly(total[r], 1);
    sum += ptx::shfl_sync_bfly(sum, 2);
    if (!there) sum = 0;
    float base = there ? largest[r] * scale : -math::infinity<float>(), factor = 1;
    if constexpr (!is_same<typename Config::Sinks, void>) {
      const float sink = 1.4426950408889634f * number_of_batch<typename Config::Sinks>(call.sinks, batch, 0.0f);
      const float both = ::fmaxf(base, sink);
      if (both != -math::infinity<float>()) {
        factor = ptx::ex2_approx_ftz(base - both);
        sum = sum * factor + ptx::ex2_approx_ftz(sink - both);
        base = both;
      }
    }
    const bool sees = there && sum != 0;
    factor = sees ? factor / sum : 0;
    if constexpr (!is_same<typename Config::Seeds, void>) factor *= call.kept;
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      if (i / 2 % 2 == r && !sees) sums[i] = 0;  // what hidden values are, which may be no numbers, times zero
    }
    // Results of each split are as those of another batch.
    const int element = tile.element + tile.split * call.batches, head = batch - tile.batch + tile.head;
    typename Config::Out* const line =
        call.out + element * call.out_batch + head * call.out_head + query * call.out_row;
    store_fragment_row(line, sums, r, factor, call.value_size, written);
    if constexpr (!is_same<typename Config::LogSumExp, void>) {
      using Operand = typename Config::LogSumExp;
      const OperandAddress& at = call.log_sum_exp;
      const long long offset =
          at.of_batch<Operand::kAffine>(element * call.query_heads + head) + at.of_row<Operand::kAffineRows>(query);
      const float found = sum == 0 ? -math::infinity<float>() : base * 0.6931471805599453f + ::logf(sum);
      if (threadIdx.x % 4 == 0 && written) static_cast<float*>(const_cast<void*>(at.data))[offset] = found;
    }
  }
}

}  // namespace jaxdnn
