// The interpreter of pointwise programs, and a kernel that runs one on its own, over whole arrays.
#include "interpreter.h"

#include <algorithm>
#include <limits>

#include "../../launch_limits.h"
#include "../base/thread_memory.h"
#include "operations.h"

JAXDNN_ISA_BEGIN

namespace pointwise {

template <typename T>
inline T combined(Reduction reduction, T a, T b) {
  switch (reduction) {
    case Reduction::sum:
      return sum(a, b);
    case Reduction::max:
      return maximum(a, b);
    default:
      return minimum(a, b);
  }
}

// What a reduction begins with.
template <typename T>
inline T identity(Reduction reduction) {
  using Limits = std::numeric_limits<T>;
  switch (reduction) {
    case Reduction::max:
      return kFloating<T> ? -Limits::infinity() : Limits::min();
    case Reduction::min:
      return kFloating<T> ? Limits::infinity() : Limits::max();
    default:
      return T(0);
  }
}

template <typename S, typename R>
inline void fetch(const S* from, int64_t row_stride, int64_t column_stride, R* to, const Tile& block) {
  for (int64_t row = 0; row < block.rows; ++row, from += row_stride, to += block.columns) {
    if (column_stride == 0) {
      std::fill_n(to, block.columns, widened<R>(*from));
    } else if (column_stride == 1) {
      widen_row<R>(from, to, block.columns);
    } else {
      for (int64_t i = 0; i < block.columns; ++i) to[i] = widened<R>(from[i * column_stride]);
    }
  }
}

// The offsets of a block's columns, from the beginning of their row.
inline void column_offsets(const Array& array, const Terms& terms, const Tile& block, int64_t* to) {
  for (int64_t i = 0; i < block.columns; ++i) to[i] = (block.column + i) * array.column;
  for (int64_t t = 0; t < terms.count(2); ++t) {
    const Term term = terms.of(2)[t];
    int64_t quotient = block.column / term.divisor, within = block.column % term.divisor;
    if (term.modulus != 0) quotient %= term.modulus;
    for (int64_t i = 0; i < block.columns; ++i) {
      to[i] += quotient * term.stride;
      if (++within == term.divisor) {
        within = 0;
        if (++quotient == term.modulus) quotient = 0;
      }
    }
  }
}

// The offset of the first column of a row.
inline int64_t row_offset(const Array& array, const Terms& terms, int64_t batch, int64_t row) {
  return batch * array.batch + row * array.row + terms.offset(0, batch) + terms.offset(1, row);
}

template <typename S, typename R>
inline void fetch(const S* from, const Array& array, const Terms& terms, R* to, const Tile& block) {
  int64_t offsets[kBlock];
  if (terms.count(2) > 0) column_offsets(array, terms, block, offsets);
  for (int64_t row = 0; row < block.rows; ++row, to += block.columns) {
    const S* start = from + row_offset(array, terms, block.batch, block.row + row);
    if (terms.count(2) == 0) {
      fetch(start + block.column * array.column, 0, array.column, to, {0, 0, 0, 1, block.columns});
    } else {
      for (int64_t i = 0; i < block.columns; ++i) to[i] = widened<R>(start[offsets[i]]);
    }
  }
}

template <typename T>
inline void count(const Instruction& code, T* to, const Tile& block) {
  for (int64_t row = 0; row < block.rows; ++row, to += block.columns) {
    const int64_t start[3] = {block.batch, block.row + row, block.column};
    const int64_t step = code.immediate == 2 ? 1 : 0;
    for (int64_t i = 0; i < block.columns; ++i) to[i] = T(start[code.immediate] + i * step);
  }
}

template <typename R>
inline void write(Dtype dtype, const R* values, const Array& array, const Tile& block) {
  with_element(dtype, [&](auto element, auto) {
    using S = decltype(element);
    // A float becomes another kind of number only by an instruction.
    if constexpr (kFloating<R> == (kFloating<S> || !std::is_arithmetic_v<S>)) {
      for (int64_t row = 0; row < block.rows; ++row, values += block.columns) {
        S* to = array.at<S>(block.batch, block.row + row, block.column);
        if (array.column == 1) {
          narrow_row<S>(values, to, block.columns);
        } else {
          for (int64_t i = 0; i < block.columns; ++i) to[i * array.column] = narrowed<S>(values[i]);
        }
      }
    }
  });
}

template <typename T>
inline void reduce(Reduction reduction, const T* values, const Array& array, const Tile& block) {
  for (int64_t row = 0; row < block.rows; ++row, values += block.columns) {
    T* to = array.at<T>(block.batch, block.row + row, block.column);
    if (array.column != 0) {
      for (int64_t i = 0; i < block.columns; ++i) {
        to[i * array.column] = combined(reduction, to[i * array.column], values[i]);
      }
      continue;
    }
    // Independent chains, as many as a vector has lanes: short for the processor, and with a smaller rounding error.
    constexpr int kChains = 16;
    T partial[kChains];
    std::fill_n(partial, kChains, identity<T>(reduction));
    int64_t i = 0;
    for (; i + kChains <= block.columns; i += kChains) {
      for (int chain = 0; chain < kChains; ++chain) {
        partial[chain] = combined(reduction, partial[chain], values[i + chain]);
      }
    }
    for (; i < block.columns; ++i) partial[i % kChains] = combined(reduction, partial[i % kChains], values[i]);
    for (int half = kChains / 2; half > 0; half /= 2) {
      for (int chain = 0; chain < half; ++chain) {
        partial[chain] = combined(reduction, partial[chain], partial[chain + half]);
      }
    }
    *to = combined(reduction, *to, partial[0]);
  }
}

Registers::Registers(int64_t count, int64_t element_bytes) : slot_bytes_(kBlock * element_bytes) {
  static thread_local ThreadMemory memory;
  // Slots first, which are cache lines.
  slots_ = memory.reserve(size_t(count) * (size_t(slot_bytes_) + sizeof(void*)));
  places_ = reinterpret_cast<const void**>(slots_ + count * slot_bytes_);
}

Interpreter::Interpreter(const int64_t* words, const Array* operands, const Array* results)
    : words_(words),
      literals_(words + 6),
      steady_(literals_ + 2 * words[2]),
      instructions_(steady_ + 2 * words[3]),
      outputs_(instructions_ + 2 * words[4]),
      output_end_(outputs_ + words[5]),
      operands_(operands),
      results_(results),
      registers_(words[1], words[0]) {
  const Processor processor(registers_);
  for (const int64_t* word = literals_; word < steady_; word += 2) processor.execute(Instruction(word), kBlock);
}

void Interpreter::initialize(const Tile& tile) const {
  for (const int64_t* word = outputs_; word < output_end_; ++word) {
    const OutputInstruction output(*word);
    const Array& array = results_[word - outputs_];
    if (output.reduction == Reduction::none) continue;
    with_register(output.type, [&](auto type) {
      using T = decltype(type);
      for (int64_t row = 0; row < (array.row != 0 ? tile.rows : 1); ++row) {
        for (int64_t column = 0; column < (array.column != 0 ? tile.columns : 1); ++column) {
          *array.at<T>(tile.batch, tile.row + row, tile.column + column) = identity<T>(output.reduction);
        }
      }
    });
  }
}

void Interpreter::run(const Rows* sums, const Tile& tile) const {
  // A block is a piece of one row, or several rows of a narrow tile.
  const int64_t width = std::min(tile.columns, kBlock);
  const int64_t height = std::min(tile.rows, kBlock / width);
  for (int64_t column = 0; column < tile.columns; column += width) {
    Tile block{tile.batch, tile.row, tile.column + column, height, std::min(width, tile.columns - column)};
    execute(steady_, instructions_, sums, {0, column}, block);
    for (int64_t row = 0; row < tile.rows; row += height) {
      block.row = tile.row + row;
      block.rows = std::min(height, tile.rows - row);
      execute(instructions_, outputs_, sums, {row, column}, block);
      store(block);
    }
  }
}

// Whether a result takes the operand's place: it is stored there when another one may still want to read the operand.
bool Interpreter::overwritten(const Array& operand) const {
  const auto there = [&](const Array& result) { return result.data == operand.data; };
  return std::any_of(results_, results_ + (output_end_ - outputs_), there);
}

// Elements that lie as a register would have them are read where they are.
template <typename S, typename R>
inline void read(const Registers& registers, uint16_t index, const S* from, int64_t row_stride, int64_t column_stride,
                 R, bool in_place, const Tile& block) {
  if (std::is_same_v<S, R> && in_place && block.rows == 1 && column_stride == 1 && block.columns % kRun == 0) {
    registers.place(index, from);
  } else {
    fetch(from, row_stride, column_stride, registers.slot<R>(index), block);
  }
}

void Interpreter::load(const Instruction& code, const Tile& block, bool steady) const {
  const Array& array = operands_[code.immediate];
  const int64_t table = output_end_[code.immediate];
  with_element(code.dtype, [&](auto element, auto type) {
    using S = decltype(element);
    using R = decltype(type);
    const bool in_place = steady && !overwritten(array);
    if (table == 0) {
      read(registers_, code.result, array.at<const S>(block.batch, block.row, block.column), array.row, array.column,
           type, in_place, block);
      return;
    }
    const Terms terms(words_ + table);
    const S* from = static_cast<const S*>(array.data);
    if (terms.count(1) == 0 && terms.count(2) == 0) {
      from += row_offset(array, terms, block.batch, block.row) + block.column * array.column;
      read(registers_, code.result, from, array.row, array.column, type, in_place, block);
    } else {
      fetch(from, array, terms, registers_.slot<R>(code.result), block);
    }
  });
}

void Interpreter::gather(const Instruction& code, const Tile& block) const {
  const int64_t operand = code.immediate >> 48 & 0xffff;
  const Array& array = operands_[operand];
  const Terms terms(words_ + output_end_[operand]);
  int64_t columns[kBlock], offsets[kBlock];
  column_offsets(array, terms, block, columns);
  for (int64_t row = 0; row < block.rows; ++row) {
    const int64_t start = row_offset(array, terms, block.batch, block.row + row);
    for (int64_t i = 0; i < block.columns; ++i) offsets[row * block.columns + i] = start + columns[i];
  }
  const int64_t count = block.rows * block.columns;
  for (int64_t k = 0; k < terms.indices(); ++k) {
    const int64_t* index = registers_.at<int64_t>(code.arguments[k]);
    const IndexTerm term = terms.of_indices()[k];
    for (int64_t i = 0; i < count; ++i) {
      offsets[i] += std::min(std::max(index[i], int64_t(0)), term.bound) * term.stride;
    }
  }
  with_element(code.dtype, [&](auto element, auto type) {
    const auto* from = static_cast<const decltype(element)*>(array.data);
    auto* to = registers_.slot<decltype(type)>(code.result);
    for (int64_t i = 0; i < count; ++i) to[i] = widened<decltype(type)>(from[offsets[i]]);
  });
}

void Interpreter::execute(const int64_t* begin, const int64_t* end, const Rows* sums, const Origin& origin,
                          const Tile& block) const {
  const Processor processor(registers_);
  for (const int64_t* word = begin; word < end; word += 2) {
    const Instruction code(word);
    switch (code.operation) {
      case Operation::accumulator:
        with_element(code.dtype, [&](auto element, auto type) {
          const Rows& rows = sums[code.immediate];
          const auto* from = static_cast<const decltype(element)*>(rows.data);
          read(registers_, code.result, from + origin.row * rows.stride + origin.column, rows.stride, 1, type, true,
               block);
        });
        break;
      case Operation::operand:
        load(code, block, word < instructions_);
        break;
      case Operation::gather:
        gather(code, block);
        break;
      case Operation::index:
        with_register(code.type, [&](auto type) { count(code, registers_.slot<decltype(type)>(code.result), block); });
        break;
      default:
        processor.execute(code, block.rows * block.columns);
    }
  }
}

void Interpreter::store(const Tile& block) const {
  for (const int64_t* word = outputs_; word < output_end_; ++word) {
    const OutputInstruction output(*word);
    const Array& array = results_[word - outputs_];
    with_register(output.type, [&](auto type) {
      const auto* values = registers_.at<decltype(type)>(output.result);
      if (output.reduction == Reduction::none) {
        write(output.dtype, values, array, block);
      } else {
        reduce(output.reduction, values, array, block);
      }
    });
  }
}

}  // namespace pointwise

// Arguments of `pointwise_program` before those of its arrays, and how many arrays a launch has room for.
constexpr int kFirstArray = 7, kArrayArguments = 4;
constexpr int kMaxArrays = (int(kMaxArguments) - kFirstArray) / kArrayArguments;

// Arguments: the program's words; rows, columns; rows of a task; how many sums, operands and results there are; then
// four for each array: its data, and its batch, row and column strides. Sums have dense rows, and tell the bytes of an
// element in place of the column stride. A program that reduces runs as one task over one matrix, and leaves its
// reductions in the program's own types.
void pointwise_program(const void* const* arguments, int64_t task) {
  const auto scalar = [&](int i) { return *static_cast<const int64_t*>(arguments[i]); };
  const int64_t rows = scalar(1), columns = scalar(2), task_rows = scalar(3),
                chunks = (rows + task_rows - 1) / task_rows;
  const int64_t batch = task / chunks, row = task % chunks * task_rows;
  const int sum_count = int(scalar(4)), array_count = int(scalar(5) + scalar(6));
  const void* const* next = arguments + kFirstArray;
  const auto stride = [&](int i) { return *static_cast<const int64_t*>(next[i]); };

  pointwise::Rows sums[kMaxArrays];
  for (int i = 0; i < sum_count; ++i, next += kArrayArguments) {
    sums[i] = {static_cast<const char*>(next[0]) + (batch * stride(1) + row * stride(2)) * stride(3), stride(2)};
  }
  pointwise::Array arrays[kMaxArrays];
  for (int i = 0; i < array_count; ++i, next += kArrayArguments) {
    arrays[i] = {const_cast<void*>(next[0]), stride(1), stride(2), stride(3)};
  }
  const pointwise::Tile tile{batch, row, 0, std::min(task_rows, rows - row), columns};
  const pointwise::Interpreter program(static_cast<const int64_t*>(arguments[0]), arrays, arrays + scalar(5));
  program.initialize(tile);
  program.run(sums, tile);
}

// Combines the parts of a reduced result that tasks have left, in their order.
//
// Arguments: words (the type of the parts, the result's dtype, the reduction, elements of a task; how many parts there
// are along batch, row and column; how many of them the result keeps, all or one; its strides); the parts; the result.
void pointwise_reduce(const void* const* arguments, int64_t task) {
  using pointwise::Dtype;
  const int64_t* words = static_cast<const int64_t*>(arguments[0]);
  const auto reduction = pointwise::Reduction(words[2]);
  const int64_t* parts = words + 4;
  const int64_t* kept = words + 7;
  const int64_t* strides = words + 10;
  const pointwise::Array result{const_cast<void*>(arguments[2]), strides[0], strides[1], strides[2]};
  const int64_t end = std::min((task + 1) * words[3], kept[0] * kept[1] * kept[2]);
  pointwise::with_register(Dtype(words[0]), [&](auto type) {
    using T = decltype(type);
    // The longest sums are these, so floats are added in double.
    using Sum = std::conditional_t<pointwise::kFloating<T>, double, T>;
    constexpr int64_t kTogether = 64;
    Sum sums[kTogether];
    T values[kTogether];
    for (int64_t start = task * words[3], count; start < end; start += count) {
      const int64_t column = start % kept[2], row = start / kept[2] % kept[1], batch = start / kept[2] / kept[1];
      count = std::min({kTogether, kept[2] - column, end - start});
      std::fill_n(sums, count, pointwise::identity<Sum>(reduction));
      for (int64_t b = 0; b < (kept[0] == 1 ? parts[0] : 1); ++b) {
        for (int64_t r = 0; r < (kept[1] == 1 ? parts[1] : 1); ++r) {
          const T* from = static_cast<const T*>(arguments[1]) + ((batch + b) * parts[1] + row + r) * parts[2] + column;
          for (int64_t c = 0; c < (kept[2] == 1 ? parts[2] : 1); ++c) {
            for (int64_t i = 0; i < count; ++i) sums[i] = combined(reduction, sums[i], Sum(from[c + i]));
          }
        }
      }
      for (int64_t i = 0; i < count; ++i) values[i] = T(sums[i]);
      write(Dtype(words[1]), values, result, {batch, row, column, 1, count});
    }
  });
}

JAXDNN_ISA_END

JAXDNN_HOST_KERNELS({"pointwise", pointwise_program}, {"pointwise_reduce", pointwise_reduce})
