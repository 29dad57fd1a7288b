// A call of attention's gradients for Hopper, as its two kernels (attention/sm90_query_gradient.cuh and
// attention/sm90_key_gradient.cuh) have it.
//
// With s = scale * query . key, both compute anew, of each query and key that it sees,
//
//   p   = exp(s - log_sum_exp)                          probabilities
//   d_p = d_out . value                                 their cotangents
//   d_s = p * (d_p - delta)                             those of scores
//
// of which the gradients are products:
//
//   d_query = scale * d_s * key        d_key = scale * d_s^T * query        d_value = p^T * d_out
//
// Each sum is in the registers of one warp group, from its first term to its last, in one order: nothing is added in
// memory, and results are the same from run to run. That takes 7 products instead of 5, and no scratch but for the
// numbers of rows (attention/sm90/backward_rows.cuh).
#pragma once

#include "attention/dropout.cuh"
#include "attention/sm90/backward_call.cuh"
#include "attention/sm90/fragment_row.cuh"
#include "ptx/math.cuh"

namespace jaxdnn {

/// What a `Config` has besides T, tiles and sizes. Where there is a mask's function, blocks are those of a list
/// (attention/lists.cuh). Functions of the kernel of keys' gradients are of transposed scores.
struct AttentionSm90GradientDefaults : AttentionMaskDefaults {
  using Score = void;  // of scaled products, with one or two results, as attention/sm90/backward_call.cuh has it
  using Seeds = void;  // of dropout: an EpilogueOperand, or none
};

template <class Config>
struct AttentionSm90Gradient : AttentionMask<Config> {
  using T = typename Config::T;
  const TensorMap *query = nullptr, *key = nullptr, *value = nullptr, *d_out = nullptr;
  // Of float32 what is summed comes by features, too (attention/sm90/call.cuh).
  const TensorMap *query_features = nullptr, *key_features = nullptr, *d_out_features = nullptr;
  const float* rows = nullptr;  // of each query the log-sum-exp, to the base of 2, and delta (backward_rows.cuh)
  int batch_rows = 0;           // of these, of a batch: whole tiles
  OperandAddress seeds, score_operands[kOperandsOf<typename Config::Score>];
  const int* lists = nullptr;  // of blocks, for each tile; strides are of them
  long long list_element = 0, list_head = 0;
  int batches = 0, group = 1;  // query heads that share a key head
  int head_size = 0, value_size = 0;
  int query_batched = 1, key_batched = 1, value_batched = 1, d_out_batched = 1;  // 0 when one array serves the batch
  float scale = 1;
  unsigned threshold = 0;  // of dropout, and the factor of what is kept
  float kept = 1;
  int swizzle = 1;   // heads that are worked through together
  int counter = -1;  // of the tiles that are taken; none where they are dealt

  __device__ __forceinline__ const float* numbers_of_row(int batch, int query) const {
    return rows + 2 * (static_cast<long long>(batch) * batch_rows + query);
  }
  static constexpr bool kByFeature = sizeof(T) == 4;
  static constexpr bool kScored = !is_same<typename Config::Score, void>;
  static constexpr bool kDropped = !is_same<typename Config::Seeds, void>;

  /// Of scores: what a function is given is scaled before.
  __device__ __forceinline__ float scale_to_base_2() const { return (kScored ? 1.0f : scale) * 1.4426950408889634f; }
  __device__ __forceinline__ Dropout dropout(int batch) const {
    if constexpr (kDropped) return Dropout::of_batch<typename Config::Seeds>(seeds, batch, threshold);
    return {};
  }
};

/// A descriptor, of which the compiler computes others where they are used, and not before the loop: there are no
/// registers to keep them.
__device__ __forceinline__ unsigned long long recomputed(unsigned long long descriptor) {
  asm volatile("" : "+l"(descriptor));
  return descriptor;
}

}  // namespace jaxdnn
