// Which keys queries see by the band and by lengths, and which queries see a key: neighbouring ones.
#pragma once

#include "core/epilogue_operands.cuh"

namespace jaxdnn {

/// What a `Config` of a kernel says of masks, besides kTileM and kTileN.
struct AttentionMaskDefaults {
  static constexpr bool kLeft = false, kRight = false;  // whether there are these bounds of the band
  static constexpr int kHeads = 1;                      // of a tile, which share their keys
  // Numbers of a batch: an EpilogueOperand, or none.
  using QueryOffset = void;
  using QueryLengths = void;
  using KeyLengths = void;
  using Mask = void;  // a function of attention/strip.cuh: what is visible besides
};

/// How many arrays a function loads from, or one.
template <class Function>
inline constexpr int kOperandsOf = Function::Operands::kArray;
template <>
inline constexpr int kOperandsOf<void> = 1;

/// What a call says of masks. Its batches are those of scores: element * query heads + head.
template <class Config>
struct AttentionMask {
  OperandAddress query_offset, query_lengths, key_lengths;
  OperandAddress mask_operands[kOperandsOf<typename Config::Mask>];
  int query_heads = 0, query_length = 0, key_length = 0;
  int left = 0, right = 0;  // of the band
  int splits = 1;           // of the keys of a tile
};

/// The number that a batch has, if the call has such numbers.
template <class Operand, class Number>
__device__ __forceinline__ Number number_of_batch(const OperandAddress& address, int batch, Number otherwise) {
  if constexpr (is_same<Operand, void>) {
    return otherwise;
  } else {
    const auto* data = static_cast<const typename Operand::Type*>(address.data);
    return widen(data[address.of_batch<Operand::kAffine>(batch)]);
  }
}

/// The keys that queries of a batch see.
template <class Config>
struct KeyRange {
  int query_length, key_length, offset;

  __device__ __forceinline__ void read(const AttentionMask<Config>& call, int batch) {
    query_length = number_of_batch<typename Config::QueryLengths>(call.query_lengths, batch, call.query_length);
    key_length = number_of_batch<typename Config::KeyLengths>(call.key_lengths, batch, call.key_length);
    offset = number_of_batch<typename Config::QueryOffset>(call.query_offset, batch, 0);
  }

  /// Of so many queries from `first` on.
  __device__ __forceinline__ int last_query(int first, int queries) const {
    return (first + queries < query_length ? first + queries : query_length) - 1;
  }

  /// The keys that a query sees; both ends grow with the query.
  __device__ __forceinline__ int first_key(const AttentionMask<Config>& call, int query) const {
    const int first = Config::kLeft ? query + offset - call.left : 0;
    return first > 0 ? first : 0;
  }
  __device__ __forceinline__ int end_key(const AttentionMask<Config>& call, int query) const {
    const int end = Config::kRight ? query + offset + call.right + 1 : key_length;
    return end < key_length ? end : key_length;
  }

  /// The queries that see a key, if it is there; both ends grow with the key.
  __device__ __forceinline__ int first_query(const AttentionMask<Config>& call, int key) const {
    const int first = Config::kRight ? key - offset - call.right : 0;
    return first > 0 ? first : 0;
  }
  __device__ __forceinline__ int end_query(const AttentionMask<Config>& call, int key) const {
    const int end = Config::kLeft ? key - offset + call.left + 1 : query_length;
    return end < query_length ? end : query_length;
  }
};

}  // namespace jaxdnn
