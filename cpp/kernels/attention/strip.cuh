// What a function makes of a warp's scores: a strip of 16 rows, fragment by fragment (core/fragment.cuh).
//
// A function has Epilogue, Operands and kLongEpilogue, as that header wants them. Of kFetched columns at once a thread
// has what the function loads in registers. Those of the first ones are fetched when the caller says so, which may be
// ahead of the wait for the scores. What lies in a tile of shared memory is read as it is used.
#pragma once

#include "core/fragment.cuh"
#include "ptx/mma.cuh"

namespace jaxdnn {

/// A strip of a tile in shared memory, of 16-bit elements, of which a chunk of 64 columns takes kChunkBytes
/// (core/tile.cuh). Lane i points ldmatrix at a row, i % 16.
template <int kChunkBytes>
struct TileStrip {
  unsigned line;  // shared address of the lane's row

  /// `row`: the strip's first one, a multiple of 16.
  __device__ __forceinline__ TileStrip(unsigned tile, int row) : line(tile + (row + threadIdx.x % 16) * 128) {}

  /// Columns 16 `fragment` to 16 `fragment` + 15. Eight rows lie in eight different sixteenths of their 128 bytes.
  template <int kTile = 0>
  __device__ __forceinline__ void read(int fragment, unsigned (&words)[4]) const {
    static_assert(kTile == 0, "a function reads one tile");
    const unsigned chunk = line + fragment / 4 * kChunkBytes;
    ptx::ldmatrix_x4<false>(words, chunk + ((fragment % 4 * 2 + threadIdx.x % 32 / 16 ^ threadIdx.x % 8) << 4));
  }
};

/// The same of transposed scores: 16 columns of the tile, from `column` on, a multiple of 16, are the strip's rows.
/// Lane i points ldmatrix at the rows of matrix i / 8, of which the second and the fourth are 8 columns to the right.
template <int kChunkBytes>
struct TransposedTileStrip {
  unsigned line;  // shared address of the lane's part of its row, in the first fragment

  __device__ __forceinline__ TransposedTileStrip(unsigned tile, int column) {
    const int lane = threadIdx.x % 32, part = column % 64 / 8 + lane / 8 % 2;
    line = tile + column / 64 * kChunkBytes + (lane / 16 * 8 + lane % 8) * 128 + ((part ^ lane % 8) << 4);
  }

  /// Rows 16 `fragment` to 16 `fragment` + 15 of the tile.
  template <int kTile = 0>
  __device__ __forceinline__ void read(int fragment, unsigned (&words)[4]) const {
    static_assert(kTile == 0, "a function reads one tile");
    ptx::ldmatrix_x4<true>(words, line + fragment * 16 * 128);
  }
};

/// Where there is no tile.
struct NoStrip {};

/// What the functions in a `Config` have besides.
struct StripFunctionDefaults {
  static constexpr int kAccumulators = 1, kResults = 1;
  static constexpr bool kLongEpilogue = false;
};

template <class Function, int kFetched>
struct StripFunction {
  FragmentOperands<typename Function::Operands, kFetched> values;

  /// Starts to load for the first columns. `first` is the thread's first element of the strip.
  __device__ __forceinline__ void fetch(const OperandAddress* addresses, const FragmentCoordinate& first) {
    values.fetch(addresses, first);
  }

  /// Hands `use` the number and the results, one or two, of each of the thread's scores.
  template <int kScores, class Use, class Strip = NoStrip>
  __device__ __forceinline__ void apply(const float (&scores)[kScores], const OperandAddress* addresses,
                                        const FragmentCoordinate& first, const Use& use, const Strip& strip = {}) {
    constexpr int kAtOnce = kFetched / kFragmentColumns;
#pragma unroll
    for (int fragment = 0; fragment < kScores / 8; ++fragment) {
      const FragmentCoordinate at = first.to_the_right(fragment * kFragmentColumns);
      if (fragment > 0 && fragment % kAtOnce == 0) values.fetch(addresses, at);
      values.read(strip, fragment);
      Fragment results[Function::kResults];
      apply_to_fragment<Function>(scores, 8 * fragment, values, fragment % kAtOnce, addresses, at, results);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if constexpr (Function::kResults == 1) {
          use(8 * fragment + i, results[0][i]);
        } else {
          use(8 * fragment + i, results[0][i], results[1][i]);
        }
      }
    }
  }
};

template <int kFetched>
struct StripFunction<void, kFetched> {};

/// Of the columns 0, 1, 8, 9, 16, 17, ..., those of a row that a thread has: how many are less than `end`.
__device__ __forceinline__ unsigned own_columns_before(unsigned end) {
  return end / 8 * 2 + (end % 8 < 2 ? end % 8 : 2);
}

/// Calls `hide` with the number of each of a thread's scores of its row `r`, of two, that is in none of `count` columns
/// from `first` on. `column`: of the thread's first score. Each score has a bit, and the compiler makes predicates of 7
/// at once. Where a function says more of the same scores, it joins comparisons with the function's, and bits take more
/// instructions: then `kFunction`.
template <int kScores, bool kFunction, class Hide>
__device__ __forceinline__ void each_outside(int r, unsigned column, unsigned first, unsigned count, const Hide& hide) {
  const auto score = [&](int i) { return i / 2 * 4 + 2 * r + i % 2; };
  if constexpr (kFunction) {
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) {
      if (column + i / 2 * 8 + i % 2 - first >= count) hide(score(i));
    }
  } else {
    const unsigned begin = own_columns_before(first > column ? first - column : 0);
    const unsigned end = own_columns_before(first + count > column ? first + count - column : 0);
#pragma unroll
    for (unsigned word = 0; word < kScores / 2; word += 32) {
      const unsigned from = ptx::shl_clamped(~0u, begin > word ? begin - word : 0);
      const unsigned past = ptx::shl_clamped(~0u, end > word ? end - word : 0);
      const unsigned outside = ~from | past;
#pragma unroll
      for (int i = word; i < kScores / 2 && i < word + 32; ++i) {
        if (outside & 1u << i % 32) hide(score(i));
      }
    }
  }
}

/// Some of a thread's scores.
template <int kScores>
struct ScoreSetOf {
  unsigned words[(kScores + 31) / 32] = {};

  __device__ __forceinline__ void add(int i) { words[i / 32] |= 1u << i % 32; }
  __device__ __forceinline__ bool has(int i) const { return words[i / 32] >> i % 32 & 1; }
};

}  // namespace jaxdnn
