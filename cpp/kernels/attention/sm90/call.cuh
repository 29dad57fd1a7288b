// A call of attention's kernel for Hopper (attention/sm90.cuh): how it is cut into tiles, where they lie in shared
// memory, and which keys their queries see.
#pragma once

#include "attention/edge.cuh"
#include "attention/key_range.cuh"
#include "core/pipeline_tma.cuh"
#include "core/scheduler.cuh"
#include "core/tile.cuh"
#include "core/tile_queue.cuh"

namespace jaxdnn {

/// Vectors of kSize elements in shared memory: queries, keys or values of a tile, or features of values that are
/// transposed. TMA fills what is past the end of a vector, or of all of them, with zeros.
template <class T, int kVectors, int kSizeOf>
struct VectorTile {
  static constexpr int kSize = kSizeOf;
  static_assert(kVectors % 16 == 0 && kVectors <= 256, "boxes of whole groups of lines");
  static constexpr int kElements = kDepthBytes / static_cast<int>(sizeof(T));  // of a chunk
  static constexpr int kChunkBytes = kVectors * kDepthBytes;
  static constexpr int kChunks = (kSize + kElements - 1) / kElements;
  static constexpr int kSteps = kSize * static_cast<int>(sizeof(T)) / 32;  // multiplies along the vectors
  static constexpr int kBytes = kChunks * kChunkBytes;

  /// By one thread. `element`: of vectors, the first that is loaded.
  static __device__ __forceinline__ void load(const TensorMap* map, unsigned tile, unsigned barrier, int first,
                                              int head, int batch, int element = 0) {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      ptx::cp_async_bulk_tensor_load(tile + i * kChunkBytes, map, barrier, element + i * kElements, first, head, batch);
    }
  }

  /// The same, of a tile that the blocks of a cluster share: each loads some of the chunks, for all of them.
  template <class Cluster>
  static __device__ __forceinline__ void load(const TensorMap* map, unsigned tile, unsigned barrier, int first,
                                              int head, int batch, const Cluster& cluster, int element = 0) {
    if constexpr (Cluster::kBlocks == 1) {
      load(map, tile, barrier, first, head, batch, element);
    } else {
#pragma unroll
      for (int i = 0; i < kChunks; i += Cluster::kBlocks) {
        const int own = i + cluster.row;
        if (kChunks % Cluster::kBlocks != 0 && own >= kChunks) break;
        ptx::cp_async_bulk_tensor_load_multicast(tile + own * kChunkBytes, map, barrier, cluster.column_mask(),
                                                 element + own * kElements, first, head, batch);
      }
    }
  }

  /// The same, of a tile that the blocks of a cluster share: the one in this row loads it for all.
  template <class Cluster>
  static __device__ __forceinline__ void load_by(int loading_row, const TensorMap* map, unsigned tile, unsigned barrier,
                                                 int first, int head, int batch, const Cluster& cluster) {
    if constexpr (Cluster::kBlocks == 1) {
      load(map, tile, barrier, first, head, batch);
    } else if (cluster.row == loading_row) {
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        ptx::cp_async_bulk_tensor_load_multicast(tile + i * kChunkBytes, map, barrier, cluster.column_mask(),
                                                 i * kElements, first, head, batch);
      }
    }
  }

  /// The descriptor of the tile. Only an operand of which vectors run along N has more than one chunk in a multiply.
  static __device__ __forceinline__ unsigned long long descriptor(unsigned tile) {
    return lines_descriptor<128>(tile, 1024, kChunkBytes);
  }

  /// What to add to a descriptor to come to bytes 32 i of all vectors, or to vector 16 i.
  static constexpr unsigned elements(int i) { return (i / 4 * kChunkBytes + i % 4 * 32) / 16; }
  static constexpr unsigned vectors(int i) { return i * 16 * 128 / 16; }
};

/// Vectors that are summed: the operand of a multiply whose K are kVectors positions. Of float32, rows of both operands
/// run along K, so that these come as features of so many positions, 8 at a time in the order of ptx/wgmma.cuh
/// (attention/transpose.cuh).
template <class T, int kVectors, int kSize>
struct SummedTile : Select<sizeof(T) == 4, VectorTile<T, kSize, kVectors>, VectorTile<T, kVectors, kSize>> {
  static constexpr bool kByFeature = sizeof(T) == 4;
  using Tile = Select<kByFeature, VectorTile<T, kSize, kVectors>, VectorTile<T, kVectors, kSize>>;

  /// By one thread: the vectors of positions from `first` on.
  static __device__ __forceinline__ void load(const TensorMap* map, unsigned tile, unsigned barrier, int first,
                                              int head, int batch) {
    Tile::load(map, tile, barrier, kByFeature ? 0 : first, head, batch, kByFeature ? first : 0);
  }

  template <class Cluster>
  static __device__ __forceinline__ void load(const TensorMap* map, unsigned tile, unsigned barrier, int first,
                                              int head, int batch, const Cluster& cluster) {
    Tile::load(map, tile, barrier, kByFeature ? 0 : first, head, batch, cluster, kByFeature ? first : 0);
  }

  /// What to add to a descriptor to come to multiply i along the positions.
  static constexpr unsigned positions(int i) { return kByFeature ? Tile::elements(i) : Tile::vectors(i); }
};

/// What a `Config` has besides T, Out, kTileM, kTileN, kQueryStages, kQueryInRegisters, kStages, kHeadSize and
/// kValueSize. Where there is a mask's function, the blocks of keys of a tile are those of a list
/// (attention/lists.cuh).
struct AttentionSm90Defaults : AttentionMaskDefaults {
  static constexpr int kBlocks = 1;  // of a multiprocessor
  // The sinks, the log-sum-exp and the seeds of dropout: an EpilogueOperand, or none.
  using Sinks = void;
  using LogSumExp = void;
  using Seeds = void;
  // What becomes of scaled products, a function of attention/strip.cuh; none where scores are products themselves, and
  // the scale, which is positive then, is part of the exponent.
  using Score = void;
  // Of tiles of an array that it reads, a row for each query and an element for each key; 0 where it has none.
  static constexpr int kScoreStages = 0;
  static constexpr int kCluster = 1;       // blocks that share them: each works on another element of the batch
  static constexpr bool kSpanned = false;  // whether there are spans of the keys that each query sees, beside lists
  // Whether a warp group multiplies only what its own rows see, and lets other blocks of keys of its tile pass.
  static constexpr bool kSkips = false;
  // Whether it multiplies half of its first block, where its own rows see no more of that.
  static constexpr bool kHalves = false;
};

template <class Config>
struct AttentionSm90 : AttentionMask<Config> {
  using T = typename Config::T;
  using Out = typename Config::Out;
  const TensorMap *query = nullptr, *key = nullptr, *value = nullptr, *score_tile = nullptr;
  Out* out = nullptr;
  long long out_row = 0, out_head = 0, out_batch = 0;  // strides, in elements
  OperandAddress sinks, log_sum_exp, seeds;
  OperandAddress score_operands[kOperandsOf<typename Config::Score>];
  const int* lists = nullptr;  // of blocks of keys, for each block of queries; strides are of them
  long long list_element = 0, list_head = 0;
  const KeySpan* spans = nullptr;  // of the keys that each query sees; strides are of queries
  long long span_element = 0, span_head = 0;
  int batches = 0, group = 1, value_size = 0;                 // group: query heads that share a key head
  int query_batched = 1, key_batched = 1, value_batched = 1;  // 0 when one array serves the whole batch
  int score_batched = 1, score_headed = 1;                    // likewise; and when one serves all heads
  float scale = 1;
  unsigned threshold = 0;  // of dropout, and the factor of what is kept
  float kept = 1;
  int tile_rows = 0;  // of all heads, or of sets of them that share keys and a tile
  int swizzle = 1;    // rows of tiles that are worked through together
  int counter = -1;   // of the tiles that are taken; none where they are dealt

  static constexpr int kConsumers = Config::kTileM / 64;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static_assert(Config::kTileM % 64 == 0 && Config::kTileM % Config::kHeads == 0, "a warp group has 64 rows");
  static constexpr int kQueries = Config::kTileM / Config::kHeads;  // of each head
  static_assert(Config::kHeadSize % 16 == 0 && Config::kValueSize % 32 == 0, "a multiply, and a row of four lanes");
  using QueryTile = VectorTile<T, Config::kTileM, Config::kHeadSize>;
  using KeyTile = VectorTile<T, Config::kTileN, Config::kHeadSize>;
  using ValueTile = SummedTile<T, Config::kTileN, Config::kValueSize>;
  static_assert(Config::kScoreStages == 0 || Config::kHeads == 1, "rows of a score tile are queries of one head");
  using ScoreTile = VectorTile<T, Config::kTileM, Config::kTileN>;
  using Queries = TmaPipeline<Config::kQueryStages, QueryTile::kBytes>;
  using Keys = TmaPipeline<Config::kStages, KeyTile::kBytes>;
  using Values = TmaPipeline<Config::kStages, ValueTile::kBytes>;
  using Cluster = ClusterCoordinate<Config::kCluster, 1>;
  static_assert(Config::kCluster == 1 || (Config::kScoreStages > 0 && Config::kBlocks == 1), "it shares score tiles");
  using Scores = TmaPipeline<Config::kScoreStages, ScoreTile::kBytes, Cluster>;
  using Queue = TileQueue<Config::kCluster>;
  static constexpr int kKeysAt = Config::kQueryStages * QueryTile::kBytes;
  static constexpr int kValuesAt = kKeysAt + Config::kStages * KeyTile::kBytes;
  static constexpr int kScoresAt = kValuesAt + Config::kStages * ValueTile::kBytes;
  static constexpr int kBarriersAt = kScoresAt + Config::kScoreStages * ScoreTile::kBytes;
  static constexpr int kKeyBarriersAt = kBarriersAt + Queries::kBarrierBytes;
  static constexpr int kValueBarriersAt = kKeyBarriersAt + Keys::kBarrierBytes;
  static constexpr int kScoreBarriersAt = kValueBarriersAt + Values::kBarrierBytes;
  static constexpr int kQueueAt = kScoreBarriersAt + Scores::kBarrierBytes;
  static constexpr int kSharedBytes = kQueueAt + Queue::kSharedBytes;
  // Registers of a thread, shared as in product/sm90.cuh. The producer, with three rings, doesn't fit in 24; with four
  // and a list, not in 40.
  static constexpr int kTogether = kThreads * Config::kBlocks;
  static constexpr bool kGivesRegisters = kTogether > 256;
  static constexpr int kShare = 65536 / kTogether / 8 * 8, kRings = Config::kScoreStages > 0 ? 4 : 3;
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : kRings == 4 ? 56 : 40;
  static constexpr int kConsumerRegisters = ((kConsumers + 1) * kShare - kProducerRegisters) / kConsumers / 8 * 8;
  // Turns pay up to this head size (Shah et al.): beyond, one's multiplies are long enough.
  static constexpr bool kTurns = kConsumers > 1 && Config::kHeadSize <= 128;
};

/// Some queries of one head, or of neighbouring heads that share their keys, one head after the other; and a split of
/// the keys that they see.
template <class Config, class Call = AttentionSm90<Config>>
struct AttentionTile : KeyRange<Config> {
  static constexpr int kQueries = Config::kTileM / Config::kHeads;
  static constexpr bool kListed = !is_same<typename Config::Mask, void>;

  int first_query, batch, element, head;  // of the first row; batch: element * query heads + head
  int split;
  int first_block = 0, blocks = 0;  // of keys; where there is a list, its length
  const int* list = nullptr;

  /// Of a block of a cluster, whose elements of the batch are neighbours.
  template <class Cluster = ClusterCoordinate<1, 1>>
  __device__ __forceinline__ AttentionTile(const Call& call, const TileOrder& order, unsigned index,
                                           const Cluster& cluster = {}) {
    const TilePosition at = order[index];
    // The last queries see most, where there is a bound to the right: they come first.
    const int tile = Config::kRight ? static_cast<int>(order.columns) - 1 - at.column : at.column;
    first_query = tile * kQueries;
    const int tiles = (call.group + Config::kHeads - 1) / Config::kHeads;  // along the heads that share keys
    batch = Config::kHeads == 1 ? at.row : at.row / tiles * call.group + at.row % tiles * Config::kHeads;
    element = batch / call.query_heads;
    head = batch - element * call.query_heads;
    if constexpr (Cluster::kBlocks > 1) {
      element = element * Cluster::kBlocks + cluster.row;
      batch = element * call.query_heads + head;
    }
    split = call.splits == 1 ? 0 : at.batch;  // a constant where keys are whole
    this->read(call, batch);
    if (first_query >= this->query_length) return;
    if constexpr (kListed) {
      const long long number = element * call.list_element + head * call.list_head + tile;
      list = call.lists + number * (1 + (call.key_length + Config::kTileN - 1) / Config::kTileN);
      blocks = *list++;
    } else {
      const int first = this->first_key(call, first_query);
      const int end = this->end_key(call, this->last_query(first_query, kQueries));
      if (end <= first) return;
      first_block = first / Config::kTileN;
      blocks = (end + Config::kTileN - 1) / Config::kTileN - first_block;
    }
    const int others = blocks * split / call.splits;
    if constexpr (kListed) list += others;
    first_block += others;
    blocks = blocks * (split + 1) / call.splits - others;
  }

  /// Of a row: its query, and how many heads after the tile's first one its own is.
  __device__ __forceinline__ int query(int row) const { return first_query + row - later_heads(row) * kQueries; }
  static __device__ __forceinline__ int later_heads(int row) { return Config::kHeads == 1 ? 0 : row / kQueries; }

  /// Whether its head is one of those that share keys.
  __device__ __forceinline__ bool has_head(const Call& call, int row) const {
    return Config::kHeads == 1 || head % call.group + later_heads(row) < call.group;
  }

  /// The keys that a query sees, but for those that the mask's function has to be asked.
  __device__ __forceinline__ KeySpan seen_keys(const Call& call, int query) const {
    if (blocks <= 0) return {0, 0};
    if constexpr (Config::kSpanned) {
      if (query >= this->query_length) return {0, 0};
      const long long number = element * call.span_element + head * call.span_head + query;
      return call.spans[number];
    } else {
      return {this->first_key(call, query), this->end_key(call, query)};
    }
  }

  /// Its batch; where it has no head, one that there is.
  __device__ __forceinline__ int batch_of(const Call& call, int row) const {
    return batch + (has_head(call, row) ? later_heads(row) : 0);
  }
};

/// The blocks of keys that a warp group of a tile multiplies, from `end - 1` down to `first`: those that one of its
/// rows sees, or, where there are none, the tile's first one, so that each has a product. It lets `before` blocks pass
/// ahead of them, at the right edge of the band, and `behind` after them, at the left one.
template <class Config>
struct OwnBlocks {
  static constexpr bool kSkips = Config::kSkips && Config::kTileM > 64 && Config::kHeads == 1;
  static_assert(!kSkips || is_same<typename Config::Mask, void>, "a list has a tile's blocks, not a warp group's");
  static_assert(!kSkips || Config::kTileM - 64 <= (Config::kStages + 1) * Config::kTileN,
                "the next tile is taken before a warp group lets go of those that it passes behind its own");

  static constexpr bool kHalves = Config::kHalves;
  static_assert(!kHalves || (Config::kTileM > 64 && Config::kHeads == 1 && is_same<typename Config::Mask, void>),
                "rows of one warp group have one edge, which arithmetic knows");

  int first, end, before = 0, behind = 0;
  bool half = false;  // whether its rows see no more than the first half of the block that ends at `end`, and others

  __device__ __forceinline__ OwnBlocks(const AttentionSm90<Config>& call, const AttentionTile<Config>& tile,
                                       int consumer)
      : first(tile.first_block), end(tile.first_block + (tile.blocks > 1 ? tile.blocks : 1)) {
    const int query = tile.first_query + consumer * 64, last = tile.last_query(query, 64);
    if constexpr (kSkips) {
      const int all_end = end, own_first = tile.first_key(call, query) / Config::kTileN;
      const int own_end = (tile.end_key(call, last) + Config::kTileN - 1) / Config::kTileN;
      const int begin = own_first > first ? own_first : first;
      end = own_end < end ? own_end : end;
      const bool sees = query <= last && begin < end;
      if (!sees) end = first + 1;
      before = all_end - end;
      behind = sees ? begin - first : 0;
      first += behind;
    }
    if constexpr (kHalves) {
      half = end - first > 1 && tile.end_key(call, last) <= (end - 1) * Config::kTileN + Config::kTileN / 2;
    }
  }
};

/// A walk through the blocks of keys of a tile, from the last to the first. Where there are fewer than `fewest`, 0 or
/// 1, it comes to one that nobody sees, of which counting says so.
template <class Tile>
struct KeyBlockWalk {
  const Tile& tile;
  int left, entry = list_entry(0, Edge::counted);  // blocks that are left; in a list

  __device__ __forceinline__ explicit KeyBlockWalk(const Tile& tile, int fewest = 0)
      : tile(tile), left(tile.blocks > fewest ? tile.blocks : fewest) {
    read();
  }

  __device__ __forceinline__ bool on_a_block() const { return left > 0; }
  __device__ __forceinline__ int number() const {
    return Tile::kListed ? listed_block(entry) : tile.first_block + left - 1;
  }
  /// What hides some of the block's keys from some of the queries; of a list.
  __device__ __forceinline__ Edge edge() const { return listed_edge(entry); }

  __device__ __forceinline__ void advance() {
    --left;
    read();
  }

 private:
  __device__ __forceinline__ void read() {
    if constexpr (Tile::kListed) {
      if (left > 0 && tile.blocks > 0) entry = tile.list[tile.blocks - left];
    }
  }
};

}  // namespace jaxdnn
