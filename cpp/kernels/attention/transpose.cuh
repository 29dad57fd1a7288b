// Vectors of float32 by features instead of positions, for multiplies of tf32 whose K are positions: the tensor cores
// read both operands along K. out[batch, head, feature, place] is of position
//
//   place % 8      0 1 2 3 4 5 6 7        the order of ptx/wgmma.cuh, in which columns of an accumulator are
//   position % 8   0 2 4 6 1 3 5 7        the registers of the other operand
//
// and zero where that is past the end: there are as many places as positions, and up to 7 more.
//
//   grid     a block for 32 positions and 32 features of a head, positions first
//   block    32 x 8 threads; each brings 4 elements through shared memory, whose lines are a word longer: no conflicts
//
// Bytes: all vectors once, and as many written.
#pragma once

#include "core/element.cuh"

namespace jaxdnn {

struct AttentionTranspose {
  const float* vectors = nullptr;
  float* out = nullptr;
  long long row = 0, head = 0, batch = 0;  // strides of `vectors`, in elements
  int positions = 0, size = 0, heads = 0;
};

__device__ __forceinline__ void attention_transpose(const AttentionTranspose& call) {
  __shared__ float tile[32][33];
  const int blocks = (call.positions + 31) / 32, places = (call.positions + 7) / 8 * 8;
  const int features = (call.size + 31) / 32;
  const int first = static_cast<int>(blockIdx.x) % blocks * 32;
  const int others = static_cast<int>(blockIdx.x) / blocks;
  const int feature = others % features * 32, matrix = others / features;
  const int element = matrix / call.heads, head = matrix - element * call.heads;
  const float* const vectors = call.vectors + element * call.batch + head * call.head;
  const int x = threadIdx.x, y = threadIdx.y;
#pragma unroll
  for (int i = 0; i < 32; i += 8) {
    const int position = first + y + i;
    const bool there = position < call.positions && feature + x < call.size;
    tile[y + i][x] = there ? vectors[position * call.row + feature + x] : 0.0f;
  }
  __syncthreads();
  float* const out = call.out + static_cast<long long>(matrix) * call.size * places;
  const int position = x / 8 * 8 + x % 4 * 2 + x / 4 % 2;
#pragma unroll
  for (int i = 0; i < 32; i += 8) {
    if (first + x < places && feature + y + i < call.size) {
      out[static_cast<long long>(feature + y + i) * places + first + x] = tile[position][y + i];
    }
  }
}

}  // namespace jaxdnn
