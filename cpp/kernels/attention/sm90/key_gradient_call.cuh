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
  int key_heads = 0, shares = 1;                  // of the query heads of a key head; `group` is of each

  static constexpr int kTileN = 64, kThreads = 384;
  static_assert(Config::kHeadSize % 32 == 0 && Config::kValueSize % 32 == 0, "a row of four lanes");
  using Cluster = ClusterCoordinate<Config::kCluster, 1>;
  using KeyTile = VectorTile<T, kTileN, Config::kHeadSize>;
  using ValueTile = VectorTile<T, kTileN, Config::kValueSize>;
  using QueryTile = VectorTile<T, Config::kTileM, Config::kHeadSize>;
  using DOutTile = VectorTile<T, Config::kTileM, Config::kValueSize>;
  // What is summed lies behind what is multiplied before, or is the same.
  using QuerySumTile = SummedTile<T, Config::kTileM, Config::kHeadSize>;
  using DOutSumTile = SummedTile<T, Config::kTileM, Config::kValueSize>;
  static constexpr bool kByFeature = AttentionSm90Gradient<Config>::kByFeature;
  static constexpr int kQuerySumsAt = kByFeature ? QueryTile::kBytes : 0;  // in a stage
  static constexpr int kDOutSumsAt = kByFeature ? DOutTile::kBytes : 0;
  using Keys = TmaPipeline<1, KeyTile::kBytes>;
  using Values = TmaPipeline<1, ValueTile::kBytes>;
  using Queries = TmaPipeline<Config::kStages, kQuerySumsAt + QuerySumTile::kBytes, Cluster>;
  using DOuts = TmaPipeline<Config::kStages, kDOutSumsAt + DOutSumTile::kBytes, Cluster>;
  using Queue = TileQueue<Config::kCluster>;
  static constexpr int kProbabilityBytes = kTileN * Config::kTileM * static_cast<int>(sizeof(T));
  static constexpr int kValuesAt = KeyTile::kBytes;
  static constexpr int kQueriesAt = kValuesAt + ValueTile::kBytes;
  static constexpr int kDOutsAt = kQueriesAt + Config::kStages * Queries::kStageBytes;
  static constexpr int kProbabilitiesAt = kDOutsAt + Config::kStages * DOuts::kStageBytes;
  static constexpr int kKeyBarriersAt = kProbabilitiesAt + Config::kStages * kProbabilityBytes;
  static constexpr int kValueBarriersAt = kKeyBarriersAt + Keys::kBarrierBytes;
  static constexpr int kQueryBarriersAt = kValueBarriersAt + Values::kBarrierBytes;
  static constexpr int kDOutBarriersAt = kQueryBarriersAt + Queries::kBarrierBytes;
  static constexpr int kQueueAt = kDOutBarriersAt + DOuts::kBarrierBytes;
  static constexpr int kSharedBytes = kQueueAt + Queue::kSharedBytes;
  // A producer that loads features, too, doesn't fit in 40.
  static constexpr int kProducerRegisters = kByFeature ? 56 : 40, kConsumerRegisters = kByFeature ? 224 : 232;
};

/// Some keys of one head, and the blocks of queries that see one of them, or of its neighbours in a cluster: of a share
/// of the heads that attend to it, one after the other. Where there is none, it has one that sees nothing: then no case
/// is special, and no block of a cluster is tiles ahead of another one, as the ring of tiles asks.
template <class Config>
struct KeyTileWalk : KeyRange<Config> {
  using Call = AttentionSm90KeyGradient<Config>;
  using KeyRange<Config>::first_query;
  using KeyRange<Config>::end_query;
  static constexpr bool kListed = !is_same<typename Config::Mask, void>;

  const Call& call;
  int first_key, element, share;  // of the block's tile; of all shares of the element
  int first_of_cluster;
  int head, batch;               // of queries; batch: element * query heads + head
  int block = 0, end_block = 0;  // in a list, its entry and how many there are
  const int* list = nullptr;
  int entry = 1;  // of the list: twice the block, and whether some of its queries don't see some of the cluster's keys

  __device__ __forceinline__ KeyTileWalk(const Call& call, const TileOrder& order, unsigned index, int rank)
      : call(call) {
    const TilePosition at = order[index];
    first_of_cluster = at.column * Config::kCluster * Call::kTileN;
    first_key = first_of_cluster + rank * Call::kTileN;
    element = at.row / (call.key_heads * call.shares);
    share = at.row - element * call.key_heads * call.shares;
    head = share * call.group;
    find();
    if (on_a_block()) return;
    --head;
    block = 0;
    end_block = entry = 1;
  }

  __device__ __forceinline__ int key_head() const { return share / call.shares; }
  __device__ __forceinline__ bool on_a_block() const { return head < (share + 1) * call.group; }
  __device__ __forceinline__ int first_query() const {
    return (kListed ? listed_block(entry) : block) * Config::kTileM;
  }

  __device__ __forceinline__ void advance() {
    if (++block < end_block) {
      enter();
    } else {
      ++head;
      find();
    }
  }

  /// Whether there are pairs in the block that see nothing of each other; those past the end of the arrays have rows'
  /// numbers by which they don't count, unless a function makes infinities of them.
  __device__ __forceinline__ bool masked() const {
    const int first = first_query(), last = first + Config::kTileM - 1, last_key = first_key + Call::kTileN - 1;
    bool found = last_key >= this->key_length || (Call::kScored && last >= this->query_length);
    if constexpr (kListed) return found || listed_edge(entry) != Edge::none;
    if constexpr (Config::kRight) found |= last_key > first + this->offset + call.right;
    if constexpr (Config::kLeft) found |= first_key < last + this->offset - call.left;
    return found;
  }

 private:
  /// The first block of this head, or of the next that has one.
  __device__ __forceinline__ void find() {
    for (; on_a_block(); ++head) {
      batch = element * call.query_heads + head;
      this->read(call, batch);
      bool found;
      if constexpr (kListed) {
        const int tile = first_of_cluster / (Config::kCluster * Call::kTileN);
        const long long its = element * call.list_element + head * call.list_head + tile;
        list = call.lists + its * (1 + (call.query_length + Config::kTileM - 1) / Config::kTileM);
        block = 0;
        end_block = *list++;
        found = end_block > 0;
      } else {
        const int end_key = first_of_cluster + Config::kCluster * Call::kTileN, length = this->key_length;
        const int first = first_query(call, first_of_cluster);
        const int end = end_query(call, (end_key < length ? end_key : length) - 1);
        block = first / Config::kTileM;
        end_block = (end + Config::kTileM - 1) / Config::kTileM;
        found = first_of_cluster < length && first < end;
      }
      if (found) {
        enter();
        return;
      }
    }
  }

  __device__ __forceinline__ void enter() {
    if constexpr (kListed) entry = list[block];
  }
};

}  // namespace jaxdnn
