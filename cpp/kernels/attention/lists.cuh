// Lists of the blocks that a tile has to visit, where a mask is more than arithmetic of coordinates: segments,
// positions that are arrays, a function. A list is written at run time, so that a new mask compiles nothing but its
// function.
//
//   attention_blocks   a warp for each block of kTileM queries by kTileN keys: whether no pair of them is visible, some
//                      are, or all
//   attention_spans    a block for each block of queries: the keys from the first that a query sees to the last. Where
//                      each query sees all in between, as in documents that are packed one after the other, what is
//                      visible of a block is a comparison of its columns with the span, and no function is asked
//   attention_lists    a warp for each list: of the blocks of keys that a block of queries sees, or the other way round
//   attention_ranks    a warp for each block of queries: of each block of keys, how many before it the queries see
//
// A list is its length, and then 4 * block + an `Edge`, from the last block to the first. There is one for each batch,
// or for fewer, if the mask is the same for all elements, or heads.
//
// Segments and positions: from the least and the greatest of both sides. Where these leave it open, some are visible.
// A function: of each pair, until one is visible and one is not. That is (operations of the function) / 128 clocks of a
// multiprocessor for each pair, of each list; the tensor cores take (d + dv) / 2048 clocks, for each head. Spans: of
// each pair of blocks that are partly visible, until a query is found to miss a key between two that it sees.
#pragma once

#include "attention/edge.cuh"
#include "attention/key_range.cuh"
#include "attention/strip.cuh"
#include "core/epilogue_element.cuh"
#include "ptx/warp.cuh"

namespace jaxdnn {

/// How much of a block is visible; `spanned` is some of it, of each query the part of its span.
enum class Visible : unsigned char { none, some, spanned, all };

__device__ __forceinline__ Edge edge_of(Visible visible) {
  return visible == Visible::all ? Edge::none : visible == Visible::spanned ? Edge::counted : Edge::asked;
}

/// What a `Config` has besides kTileM, kTileN and Mask.
struct AttentionBlocksDefaults : AttentionMaskDefaults {
  // Of rows and of columns; or none.
  using QuerySegments = void;
  using KeySegments = void;
  using QueryPositions = void;
  using KeyPositions = void;
  static constexpr bool kPositions = false;  // whether the band counts positions that are arrays, of either side
  static constexpr bool kFunction = false;   // whether there is more to the mask's function than segments and positions
};

template <class Config>
struct AttentionBlocks : AttentionMask<Config> {
  static constexpr int kThreads = 256;

  Visible* seen = nullptr;  // [lists, blocks of queries, blocks of keys]
  OperandAddress query_segments, key_segments, query_positions, key_positions;
  int heads = 1;  // that have lists of their own
  unsigned query_blocks = 0, key_blocks = 0, blocks = 0;
  long long position_left = 0, position_right = 0;  // of the band, if it counts positions
};

/// The least and the greatest of some numbers.
struct Extremes {
  int least, greatest;

  __device__ __forceinline__ bool single() const { return least == greatest; }
};

/// Of rows, or columns, `first` .. `end - 1` of a batch; by a warp. Where there is no array it is the coordinates'.
template <class Operand, bool kRows>
__device__ __forceinline__ Extremes extremes(const OperandAddress& address, int batch, int first, int end) {
  if constexpr (is_same<Operand, void>) {
    return {first, end - 1};
  } else {
    const auto* data =
        static_cast<const typename Operand::Type*>(address.data) + address.of_batch<Operand::kAffine>(batch);
    Extremes found{math::kHighest<int>, math::kLowest<int>};
    for (int i = first + threadIdx.x % 32; i < end; i += 32) {
      const int value = data[kRows ? address.of_row<Operand::kAffine>(i) : address.of_column<Operand::kAffine>(i)];
      found.least = value < found.least ? value : found.least;
      found.greatest = value > found.greatest ? value : found.greatest;
    }
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) {
      const int least = ptx::shfl_sync_bfly(static_cast<unsigned>(found.least), mask);
      const int greatest = ptx::shfl_sync_bfly(static_cast<unsigned>(found.greatest), mask);
      found.least = least < found.least ? least : found.least;
      found.greatest = greatest > found.greatest ? greatest : found.greatest;
    }
    return found;
  }
}

/// Which of some pairs of a batch are visible, by all there is; `counted` if the range need not be looked at. Those
/// that are not `inside` are left alone.
template <int kPairs, class Config>
__device__ __forceinline__ void see_pairs(const AttentionBlocks<Config>& call, const KeyRange<Config>& range,
                                          const Coordinate (&at)[kPairs], const bool (&inside)[kPairs], bool counted,
                                          bool (&sees)[kPairs]) {
  using Function = typename Config::Mask;
  Register operand[kPairs][Function::Operands::kArray];
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    if (inside[i]) load_elements<0, typename Function::Operands>(call.mask_operands, at[i], operand[i]);
  }
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    if (!inside[i]) continue;
    const float none[1] = {};
    Register result[1];
    Function::Epilogue::apply(none, operand[i], ElementContext<typename Function::Operands>{at[i], call.mask_operands},
                              result);
    sees[i] = result[0];
    if (!counted) {
      sees[i] =
          sees[i] && at[i].column >= range.first_key(call, at[i].row) && at[i].column < range.end_key(call, at[i].row);
    }
  }
}

/// Some rows and columns of scores, of which a warp says how much is visible.
template <class Config>
struct ScoreBlock {
  const AttentionBlocks<Config>& call;
  KeyRange<Config> range;
  int batch, first_row, end_row, first_column, end_column;

  __device__ __forceinline__ ScoreBlock(const AttentionBlocks<Config>& call, int batch, int row_block, int column_block)
      : call(call), batch(batch), first_row(row_block * Config::kTileM), first_column(column_block * Config::kTileN) {
    range.read(call, batch);
    end_row = range.last_query(first_row, Config::kTileM) + 1;
    end_column = first_column + Config::kTileN < range.key_length ? first_column + Config::kTileN : range.key_length;
  }

  __device__ __forceinline__ Visible visible() const {
    if (end_row <= first_row || end_column <= first_column) return Visible::none;
    const Visible counted = by_range();
    if (counted == Visible::none) return counted;
    const Visible by_sides = least(counted, least(by_segments(), by_positions()));
    if constexpr (Config::kFunction) {
      return by_sides == Visible::none ? by_sides : by_function(counted == Visible::all);
    }
    return by_sides;
  }

 private:
  static __device__ __forceinline__ Visible least(Visible a, Visible b) { return a < b ? a : b; }

  __device__ __forceinline__ Visible by_range() const {
    const int last_row = end_row - 1;
    if (range.end_key(call, last_row) <= first_column || range.first_key(call, first_row) >= end_column) {
      return Visible::none;
    }
    const bool all = range.first_key(call, last_row) <= first_column &&
                     range.end_key(call, first_row) >= first_column + Config::kTileN;
    return all ? Visible::all : Visible::some;
  }

  __device__ __forceinline__ Visible by_segments() const {
    if constexpr (is_same<typename Config::QuerySegments, void>) {
      return Visible::all;
    } else {
      const Extremes query =
          extremes<typename Config::QuerySegments, true>(call.query_segments, batch, first_row, end_row);
      const Extremes key =
          extremes<typename Config::KeySegments, false>(call.key_segments, batch, first_column, end_column);
      if (query.greatest < 0 || query.greatest < key.least || key.greatest < query.least) return Visible::none;
      return query.single() && key.single() ? Visible::all : Visible::some;
    }
  }

  __device__ __forceinline__ Visible by_positions() const {
    if constexpr (!Config::kPositions) {
      return Visible::all;
    } else {
      const Extremes query =
          extremes<typename Config::QueryPositions, true>(call.query_positions, batch, first_row, end_row);
      const Extremes key =
          extremes<typename Config::KeyPositions, false>(call.key_positions, batch, first_column, end_column);
      const long long nearest = static_cast<long long>(key.least) - query.greatest;
      const long long farthest = static_cast<long long>(key.greatest) - query.least;
      // The function's distances have 32 bits, and go round.
      if (nearest < math::kLowest<int> || farthest > math::kHighest<int>) return Visible::some;
      if (farthest < -call.position_left || nearest > call.position_right) return Visible::none;
      const bool all = nearest >= -call.position_left && farthest <= call.position_right;
      return all ? Visible::all : Visible::some;
    }
  }

  /// By all there is; `counted` if the range need not be looked at.
  __device__ __forceinline__ Visible by_function(bool counted) const {
    constexpr int kAtOnce = 8, kColumns = Config::kTileN;
    static_assert(Config::kTileM * kColumns % (32 * kAtOnce) == 0, "a warp's elements");
    bool some = false, all = end_column == first_column + kColumns;
    // Lanes vote together: how far they are is the same for all.
    for (int first = 0; first < (end_row - first_row) * kColumns && !(some && !all); first += 32 * kAtOnce) {
      bool seen = false, unseen = false;
      Coordinate at[kAtOnce];
      bool inside[kAtOnce], sees[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int element = first + 32 * i + threadIdx.x % 32;
        at[i] = {first_row + element / kColumns, first_column + element % kColumns, batch};
        inside[i] = at[i].row < end_row && at[i].column < end_column;
      }
      see_pairs(call, range, at, inside, counted, sees);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        seen = seen || (inside[i] && sees[i]);
        unseen = unseen || (inside[i] && !sees[i]);
      }
      some = some || ptx::vote_sync_ballot(seen) != 0;
      all = all && ptx::vote_sync_ballot(unseen) == 0;
    }
    return !some ? Visible::none : all ? Visible::all : Visible::some;
  }
};

/// Keys that a query sees: the first and the last of them, and how many.
struct SeenKeys {
  int first = math::kHighest<int>, last = -1, count = 0;

  __device__ __forceinline__ void add(int key) {
    first = key < first ? key : first;
    last = key > last ? key : last;
    ++count;
  }
  __device__ __forceinline__ void add(const SeenKeys& others) {
    first = others.first < first ? others.first : first;
    last = others.last > last ? others.last : last;
    count += others.count;
  }
  /// Whether there is none between them that it does not see.
  __device__ __forceinline__ bool neighbours() const { return count == 0 || count == last - first + 1; }
};

template <class Config>
struct AttentionSpans : AttentionBlocks<Config> {
  static constexpr int kLanes = 4;  // of a query, each with as many neighbouring keys of a block
  static constexpr int kThreads = kLanes * Config::kTileM;

  KeySpan* spans = nullptr;  // [lists, queries]
};

template <class Config>
__device__ __forceinline__ void attention_spans(const AttentionSpans<Config>& call) {
  constexpr int kLanes = AttentionSpans<Config>::kLanes, kKeys = Config::kTileN / kLanes, kAtOnce = 4;
  static_assert(kKeys % kAtOnce == 0, "a lane's keys");
  extern __shared__ __align__(16) unsigned char shared_memory[];
  volatile int& broken = *reinterpret_cast<int*>(shared_memory);  // whether one of the queries has no span
  if (threadIdx.x == 0) broken = 0;
  __syncthreads();

  const unsigned list = blockIdx.x / call.query_blocks;
  const int batch = list / call.heads * call.query_heads + list % call.heads;
  const int query = blockIdx.x % call.query_blocks * Config::kTileM + threadIdx.x / kLanes;
  Visible* const seen = call.seen + static_cast<long long>(blockIdx.x) * call.key_blocks;
  KeyRange<Config> range;
  range.read(call, batch);
  SeenKeys keys;
  const int key_blocks = call.key_blocks;
  // It may stop early where one is broken, since no span is asked for then: a warp's lanes together, as they vote.
  for (int before = 0; before < key_blocks && !ptx::vote_sync_any(broken != 0); before += 32) {
    const int lane = threadIdx.x % 32;
    const Visible visible = before + lane < key_blocks ? seen[before + lane] : Visible::none;
    const unsigned whole = ptx::vote_sync_ballot(visible == Visible::all);
    unsigned left = ptx::vote_sync_ballot(visible != Visible::none);
    for (; left != 0 && broken == 0; left &= left - 1) {
      const int number = __popcll((left & -left) - 1);
      const int first = (before + number) * Config::kTileN + threadIdx.x % kLanes * kKeys;
      SeenKeys found;
      if (whole >> number & 1) {
        found = {first, first + kKeys - 1, kKeys};
      } else {
        for (int key = first; key < first + kKeys; key += kAtOnce) {
          Coordinate at[kAtOnce];
          bool inside[kAtOnce], sees[kAtOnce];
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i) {
            at[i] = {query, key + i, batch};
            inside[i] = query < range.query_length && key + i < range.key_length;
          }
          see_pairs(call, range, at, inside, false, sees);
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i) {
            if (inside[i] && sees[i]) found.add(key + i);
          }
        }
      }
      if (!found.neighbours()) broken = 1;
      keys.add(found);
    }
  }
#pragma unroll
  for (int mask = 1; mask < kLanes; mask *= 2) {
    keys.add({static_cast<int>(ptx::shfl_sync_bfly(static_cast<unsigned>(keys.first), mask)),
              static_cast<int>(ptx::shfl_sync_bfly(static_cast<unsigned>(keys.last), mask)),
              static_cast<int>(ptx::shfl_sync_bfly(static_cast<unsigned>(keys.count), mask))});
  }
  if (!keys.neighbours()) broken = 1;
  __syncthreads();
  const bool spanned = broken == 0;
  if (threadIdx.x % kLanes == 0 && query < call.query_length) {
    KeySpan span = {range.first_key(call, query), range.end_key(call, query)};
    if (query >= range.query_length || (spanned && keys.count == 0)) {
      span = {0, 0};
    } else if (spanned) {
      span = {keys.first, keys.last + 1};
    }
    call.spans[static_cast<long long>(list) * call.query_length + query] = span;
  }
  if (!spanned) return;
  for (int block = threadIdx.x; block < key_blocks; block += AttentionSpans<Config>::kThreads) {
    if (seen[block] == Visible::some) seen[block] = Visible::spanned;
  }
}

template <class Config>
__device__ __forceinline__ void attention_blocks(const AttentionBlocks<Config>& call) {
  const unsigned index = blockIdx.x * (AttentionBlocks<Config>::kThreads / 32) + threadIdx.x / 32;
  if (index >= call.blocks) return;
  const unsigned row = index / call.key_blocks, list = row / call.query_blocks;
  const int batch = list / call.heads * call.query_heads + list % call.heads;
  const ScoreBlock<Config> block(call, batch, row % call.query_blocks, index % call.key_blocks);
  const Visible visible = block.visible();
  if (threadIdx.x % 32 == 0) call.seen[index] = visible;
}

struct AttentionLists {
  static constexpr int kThreads = 256;

  const Visible* seen = nullptr;
  int* lists = nullptr;                                             // [.., listed, 1 + of each]
  unsigned lists_count = 0, listed = 0;                             // in all, and of a matrix of blocks
  int of_each = 0;                                                  // blocks, at most
  unsigned matrix_stride = 0, listed_stride = 0, block_stride = 0;  // in `seen`
};

__device__ __forceinline__ void attention_lists(const AttentionLists& call) {
  const unsigned index = blockIdx.x * (AttentionLists::kThreads / 32) + threadIdx.x / 32;
  if (index >= call.lists_count) return;
  const Visible* const seen =
      call.seen + index / call.listed * call.matrix_stride + index % call.listed * call.listed_stride;
  int* const list = call.lists + static_cast<long long>(index) * (1 + call.of_each);
  const int lane = threadIdx.x % 32;
  int count = 0;
  for (int last = call.of_each - 1; last >= 0; last -= 32) {
    const int block = last - lane;
    const Visible visible = block >= 0 ? seen[block * call.block_stride] : Visible::none;
    const unsigned found = ptx::vote_sync_ballot(visible != Visible::none);
    if (visible != Visible::none) {
      list[1 + count + __popcll(found & ((1u << lane) - 1))] = list_entry(block, edge_of(visible));
    }
    count += __popcll(found);
  }
  if (lane == 0) list[0] = count;
}

struct AttentionRanks {
  static constexpr int kThreads = 256;

  const Visible* seen = nullptr;
  int* ranks = nullptr;  // [.., blocks of keys, blocks of queries]
  unsigned rows = 0;     // blocks of queries in all
  unsigned query_blocks = 0;
  int key_blocks = 0;
};

__device__ __forceinline__ void attention_ranks(const AttentionRanks& call) {
  const unsigned row = blockIdx.x * (AttentionRanks::kThreads / 32) + threadIdx.x / 32;
  if (row >= call.rows) return;
  const Visible* const seen = call.seen + static_cast<long long>(row) * call.key_blocks;
  int* const ranks = call.ranks +
                     static_cast<long long>(row / call.query_blocks) * call.key_blocks * call.query_blocks +
                     row % call.query_blocks;
  const int lane = threadIdx.x % 32;
  int count = 0;
  for (int first = 0; first < call.key_blocks; first += 32) {
    const int block = first + lane;
    const bool there = block < call.key_blocks;
    const unsigned found = ptx::vote_sync_ballot(there && seen[block] != Visible::none);
    if (there) {
      ranks[static_cast<long long>(block) * call.query_blocks] = count + __popcll(found & ((1u << lane) - 1));
    }
    count += __popcll(found);
  }
}

}  // namespace jaxdnn
