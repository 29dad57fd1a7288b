// Where the operands and results of an epilogue lie, and what its functor is given: the element's coordinate, tables to
// look up, and the functions of core/math.cuh.
#pragma once

#include "core/affine.cuh"
#include "core/element.cuh"
#include "core/math.cuh"
#include "core/table.cuh"

namespace jaxdnn {

/// An element of the whole result.
struct Coordinate {
  int row, column, batch;
};

/// Which coordinates an operand varies with; each may vary with the batch too, by its stride.
enum class Broadcast { scalar, row, column, full };  // row: one value a column; column: one value a row

/// How neighbouring columns lie: one by one, or in pairs that are an aligned word (or two), or `strided` apart; or the
/// operand is a table, in which the functor looks up what it wants, and of which nothing is loaded before; or TMA has
/// brought a tile of it to shared memory.
enum class Columns { single, pairs, strided, table, tile };

template <class T, Broadcast kBroadcastOf, Columns kColumnsOf = Columns::single>
struct EpilogueOperand {
  using Type = T;
  static constexpr Broadcast kBroadcast = kBroadcastOf;
  static constexpr Columns kColumns = kColumnsOf;
  static constexpr bool kIsTable = kColumnsOf == Columns::table;
  static constexpr bool kAffine = false, kAffineRows = false, kAffineColumns = false;
  static constexpr bool kIsTile = kColumnsOf == Columns::tile;
  static_assert(!kIsTile || kBroadcastOf == Broadcast::full, "a tile has rows and columns");
  static constexpr bool kByRow = kBroadcastOf == Broadcast::column || kBroadcastOf == Broadcast::full;
  static constexpr bool kByColumn = kBroadcastOf == Broadcast::row || kBroadcastOf == Broadcast::full;
};

/// An operand whose address has terms besides its strides: of a batch, or also of rows and columns. That is said in its
/// type, because a compiler that finds out by itself that there are none takes 15 % longer for a kernel of four
/// operands, 45 s, not 1, for two tables that a function looks up for each element of 128 x 128, and 42, not 5, for the
/// gradients of attention with a bias.
template <class Operand, bool kRows = false, bool kColumnsToo = false>
struct Affine : Operand {
  static constexpr bool kAffine = true, kAffineRows = kRows, kAffineColumns = kColumnsToo;
};

template <class Operands>
inline constexpr bool has_tables = false;
template <class... Operands>
inline constexpr bool has_tables<TypeList<Operands...>> = (Operands::kIsTable || ...);

/// The terms of any table: a functor knows tables by their numbers alone.
template <class Operands>
struct AnyTable;
template <class... Operands>
struct AnyTable<TypeList<Operands...>> {
  static constexpr bool kAffine = ((Operands::kIsTable && Operands::kAffine) || ...);
  static constexpr bool kAffineRows = ((Operands::kIsTable && Operands::kAffineRows) || ...);
  static constexpr bool kAffineColumns = ((Operands::kIsTable && Operands::kAffineColumns) || ...);
};

/// How many tiles there are.
template <class Operands>
inline constexpr int tile_count = 0;
template <class... Operands>
inline constexpr int tile_count<TypeList<Operands...>> = (0 + ... + int{Operands::kIsTile});

/// Strides count elements. Those that a plan leaves at zero cost no instruction.
template <class Pointer>
struct Address {
  Pointer data = nullptr;
  long long row_stride = 0, column_stride = 0, batch_stride = 0;

  __device__ __forceinline__ long long offset(const Coordinate& at) const {
    return at.row * row_stride + at.column * column_stride + at.batch * batch_stride;
  }
};

struct TensorMap;

struct OperandAddress : Address<const void*> {
  const TensorMap* map = nullptr;  // where TMA loads
  AffineTerms batch_terms, row_terms, column_terms;
  TableIndex indices[kMostIndices];  // of a table

  template <bool kAffine>
  __device__ __forceinline__ long long of_batch(int batch) const {
    return batch * batch_stride + (kAffine ? batch_terms.offset(batch) : 0);
  }
  template <bool kAffine>
  __device__ __forceinline__ long long of_row(int row) const {
    return row * row_stride + (kAffine ? row_terms.offset(row) : 0);
  }
  template <bool kAffine>
  __device__ __forceinline__ long long of_column(int column) const {
    return column * column_stride + (kAffine ? column_terms.offset(column) : 0);
  }
  template <class Operand>
  __device__ __forceinline__ long long of_element(int row, int column) const {
    return of_row<Operand::kAffineRows>(row) + of_column<Operand::kAffineColumns>(column);
  }
  template <class Operand>
  __device__ __forceinline__ long long offset(const Coordinate& at) const {
    return of_element<Operand>(at.row, at.column) + of_batch<Operand::kAffine>(at.batch);
  }
};

/// What a functor is told of an element: its coordinate, and the tables to look up.
template <class Operands>
struct ElementContext : Coordinate {
  const OperandAddress* operands;

  template <class T, int kIndices>
  __device__ __forceinline__ Table<T, kIndices> table(int k) const {
    Table<T, kIndices> found;
    found.data = static_cast<const T*>(operands[k].data) + operands[k].template offset<AnyTable<Operands>>(*this);
#pragma unroll
    for (int i = 0; i < kIndices; ++i) found.indices[i] = operands[k].indices[i];
    return found;
  }
};

struct ResultAddress : Address<void*> {
  const TensorMap* map = nullptr;  // where TMA stores
};

}  // namespace jaxdnn
