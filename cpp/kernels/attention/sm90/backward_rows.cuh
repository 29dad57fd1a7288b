// What the backward pass needs of each query: the log-sum-exp, to the base of 2, and
//
//   delta = out . d_out - d_log_sum_exp
//
// next to each other, for all queries of whole blocks. A query that isn't there or sees nothing has the log-sum-exp
// infinity, which makes its weights zero.
//
//   grid             for each batch, blocks of 16 queries
//   block            256 threads: 16 lanes a query, each with 8 elements of every 128
//
// Bytes: those of the results and their cotangents, once. Flops: 2 for each element. Memory bounds it.
#pragma once

#include "attention/sm90/backward_call.cuh"
#include "core/reduce.cuh"
#include "core/vector.cuh"

namespace jaxdnn {

template <class Config>
struct AttentionSm90BackwardRows {
  using T = typename Config::T;
  HeadsAddress<const T> out, d_out;
  OperandAddress log_sum_exp, d_log_sum_exp, query_lengths;
  float* rows = nullptr;
  unsigned* contributions = nullptr;  // if there are any, and after them the parts' counters of tiles: all become zero
  int parts = 1;
  int query_heads = 1, query_length = 0, query_blocks = 0, value_size = 0;

  static constexpr int kThreads = 256, kLanes = 16, kRows = kThreads / kLanes;
};

/// The number that a row has, if rows have such numbers.
template <class Operand>
__device__ __forceinline__ float number_of_row(const OperandAddress& address, int batch, int row) {
  if constexpr (is_same<Operand, void>) {
    return 0;
  } else {
    const auto* data = static_cast<const typename Operand::Type*>(address.data);
    return widen(data[address.of_batch<Operand::kAffine>(batch) + address.of_row<Operand::kAffine>(row)]);
  }
}

template <class Config>
__device__ __forceinline__ void attention_sm90_backward_rows(const AttentionSm90BackwardRows<Config>& call) {
  using Call = AttentionSm90BackwardRows<Config>;
  using T = typename Config::T;
  const int blocks = call.query_blocks * (Config::kTileM / Call::kRows);  // of a batch
  const int batch = blockIdx.x / blocks, lane = threadIdx.x % Call::kLanes;
  const int row = (blockIdx.x - batch * blocks) * Call::kRows + threadIdx.x / Call::kLanes;
  const int element = batch / call.query_heads, head = batch - element * call.query_heads;
  const bool there = row < number_of_batch<typename Config::QueryLengths>(call.query_lengths, batch, call.query_length);
  float delta = 0;
  if constexpr (Config::kOut) {
    for (int column = lane * 8; there && column < call.value_size; column += Call::kLanes * 8) {
      Vector<T, 8> results, cotangents;
      results.load(call.out.vector(element, head, row) + column);
      cotangents.load(call.d_out.vector(element, head, row) + column);
      float a[8], b[8];
      results.unpack(a);
      cotangents.unpack(b);
#pragma unroll
      for (int i = 0; i < 8; ++i) a[i] *= b[i];
      delta += tree_sum(a);
    }
    delta = lanes_sum<Call::kLanes>(delta);
  }
  const long long index = static_cast<long long>(batch) * call.query_blocks * Config::kTileM + row;
  if (lane == 0) {
    float log_sum_exp = math::infinity<float>();
    if (there) {
      const float found = number_of_row<typename Config::LogSumExp>(call.log_sum_exp, batch, row);
      if (found != -math::infinity<float>()) {
        log_sum_exp = found * 1.4426950408889634f;
        delta -= number_of_row<typename Config::DLogSumExp>(call.d_log_sum_exp, batch, row);
      } else {
        delta = 0;
      }
    }
    Vector<float, 2> both;
    const float values[2] = {log_sum_exp, delta};
    both.pack(values);
    both.store(call.rows + 2 * index);
    if (call.contributions == nullptr) return;
    if (row % Config::kTileM == 0) call.contributions[index / Config::kTileM] = 0;
    if (index < call.parts)
      call.contributions[static_cast<long long>(gridDim.x) * Call::kRows / Config::kTileM + index] = 0;
  }
}

}  // namespace jaxdnn
