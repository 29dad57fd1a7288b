// A call of attention's backward kernels for Hopper (attention/sm90_backward.cuh): how it is cut into tiles, where they
// lie in shared memory, and which queries see a tile's keys.
#pragma once

#include "attention/sm90/call.cuh"

namespace jaxdnn {

/// What a `Config` has besides T, kTileM, kHeadSize and kValueSize.
struct AttentionSm90BackwardDefaults {
  static constexpr bool kLeft = false, kRight = false;  // whether there are these bounds of the band
  static constexpr bool kOut = true;                    // whether results have a cotangent
  // Numbers of a batch that the mask has, the sinks, and the log-sum-exp's cotangent: an EpilogueOperand, or none.
  using QueryOffset = void;
  using QueryLengths = void;
  using KeyLengths = void;
  using Sinks = void;
  using DSinks = void;
  using DLogSumExp = void;
  // Of the gradients' elements, or none where one is not asked for.
  using DQuery = void;
  using DKey = void;
  using DValue = void;
};

/// Where vectors lie. Strides count elements.
template <class T>
struct HeadsAddress {
  T* data = nullptr;
  long long row = 0, head = 0, batch = 0;

  __device__ __forceinline__ T* vector(int element, int its_head, int position) const {
    return data + element * batch + its_head * head + position * row;
  }
};

/// Sums of a block of queries' gradient, as the warp groups have them, one after the other: a fragment of 64 rows each,
/// in which neighbouring threads have neighbouring vectors of four numbers. The warp groups share the block's rows, if
/// it has 128, or its columns.
template <class Config>
struct QuerySums {
  static constexpr bool kByRows = Config::kTileM == 128;
  static constexpr int kChunks = (Config::kHeadSize + kChunk - 1) / kChunk;
  static constexpr int kColumns = kByRows ? kChunks * kChunk : kChunks * kChunk / 2;
  static constexpr int kNumbers = kColumns / 2;  // of a thread
  static constexpr int kFragmentBytes = kNumbers * 128 * 4, kBytes = 2 * kFragmentBytes;
  static_assert(kByRows || Config::kTileM == 64, "a multiply has 64 rows");

  /// Bytes from the first number to where thread `thread` of a warp group has its vector `i`.
  static __device__ __forceinline__ int vector(int group, int i, int thread) {
    return group * kFragmentBytes + (i * 128 + thread) * 16;
  }
};

template <class Config>
struct AttentionSm90Backward {
  using T = typename Config::T;
  const TensorMap *query = nullptr, *key = nullptr, *value = nullptr, *d_out = nullptr;
  const float* rows = nullptr;        // of each query the log-sum-exp, to the base of 2, and delta
  float* query_sums = nullptr;        // for each batch and block of queries
  unsigned* contributions = nullptr;  // to each of these
  unsigned* counter = nullptr;        // of the tiles that are taken
  HeadsAddress<typename Config::DKey> d_key;
  HeadsAddress<typename Config::DValue> d_value;
  OperandAddress query_offset, query_lengths, key_lengths;
  int batches = 0, key_heads = 0, group = 1;  // query heads that share a key head
  int query_length = 0, key_length = 0, head_size = 0, value_size = 0;
  int query_batched = 1, key_batched = 1, value_batched = 1, d_out_batched = 1;  // 0 when one array serves the batch
  int left = 0, right = 0;                                                       // of the band
  float scale = 1;
  int swizzle = 1;  // key heads that are worked through together

  static constexpr int kTileM = Config::kTileM, kTileN = 128, kConsumers = 2, kThreads = 384;
  static constexpr bool kDQuery = !is_same<typename Config::DQuery, void>;
  static constexpr bool kDKey = !is_same<typename Config::DKey, void>;
  static constexpr bool kDValue = Config::kOut && !is_same<typename Config::DValue, void>;
  static_assert(Config::kHeadSize % 32 == 0 && Config::kValueSize % 32 == 0, "a row of four lanes");

  using KeyTile = VectorTile<T, kTileN, Config::kHeadSize>;
  using ValueTile = VectorTile<T, kTileN, Config::kValueSize>;
  using QueryTile = VectorTile<T, kTileM, Config::kHeadSize>;
  using DOutTile = VectorTile<T, kTileM, Config::kValueSize>;
  using WeightTile = VectorTile<T, kTileN, kTileM>;  // a line a key, of the queries' gradients of its scores
  using Sums = QuerySums<Config>;
  // In a stage of keys, or queries.
  static constexpr int kValuesAt = KeyTile::kBytes;
  static constexpr int kDOutAt = QueryTile::kBytes, kRowsAt = kDOutAt + Config::kOut * DOutTile::kBytes;
  static constexpr int kRowsBytes = kTileM * 8;

  using Keys = TmaPipeline<1, KeyTile::kBytes + ValueTile::kBytes>;
  using Queries = TmaPipeline<2, kRowsAt + kRowsBytes>;
  using Queue = TileQueue<1>;
  static constexpr int kQueriesAt = Keys::kStageStride;
  static constexpr int kWeightsAt = kQueriesAt + 2 * Queries::kStageStride;
  static constexpr int kSumsAt = kWeightsAt + kDQuery * 2 * WeightTile::kBytes;
  static constexpr int kBarriersAt = kSumsAt + kDQuery * 2 * Sums::kBytes;
  static constexpr int kQueryBarriersAt = kBarriersAt + Keys::kBarrierBytes;
  static constexpr int kQueueAt = kQueryBarriersAt + Queries::kBarrierBytes;
  static constexpr int kSharedBytes = kQueueAt + Queue::kSharedBytes;

  // Named barriers: gradients of scores are in shared memory; one of two sums is there, and for each consumer, may be.
  static constexpr int kWeightsThere = 1, kSumsFull = 2, kSumsEmpty = 4;
  static constexpr int kSumsFullThreads = 288, kSumsEmptyThreads = 160;

  __device__ __forceinline__ int query_blocks() const { return (query_length + kTileM - 1) / kTileM; }
  __device__ __forceinline__ int key_blocks() const { return (key_length + kTileN - 1) / kTileN; }
};

/// Some keys of one head.
template <class Config>
struct AttentionBackwardTile {
  int block, element, head;  // of keys

  __device__ __forceinline__ AttentionBackwardTile(const AttentionSm90Backward<Config>& call, const TileOrder& order,
                                                   unsigned index) {
    const TilePosition at = order[index];
    block = at.column;
    element = at.row / call.key_heads;
    head = at.row - element * call.key_heads;
  }
};

/// Of one query head: which of its blocks see which blocks of keys. Block m sees the keys from `first_key` of its first
/// query to `end_key` of its last one, in whole blocks, and both grow with m: so that those who see a block of keys,
/// and those that a block of queries sees, are neighbours.
template <class Config>
struct AttentionSight {
  using Call = AttentionSm90Backward<Config>;
  const Call& call;
  int batch, query_length, key_length, offset;  // batch: element * query heads + head

  __device__ __forceinline__ AttentionSight(const Call& call, int batch)
      : call(call),
        batch(batch),
        query_length(number_of_batch<typename Config::QueryLengths>(call.query_lengths, batch, call.query_length)),
        key_length(number_of_batch<typename Config::KeyLengths>(call.key_lengths, batch, call.key_length)),
        offset(number_of_batch<typename Config::QueryOffset>(call.query_offset, batch, 0)) {}

  /// The queries that see a key, if it is there; both grow with the key.
  __device__ __forceinline__ int first_query(int key) const {
    const int first = Config::kRight ? key - offset - call.right : 0;
    return first > 0 ? first : 0;
  }
  __device__ __forceinline__ int end_query(int key) const {
    const int end = Config::kLeft ? key - offset + call.left + 1 : query_length;
    return end < query_length ? end : query_length;
  }

  /// The blocks of queries that see a block of keys.
  __device__ __forceinline__ int first_query_block(int key_block) const {
    return first_query(key_block * Call::kTileN) / Call::kTileM;
  }
  __device__ __forceinline__ int end_query_block(int key_block) const {
    const int first = key_block * Call::kTileN, end = end_query(first + Call::kTileN - 1);
    const bool seen = first < key_length && first_query(first) < query_length && end > 0;
    return seen ? (end + Call::kTileM - 1) / Call::kTileM : 0;
  }

  /// The first block of keys that a block of queries sees.
  __device__ __forceinline__ int first_key_block(int query_block) const {
    const int first = Config::kLeft ? query_block * Call::kTileM + offset - call.left : 0;
    return first > 0 ? first / Call::kTileN : 0;
  }

  /// Whether each of so many keys, from `key` on, is seen by each query of a block.
  __device__ __forceinline__ bool whole(int query_block, int key, int keys) const {
    const int first = query_block * Call::kTileM, last_key = key + keys - 1;
    return last_key < key_length && first_query(last_key) <= first &&
           (!Config::kLeft || key - offset + call.left >= first + Call::kTileM - 1);
  }
};

}  // namespace jaxdnn
