// A call of the kernel of keys' and values' gradients (attention/sm90_key_gradient.cuh): how it is cut into tiles,
// where they lie in shared memory, and which blocks of queries see a tile's keys.
#pragma once

#include "attention/sm90/gradient_call.cuh"

namespace jaxdnn {

template <class Config>
struct AttentionSm90KeyGradient : AttentionSm90Gradient<Config> {
  using T = typename Config::T;
  HeadsAddress<typename Config::DKey> d_key;      // null
  HeadsAddress<typename Config::DValue> d_value;  // where it is not asked for
  int key_heads = 0;

  static constexpr int kTileN = 64, kThreads = 384;
  static_assert(Config::kHeadSize % 32 == 0 && Config::kValueSize % 32 == 0, "a row of four lanes");
  using Cluster = ClusterCoordinate<Config::kCluster, 1>;
  using KeyTile = VectorTile<T, kTileN, Config::kHeadSize>;
  using ValueTile = VectorTile<T, kTileN, Config::kValueSize>;
  using QueryTile = VectorTile<T, Config::kTileM, Config::kHeadSize>;
  using DOutTile = VectorTile<T, Config::kTileM, Config::kValueSize>;
  using Keys = TmaPipeline<1, KeyTile::kBytes>;
  using Values = TmaPipeline<1, ValueTile::kBytes>;
  using Queries = TmaPipeline<Config::kStages, QueryTile::kBytes, Cluster>;
  using DOuts = TmaPipeline<Config::kStages, DOutTile::kBytes, Cluster>;
  using Queue = TileQueue<Config::kCluster>;
  static constexpr int kProbabilityBytes = kTileN * Config::kTileM * 2;
  static constexpr int kValuesAt = KeyTile::kBytes;
  static constexpr int kQueriesAt = kValuesAt + ValueTile::kBytes;
  static constexpr int kDOutsAt = kQueriesAt + Config::kStages * QueryTile::kBytes;
  static constexpr int kProbabilitiesAt = kDOutsAt + Config::kStages * DOutTile::kBytes;
  static constexpr int kKeyBarriersAt = kProbabilitiesAt + Config::kStages * kProbabilityBytes;
  static constexpr int kValueBarriersAt = kKeyBarriersAt + Keys::kBarrierBytes;
  static constexpr int kQueryBarriersAt = kValueBarriersAt + Values::kBarrierBytes;
  static constexpr int kDOutBarriersAt = kQueryBarriersAt + Queries::kBarrierBytes;
  static constexpr int kQueueAt = kDOutBarriersAt + DOuts::kBarrierBytes;
  static constexpr int kSharedBytes = kQueueAt + Queue::kSharedBytes;
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
};

/// Some keys of one head, and the blocks of queries that see one of them, or of its neighbours in a cluster: of all
/// heads that share it, one after the other. Where there is none, it has one that sees nothing: then no case is
/// special, and no block of a cluster is tiles ahead of another one, as the ring of tiles asks.
template <class Config>
struct KeyTileWalk {
  using Call = AttentionSm90KeyGradient<Config>;

  const Call& call;
  int first_key, element, key_head;  // of the block's tile
  int first_of_cluster;
  int head, batch;                                   // of queries; batch: element * query heads + head
  int query_length = 0, key_length = 0, offset = 0;  // of the batch
  int block = 0, end_block = 0;

  __device__ __forceinline__ KeyTileWalk(const Call& call, const TileOrder& order, unsigned index, int rank)
      : call(call) {
    const TilePosition at = order[index];
    first_of_cluster = at.column * Config::kCluster * Call::kTileN;
    first_key = first_of_cluster + rank * Call::kTileN;
    element = at.row / call.key_heads;
    key_head = at.row - element * call.key_heads;
    head = key_head * call.group;
    find();
    if (on_a_block()) return;
    --head;
    block = 0;
    end_block = 1;
  }

  __device__ __forceinline__ bool on_a_block() const { return head < (key_head + 1) * call.group; }
  __device__ __forceinline__ int first_query() const { return block * Config::kTileM; }

  __device__ __forceinline__ void advance() {
    if (++block < end_block) return;
    ++head;
    find();
  }

  /// The queries that see a key.
  __device__ __forceinline__ int first_query(int key) const {
    const int first = Config::kRight ? key - offset - call.right : 0;
    return first > 0 ? first : 0;
  }
  __device__ __forceinline__ int end_query(int key) const {
    if (key >= key_length) return 0;
    const int end = Config::kLeft ? key - offset + call.left + 1 : query_length;
    return end < query_length ? end : query_length;
  }

  /// Whether there are pairs in the block that see nothing of each other; those past the end of the arrays have rows'
  /// numbers by which they don't count.
  __device__ __forceinline__ bool masked() const {
    const int first = first_query(), last = first + Config::kTileM - 1, last_key = first_key + Call::kTileN - 1;
    bool found = last_key >= key_length;
    if constexpr (Config::kRight) found |= last_key > first + offset + call.right;
    if constexpr (Config::kLeft) found |= first_key < last + offset - call.left;
    return found;
  }

 private:
  /// The first block of this head, or of the next that has one.
  __device__ __forceinline__ void find() {
    for (; on_a_block(); ++head) {
      batch = element * call.query_heads + head;
      query_length = number_of_batch<typename Config::QueryLengths>(call.query_lengths, batch, call.query_length);
      key_length = number_of_batch<typename Config::KeyLengths>(call.key_lengths, batch, call.key_length);
      offset = number_of_batch<typename Config::QueryOffset>(call.query_offset, batch, 0);
      const int end_key = first_of_cluster + Config::kCluster * Call::kTileN;
      const int first = first_query(first_of_cluster);
      const int end = end_query((end_key < key_length ? end_key : key_length) - 1);
      block = first / Config::kTileM;
      end_block = (end + Config::kTileM - 1) / Config::kTileM;
      if (first_of_cluster < key_length && first < end) return;
    }
  }
};

}  // namespace jaxdnn
