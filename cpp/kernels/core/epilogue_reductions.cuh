// Results that an epilogue reduces: each warp reduces what it has of tiles, and writes that to scratch memory, where
// product/reduce.cuh takes it from. All orders are fixed, so results are the same bits on every run.
//
//   over             what a warp writes at once                     scratch, [matrix, part, what is kept]
//   columns          16 rows x kWidth columns; one value a row      [batch, ceil(columns / kWidth), rows]
//   rows, or both    likewise; one value a column, or one           [batch, ceil(rows / 16), columns], or
//                                                                   [batch, ceil(columns / kWidth), ceil(rows / 16)]
//   with kOwnLines   what it has of all tiles of the same columns   [batch, warps of the grid, columns], or
//                    and matrix, one after the other                [batch, warps of the grid]
//   kBlockLines too  what its block's warps have of all tiles       [blocks that have the same columns, columns], or
//                                                                   [blocks that have the same rows, rows]
//
// Of many rows a warp has a line of its own: there are fewer lines than 16 rows each would leave, which are written and
// read again, and it does not matter which rows a tile has. A warp first fills its lines with what changes nothing.
// While its tiles are of the same columns it keeps what it has of them in registers, and then adds it to the line: it
// may come to the same columns again. So tiles have to be dealt, and not taken (core/tile_queue.cuh). A line for each
// warp is more than there is of few rows, of which each warp would write few of its columns. Where all tiles of a block
// are of the same columns and matrix, or of the same rows where columns are reduced, its warps meet in shared memory
// after the last one, and leave one line.
//
// A lane has two rows of four columns of a fragment, and eight lanes have the same columns. In registers it keeps all
// four, to which it adds a row of its own if the matrix has that: an instruction a value, and for squares too, which
// are multiplied as they are added. Or, where these would be more than kMostHeld, it keeps two or one of them, of which
// it has more rows: each exchange halves the lanes that share columns, and the columns. What the matrix has no columns
// of is never written, so columns are looked at only where these are reduced.
#pragma once

#include "core/epilogue_results.cuh"
#include "core/reduction.cuh"

namespace jaxdnn {

/// The type that values of T, which registers hold, are reduced in.
template <class T>
using Accumulated = Select<is_same<T, float>, float, Select<math::kSigned<T>, int32, uint32>>;

/// A result reduced over a tile's rows, columns, or both. `Of` is the type in which the functor returns its values.
template <Reduction kReduction, class Of, bool kOverRowsOf, bool kOverColumnsOf>
struct Reduced : ReductionOf<kReduction, Accumulated<Of>> {
  using Source = Of;
  using Type = Accumulated<Of>;
  static constexpr bool kOverRows = kOverRowsOf, kOverColumns = kOverColumnsOf;

  /// Combined with the value of the lane whose number differs in the bit `mask`.
  static __device__ __forceinline__ Type across(Type mine, Type given, int mask) {
    if constexpr (is_same<Type, float>) {
      return Reduced::combine(mine, ptx::shfl_sync_bfly(given, mask));
    } else {
      const float bits = ptx::mov_f32(static_cast<unsigned>(given));
      return Reduced::combine(mine, static_cast<Type>(ptx::mov_b32(ptx::shfl_sync_bfly(bits, mask))));
    }
  }
};

template <class T>
inline constexpr bool is_reduced = false;
template <Reduction kReduction, class Of, bool kOverRows, bool kOverColumns>
inline constexpr bool is_reduced<Reduced<kReduction, Of, kOverRows, kOverColumns>> = true;

/// What the matrix has of 16 rows of a tile: all of it, which every lane knows, and each of the lane's own two rows.
struct Presence {
  bool whole = true, rows[2] = {true, true};

  __device__ __forceinline__ bool has(const FragmentCoordinate& at, int i) const {
    return rows[i / 2 % 2] && at.column + i / 4 * 8 + i % 2 < at.columns;
  }
};

/// Where a warp's own lines are, or its block's line.
struct OwnLines {
  int line, lines = 1;
  int batches = 1, columns = 0;  // of the results

  /// That of a matrix, of so many values.
  template <class T>
  __device__ __forceinline__ T* of(const ResultAddress& address, int batch, int values) const {
    return static_cast<T*>(address.data) + (static_cast<long long>(batch) * lines + line) * values;
  }
};

/// The warps of a block, which meet in shared memory where results are stored from: consumers of four warps each, of
/// which each has kRows rows of its tile, and all of them the same ones where each has tiles of its own.
template <int kConsumersOf, int kRowsOf, bool kOwnTiles, int kApartOf>
struct BlockWarps {
  static constexpr int kConsumers = kConsumersOf, kWarps = 4 * kConsumers, kRows = kRowsOf;
  static constexpr int kTileM = kOwnTiles ? kRows : kConsumers * kRows, kSharers = kOwnTiles ? kConsumers : 1;
  static constexpr int kApart = kApartOf;  // bytes from one's shared memory to the next one's
};

/// What one warp has of one reduced result: while it works through the columns of 16 rows or, on a line of its own,
/// through tiles of the same columns; or for its block's line through tiles of the same rows, kBlocks of 64 each.
template <class R, int kWidth, bool kOwnLines, int kBlocks, int kExchanges>
struct Partial {
  using Type = typename R::Type;
  static constexpr bool kByColumn = !R::kOverColumns;
  static constexpr bool kKept = kOwnLines && (R::kOverRows || kBlocks > 0);  // from tile to tile
  static constexpr bool kKeptRows = kKept && !R::kOverRows;
  static constexpr int kFragments = kByColumn && kKept ? kWidth / kFragmentColumns : kKeptRows ? kBlocks : 1;
  static constexpr int kHeld = kByColumn ? 4 >> kExchanges : R::kOverRows ? 1 : 2;  // columns; or one a row

  Type held[kFragments][kHeld];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int number = 0; number < kFragments; ++number) {
#pragma unroll
      for (int i = 0; i < kHeld; ++i) held[number][i] = R::identity();
    }
  }

  /// Before 16 rows.
  __device__ __forceinline__ void begin() {
    if constexpr (!kKept) clear();
  }

  /// Adds fragment `number` of 64 rows of a tile, block `block` of these, of which the matrix has what is `present`.
  __device__ __forceinline__ void add(const Fragment& fragment, const ResultAddress& address,
                                      const FragmentCoordinate& at, int block, int number, const Presence& present) {
    Type values[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const typename R::Source value = fragment[i];
      values[i] = static_cast<Type>(value);
    }
    if constexpr (!kByColumn) {
      const int set = kKeptRows ? block : 0;
      if (present.whole) {
#pragma unroll
        for (int i = 0; i < 8; ++i) add_to_row(set, i, values[i]);
      } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          if (present.has(at, i)) add_to_row(set, i, values[i]);
        }
      }
    } else if constexpr (kKept && kExchanges == 0) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        Type& to = held[number][i / 4 * 2 + i % 2];
        if (present.rows[i / 2 % 2]) to = R::combine(to, values[i]);
      }
    } else {
      Type columns[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int first = i / 2 * 4 + i % 2;
        columns[i] = present.rows[0] ? values[first] : R::identity();
        if (present.rows[1]) columns[i] = R::combine(columns[i], values[first + 2]);
      }
      if constexpr (kKept) {
        exchange<0, kExchanges>(columns);
#pragma unroll
        for (int i = 0; i < kHeld; ++i) held[number][i] = R::combine(held[number][i], columns[i]);
      } else {
        const Type value = all_rows<0>(columns);
        const int row = at.row - threadIdx.x % 32 / 4, column = at.column + column_of_lane() - threadIdx.x % 4 * 2;
        if (has_column() && row < at.rows && column < at.columns) {
          const long long part = static_cast<long long>(at.batch) * ((at.rows + 15) / 16) + row / 16;
          static_cast<Type*>(address.data)[part * at.columns + column] = value;
        }
      }
    }
  }

  /// After 16 rows, which are `others` of the matrix, writes what was held of them; `at` is the lane's first element.
  template <class Rows>
  __device__ __forceinline__ void finish(const ResultAddress& address, const FragmentCoordinate& at,
                                         const Rows& others) {
    if constexpr (!kByColumn && !kKept) {
      const int lane = threadIdx.x % 32, parts = (at.columns + kWidth - 1) / kWidth;
      const int left = at.column - lane % 4 * 2;
      const FragmentCoordinate its = at.through(others);
      Type* const to = static_cast<Type*>(address.data);
      const long long part = static_cast<long long>(at.batch) * parts + left / kWidth;
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        const Type value = all_lanes(held[0][i]);
        const int kept = R::kOverRows ? (at.row - lane / 4) / 16 : its.row + its.below * i;
        const int count = R::kOverRows ? (at.rows + 15) / 16 : at.rows;
        if (lane % (R::kOverRows ? 32 : 4) == 0 && kept < count && left < at.columns) to[part * count + kept] = value;
      }
    }
  }

  /// Fills the warp's lines with what changes nothing.
  __device__ __forceinline__ void open(const ResultAddress& address, const OwnLines& own) const {
    if constexpr (kKept) {
      const int values = kByColumn ? own.columns : 1;
      for (int batch = 0; batch < own.batches; ++batch) {
        for (int i = threadIdx.x % 32; i < values; i += 32) own.of<Type>(address, batch, values)[i] = R::identity();
      }
    }
  }

  /// Adds what is held of tiles from `column` on to the warp's line, and holds nothing more.
  __device__ __forceinline__ void leave(const ResultAddress& address, const OwnLines& own, int column, int batch) {
    if constexpr (kKept && kByColumn) {
      Type* const to = own.of<Type>(address, batch, own.columns) + column + column_of_lane();
      const int left = has_column() ? own.columns - column - column_of_lane() : 0;
      Type before[kFragments];
#pragma unroll
      for (int number = 0; number < kFragments; ++number) {
        const int at = number * kFragmentColumns;
        before[number] = at < left ? to[at] : R::identity();
      }
#pragma unroll
      for (int number = 0; number < kFragments; ++number) {
        const int at = number * kFragmentColumns;
        const Type value = all_rows<kExchanges>(held[number]);
        if (at < left) to[at] = R::combine(before[number], value);
      }
      clear();
    } else if constexpr (kKept) {
      const Type value = all_lanes(held[0][0]);
      Type* const to = own.of<Type>(address, batch, 1);
      if (threadIdx.x % 32 == 0) *to = R::combine(*to, value);
      clear();
    }
  }

  /// Puts what is held of each column, or of each row, into shared memory, at `to`.
  __device__ __forceinline__ void put(unsigned to) {
#pragma unroll
    for (int number = 0; number < kFragments; ++number) {
      if constexpr (kKeptRows) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < kHeld; ++i) {
          const Type value = all_lanes(held[number][i]);
          if (lane % 4 == 0) ptx::st_shared(to + 4 * (16 * number + 8 * i + lane / 4), static_cast<Bits>(value));
        }
      } else {
        const Type value = all_rows<kExchanges>(held[number]);
        const unsigned at = to + 4 * (number * kFragmentColumns + column_of_lane());
        if (has_column()) ptx::st_shared(at, static_cast<Bits>(value));
      }
    }
  }

  /// By thread `thread` of the `Warps`: combines what they have put, the first one at `from`, into the block's line of
  /// `extent` values, of which its tiles have those from `begin` on.
  template <class Warps>
  static __device__ __forceinline__ void gather(const ResultAddress& address, const OwnLines& own, unsigned from,
                                                int thread, int begin, int extent) {
    Type* const line = own.of<Type>(address, 0, extent);
    constexpr int kCount = kKeptRows ? Warps::kTileM : kWidth;
    constexpr int kSharers = kKeptRows ? Warps::kSharers : Warps::kWarps, kStep = kKeptRows ? 4 : 1;
    for (int i = thread; i < kCount && begin + i < extent; i += 32 * Warps::kWarps) {
      const int first = kKeptRows ? i / Warps::kRows * 4 + i % 64 / 16 : 0;
      const int place = kKeptRows ? i % Warps::kRows / 64 * 16 + i % 16 : i;
      const unsigned at = from + first * Warps::kApart + 4 * place;
      unsigned words[kSharers];
#pragma unroll
      for (int j = 0; j < kSharers; ++j) ptx::ld_shared<4>(words + j, at + j * kStep * Warps::kApart);
      Type value = of_bits(words[0]);
#pragma unroll
      for (int j = 1; j < kSharers; ++j) value = R::combine(value, of_bits(words[j]));
      line[begin + i] = value;
    }
  }

 private:
  using Bits = Select<is_same<Type, float>, float, unsigned>;
  static __device__ __forceinline__ Type of_bits(unsigned bits) {
    if constexpr (is_same<Type, float>) {
      return ptx::mov_f32(bits);
    } else {
      return static_cast<Type>(bits);
    }
  }

  /// Adds value `i` of a fragment to its row.
  __device__ __forceinline__ void add_to_row(int set, int i, Type value) {
    Type& to = held[set][i / 2 % 2 % kHeld];
    to = R::combine(to, value);
  }

  /// Exchanges number kFrom to kTo - 1 with lanes that have other rows: of each, half of the columns are left.
  template <int kFrom, int kTo, int kCount>
  static __device__ __forceinline__ void exchange(Type (&columns)[kCount]) {
    if constexpr (kFrom < kTo) {
      constexpr int kMask = 16 >> kFrom, kLeft = 2 >> kFrom;
      const bool upper = threadIdx.x & kMask;
#pragma unroll
      for (int i = 0; i < kLeft; ++i) {
        const Type low = columns[i], high = columns[i + kLeft];
        columns[i] = R::across(upper ? high : low, upper ? low : high, kMask);
      }
      exchange<kFrom + 1, kTo>(columns);
    }
  }

  /// What all rows have of one of the lane's columns, after so many exchanges.
  template <int kDone, int kCount>
  static __device__ __forceinline__ Type all_rows(Type (&columns)[kCount]) {
    exchange<kDone, 2>(columns);
    return R::across(columns[0], columns[0], 4);
  }

  /// Which column of a fragment that is; two lanes have it, of which one writes it.
  static __device__ __forceinline__ int column_of_lane() {
    const int lane = threadIdx.x % 32;
    return lane % 4 * 2 + (lane & 16 ? 8 : 0) + (lane & 8 ? 1 : 0);
  }
  static __device__ __forceinline__ bool has_column() { return (threadIdx.x & 4) == 0; }

  /// What the lanes have that share the row, or all.
  static __device__ __forceinline__ Type all_lanes(Type value) {
#pragma unroll
    for (int mask = R::kOverRows ? 16 : 2; mask > 0; mask /= 2) value = R::across(value, value, mask);
    return value;
  }
};

/// How many results are reduced over rows alone.
template <class Results>
inline constexpr int kReducedOverRows = 0;
template <class First, class... Rest>
inline constexpr int kReducedOverRows<TypeList<First, Rest...>> = kReducedOverRows<TypeList<Rest...>>;
template <Reduction kReduction, class Of, class... Rest>
inline constexpr int kReducedOverRows<TypeList<Reduced<kReduction, Of, true, false>, Rest...>> =
    1 + kReducedOverRows<TypeList<Rest...>>;

/// How many exchanges each fragment takes: none, if what is kept of all of them fits in kMostHeld registers; or else so
/// many that it stays in kMostExchanged, if it can, since they take registers too.
constexpr int kMostHeld = 64, kMostExchanged = 32;
constexpr int exchanges_of(int results, int width) {
  const int columns = results * width / kFragmentColumns;
  return 4 * columns <= kMostHeld ? 0 : 2 * columns <= kMostExchanged ? 1 : 2;
}

/// The partial reductions of all results that are reduced.
template <class Results, int kWidth, bool kOwnLines, int kBlocks, int kExchanges, int kIndex = 0>
struct PartialsOf {
  template <class Visit>
  __device__ __forceinline__ void each(const Visit&) {}
};

template <class First, class... Rest, int kWidth, bool kOwnLines, int kBlocks, int kExchanges, int kIndex>
struct PartialsOf<TypeList<First, Rest...>, kWidth, kOwnLines, kBlocks, kExchanges, kIndex>
    : PartialsOf<TypeList<Rest...>, kWidth, kOwnLines, kBlocks, kExchanges, kIndex + 1> {};

template <Reduction kReduction, class Of, bool kOverRows, bool kOverColumns, class... Rest, int kWidth, bool kOwnLines,
          int kBlocks, int kExchanges, int kIndex>
struct PartialsOf<TypeList<Reduced<kReduction, Of, kOverRows, kOverColumns>, Rest...>, kWidth, kOwnLines, kBlocks,
                  kExchanges, kIndex> {
  Partial<Reduced<kReduction, Of, kOverRows, kOverColumns>, kWidth, kOwnLines, kBlocks, kExchanges> own;
  PartialsOf<TypeList<Rest...>, kWidth, kOwnLines, kBlocks, kExchanges, kIndex + 1> rest;

  /// Calls `visit` with each, and the number of its result.
  template <class Visit>
  __device__ __forceinline__ void each(const Visit& visit) {
    visit(own, kIndex);
    rest.each(visit);
  }
};

template <class Results, int kWidth, bool kOwnLines, int kBlocks>
using Partials =
    PartialsOf<Results, kWidth, kOwnLines, kBlocks, kOwnLines ? exchanges_of(kReducedOverRows<Results>, kWidth) : 0>;

}  // namespace jaxdnn
