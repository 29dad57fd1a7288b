// out = the sum over splits of exp(m[split] - m) * out[split], where m = log(sum over splits of exp(m[split])):
// attention to keys that were split, each of which has left its result and its log-sum-exp. It is rounded once.
//
//   grid             a block for each query of each head
//   block            (columns / 4, lanes): a thread has 4 neighbouring columns. A lane takes every lanes-th split, as
//   an
//                    online softmax does, then lanes are combined in pairs: the order is always the same
//   barriers         one for each halving of the lanes
//   shared memory    6 numbers a thread: what a `WeightedSum` is
//
// Bytes: 4 for each split and column, mostly from L2, and the results. Flops: 2 for each split and column. What bounds
// it is the latency of loads, of which a thread has those of kTogether splits in flight.
#pragma once

#include "attention/key_range.cuh"
#include "core/vector.cuh"
#include "ptx/math.cuh"

namespace jaxdnn {

/// Config has: T, of the result; Sinks and LogSumExp, each an EpilogueOperand or void.
template <class Config>
struct AttentionCombine {
  const float *parts = nullptr, *log_sum_exps = nullptr;  // [split, batch, query, column], and without columns
  typename Config::T* out = nullptr;
  long long out_row = 0, out_head = 0, out_batch = 0;  // strides, in elements
  OperandAddress sinks, log_sum_exp;
  int splits = 1, query_heads = 1, query_length = 1;
};

/// Of some columns, values weighted by exp(log-sum-exp - largest).
struct WeightedSum {
  static constexpr int kColumns = 4;
  float largest, total;  // the largest log-sum-exp; the sum of weights
  float values[kColumns];

  __device__ __forceinline__ void add(const WeightedSum& other) {
    const float before = largest;
    largest = ::fmaxf(before, other.largest);
    const float base = largest == -math::infinity<float>() ? 0.0f : largest;
    const float own = exponential(before - base), its = exponential(other.largest - base);
    total = total * own + other.total * its;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) values[i] = values[i] * own + other.values[i] * its;
  }

 private:
  static __device__ __forceinline__ float exponential(float x) { return ptx::ex2_approx_ftz(x * 1.4426950408889634f); }
};

template <class Config>
__device__ __forceinline__ void attention_combine(const AttentionCombine<Config>& call) {
  constexpr int kMostThreads = 256, kTogether = 4, kColumns = WeightedSum::kColumns;
  __shared__ WeightedSum shared[kMostThreads];
  const int width = blockDim.x, lanes = blockDim.y, lane = threadIdx.y, column = threadIdx.x * kColumns;
  const long long rows = gridDim.x, row = blockIdx.x;
  WeightedSum sum = {-math::infinity<float>(), 0, {}};
#pragma unroll 1
  for (int first = lane; first < call.splits; first += kTogether * lanes) {
    WeightedSum parts[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int split = first + i * lanes;
      parts[i] = {-math::infinity<float>(), 1, {}};
      if (split < call.splits) {
        const long long from = split * rows + row;
        Vector<float, kColumns> values;
        values.load(call.parts + from * width * kColumns + column);
        values.unpack(parts[i].values);
        parts[i].largest = call.log_sum_exps[from];
      }
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) sum.add(parts[i]);
  }
  WeightedSum* const own = shared + lane * width + threadIdx.x;
  *own = sum;
  for (int half = lanes / 2; half > 0; half /= 2) {
    __syncthreads();
    if (lane < half) own->add(own[half * width]);
  }
  if (lane > 0) return;
  sum = *own;

  const int batch = blockIdx.x / call.query_length, query = blockIdx.x % call.query_length;
  const int element = batch / call.query_heads, head = batch % call.query_heads;
  if constexpr (!is_same<typename Config::Sinks, void>) {
    sum.add({number_of_batch<typename Config::Sinks>(call.sinks, batch, 0.0f), 1, {}});
  }
  const float factor = sum.total == 0 ? 0 : 1 / sum.total;
  float scaled[kColumns];
#pragma unroll
  for (int i = 0; i < kColumns; ++i) scaled[i] = sum.values[i] * factor;
  Vector<typename Config::T, kColumns> rounded;
  rounded.pack(scaled);
  rounded.store(call.out + element * call.out_batch + head * call.out_head + query * call.out_row + column);
  if constexpr (!is_same<typename Config::LogSumExp, void>) {
    using Operand = typename Config::LogSumExp;
    const OperandAddress& at = call.log_sum_exp;
    const long long offset = at.of_batch<Operand::kAffine>(batch) + at.of_row<Operand::kAffineRows>(query);
    const float found = sum.total == 0 ? -math::infinity<float>() : sum.largest + ::logf(sum.total);
    if (threadIdx.x == 0) static_cast<float*>(const_cast<void*>(at.data))[offset] = found;
  }
}

}  // namespace jaxdnn
