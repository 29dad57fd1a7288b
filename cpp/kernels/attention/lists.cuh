// Lists of the blocks that a tile has to visit, where a mask is more than arithmetic of coordinates: segments,
// positions that are arrays, a function. A list is written at run time, so that a new mask compiles nothing but its
// function.
//
//   attention_blocks   a warp for each block of kTileM queries by kTileN keys: whether no pair of them is visible, some
//                      are, or all
//   attention_lists    a warp for each list: of the blocks of keys that a block of queries sees, or the other way round
//   attention_ranks    a warp for each block of queries: of each block of keys, how many before it the queries see
//
// A list is its length, and then 4 * block + an `Edge`, from the last block to the first. There is one for each batch,
// or for fewer, if the mask is the same for all elements, or heads.
//
// Segments and positions: from the least and the greatest of both sides. Where these leave it open, some are visible.
// A function: of each pair, until one is visible and one is not. That is (operations of the function) / 128 clocks of a
// multiprocessor for each pair, of each list; the tensor cores take (d + dv) / 2048 clocks, for each head.
// attention/spans.cuh: what more is known of a list's blocks, and one kernel for all that segments need.
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

/// The number of the lowest bit that is set.
__device__ __forceinline__ int lowest_bit(unsigned bits) { return __popcll((bits & -bits) - 1); }

/// What a `Config` has besides kTileM, kTileN and Mask.
struct AttentionBlocksDefaults : AttentionMaskDefaults {
  // Of rows and of columns; or none.
  using QuerySegments = void;
  using KeySegments = void;
  using QueryPositions = void;
  using KeyPositions = void;
  static constexpr bool kPositions = false;  // whether the band counts positions that are arrays, of either side
  static constexpr bool kFunction = false;   // whether there is more to the mask's function than segments and positions
  static constexpr bool kSpanned = false;    // whether spans are wanted of what segments alone say
};

template <class Config>
struct AttentionBlocks : AttentionMask<Config> {
  static constexpr int kThreads = 256;

  Visible* seen = nullptr;  // [lists, blocks of queries, blocks of keys]
  OperandAddress query_segments, key_segments, query_positions, key_positions;
  int heads = 1;  // that have lists of their own
  unsigned query_blocks = 0, key_blocks = 0, blocks = 0;
  long long position_left = 0, position_right = 0;  // of the band, if it counts positions

  __device__ __forceinline__ int batch_of_list(unsigned list) const {
    return list / heads * this->query_heads + list % heads;
  }
};

/// The least and the greatest of some numbers.
struct Extremes {
  int least, greatest;

  __device__ __forceinline__ bool single() const { return least == greatest; }
};

/// What an array has for a row, or a column, of a batch.
template <class Operand, bool kRow>
__device__ __forceinline__ int number_of(const OperandAddress& address, int batch, int at) {
  const auto* data =
      static_cast<const typename Operand::Type*>(address.data) + address.of_batch<Operand::kAffine>(batch);
  return data[kRow ? address.of_row<Operand::kAffineRows>(at) : address.of_column<Operand::kAffineColumns>(at)];
}

/// Of rows, or columns, `first` .. `end - 1` of a batch, at most kMost; by a warp. Where there is no array it is the
/// coordinates'.
template <class Operand, bool kRows, int kMost>
__device__ __forceinline__ Extremes extremes(const OperandAddress& address, int batch, int first, int end) {
  if constexpr (is_same<Operand, void>) {
    return {first, end - 1};
  } else {
    constexpr int kLoads = (kMost + 31) / 32;  // at once
    Extremes found{math::kHighest<int>, math::kLowest<int>};
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int at = first + 32 * i + threadIdx.x % 32;
      if (at >= end) continue;
      const int value = number_of<Operand, kRows>(address, batch, at);
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
    if (inside[i]) load_elements<typename Function::Operands>(call.mask_operands, at[i], operand[i]);
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

/// Some rows of scores, of which a warp says how much is visible of a block of columns.
template <class Config>
struct ScoreRows {
  const AttentionBlocks<Config>& call;
  KeyRange<Config> range;
  int batch, first_row, end_row;
  Extremes segment, position;  // of the rows

  __device__ __forceinline__ ScoreRows(const AttentionBlocks<Config>& call, int batch, int row_block)
      : call(call), batch(batch), first_row(row_block * Config::kTileM) {
    range.read(call, batch);
    end_row = range.last_query(first_row, Config::kTileM) + 1;
    segment = of_rows<typename Config::QuerySegments>(call.query_segments);
    position = of_rows<typename Config::QueryPositions>(call.query_positions);
  }

  __device__ __forceinline__ Visible visible(int column_block) const {
    const int first = column_block * Config::kTileN;
    const int end = first + Config::kTileN < range.key_length ? first + Config::kTileN : range.key_length;
    if (end_row <= first_row || end <= first) return Visible::none;
    const Visible counted = by_range(first, end);
    if (counted == Visible::none) return counted;
    const Visible by_sides = least(counted, least(by_segments(first, end), by_positions(first, end)));
    if constexpr (Config::kFunction) {
      return by_sides == Visible::none ? by_sides : by_function(first, end, counted == Visible::all);
    }
    return by_sides;
  }

 private:
  static __device__ __forceinline__ Visible least(Visible a, Visible b) { return a < b ? a : b; }

  template <class Operand>
  __device__ __forceinline__ Extremes of_rows(const OperandAddress& address) const {
    return extremes<Operand, true, Config::kTileM>(address, batch, first_row, end_row);
  }
  template <class Operand>
  __device__ __forceinline__ Extremes of_columns(const OperandAddress& address, int first, int end) const {
    return extremes<Operand, false, Config::kTileN>(address, batch, first, end);
  }

  __device__ __forceinline__ Visible by_range(int first, int end) const {
    const int last_row = end_row - 1;
    if (range.end_key(call, last_row) <= first || range.first_key(call, first_row) >= end) return Visible::none;
    const bool all =
        range.first_key(call, last_row) <= first && range.end_key(call, first_row) >= first + Config::kTileN;
    return all ? Visible::all : Visible::some;
  }

  __device__ __forceinline__ Visible by_segments(int first, int end) const {
    if constexpr (is_same<typename Config::QuerySegments, void>) {
      return Visible::all;
    } else {
      const Extremes key = of_columns<typename Config::KeySegments>(call.key_segments, first, end);
      if (segment.greatest < 0 || segment.greatest < key.least || key.greatest < segment.least) return Visible::none;
      return segment.single() && key.single() ? Visible::all : Visible::some;
    }
  }

  __device__ __forceinline__ Visible by_positions(int first, int end) const {
    if constexpr (!Config::kPositions) {
      return Visible::all;
    } else {
      const Extremes key = of_columns<typename Config::KeyPositions>(call.key_positions, first, end);
      const long long nearest = static_cast<long long>(key.least) - position.greatest;
      const long long farthest = static_cast<long long>(key.greatest) - position.least;
      // The function's distances have 32 bits, and go round.
      if (nearest < math::kLowest<int> || farthest > math::kHighest<int>) return Visible::some;
      if (farthest < -call.position_left || nearest > call.position_right) return Visible::none;
      const bool all = nearest >= -call.position_left && farthest <= call.position_right;
      return all ? Visible::all : Visible::some;
    }
  }

  /// By all there is; `counted` if the range need not be looked at.
  __device__ __forceinline__ Visible by_function(int first_column, int end_column, bool counted) const {
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

template <class Config>
__device__ __forceinline__ void attention_blocks(const AttentionBlocks<Config>& call) {
  const unsigned index = blockIdx.x * (AttentionBlocks<Config>::kThreads / 32) + threadIdx.x / 32;
  if (index >= call.blocks) return;
  const unsigned row = index / call.key_blocks, list = row / call.query_blocks;
  const ScoreRows<Config> rows(call, call.batch_of_list(list), row % call.query_blocks);
  const Visible visible = rows.visible(index % call.key_blocks);
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

/// Writes one list, of so many blocks at most; by a warp.
__device__ __forceinline__ void write_list(int* list, const Visible* seen, int of_each, unsigned block_stride) {
  const int lane = threadIdx.x % 32;
  int count = 0;
  for (int last = of_each - 1; last >= 0; last -= 32) {
    const int block = last - lane;
    const Visible visible = block >= 0 ? seen[block * block_stride] : Visible::none;
    const unsigned found = ptx::vote_sync_ballot(visible != Visible::none);
    if (visible != Visible::none) {
      list[1 + count + __popcll(found & ((1u << lane) - 1))] = list_entry(block, edge_of(visible));
    }
    count += __popcll(found);
  }
  if (lane == 0) list[0] = count;
}

__device__ __forceinline__ void attention_lists(const AttentionLists& call) {
  const unsigned index = blockIdx.x * (AttentionLists::kThreads / 32) + threadIdx.x / 32;
  if (index >= call.lists_count) return;
  const Visible* const seen =
      call.seen + index / call.listed * call.matrix_stride + index % call.listed * call.listed_stride;
  write_list(call.lists + static_cast<long long>(index) * (1 + call.of_each), seen, call.of_each, call.block_stride);
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
