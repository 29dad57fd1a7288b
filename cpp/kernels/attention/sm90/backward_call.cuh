// A call of attention's backward kernels for Hopper (attention/sm90_backward.cuh): how it is cut into tiles, where they
// lie in shared memory, and which queries see a tile's keys.
#pragma once

#include "attention/sm90/call.cuh"
#include "attention/strip.cuh"

namespace jaxdnn {

/// What a `Config` has besides T, kTileM, kTileN, kHeadSize and kValueSize. Functions are of transposed scores, of
/// which a row is a key. Where there is a mask's, the blocks of queries of a tile are those of a list
/// (attention/lists.cuh).
struct AttentionSm90BackwardDefaults : AttentionMaskDefaults {
  static constexpr int kTileN = 128;
  static constexpr bool kOut = true;  // whether results have a cotangent
  // What becomes of scaled products, a function of attention/strip.cuh with one or two results, the second one its
  // derivative, if that isn't one; and of how many queries a thread has at once what it loads.
  using Score = void;
  static constexpr int kFetched = kFragmentColumns;
  // Whether one of the arrays that it loads comes in tiles, a row for each query and an element for each key.
  static constexpr bool kScoreTiled = false;
  static constexpr int kSumBuffers = 2;  // of sums of queries' gradients: one, or one of each warp that adds them
  // The sinks, the log-sum-exp's cotangent and the seeds of dropout: an EpilogueOperand, or none.
  using Sinks = void;
  using DSinks = void;
  using DLogSumExp = void;
  using Seeds = void;
  // Of the gradients' elements, or none where one is not asked for.
  using DQuery = void;
  using DKey = void;
  using DValue = void;
};

/// The number that a row has, if rows have such numbers.
template <class Operand>
__device__ __forceinline__ float number_of_row(const OperandAddress& address, int batch, int row) {
  if constexpr (is_same<Operand, void>) {
    return 0;
  } else {
    const auto* data = static_cast<const typename Operand::Type*>(address.data);
    return widen(data[address.of_batch<Operand::kAffine>(batch) + address.of_row<Operand::kAffineRows>(row)]);
  }
}

/// How many results a function has, if it is there.
template <class Function>
inline constexpr int kResultsOf = Function::kResults;
template <>
inline constexpr int kResultsOf<void> = 0;

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
struct AttentionSm90Backward : AttentionMask<Config> {
  using T = typename Config::T;
  const TensorMap *query = nullptr, *key = nullptr, *value = nullptr, *d_out = nullptr, *score_tile = nullptr;
  const float* rows = nullptr;        // of each query the log-sum-exp, to the base of 2, and delta
  float* query_sums = nullptr;        // for each batch and block of queries of this part
  unsigned* contributions = nullptr;  // to each of these
  unsigned* counter = nullptr;        // of the tiles that are taken
  HeadsAddress<typename Config::DKey> d_key;
  HeadsAddress<typename Config::DValue> d_value;
  OperandAddress seeds, score_operands[kOperandsOf<typename Config::Score>];
  const int* lists = nullptr;  // of blocks of queries, for each block of keys; strides are of them
  const int* ranks = nullptr;  // of each such block: how many blocks of less keys its queries see
  long long list_element = 0, list_head = 0;
  long long first_block = 0;      // of queries, of this part
  int first_head = 0, heads = 0;  // of this part, among the shares of all elements of the batch
  int key_heads = 0, shares = 1;  // of the query heads of a key head, of which each has tiles of its own
  int group = 1;                  // query heads of a share
  int together = 1;               // of these, neighbours that see the same
  int head_size = 0, value_size = 0;
  int query_batched = 1, key_batched = 1, value_batched = 1, d_out_batched = 1;  // 0 when one array serves the batch
  int score_batched = 1, score_headed = 1;  // likewise; and when one serves all heads
  float scale = 1;
  unsigned threshold = 0;  // of dropout, and the factor of what is kept
  float kept = 1;
  int swizzle = 1;  // shares that are worked through together

  static constexpr int kTileM = Config::kTileM, kTileN = Config::kTileN, kConsumers = 2, kThreads = 384;
  static constexpr bool kDQuery = !is_same<typename Config::DQuery, void>;
  static constexpr bool kDKey = !is_same<typename Config::DKey, void>;
  static constexpr bool kDValue = Config::kOut && !is_same<typename Config::DValue, void>;
  static_assert(Config::kHeadSize % 32 == 0 && Config::kValueSize % 32 == 0, "a row of four lanes");

  using KeyTile = VectorTile<T, kTileN, Config::kHeadSize>;
  using ValueTile = VectorTile<T, kTileN, Config::kValueSize>;
  using QueryTile = VectorTile<T, kTileM, Config::kHeadSize>;
  using DOutTile = VectorTile<T, kTileM, Config::kValueSize>;
  using ScoreTile = VectorTile<T, kTileM, kTileN>;
  using WeightTile = VectorTile<T, kTileN, kTileM>;  // a line a key, of the queries' gradients of its scores
  using Sums = QuerySums<Config>;
  // In a stage of keys, or queries.
  static constexpr int kValuesAt = KeyTile::kBytes;
  static constexpr int kDOutAt = QueryTile::kBytes, kScoresAt = kDOutAt + Config::kOut * DOutTile::kBytes;
  static constexpr int kRowsAt = kScoresAt + Config::kScoreTiled * ScoreTile::kBytes;
  static constexpr int kRowsBytes = kTileM * 8;

  using Keys = TmaPipeline<1, KeyTile::kBytes + ValueTile::kBytes>;
  using Queries = TmaPipeline<2, kRowsAt + kRowsBytes>;
  using Queue = TileQueue<1>;
  static constexpr int kQueriesAt = Keys::kStageStride;
  static constexpr int kWeightsAt = kQueriesAt + 2 * Queries::kStageStride;
  static constexpr int kSumsAt = kWeightsAt + kDQuery * 2 * WeightTile::kBytes;
  static constexpr int kBarriersAt = kSumsAt + kDQuery * Config::kSumBuffers * Sums::kBytes;
  static constexpr int kQueryBarriersAt = kBarriersAt + Keys::kBarrierBytes;
  static constexpr int kQueueAt = kQueryBarriersAt + Queries::kBarrierBytes;
  static constexpr int kSharedBytes = kQueueAt + Queue::kSharedBytes;

  // Named barriers: gradients of scores are in shared memory; one of two sums is there, and has been read, for each
  // consumer.
  static constexpr int kWeightsThere = 1, kSumsFull = 2, kSumsEmpty = 4;
  static constexpr int kSumsFullThreads = 288, kSumsEmptyThreads = 160;

  static_assert(Config::kSumBuffers == 1 || Config::kSumBuffers == 2, "as many as warps that add, or one for both");

  __device__ __forceinline__ int query_blocks() const { return (this->query_length + kTileM - 1) / kTileM; }
  __device__ __forceinline__ int key_blocks() const { return (this->key_length + kTileN - 1) / kTileN; }
};

/// Some keys of one head, and a share of the query heads that attend to them.
template <class Config>
struct AttentionBackwardTile {
  int block, element, key_head;
  int share;  // of all shares of the element

  __device__ __forceinline__ AttentionBackwardTile(const AttentionSm90Backward<Config>& call, const TileOrder& order,
                                                   unsigned index) {
    const TilePosition at = order[index];
    block = at.column;
    const int row = call.first_head + at.row;
    element = row / (call.key_heads * call.shares);
    share = row - element * call.key_heads * call.shares;
    key_head = share / call.shares;
  }
};

/// A block of queries, and whether some of them don't see some of a tile's keys, if a list says so.
struct QueryBlock {
  int number;
  bool partial;
};

/// Of one query head, and of those after it that see the same: which of their blocks see a tile, from the last to the
/// first, each of all these heads. One head after the other would have a causal mask's short tiles, whose few blocks
/// all tiles add to, wait at each head for the long ones. By arithmetic, block m sees the keys from `first_key` of its
/// first query to `end_key` of its last one, in whole blocks, and both grow with m: so that those who see a block of
/// keys, and those that a block of queries sees, are neighbours.
template <class Config>
struct AttentionSight : KeyRange<Config> {
  using Call = AttentionSm90Backward<Config>;
  using Tile = AttentionBackwardTile<Config>;
  static constexpr bool kListed = !is_same<typename Config::Mask, void>;
  static constexpr bool kScored = !is_same<typename Config::Score, void>;

  const Call& call;
  int head, batch, key_block;  // batch: element * query heads + head
  int first = 0, end = 0;      // of the blocks; in a list, from its end
  int at, turn = 0;            // the block, and of the heads that see the same, which one it is of
  const int* last = nullptr;   // of a list
  const int* ranks = nullptr;  // of the blocks of queries

  __device__ __forceinline__ AttentionSight(const Call& call, const Tile& tile, int head)
      : call(call),
        head(head),
        batch(tile.element * call.key_heads * call.shares * call.group + head),
        key_block(tile.block) {
    this->read(call, batch);
    if constexpr (kListed) {
      const long long number = tile.element * call.list_element + head * call.list_head + tile.block;
      const int* const list = call.lists + number * (1 + call.query_blocks());
      end = list[0];
      last = list + end;
      ranks = call.ranks + number * call.query_blocks();
    } else {
      const int first_key = tile.block * Call::kTileN, end_query = this->end_query(call, first_key + Call::kTileN - 1);
      const int first_query = this->first_query(call, first_key);
      first = first_query / Call::kTileM;
      const bool seen = first_key < this->key_length && first_query < this->query_length && end_query > 0;
      end = seen ? (end_query + Call::kTileM - 1) / Call::kTileM : 0;
    }
    at = end - 1;
  }

  /// Blocks of this head, and of those that see the same.
  __device__ __forceinline__ int count() const { return end > first ? (end - first) * call.together : 0; }
  __device__ __forceinline__ bool on() const { return at >= first; }

  /// To the same block of the next head, or to the first one's block before.
  __device__ __forceinline__ void advance() {
    const bool same = ++turn < call.together;
    const int heads = same ? 1 : 1 - call.together;
    head += heads;
    batch += heads;
    if (same) return;
    turn = 0;
    --at;
  }

  __device__ __forceinline__ QueryBlock block() const {
    if constexpr (kListed) {
      const int entry = last[-at];
      return {listed_block(entry), listed_edge(entry) != Edge::none};
    } else {
      return {at, false};
    }
  }

  __device__ __forceinline__ int first_key() const { return key_block * Call::kTileN; }

  /// How many blocks of less keys a block of queries sees.
  __device__ __forceinline__ int rank(int query_block) const {
    if constexpr (kListed) {
      return ranks[query_block];
    } else {
      const int first = Config::kLeft ? query_block * Call::kTileM + this->offset - call.left : 0;
      return key_block - (first > 0 ? first / Call::kTileN : 0);
    }
  }

  /// Whether each of so many keys, from `key` on, is seen by each query of a block. Queries that aren't there have no
  /// weights, unless a function makes infinities of nothing.
  __device__ __forceinline__ bool whole(const QueryBlock& block, int key, int keys) const {
    if (kScored && (block.number + 1) * Call::kTileM > this->query_length) return false;
    if constexpr (kListed) {
      return !block.partial;
    } else {
      const int first = block.number * Call::kTileM, last_key = key + keys - 1;
      return last_key < this->key_length && this->first_query(call, last_key) <= first &&
             (!Config::kLeft || key - this->offset + call.left >= first + Call::kTileM - 1);
    }
  }
};

/// Calls `hide` with the number of each of a thread's scores that the mask hides, of a strip of which rows are keys.
/// `at` is the thread's first element.
template <class Config, class Call, int kScores, class Hide>
__device__ __forceinline__ void each_hidden_key(const KeyRange<Config>& range, const Call& call,
                                                const float (&scores)[kScores], const FragmentCoordinate& at,
                                                const Hide& hide) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int key = at.row + 8 * r, first = range.first_query(call, key), end = range.end_query(call, key);
    const unsigned count = key < range.key_length && end > first ? end - first : 0;
    each_outside<kScores, !is_same<typename Config::Mask, void>>(r, at.column, first, count, hide);
  }
  if constexpr (!is_same<typename Config::Mask, void>) {
    StripFunction<typename Config::Mask, kFragmentColumns> visible;
    visible.fetch(call.mask_operands, at);
    visible.apply(scores, call.mask_operands, at, [&](int i, bool sees) {
      if (!sees) hide(i);
    });
  }
}

}  // namespace jaxdnn
