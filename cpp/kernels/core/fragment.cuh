// A fragment: 16 x 16 elements of an accumulator as the tensor cores leave them in a warp's registers, 8 a thread, and
// what a functor makes of them.
//
//   element i of lane   row  lane / 4 + i / 2 % 2 * 8,   column  lane % 4 * 2 + i / 4 * 8 + i % 2
//   registers           the accumulator of a 16 x n strip is n / 16 fragments, one after the other
//
// What the functor reads of its operands is fetched for some fragments at once, ahead of their use:
//   FragmentOperands<Operands, kColumns> values;
//   values.fetch(addresses, at);
//   apply_to_fragment<Config>(accumulator, first, values, fragment, addresses, at, results);
// The results stay in registers: a product stores and reduces them (core/epilogue.cuh), an attention's score goes on.
#pragma once

#include "core/epilogue_operands.cuh"
#include "core/vector.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"

namespace jaxdnn {

constexpr int kFragmentColumns = 16;

/// A thread's elements of a fragment.
using Fragment = RegisterOf<4>[8];

/// The registers of A for K that are these columns of an accumulator (ptx/wgmma.cuh): 16 of 16 bits, or 8 of tf32 in
/// another order.
template <class T>
__device__ __forceinline__ Vector<T, 16 / static_cast<int>(sizeof(T))> operand_of(const float* sums) {
  Vector<T, 16 / static_cast<int>(sizeof(T))> result;
  if constexpr (sizeof(T) == 4) {
    // Elements are rows and then columns: row 0, row 8, of neighbouring columns.
#pragma unroll
    for (int i = 0; i < 4; ++i) result.set(i, ptx::cvt_rna_tf32_f32(sums[i % 2 * 2 + i / 2]));
  } else {
    float values[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) values[j] = sums[j];
    result.pack(values);
  }
  return result;
}

/// The columns that `operand_of` was given, as it rounded them.
template <class T, int kCount>
__device__ __forceinline__ void sums_of(const Vector<T, kCount>& operand, float (&sums)[kCount]) {
  operand.unpack(sums);
  if constexpr (sizeof(T) == 4) {
    const float second = sums[1];
    sums[1] = sums[2];
    sums[2] = second;
  }
}

/// Rows of a tile that are those of the matrix, one after the other. Others say where in the matrix each is, and
/// whether 16 of them, a warp's, are a box that TMA can store and load: and `has_box`, whether all of it is there.
struct StraightRows {
  static constexpr bool kStraight = true, kBoxes = true;

  __device__ __forceinline__ int operator()(int row) const { return row; }

  /// By one thread: the 16 rows from `row` on, from shared memory, where they are so many bytes apart, and to there.
  template <bool kEvictFirst>
  __device__ __forceinline__ void store(const TensorMap* map, unsigned source, int, int column, int row,
                                        int batch) const {
    ptx::cp_async_bulk_tensor_store<kEvictFirst>(map, source, column, row, batch);
  }
  __device__ __forceinline__ void load(const TensorMap* map, unsigned destination, unsigned barrier, int, int column,
                                       int row, int batch) const {
    ptx::cp_async_bulk_tensor_load(destination, map, barrier, column, row, batch);
  }
};

/// Of a matrix that lies in memory by columns: a row here is a column there.
struct SwappedRows : StraightRows {
  template <bool kEvictFirst>
  __device__ __forceinline__ void store(const TensorMap* map, unsigned source, int, int column, int row,
                                        int batch) const {
    ptx::cp_async_bulk_tensor_store<kEvictFirst>(map, source, row, column, batch);
  }
  __device__ __forceinline__ void load(const TensorMap* map, unsigned destination, unsigned barrier, int, int column,
                                       int row, int batch) const {
    ptx::cp_async_bulk_tensor_load(destination, map, barrier, row, column, batch);
  }
};

/// Rows that are no box: pieces of them are copied to where they lie.
struct ScatteredRows {
  static constexpr bool kStraight = false, kBoxes = false;

  /// Of an element in memory.
  __device__ __forceinline__ long long offset(int row, int column, int columns) const {
    return static_cast<long long>(row) * columns + column;
  }
};

/// The matrix's own, which are not aligned as TMA wants them.
struct UnalignedRows : ScatteredRows {
  static constexpr bool kStraight = true;

  __device__ __forceinline__ int operator()(int row) const { return row; }
};

template <class Config>
using MatrixRows = Select<Config::kPieceBytes != 0, UnalignedRows, Select<Config::kSwapped, SwappedRows, StraightRows>>;

/// Where a thread's first element of a fragment lies, in a matrix of so many rows and columns.
struct FragmentCoordinate {
  int row, column, batch;
  int rows, columns;
  int below = 8;  // from the thread's first row to its second one

  /// Of the thread itself, in the fragment of its warp whose first element is at (row, column).
  static __device__ __forceinline__ FragmentCoordinate of_lane(int row, int column, int batch, int rows, int columns) {
    const int lane = threadIdx.x % 32;
    return {row + lane / 4, column + lane % 4 * 2, batch, rows, columns};
  }

  /// Where these rows of a tile are others of the matrix.
  template <class Rows>
  __device__ __forceinline__ FragmentCoordinate through(const Rows& other) const {
    const int first = other(row);
    return {first, column, batch, rows, columns, Rows::kStraight ? below : other(row + below) - first};
  }

  __device__ __forceinline__ FragmentCoordinate to_the_right(int distance) const {
    return {row, column + distance, batch, rows, columns, below};
  }

  /// Of element `i`.
  __device__ __forceinline__ Coordinate element(int i) const {
    return {row + i / 2 % 2 * below, column + i / 4 * 8 + i % 2, batch};
  }
};

/// One of two steps to transpose the words of four lanes, which are so far `kApart`: those whose number differs from
/// the lane's in a bit go to the lane that differs in it.
template <int kBit, int kApart>
__device__ __forceinline__ void exchange_words(unsigned (&words)[4]) {
  const bool upper = threadIdx.x & kBit * kApart;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i & kBit) continue;
    const unsigned got = ptx::shfl_sync_bfly(upper ? words[i] : words[i | kBit], kBit * kApart);
    (upper ? words[i] : words[i | kBit]) = got;
  }
}

/// Gives each of four lanes, in word i, what was its word of lane i.
template <int kApart>
__device__ __forceinline__ void transpose_words(unsigned (&words)[4]) {
  exchange_words<1, kApart>(words);
  exchange_words<2, kApart>(words);
}

// ---------------------------------------------------------------------------------------------------------- operands

/// The values of one operand for a thread's elements of neighbouring fragments: `kPairs` pairs of columns in two rows.
template <class Operand, int kPairs>
struct FragmentOperand {
  using T = typename Operand::Type;
  static constexpr bool kPaired = Operand::kByColumn && Operand::kColumns == Columns::pairs;
  static constexpr int kRowCount = Operand::kByRow ? 2 : 1;
  static constexpr int kPairCount = Operand::kByColumn ? kPairs : 1;
  static constexpr int kVectors = Operand::kByColumn && !kPaired ? 2 : 1;

  Vector<T, kPaired ? 2 : 1> vectors[kRowCount][kPairCount][kVectors];

  /// Elements outside the matrix are zero.
  __device__ __forceinline__ void fetch(const OperandAddress& address, const FragmentCoordinate& at) {
    const T* base = static_cast<const T*>(address.data) + address.of_batch<Operand::kAffine>(at.batch);
    // What is added to these is a constant, which instructions have room for.
    if constexpr (Operand::kByColumn && Operand::kColumns != Columns::strided) base += at.column;
    const int remaining = at.columns - at.column;
#pragma unroll
    for (int r = 0; r < kRowCount; ++r) {
      const int row = at.row + at.below * r;
      const bool inside = !Operand::kByRow || row < at.rows;
      const T* const line = base + (Operand::kByRow ? address.of_row<Operand::kAffineRows>(row) : 0);
#pragma unroll
      for (int pair = 0; pair < kPairCount; ++pair) {
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
          const int column = 8 * pair + i;
          vectors[r][pair][i].clear();
          if constexpr (Operand::kByColumn) {
            const long long offset = Operand::kColumns == Columns::strided
                                         ? address.of_column<Operand::kAffineColumns>(at.column + column)
                                         : column;
            if (inside && column < remaining) vectors[r][pair][i].load(line + offset);
          } else {
            if (inside) vectors[r][pair][i].load(line);
          }
        }
      }
    }
  }

  /// Of element `i` of fragment `fragment`.
  __device__ __forceinline__ Held<T> value(int fragment, int i) const {
    const int row = Operand::kByRow ? i / 2 % 2 : 0;
    const int pair = Operand::kByColumn ? fragment * 2 + i / 4 : 0;
    const auto& from = vectors[row][pair];
    return widen(kPaired ? from[0].get(i % 2) : from[kVectors == 2 ? i % 2 : 0].get(0));
  }
};

/// Of one that lies in a tile of shared memory, where a fragment is four matrices of 8 x 8: elements 2 i and 2 i + 1
/// are the thread's of matrix i, as ldmatrix gives them where they have 16 bits.
template <class T, Broadcast kBroadcast, int kPairs>
struct FragmentOperand<EpilogueOperand<T, kBroadcast, Columns::tile>, kPairs> {
  Vector<T, 8> elements;

  __device__ __forceinline__ Held<T> value(int, int i) const { return widen(elements.get(i)); }
};

/// The values of all operands, for `kColumns` columns; of a tile's, for the fragment that was read last.
template <class Operands, int kColumns, int kIndex = 0>
struct FragmentOperands {
  __device__ __forceinline__ void fetch(const OperandAddress*, const FragmentCoordinate&) {}
  template <int kTile = 0, class Strip>
  __device__ __forceinline__ void read(const Strip&, int) {}
  __device__ __forceinline__ void values(int, int, RegisterOf<4>*) const {}
};

template <class First, class... Rest, int kColumns, int kIndex>
struct FragmentOperands<TypeList<First, Rest...>, kColumns, kIndex> {
  FragmentOperand<First, kColumns / 8> own;
  FragmentOperands<TypeList<Rest...>, kColumns, kIndex + 1> rest;

  __device__ __forceinline__ void fetch(const OperandAddress* addresses, const FragmentCoordinate& at) {
    if constexpr (!First::kIsTable && !First::kIsTile) own.fetch(addresses[kIndex], at);
    rest.fetch(addresses, at);
  }

  /// Reads a fragment of each tile, of whose `strip` of 16 rows it is one. Before the first are `kTile` others.
  template <int kTile = 0, class Strip>
  __device__ __forceinline__ void read(const Strip& strip, int fragment) {
    if constexpr (First::kIsTile) strip.template read<kTile>(fragment, own.elements.words);
    rest.template read<kTile + First::kIsTile>(strip, fragment);
  }

  /// Of element `i` of fragment `fragment`.
  __device__ __forceinline__ void values(int fragment, int i, RegisterOf<4>* to) const {
    if constexpr (!First::kIsTable) to[kIndex].set(own.value(fragment, i));
    rest.values(fragment, i, to);
  }
};

/// Brings a warp's 16 rows x kWidth columns of all operands closer: rows, which all warps of the tile read, into the L1
/// cache, and matrices into the L2 cache. `at` is the warp's first element.
template <class Operands, int kWidth, int kIndex = 0>
__device__ __forceinline__ void prefetch_operands(const OperandAddress* addresses, const FragmentCoordinate& at) {
  if constexpr (kIndex < Operands::kCount) {
    using Operand = TypeAt<kIndex, Operands>;
    using T = typename Operand::Type;
    if constexpr (Operand::kByColumn && Operand::kColumns <= Columns::pairs) {
      constexpr int kPart = (Operand::kByRow ? 128 : 32) / static_cast<int>(sizeof(T));  // elements of a line or sector
      constexpr int kParts = (kWidth + kPart - 1) / kPart;
      const OperandAddress& address = addresses[kIndex];
      const T* const matrix = static_cast<const T*>(address.data) + address.of_batch<Operand::kAffine>(at.batch);
      for (int i = threadIdx.x % 32; i < kParts * (Operand::kByRow ? 16 : 1); i += 32) {
        const int line = at.row + i / kParts, first = at.column + i % kParts * kPart;
        if (first >= at.columns || line >= at.rows) continue;
        if constexpr (Operand::kByRow) {
          ptx::prefetch_global_l2(matrix + address.of_row<Operand::kAffineRows>(line) + first);
        } else {
          ptx::prefetch_global_l1(matrix + first);
        }
      }
    }
    prefetch_operands<Operands, kWidth, kIndex + 1>(addresses, at);
  }
}

// ----------------------------------------------------------------------------------------------------------- functor

/// The functor's results for one element. Tables are looked up inside the matrix only: what is outside is never used.
template <class Config, class Accumulator, int kAccumulators, int kOperands, int kResults>
__device__ __forceinline__ void apply_to_element(const Accumulator (&accumulator)[kAccumulators],
                                                 const RegisterOf<4> (&operand)[kOperands],
                                                 const OperandAddress* addresses, const FragmentCoordinate& at, int i,
                                                 RegisterOf<4> (&result)[kResults]) {
  Coordinate element = at.element(i);
  if constexpr (has_tables<typename Config::Operands>) {
    element.row = element.row < at.rows ? element.row : at.rows - 1;
    element.column = element.column < at.columns ? element.column : at.columns - 1;
  }
  Config::Epilogue::apply(accumulator, operand, ElementContext<typename Config::Operands>{element, addresses}, result);
}

/// Applies the functor to the fragment whose registers begin at `accumulator[first]`; with two accumulators, the second
/// one's follow the first one's. Config has: Epilogue, Operands, Accumulator, kAccumulators, kLongEpilogue (the
/// functor's code stands once for 8 elements, and not for each: they pass through local memory, and the compiler takes
/// a second instead of many).
template <class Config, class Accumulator, int kRegisters, int kColumns, int kResults>
__device__ __forceinline__ void apply_to_fragment(const Accumulator (&accumulator)[kRegisters], int first,
                                                  const FragmentOperands<typename Config::Operands, kColumns>& values,
                                                  int fragment, const OperandAddress* addresses,
                                                  const FragmentCoordinate& at, Fragment (&results)[kResults]) {
  Accumulator own[8][Config::kAccumulators];
  RegisterOf<4> operand[8][Config::Operands::kArray], result[8][kResults];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
#pragma unroll
    for (int s = 0; s < Config::kAccumulators; ++s)
      own[i][s] = accumulator[s * (kRegisters / Config::kAccumulators) + first + i];
    values.values(fragment, i, operand[i]);
    if constexpr (!Config::kLongEpilogue) {
      apply_to_element<Config>(own[i], operand[i], addresses, at, i, result[i]);
    }
  }
  if constexpr (Config::kLongEpilogue) {
#pragma unroll 1
    for (int i = 0; i < 8; ++i) apply_to_element<Config>(own[i], operand[i], addresses, at, i, result[i]);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
#pragma unroll
    for (int j = 0; j < kResults; ++j) results[j][i] = result[i][j];
  }
}

}  // namespace jaxdnn
