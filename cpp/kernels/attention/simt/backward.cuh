// The gradients of attention/simt.cuh. Every sum is one block's, in a fixed order.
//
//   attention_simt_delta     a warp a row: delta = out . d_out - d_log_sum_exp, and what its exponents subtract
//   attention_simt_backward  a block owns kTileM vectors of one side, which stay in shared memory with their sums in
//                            registers, while those of the other side pass by, kTileN at a time:
//
//       p = exp(score(scale * Q * K^T) - log_sum_exp)       d_p = kept * (d_out * V^T)       d_s = p * (d_p - delta)
//
//       side      stays       passes by                           sums
//       queries   Q, d_out    K, V                                d_query = scale * d_s * K
//       keys      K, V        Q, d_out of all heads that have K   d_key = scale * d_s^T * Q
//                                                                 d_value = (kept p)^T * d_out
//
//                            with d_s replaced by the gradient of the score's function, where it has one
//   attention_simt_d_sinks   a block for each sink
//
//   block            as in attention/simt.cuh; scores of the side of keys are transposed
//   barriers         three __syncthreads a tile: what passed by before is done with; the tile is there; factors are
//   shared memory    | both of what stays | both of what passes by | d_s | kept p |
//
// Bytes: what stays once, and what passes by once for each tile of that, from the L2 cache. Flops: for each score
// 2 (2 d + dv) on the side of queries and 2 (2 d + 2 dv) on that of keys. Exactly, at one fused multiply-add a lane and
// cycle, they bound it.
#pragma once

#include "attention/simt/call.cuh"
#include "attention/simt/tile.cuh"

namespace jaxdnn {

/// The vectors of a query, or of a key, in a tile of kRows, and their address in the call.
template <class Config, bool kOfKeys, int kRows>
struct BackwardSide {
  using Call = AttentionSimt<Config>;
  using Element = typename Config::Element;
  static constexpr bool kOut = kOfKeys || is_there<typename Config::DOut>;  // whether there are second vectors
  using First = Select<kOfKeys, typename Config::Key, typename Config::Query>;
  using Second = Select<kOfKeys, typename Config::Value, Select<kOut, typename Config::DOut, First>>;
  using Tiles = SimtTiles<Config>;
  using Heads = typename Tiles::template Vectors<First, kRows, Config::kHeadSize,
                                                 kOfKeys ? Config::kKeyCopy : Config::kQueryCopy>;
  using Values = typename Tiles::template Vectors<Second, kRows, Config::kValueSize,
                                                  kOfKeys ? Config::kValueCopy : Config::kDOutCopy>;

  static __device__ __forceinline__ void start(const AttentionScores<Config>& scores, int first, Element* heads,
                                               Element* values) {
    const Call& call = scores.call;
    const int head = kOfKeys ? scores.key_head() : scores.head;
    const int there = (kOfKeys ? scores.keys : scores.queries) - first;
    const VectorsAddress& of_heads = kOfKeys ? call.key : call.query;
    const VectorsAddress& of_values = kOfKeys ? call.value : call.d_out;
    Heads::start(heads, of_heads.template at<First>(scores.element, first, head), of_heads.row_stride,
                 of_heads.feature_stride, there, call.head_size);
    if constexpr (kOut) {
      Values::start(values, of_values.template at<Second>(scores.element, first, head), of_values.row_stride,
                    of_values.feature_stride, there, call.value_size);
    }
  }

  static __device__ __forceinline__ void finish(Element* heads, Element* values) {
    Heads::finish(heads);
    if constexpr (kOut) Values::finish(values);
  }
};

/// The scores of a tile, transposed where keys stay, and their cotangents.
template <class Config, bool kKeysStay>
struct BackwardScores {
  using Call = AttentionSimt<Config>;
  using Element = typename Config::Element;
  using Scores = AttentionScores<Config>;
  using Staying = BackwardSide<Config, kKeysStay, Config::kTileM>;
  using Passing = BackwardSide<Config, !kKeysStay, Config::kTileN>;
  using Products = typename SimtTiles<Config>::Products;
  static constexpr int kRows = Products::kRows, kColumns = Products::kColumns;
  static constexpr int kStayingValuesAt = Staying::Heads::kCount;
  static constexpr int kPassingAt = kStayingValuesAt + Staying::Values::kCount;
  static constexpr int kPassingValuesAt = kPassingAt + Passing::Heads::kCount;
  static constexpr int kEnd = kPassingValuesAt + Passing::Values::kCount;

  Element* const shared;
  int row, column;  // of the tile
  unsigned seen;    // which of this thread's scores are visible
  Products products, d_weights;

  __device__ __forceinline__ MaskedQuery query(const Scores& scores, int i, int j) const {
    return scores.query(kKeysStay ? column + Products::column(j) : row + Products::row(i));
  }
  __device__ __forceinline__ MaskedKey key(const Scores& scores, int i, int j) const {
    return scores.key(kKeysStay ? row + Products::row(i) : column + Products::column(j));
  }

  /// Whether any score of the tile may be visible.
  __device__ __forceinline__ bool find(const Scores& scores, int tile_row, int tile_column) {
    row = tile_row;
    column = tile_column;
    seen = 0;
    Products::each([&](int i, int j) {
      const bool visible = scores.visible(query(scores, i, j), key(scores, i, j));
      seen |= (visible ? 1u : 0u) << (i * kColumns + j);
    });
    return !Scores::kHides || __syncthreads_or(seen != 0);
  }

  __device__ __forceinline__ void start_staying(const Scores& scores) const {
    Staying::start(scores, row, shared, shared + kStayingValuesAt);
  }
  __device__ __forceinline__ void start_passing(const Scores& scores) const {
    Passing::start(scores, column, shared + kPassingAt, shared + kPassingValuesAt);
  }

  __device__ __forceinline__ void finish_staying() const { Staying::finish(shared, shared + kStayingValuesAt); }
  __device__ __forceinline__ void finish_passing() const {
    Passing::finish(shared + kPassingAt, shared + kPassingValuesAt);
  }

  __device__ __forceinline__ void multiply() {
    products.clear();
    products.template add_dots<Config::kHeadSize, Staying::Heads::kPitch, Passing::Heads::kPitch>(shared,
                                                                                                  shared + kPassingAt);
    d_weights.clear();
    if constexpr (is_there<typename Config::DOut>) {
      d_weights.template add_dots<Config::kValueSize, Staying::Values::kPitch, Passing::Values::kPitch>(
          shared + kStayingValuesAt, shared + kPassingValuesAt);
    }
  }

  /// Makes of products what number `kOutput` of the score's gradient leaves, and of the weights' cotangents the kept
  /// weights. Nothing moves a hidden score.
  template <int kOutput>
  __device__ __forceinline__ void differentiate(const Scores& scores) {
    constexpr int kQueries = kKeysStay ? kColumns : kRows;
    const Call& call = scores.call;
    Element base[kQueries], delta[kQueries];
#pragma unroll
    for (int i = 0; i < kQueries; ++i) {
      const int query = kKeysStay ? column + Products::column(i) : row + Products::row(i);
      const long long at = static_cast<long long>(scores.batch) * call.query_length +
                           (query < call.query_length ? query : call.query_length - 1);
      base[i] = call.base[at];
      delta[i] = call.delta[at];
    }
    Products::each([&](int i, int j) {
      const MaskedQuery query = this->query(scores, i, j);
      const MaskedKey key = this->key(scores, i, j);
      const bool visible = seen >> (i * kColumns + j) & 1;
      const int q = kKeysStay ? j : i;
      const Element product = call.scale * products.values[i][j];
      const Element p = visible ? math::exp(scores.score(product, query, key) - base[q]) : Element(0);
      const Element kept = scores.kept(query, key);
      const Element d_score = p * (kept * d_weights.values[i][j] - delta[q]);
      products.values[i][j] = visible ? scores.template gradient<kOutput>(product, d_score, query, key) : Element(0);
      d_weights.values[i][j] = p * kept;
    });
  }
};

template <class Config>
struct AttentionSimtBackward {
  using Call = AttentionSimt<Config>;
  using Element = typename Config::Element;
  using Scores = AttentionScores<Config>;
  using Tile = BackwardScores<Config, Config::kKeysStay>;
  using Products = typename Tile::Products;
  using Tiles = SimtTiles<Config>;
  using Strip = typename Tiles::Strip;
  using First = Select<Config::kKeysStay, typename Config::DKey, typename Config::DQuery>;
  using Second = Select<Config::kKeysStay, typename Config::DValue, void>;
  static constexpr bool kFirst = is_there<First>, kSecond = is_there<Second>;
  template <int kSize>
  using Sums = typename Tiles::template Sums<kSize>;
  static constexpr int kWeightsAt = Tile::kEnd + Strip::kCount;
  static constexpr int kSharedBytes = (kWeightsAt + kSecond * Strip::kCount) * static_cast<int>(sizeof(Element));
  static constexpr int kTileM = Config::kTileM, kTileN = Config::kTileN;

  const Call& call;
  Tile tile;
  Sums<Config::kHeadSize> heads;
  Sums<kSecond ? Config::kValueSize : 16 * Config::kWarpsN> values;

  /// Of one query head; or of one key head, and all query heads that share it.
  __device__ __forceinline__ void run(int batch, int row) {
    const int heads_of = Config::kKeysStay ? call.group : 1;
    const int end = (batch + 1) * heads_of;
    heads.clear();
    values.clear();
    tile.row = row;
    tile.start_staying(Scores(call, end - 1));
    ptx::cp_async_commit_group();
    ptx::cp_async_wait_group<0>();
    tile.finish_staying();
#pragma unroll 1
    for (int n = end - heads_of; n < end; ++n) {
      const Scores scores(call, n);
      const Span rows{row, row + kTileM};
      const Span span = Config::kKeysStay ? scores.queries_of(rows) : scores.keys_of(rows);
#pragma unroll 1
      for (int column = span.begin / kTileN * kTileN; column < span.end; column += kTileN) {
        if (tile.find(scores, row, column)) add(scores);
      }
    }
    store(Scores(call, end - 1));
  }

 private:
  __device__ __forceinline__ void add(const Scores& scores) {
    Element* const strip = tile.shared + Tile::kEnd;
    Element* const weights = tile.shared + kWeightsAt;
    __syncthreads();
    tile.start_passing(scores);
    ptx::cp_async_commit_group();
    ptx::cp_async_wait_group<0>();
    tile.finish_passing();
    __syncthreads();
    tile.multiply();
    tile.template differentiate<0>(scores);
    Products::each([&](int i, int j) {
      if constexpr (kFirst) Tiles::put(strip, i, j, tile.products.values[i][j]);
      if constexpr (kSecond) Tiles::put(weights, i, j, tile.d_weights.values[i][j]);
    });
    __syncthreads();
    if constexpr (kFirst) {
      heads.template add_product<kTileN, Strip::kPitch, Tile::Passing::Heads::kPitch>(strip,
                                                                                      tile.shared + Tile::kPassingAt);
    }
    if constexpr (kSecond && is_there<typename Config::DOut>) {
      values.template add_product<kTileN, Strip::kPitch, Tile::Passing::Values::kPitch>(
          weights, tile.shared + Tile::kPassingValuesAt);
    }
  }

  __device__ __forceinline__ void store(const Scores& scores) {
    if constexpr (kFirst) {
      store<First>(Config::kKeysStay ? call.d_key : call.d_query, scores, heads, call.head_size, call.scale);
    }
    if constexpr (kSecond) store<Second>(call.d_value, scores, values, call.value_size, Element(1));
  }

  template <class Operand, class Sums>
  __device__ __forceinline__ void store(const VectorsAddress& to, const Scores& scores, const Sums& sums, int size,
                                        Element factor) const {
    using T = typename Operand::Type;
    const int length = Config::kKeysStay ? call.key_length : call.query_length;
    const int head = Config::kKeysStay ? scores.key_head() : scores.head;
#pragma unroll
    for (int i = 0; i < Sums::kRows; ++i) {
      const int row = tile.row + Sums::row(i);
      if (row >= length) continue;
      T* const line = const_cast<T*>(to.template at<Operand>(scores.element, row, head));
#pragma unroll
      for (int j = 0; j < Sums::kColumns; ++j) {
        const int column = Sums::column(j);
        if (column < size) line[column * to.feature_stride] = narrow<T>(sums.values[i][j] * factor);
      }
    }
  }
};

template <class Config>
__device__ __forceinline__ void attention_simt_backward(const AttentionSimt<Config>& call) {
  extern __shared__ __align__(16) unsigned char shared_memory[];
  const int length = Config::kKeysStay ? call.key_length : call.query_length;
  const int tiles = (length + Config::kTileM - 1) / Config::kTileM;
  const int batch = blockIdx.x / tiles, tile = blockIdx.x - batch * tiles;
  // Those that see most come first, where there is a bound to the right.
  const int row = (Config::kRight && !Config::kKeysStay ? tiles - 1 - tile : tile) * Config::kTileM;
  AttentionSimtBackward<Config>{call, {reinterpret_cast<typename Config::Element*>(shared_memory)}}.run(batch, row);
}

// ---------------------------------------------------------------------------------------------------- sums of one kind

/// Rows of a block.
constexpr int kDeltaWarps = 8;

template <class Config>
__device__ __forceinline__ void attention_simt_delta(const AttentionSimt<Config>& call) {
  using Element = typename Config::Element;
  const long long at = static_cast<long long>(blockIdx.x) * kDeltaWarps + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (at >= static_cast<long long>(call.batches) * call.query_length) return;
  const int batch = static_cast<int>(at / call.query_length), row = static_cast<int>(at % call.query_length);
  const Coordinate place{row, 0, batch};
  Element sum = 0;
  if constexpr (is_there<typename Config::DOut>) {
    const int element = batch / call.query_heads, head = batch % call.query_heads;
    const auto* out = call.out.template at<typename Config::Out>(element, row, head);
    const auto* d_out = call.d_out.template at<typename Config::DOut>(element, row, head);
    for (int i = lane; i < call.value_size; i += 32) {
      const Element value = widen(out[i * call.out.feature_stride]);
      sum += value * static_cast<Element>(widen(d_out[i * call.d_out.feature_stride]));
    }
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) sum += ptx::shfl_sync_bfly(sum, mask);
  }
  const Element base = number_at<typename Config::LogSumExp>(call.log_sum_exp, place, Element(0));
  const bool sees_none = base == -math::infinity<Element>();
  if (lane == 0) {
    call.base[at] = sees_none ? Element(0) : base;
    call.delta[at] =
        sees_none ? Element(0) : sum - number_at<typename Config::DLogSumExp>(call.d_log_sum_exp, place, Element(0));
  }
}

constexpr int kSinkThreads = 512;

/// Of a sink, the sum of -exp(sink - log_sum_exp) * delta over all rows that have it.
template <class Config>
__device__ __forceinline__ void attention_simt_d_sinks(const AttentionSimt<Config>& call) {
  using Element = typename Config::Element;
  using Operand = typename Config::DSinks;
  using T = typename Operand::Type;
  __shared__ Element sums[kSinkThreads];
  const int first = static_cast<int>(call.summed.template of_batch<true>(blockIdx.x));
  Element sum = 0;
  for (int member = 0; member < call.members; ++member) {
    const int batch = first + static_cast<int>(call.summed.template of_row<true>(member));
    const Element sink = number_at<typename Config::Sinks>(call.sinks, {0, 0, batch}, Element(0));
    const long long rows = static_cast<long long>(batch) * call.query_length;
    for (int row = threadIdx.x; row < call.query_length; row += kSinkThreads) {
      const Coordinate at{row, 0, batch};
      const Element log_sum_exp = number_at<typename Config::LogSumExp>(call.log_sum_exp, at, Element(0));
      if (log_sum_exp != -math::infinity<Element>()) sum -= math::exp(sink - log_sum_exp) * call.delta[rows + row];
    }
  }
  sums[threadIdx.x] = sum;
#pragma unroll 1
  for (int half = kSinkThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x == 0) {
    T* const to = static_cast<T*>(const_cast<void*>(call.d_sinks.data));
    to[call.d_sinks.template offset<Operand>(Coordinate{0, 0, first})] = narrow<T>(sums[0]);
  }
}

}  // namespace jaxdnn
