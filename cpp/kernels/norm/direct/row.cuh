// Which rows and columns a thread of the norm kernels owns.
//
// A row belongs to `kThreadsPerRow` threads in each of `kSplits` blocks. A block holds `kRowsPerBlock` rows at once,
// and works on `kTurns` such, one after the other; with `kTurns` 0 the blocks that fit on the device at once stride
// over all rows of one group. Within a row, split `rank` is `slice` columns, and each thread owns `kVectors` vectors of
// `kVector` columns, which lie as many threads' widths apart so that a warp's access is contiguous:
//
//   slice:   | vector 0: thread 0, thread 1, ... | vector 1: thread 0, thread 1, ... | ... (the end may be masked)
//
// Rows of a length that `kVector` does not divide (`kSkewed`) begin between vectors of memory. Their vectors begin
// `skew` columns before them, where memory is aligned, and what the first and the last one hold of other rows, or of
// what lies after the last row in the same 16 bytes, is cleared, and not written:
//
//   memory:  | vector | vector | ...                          skew = first element of the row % kVector
//   row:         |< column 0 ...            columns - 1 >|
//
// Each row has its own skew, but rows `kPeriod` turns apart have the same one. A block works on such rows only, so that
// its threads keep their columns, and with them parameters and sums.
//
// Almost always there is one split. Rows too wide for one block, and few wide rows, have several: the blocks of a
// cluster, which add their sums through distributed shared memory (`Step::whole`), or unrelated blocks of two launches,
// of which the first writes each split's sums to memory (`Step::measure`) and the second reads them (`Step::apply`).
// The second works through the rows from the last to the first: those that were measured last are still in the L2
// cache.
#pragma once

#include "core/pipeline_async.cuh"
#include "ptx/math.cuh"

namespace jaxdnn {

enum class Step { whole, measure, apply };

/// A row of one turn.
struct Row {
  long long order;   // its place among the rows of its group as they are worked through
  long long number;  // and as they lie in memory
  bool valid;        // the last turn of a group may leave some threads of a block without a row
  long long offset;  // of its first column, in elements; if it is not valid, where an access is aligned all the same
};

template <class Config>
struct RowThreads {
  static constexpr int kThreads = Config::kThreadsPerRow * Config::kRowsPerBlock;
  static_assert(kThreads % 32 == 0 && kThreads <= 1024, "a block is 1 to 32 whole warps");
  static_assert(Config::kStep == Step::whole || Config::kRowsPerBlock == 1, "a split of a row has a block of its own");

  int lane;              // this thread among those of its row and block
  int row_in_block;      // these threads' row
  int rank;              // this block's split of the row
  int skew = 0;          // columns by which vectors begin before their row
  int columns;           // of a row
  int slice;             // columns of a split, `skew` of them before the row
  int first;             // this thread's first column
  int end;               // the first column after this block's slice
  long long group;       // the group of rows this block works on
  long long block;       // this block, with those of the other splits, among the blocks of its group
  long long first_row;   // of this block's first turn
  long long end_row;     // after this block's last turn, or the group's last row
  long long row_stride;  // rows between two turns
  long long mirrored;    // of blocks that stride over the rows from the last to the first: the sum of these two rows

  // The rows that were measured last are still in the L2 cache.
  static constexpr bool kLastFirst = Config::kStep == Step::apply;

  __device__ __forceinline__ RowThreads(long long rows, int row_columns, int row_slice, int blocks_per_group)
      : columns(row_columns), slice(row_slice) {
    lane = threadIdx.x % Config::kThreadsPerRow;
    row_in_block = threadIdx.x / Config::kThreadsPerRow;
    rank = static_cast<int>(blockIdx.x % Config::kSplits);
    const unsigned unit = blockIdx.x / Config::kSplits;
    group = Config::kGrouped ? unit / blocks_per_group : 0;
    block = Config::kGrouped ? unit % blocks_per_group : unit;
    if (kLastFirst && Config::kTurns > 0) block = blocks_per_group - 1 - block;
    if constexpr (Config::kTurns == 0) {
      first_row = block * Config::kRowsPerBlock;
      end_row = rows;
      row_stride = static_cast<long long>(blocks_per_group) * Config::kRowsPerBlock;
      mirrored = 2 * first_row + (end_row - 1 - first_row) / row_stride * row_stride;
    } else {
      // As many neighbouring blocks as a period has turns work on as many rows, each on every kPeriod-th of them.
      constexpr int kPeriodRows = Config::kPeriod * Config::kTurns * Config::kRowsPerBlock;
      const long long start = block / Config::kPeriod * kPeriodRows;
      first_row = start + block % Config::kPeriod * Config::kRowsPerBlock;
      end_row = start + kPeriodRows > rows ? rows : start + kPeriodRows;
      row_stride = Config::kPeriod * Config::kRowsPerBlock;
    }
    if constexpr (Config::kSkewed) {
      skew = static_cast<int>(static_cast<unsigned>(first_row + row_in_block) * columns % Config::kVector);
    }
    first = rank * slice - skew + lane * Config::kVector;
    end = Config::kSplits == 1 || (rank + 1) * slice - skew > columns ? columns : (rank + 1) * slice - skew;
  }

  /// Where this thread's vector `v` begins.
  __device__ __forceinline__ int column(int v) const { return first + v * (Config::kThreadsPerRow * Config::kVector); }

  /// Whether any of vector `v` lies in the slice. Vectors never straddle its ends, but those of a skewed row: `kVector`
  /// divides `slice`, and else the columns. `kWhole` vectors of each thread end in all rows before the last column: who
  /// asks about one of those asks nothing at run time.
  __device__ __forceinline__ bool holds(int v) const { return Config::kExact || v < Config::kWhole || column(v) < end; }

  /// The elements of a vector that is held from the first one that lies in the row to the one after the last.
  __device__ __forceinline__ int first_inside(int v) const { return Config::kSkewed && v == 0 ? -column(v) : 0; }
  __device__ __forceinline__ int end_inside(int v) const {
    return Config::kSkewed && v >= Config::kWhole ? columns - column(v) : Config::kVector;
  }

  /// Whether all of a vector that is held lies in the row.
  __device__ __forceinline__ bool whole(int v) const {
    return first_inside(v) <= 0 && end_inside(v) >= Config::kVector;
  }

  /// Whether element `i` of a vector that is held lies in the row.
  __device__ __forceinline__ bool inside(int v, int i) const { return first_inside(v) <= i && i < end_inside(v); }

  /// How many of the row's columns a split has.
  __device__ __forceinline__ int count(int split) const {
    const int from = split * slice - skew, to = from + slice;
    return (to < columns ? to : columns) - (from > 0 ? from : 0);
  }

  /// Clears what vector `v` holds of other rows.
  template <class T>
  __device__ __forceinline__ void trim(Vector<T, Config::kVector>& vector, int v) const {
    if (!whole(v)) vector.trim(first_inside(v), end_inside(v));
  }

  /// Stores what vector `v` has of the row at `destination`.
  template <class T>
  __device__ __forceinline__ void store(const Vector<T, Config::kVector>& vector, T* destination, int v) const {
    if (whole(v)) {
      vector.store(destination + column(v));
    } else {
      vector.store(destination + column(v), first_inside(v), end_inside(v));
    }
  }

  /// The row that comes where a walk from the first to the last would have row `order`. It is one of the same block.
  __device__ __forceinline__ long long number(long long order) const {
    return kLastFirst && Config::kTurns == 0 ? mirrored - order : order;
  }

  /// These threads' row of the turn that begins at row `base`, before `end_row`.
  __device__ __forceinline__ Row row(long long base, long long columns) const {
    const long long order = base + row_in_block;
    return row(order, columns, Config::kRowsPerBlock == 1 || order < end_row);
  }

  /// A row of these threads that may lie after the block's last.
  __device__ __forceinline__ Row ahead(long long order, long long columns) const {
    return row(order, columns, order < end_row);
  }

 private:
  __device__ __forceinline__ Row row(long long order, long long columns, bool valid) const {
    return {order, number(order), valid, valid ? number(order) * columns : skew};
  }
};

/// An array of rows that streams through a thread's slots of the ring of stages, or, without stages, straight into its
/// registers. One that is not `kPresent` has no slots, and is not read.
template <class T, class Config, bool kPresent>
struct RowStream {
  using Element = Vector<T, Config::kVector>;
  using Slots =
      Ring<T, Config::kVector, kPresent ? Config::kVectors : 0, RowThreads<Config>::kThreads, Config::kStages>;
  static constexpr int kSharedBytes = Slots::kSharedBytes;

  const T* source;  // of the group
  Slots slots;

  __device__ __forceinline__ RowStream(const T* array, unsigned shared) : source(array), slots(shared) {}

  /// Starts the copy of vector `v` of a row.
  __device__ __forceinline__ void fetch(const RowThreads<Config>& threads, const Row& row, int stage, int v) const {
    if constexpr (kPresent) {
      slots.fetch(stage, v, source + row.offset + threads.column(v), row.valid && threads.holds(v));
    }
  }

  /// Vector `v` of a row, whose copy has arrived, if there are stages.
  __device__ __forceinline__ void read(Element& element, const RowThreads<Config>& threads, const Row& row, int stage,
                                       int v) const {
    if constexpr (kPresent && Config::kStages > 0) {
      slots.read(element, stage, v);
    } else if constexpr (kPresent) {
      element.clear();
      if (row.valid && threads.holds(v)) element.load(source + row.offset + threads.column(v));
    }
  }
};

/// A sum over `count` numbers divided by it, to within a rounding, and exact where the quotient is: the mean of equal
/// numbers is that number, which a product with `inverse`, the rounded 1 / count, misses.
template <class Compute>
__device__ __forceinline__ Compute mean_of(Compute sum, Compute count, Compute inverse) {
  const Compute quotient = sum * inverse;
  const Compute rest = ptx::fma_rn(-quotient, count, sum);
  // An infinite sum leaves no rest.
  return rest == rest ? ptx::fma_rn(rest, inverse, quotient) : quotient;
}

__device__ __forceinline__ float reciprocal_square_root(float value) { return ptx::rsqrt_approx(value); }

__device__ __forceinline__ double reciprocal_square_root(double value) { return ptx::rcp_rn(ptx::sqrt_rn(value)); }

/// Where a thread finds its columns of a parameter, row after row.
enum class Place { registers, shared, memory };

/// A thread's columns of a parameter. From memory, which is the L1 cache once a multiprocessor's first block has read
/// them, the vectors that come next wait in registers: `kAhead` of them, so that no vector waits for its own loads.
template <class T, class Config, bool kPresent>
struct Parameter {
  static constexpr bool kInRegisters = kPresent && Config::kParameters == Place::registers;
  static constexpr bool kInShared = kPresent && Config::kParameters == Place::shared;
  static constexpr int kAhead = kPresent && Config::kParameters == Place::memory ? Config::kAhead : 0;
  static constexpr int kKept = kInRegisters ? Config::kVectors : kAhead;
  using Slots = Ring<T, Config::kVector, Config::kVectors, RowThreads<Config>::kThreads, kInShared ? 1 : 0>;
  static constexpr int kSharedBytes = Slots::kSharedBytes;

  const T* source;
  Slots slots;
  Vector<T, Config::kVector> kept[kKept > 0 ? kKept : 1];

  __device__ __forceinline__ Parameter(const T* array, unsigned shared) : source(array), slots(shared) {}

  /// Before the first row is fetched: its arrival then says that the parameters have arrived too. From memory, before
  /// the first vector of each row.
  __device__ __forceinline__ void load(const RowThreads<Config>& threads) {
#pragma unroll
    for (int v = 0; v < Config::kVectors; ++v) {
      if (v < kKept) load_vector(threads, v);
      if constexpr (kInShared) slots.fetch(0, v, source + threads.column(v), threads.holds(v));
    }
  }

  /// After the last use of vector `v` in a row.
  __device__ __forceinline__ void advance(const RowThreads<Config>& threads, int v) {
    if (kAhead > 0 && v + kAhead < Config::kVectors) load_vector(threads, v + kAhead);
  }

  __device__ __forceinline__ void load_vector(const RowThreads<Config>& threads, int v) {
    read(kept[kKept > 0 ? v % kKept : 0], threads, v);
  }

  /// Of a skewed row's columns, which begin anywhere in a vector of the parameter, one at a time.
  __device__ __forceinline__ void read(Vector<T, Config::kVector>& vector, const RowThreads<Config>& threads,
                                       int v) const {
    vector.clear();
    if (!threads.holds(v)) return;
    if constexpr (!Config::kSkewed) {
      vector.load(source + threads.column(v));
    } else if (threads.whole(v)) {
      vector.load(source + threads.column(v), 0, Config::kVector);
    } else {
      vector.load(source + threads.column(v), threads.first_inside(v), threads.end_inside(v));
    }
  }

  template <class Compute>
  __device__ __forceinline__ void get(const RowThreads<Config>& threads, int v,
                                      Compute (&values)[Config::kVector]) const {
    if constexpr (kPresent) {
      Vector<T, Config::kVector> vector;
      if constexpr (kKept > 0) {
        // Opaque to the compiler, which would otherwise widen all of them ahead of the rows, and spill.
        vector = kept[v % kKept];
        vector.keep_packed();
      } else if constexpr (kInShared) {
        slots.read(vector, 0, v);
      } else {
        read(vector, threads, v);
      }
      vector.unpack(values);
    }
  }
};

}  // namespace jaxdnn
