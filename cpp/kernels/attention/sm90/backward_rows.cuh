// What the backward pass needs of each query: the log-sum-exp, to the base of 2, and
//
//   delta = out . d_out - d_log_sum_exp
//
// next to each other, for all queries of whole blocks. A query that isn't there or sees nothing has the log-sum-exp
// infinity, which makes its weights zero.
//
//   grid             for each batch, blocks of kRows queries
//   block            256 threads: a vector has 8, 16 or 32 lanes, with 8 elements each. They have four neighbouring
//                    queries, whose vectors are all loaded before one is used; so are their other numbers, of which the
//                    first four lanes have one each
//
// Bytes: those of the results and their cotangents, once. Flops: 2 for each element. Memory bounds it, if enough is on
// its way: 18 bytes a clock for each multiprocessor, and some 800 clocks, are 15 KiB; a thread's loads are 128 bytes.
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

  static constexpr int kLanes = Config::kValueSize <= 64 ? 8 : Config::kValueSize <= 128 ? 16 : 32;
  static constexpr int kThreads = 256, kOfThread = 4, kRows = kThreads / kLanes * kOfThread;
  static_assert(Config::kValueSize <= 256 && Config::kTileM % kOfThread == 0, "lanes have a vector each, of one batch");
};

template <class Config>
__device__ __forceinline__ void attention_sm90_backward_rows(const AttentionSm90BackwardRows<Config>& call) {
  using Call = AttentionSm90BackwardRows<Config>;
  using T = typename Config::T;
  const int batch_rows = call.query_blocks * Config::kTileM, blocks = (batch_rows + Call::kRows - 1) / Call::kRows;
  const int batch = blockIdx.x / blocks, lane = threadIdx.x % Call::kLanes;
  const int first = (blockIdx.x - batch * blocks) * Call::kRows + threadIdx.x / Call::kLanes * Call::kOfThread;
  const int element = batch / call.query_heads, head = batch - element * call.query_heads;
  const int length = number_of_batch<typename Config::QueryLengths>(call.query_lengths, batch, call.query_length);
  Vector<T, 8> results[Call::kOfThread], cotangents[Call::kOfThread];
#pragma unroll
  for (int i = 0; i < Call::kOfThread; ++i) {
    results[i].clear();
    cotangents[i].clear();
    if (Config::kOut && first + i < length && lane * 8 < call.value_size) {
      results[i].load(call.out.vector(element, head, first + i) + lane * 8);
      cotangents[i].load(call.d_out.vector(element, head, first + i) + lane * 8);
    }
  }
  const int row = first + lane;
  const bool own = lane < Call::kOfThread && row < batch_rows;
  float log_sum_exp = -math::infinity<float>(), delta = 0;
  if (own && row < length) {
    log_sum_exp = number_of_row<typename Config::LogSumExp>(call.log_sum_exp, batch, row);
    delta = -number_of_row<typename Config::DLogSumExp>(call.d_log_sum_exp, batch, row);
  }
#pragma unroll
  for (int i = 0; i < Call::kOfThread; ++i) {
    float a[8], b[8];
    results[i].unpack(a);
    cotangents[i].unpack(b);
#pragma unroll
    for (int j = 0; j < 8; ++j) a[j] *= b[j];
    const float sum = lanes_sum<Call::kLanes>(tree_sum(a));
    if (lane == i) delta += sum;
  }
  if (!own) return;
  const bool sees = log_sum_exp != -math::infinity<float>();
  const float values[2] = {sees ? log_sum_exp * 1.4426950408889634f : math::infinity<float>(), sees ? delta : 0};
  const long long index = static_cast<long long>(batch) * batch_rows + row;
  Vector<float, 2> both;
  both.pack(values);
  both.store(call.rows + 2 * index);
  if (call.contributions == nullptr) return;
  if (row % Config::kTileM == 0) call.contributions[index / Config::kTileM] = 0;
  if (index < call.parts)
    call.contributions[static_cast<long long>(gridDim.x / blocks) * call.query_blocks + index] = 0;
}

}  // namespace jaxdnn
