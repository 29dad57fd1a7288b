// The gradient of keys, or of values, of which several tiles have a share each (attention/sm90_backward.cuh,
// attention/sm90_key_gradient.cuh): the sum of these, always in the same order, rounded once.
//
//   grid             threads of 8 neighbouring columns, of all keys
//
// Bytes: the shares and the gradient, once, the former mostly from the L2 cache. Memory bounds it.
#pragma once

#include "attention/sm90/backward_call.cuh"

namespace jaxdnn {

template <class Gradient>
struct AttentionSm90BackwardShares {
  HeadsAddress<Gradient> sum;
  const float* parts = nullptr;  // [key head of all elements, share, key, column]
  int key_heads = 1, shares = 1, key_length = 0, columns = 0;
  long long vectors = 0;  // of 8 columns, of the sum

  static constexpr int kThreads = 256;
};

template <class Gradient>
__device__ __forceinline__ void attention_sm90_backward_shares(const AttentionSm90BackwardShares<Gradient>& call) {
  const long long index = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (index >= call.vectors) return;
  const int width = call.columns / 8;
  const long long vector = index / width;
  const int column = static_cast<int>(index - vector * width) * 8;
  const int row = static_cast<int>(vector / call.key_length);  // of key heads
  const int key = static_cast<int>(vector - static_cast<long long>(row) * call.key_length);
  const long long stride = static_cast<long long>(call.key_length) * call.columns;
  const float* const from =
      call.parts + row * call.shares * stride + static_cast<long long>(key) * call.columns + column;
  float sum[8] = {};
#pragma unroll 4
  for (int share = 0; share < call.shares; ++share) {
    Vector<float, 8> part;
    part.load(from + share * stride);
    float values[8];
    part.unpack(values);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] += values[i];
  }
  const int element = row / call.key_heads;
  Vector<Gradient, 8> rounded;
  rounded.pack(sum);
  rounded.store(call.sum.vector(element, row - element * call.key_heads, key) + column);
}

}  // namespace jaxdnn
