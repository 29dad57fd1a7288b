// The gradient of sinks: the sum of -exp(sink - log-sum-exp) * delta over the queries of all batches that share one. Of
// queries past their element's length, which are not among the numbers of rows, the sink is the log-sum-exp.
//
//   grid             a block a batch: the first of those that share a sink adds up their queries, always in the same
//                    order; the others are done
//   shared memory    a number of each warp
//
// Bytes: the numbers of rows, once. Latency bounds it.
#pragma once

#include "attention/sm90/backward_call.cuh"
#include "core/reduce.cuh"
#include "ptx/math.cuh"

namespace jaxdnn {

template <class Config>
struct AttentionSm90BackwardSinks {
  OperandAddress sinks, d_sinks, d_log_sum_exp, query_lengths;
  const float* rows = nullptr;
  int batches = 0;  // of heads
  int query_length = 0;
  long long batch_rows = 0;

  static constexpr int kThreads = 256;
  using Sum = RowSum<float, kThreads, 1, 1, 1>;
};

template <class Config>
__device__ __forceinline__ void attention_sm90_backward_sinks(const AttentionSm90BackwardSinks<Config>& call) {
  using Call = AttentionSm90BackwardSinks<Config>;
  using Result = typename Config::DSinks;
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const auto offset = [&](int batch) { return call.d_sinks.template of_batch<Result::kAffine>(batch); };
  const int batch = blockIdx.x;
  const long long own = offset(batch);
  typename Call::Sum sum(ptx::cvta_to_shared(shared_memory), 0);
  float before[1] = {0};
  for (int other = threadIdx.x; other < batch; other += Call::kThreads) before[0] += offset(other) == own ? 1 : 0;
  sum(before);
  if (before[0] > 0) return;
  float total[1] = {0};
  for (int other = batch; other < call.batches; ++other) {
    if (offset(other) != own) continue;
    const float sink = 1.4426950408889634f * number_of_batch<typename Config::Sinks>(call.sinks, other, 0.0f);
    const float* const rows = call.rows + 2 * other * call.batch_rows;
    for (long long row = threadIdx.x; row < call.batch_rows; row += Call::kThreads) {
      total[0] -= ptx::ex2_approx_ftz(sink - rows[2 * row]) * rows[2 * row + 1];
    }
    const int length = number_of_batch<typename Config::QueryLengths>(call.query_lengths, other, call.query_length);
    if (sink == -math::infinity<float>()) continue;
    for (int row = length + threadIdx.x; row < call.query_length; row += Call::kThreads) {
      total[0] += number_of_row<typename Config::DLogSumExp>(call.d_log_sum_exp, other, row);
    }
  }
  sum(total);
  auto* const d_sinks = static_cast<typename Result::Type*>(const_cast<void*>(call.d_sinks.data));
  if (threadIdx.x == 0) d_sinks[own] = narrow<typename Result::Type>(total[0]);
}

}  // namespace jaxdnn
