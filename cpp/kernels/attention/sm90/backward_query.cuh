// The gradient of queries, from the sums that attention/sm90_backward.cuh leaves: scaled, and rounded once.
//
//   grid             a block of queries of one head of a part
//   block            the two warp groups, each of which reads what one of that kernel wrote
//
// Bytes: the sums and the gradient, once. Memory bounds it.
#pragma once

#include "attention/sm90/backward_call.cuh"
#include "attention/sm90/fragment_row.cuh"

namespace jaxdnn {

template <class Config>
struct AttentionSm90BackwardQuery {
  HeadsAddress<typename Config::DQuery> d_query;
  const float* query_sums = nullptr;
  const unsigned* contributions = nullptr;  // sums that nobody has added to are not there
  int first_batch = 0;                      // of this part
  int query_heads = 1, query_length = 0, query_blocks = 0, head_size = 0;
  float scale = 1;

  static constexpr int kThreads = 256;
};

template <class Config>
__device__ __forceinline__ void attention_sm90_backward_query(const AttentionSm90BackwardQuery<Config>& call) {
  using Sums = QuerySums<Config>;
  const int group = ptx::shfl_sync_idx(threadIdx.x / 128), thread = threadIdx.x % 128;
  const int in_part = blockIdx.x / call.query_blocks, block = blockIdx.x - in_part * call.query_blocks;
  const int batch = call.first_batch + in_part;
  const int element = batch / call.query_heads, head = batch - element * call.query_heads;
  const float* const from = call.query_sums + static_cast<long long>(blockIdx.x) * (Sums::kBytes / 4);
  float sums[Sums::kNumbers];
  const bool found = call.contributions[static_cast<long long>(batch) * call.query_blocks + block] != 0;
#pragma unroll
  for (int i = 0; i < Sums::kNumbers; i += 4) {
    unsigned words[4] = {};
    if (found) ptx::ld_global<16>(words, from + Sums::vector(group, i / 4, thread) / 4);
#pragma unroll
    for (int j = 0; j < 4; ++j) sums[i + j] = ptx::mov_f32(words[j]);
  }
  const int first_row = block * Config::kTileM + thread / 32 * 16 + thread % 32 / 4 + (Sums::kByRows ? 64 * group : 0);
  const int first_column = Sums::kByRows ? 0 : Sums::kColumns * group;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = first_row + 8 * r;
    store_fragment_row(call.d_query.vector(element, head, row) + first_column, sums, r, call.scale,
                       call.head_size - first_column, row < call.query_length);
  }
}

}  // namespace jaxdnn
