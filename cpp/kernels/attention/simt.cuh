// out = softmax(score(scale * Q * K^T), where the mask lets see) * V, for vectors of any size, layout and dtype:
// exactly in float32 or float64, or of tf32 on tensor cores. The gradients are in attention/simt/backward.cuh.
//
//   grid             one block for kTileM queries of a head, the last ones first where there is a bound to the right
//   block            kWarpsM x kWarpsN warps, which share the tile of kTileM x kTileN scores, and that of kTileM sums
//                    of kValueSize columns (attention/simt/tile.cuh)
//   loop over keys   kTileN at a time; copies run behind the multiplies of the other operand
//                        copies     | Q, K[0] | V[0]       | K[1]         | V[1] ...
//                        multiply             | S = Q K[0] | O += P V[0]  | S = Q K[1] ...
//                    a tile of which no query sees a key is passed over, before it is copied
//   softmax          online (Milakov and Gimelshein, 2018). Warps that share rows exchange maxima through shared
//                    memory. Sums stay with the threads until the end
//   barriers         three __syncthreads a tile: keys are there, and sums are done with values and weights; maxima are
//                    there, and keys are free; weights and values are there
//   shared memory    | Q | K | V | weights | maxima, kWarpsN of a row |
//
// Bytes: Q and the results once, K and V once for each tile of queries, from the L2 cache. Flops: 2 (d + dv) for each
// query and key that it sees. Exactly, at one fused multiply-add a lane and cycle, they bound it.
#pragma once

#include "attention/simt/call.cuh"
#include "attention/simt/tile.cuh"

namespace jaxdnn {

/// What a `Config` has for this kernel: kTileM, kTileN, kWarpsM, kWarpsN, kTensor (whether tensor cores multiply);
/// kHeadSize and kValueSize, of rows in shared memory.
template <class Config>
struct AttentionSimtForward {
  using Call = AttentionSimt<Config>;
  using Element = typename Config::Element;
  using Scores = AttentionScores<Config>;
  using Tiles = SimtTiles<Config>;
  static constexpr int kTileM = Config::kTileM, kTileN = Config::kTileN, kWarpsN = Config::kWarpsN;
  using Queries =
      typename Tiles::template Vectors<typename Config::Query, kTileM, Config::kHeadSize, Config::kQueryCopy>;
  using Keys = typename Tiles::template Vectors<typename Config::Key, kTileN, Config::kHeadSize, Config::kKeyCopy>;
  using Values =
      typename Tiles::template Vectors<typename Config::Value, kTileN, Config::kValueSize, Config::kValueCopy>;
  using Weights = typename Tiles::Strip;
  using Products = typename Tiles::Products;
  using Sums = typename Tiles::template Sums<Config::kValueSize>;
  static constexpr int kRows = Products::kRows, kColumns = Products::kColumns;
  static constexpr int kKeysAt = Queries::kCount, kValuesAt = kKeysAt + Keys::kCount;
  static constexpr int kWeightsAt = kValuesAt + Values::kCount, kMaximaAt = kWeightsAt + Weights::kCount;
  static constexpr int kSharedBytes = (kMaximaAt + kWarpsN * kTileM) * static_cast<int>(sizeof(Element));

  const Call& call;
  const Scores scores;
  Element* const shared;
  const int first;  // query
  int end;          // of the tiles of keys
  MaskedQuery rows[kRows];
  Products products;
  Sums sums;
  Element largest[kRows], total[kRows];  // of a row: the largest score; the sum of this thread's weights

  __device__ __forceinline__ AttentionSimtForward(const Call& call, Element* shared, int batch, int first)
      : call(call), scores(call, batch), shared(shared), first(first) {
    // One thread of each row begins with the sink, which is as a key that has no value.
    const Element none = -math::infinity<Element>();
    const Element sink = number_at<typename Config::Sinks>(call.sinks, {0, 0, batch}, none);
    const bool has_sink = Products::leads() && sink != none;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      rows[i] = scores.query(first + Products::row(i));
      largest[i] = sink;
      total[i] = has_sink ? 1 : 0;
    }
    sums.clear();
  }

  __device__ __forceinline__ void run() {
    const Span span = scores.keys_of({first, first + kTileM});
    end = (span.end + kTileN - 1) / kTileN;
    Queries::start(shared, call.query.template at<typename Config::Query>(scores.element, first, scores.head),
                   call.query.row_stride, call.query.feature_stride, scores.queries - first, call.head_size);
    unsigned seen = 0;
    int tile = next(span.begin / kTileN, seen);
    start_keys(tile);
    if (tile < end) {
      ptx::cp_async_wait_group<0>();
      Queries::finish(shared);
    }
#pragma unroll 1
    while (tile < end) {
      ptx::cp_async_wait_group<0>();
      Keys::finish(shared + kKeysAt);
      __syncthreads();
      start_values(tile);
      products.clear();
      products.template add_dots<Config::kHeadSize, Queries::kPitch, Keys::kPitch>(shared, shared + kKeysAt);
      score(tile * kTileN, seen);
      exchange_maxima();
      const int number = tile;
      tile = next(number + 1, seen);
      start_keys(tile);
      weigh(number * kTileN);
      ptx::cp_async_wait_group<1>();
      Values::finish(shared + kValuesAt);
      __syncthreads();
      sums.template add_product<kTileN, Weights::kPitch, Values::kPitch>(shared + kWeightsAt, shared + kValuesAt);
    }
    store();
  }

 private:
  /// The first tile from `tile` on of which a query sees a key; and which scores of this thread those are.
  __device__ __forceinline__ int next(int tile, unsigned& seen) const {
#pragma unroll 1
    for (; tile < end; ++tile) {
      seen = 0;
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        const MaskedKey key = scores.key(tile * kTileN + Products::column(j));
#pragma unroll
        for (int i = 0; i < kRows; ++i) seen |= (scores.visible(rows[i], key) ? 1u : 0u) << (i * kColumns + j);
      }
      if (!Scores::kHides || __syncthreads_or(seen != 0)) break;
    }
    return tile;
  }

  __device__ __forceinline__ void start_keys(int tile) const {
    if (tile < end) {
      const int key = tile * kTileN;
      Keys::start(shared + kKeysAt, call.key.template at<typename Config::Key>(scores.element, key, scores.key_head()),
                  call.key.row_stride, call.key.feature_stride, scores.keys - key, call.head_size);
    }
    ptx::cp_async_commit_group();
  }

  __device__ __forceinline__ void start_values(int tile) const {
    const int key = tile * kTileN;
    Values::start(shared + kValuesAt,
                  call.value.template at<typename Config::Value>(scores.element, key, scores.key_head()),
                  call.value.row_stride, call.value.feature_stride, scores.keys - key, call.value_size);
    ptx::cp_async_commit_group();
  }

  static __device__ __forceinline__ Element larger(Element a, Element b) { return a > b ? a : b; }

  /// Makes scores of products.
  __device__ __forceinline__ void score(int key, unsigned seen) {
    Products::each([&](int i, int j) {
      Element& value = products.values[i][j];
      value = scores.score(call.scale * value, rows[i], scores.key(key + Products::column(j)));
      if (!(seen >> (i * kColumns + j) & 1)) value = -math::infinity<Element>();
    });
  }

  /// Finds rows' largest scores so far, of all warps that share them; leaves them in `largest`, and what was summed
  /// before relative to them.
  __device__ __forceinline__ void exchange_maxima() {
    Element* const maxima = shared + kMaximaAt;
    Element before[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      before[i] = largest[i];
#pragma unroll
      for (int j = 0; j < kColumns; ++j) largest[i] = larger(largest[i], products.values[i][j]);
      largest[i] = Products::of_lanes(largest[i], larger);
      if (kWarpsN > 1 && Products::leads_lanes()) {
        maxima[Products::warp_column() * kTileM + Products::row(i)] = largest[i];
      }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int warp = 0; warp < kWarpsN && kWarpsN > 1; ++warp) {
        largest[i] = larger(largest[i], maxima[warp * kTileM + Products::row(i)]);
      }
      const Element shrunk = math::exp(before[i] - base(i));
      total[i] *= shrunk;
#pragma unroll
      for (int j = 0; j < Sums::kColumns; ++j) sums.values[i][j] *= shrunk;
    }
  }

  /// What exponents subtract: nothing, of a row that has seen no key.
  __device__ __forceinline__ Element base(int i) const {
    return largest[i] == -math::infinity<Element>() ? Element(0) : largest[i];
  }

  /// Makes weights of scores.
  __device__ __forceinline__ void weigh(int key) {
    Products::each([&](int i, int j) {
      const Element weight = math::exp(products.values[i][j] - base(i));
      total[i] += weight;
      products.values[i][j] = weight * scores.kept(rows[i], scores.key(key + Products::column(j)));
    });
    // Apart, or each load would wait for the store before it, which may be to the same place.
    Products::each([&](int i, int j) { Tiles::put(shared + kWeightsAt, i, j, products.values[i][j]); });
  }

  /// Divides by the weights' sums, and writes the rows.
  __device__ __forceinline__ void store() {
    const auto add = [](Element a, Element b) { return a + b; };
    Element* const totals = shared + kMaximaAt;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      total[i] = Products::of_lanes(total[i], add);
      if (Products::leads_lanes()) totals[Products::warp_column() * kTileM + Products::row(i)] = total[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = first + Products::row(i);
      if (row >= call.query_length) continue;
      Element sum = 0;
#pragma unroll
      for (int warp = 0; warp < kWarpsN; ++warp) sum += totals[warp * kTileM + Products::row(i)];
      const Element factor = sum == 0 ? Element(0) : 1 / sum;
      using Operand = typename Config::Out;
      auto* const line =
          const_cast<typename Operand::Type*>(call.out.template at<Operand>(scores.element, row, scores.head));
#pragma unroll
      for (int j = 0; j < Sums::kColumns; ++j) {
        const int column = Sums::column(j);
        if (column < call.value_size) {
          line[column * call.out.feature_stride] = narrow<typename Operand::Type>(sums.values[i][j] * factor);
        }
      }
      if constexpr (is_there<typename Config::LogSumExp>) {
        using Number = typename Config::LogSumExp;
        const long long at = call.log_sum_exp.template offset<Number>(Coordinate{row, 0, scores.batch});
        const Element found = sum == 0 ? -math::infinity<Element>() : largest[i] + math::log(sum);
        if (Sums::leads()) {
          static_cast<typename Number::Type*>(const_cast<void*>(call.log_sum_exp.data))[at] =
              narrow<typename Number::Type>(found);
        }
      }
    }
  }
};

template <class Config>
__device__ __forceinline__ void attention_simt(const AttentionSimt<Config>& call) {
  extern __shared__ __align__(16) unsigned char shared_memory[];
  const int tiles = (call.query_length + Config::kTileM - 1) / Config::kTileM;
  const int batch = blockIdx.x / tiles, tile = blockIdx.x - batch * tiles;
  const int first = (Config::kRight ? tiles - 1 - tile : tile) * Config::kTileM;
  AttentionSimtForward<Config>(call, reinterpret_cast<typename Config::Element*>(shared_memory), batch, first).run();
}

}  // namespace jaxdnn
