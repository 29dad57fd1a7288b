// The interpreter of pointwise programs, and a kernel that runs one on its own, over whole arrays.
#include "pointwise.h"

#include <algorithm>
#include <limits>

#include "pointwise_operations.h"

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

Interpreter::Interpreter(const int64_t* words, const Array* operands, const Array* results)
    : literals_(words + 5),
      instructions_(literals_ + 2 * words[2]),
      outputs_(instructions_ + 2 * words[3]),
      output_end_(outputs_ + words[4]),
      operands_(operands),
      results_(results),
      registers_(new Registers(words[1], words[0])) {
  for (const int64_t* word = literals_; word < instructions_; word += 2) registers_->execute(Instruction(word), kBlock);
}

Interpreter::~Interpreter() { delete registers_; }

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
  const int64_t height = kBlock / std::max<int64_t>(1, width);
  for (int64_t row = 0; row < tile.rows; row += height) {
    for (int64_t column = 0; column < tile.columns; column += width) {
      run_block(sums, tile, {row, column, std::min(height, tile.rows - row), std::min(width, tile.columns - column)});
    }
  }
}

void Interpreter::run_block(const Rows* sums, const Tile& tile, const Piece& piece) const {
  const Tile block{tile.batch, tile.row + piece.row, tile.column + piece.column, piece.rows, piece.columns};
  for (const int64_t* word = instructions_; word < outputs_; word += 2) {
    const Instruction code(word);
    switch (code.operation) {
      case Operation::accumulator:
        with_element(code.dtype, [&](auto element, auto type) {
          const Rows& rows = sums[code.immediate];
          const auto* from = static_cast<const decltype(element)*>(rows.data) + piece.row * rows.stride + piece.column;
          fetch(from, rows.stride, 1, registers_->at<decltype(type)>(code.result), block);
        });
        break;
      case Operation::operand:
        with_element(code.dtype, [&](auto element, auto type) {
          const Array& array = operands_[code.immediate];
          const auto* from = array.at<const decltype(element)>(block.batch, block.row, block.column);
          fetch(from, array.row, array.column, registers_->at<decltype(type)>(code.result), block);
        });
        break;
      case Operation::index:
        with_register(code.type, [&](auto type) { count(code, registers_->at<decltype(type)>(code.result), block); });
        break;
      default:
        registers_->execute(code, block.rows * block.columns);
    }
  }
  for (const int64_t* word = outputs_; word < output_end_; ++word) {
    const OutputInstruction output(*word);
    const Array& array = results_[word - outputs_];
    with_register(output.type, [&](auto type) {
      const auto* values = registers_->at<const decltype(type)>(output.result);
      if (output.reduction == Reduction::none) {
        write(output.dtype, values, array, block);
      } else {
        reduce(output.reduction, values, array, block);
      }
    });
  }
}

}  // namespace pointwise

// More than any program has; a launch takes 128 arguments.
constexpr int kMaxArrays = 32;

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
  const void* const* next = arguments + 7;
  const auto stride = [&](int i) { return *static_cast<const int64_t*>(next[i]); };

  pointwise::Rows sums[kMaxArrays];
  for (int i = 0; i < sum_count; ++i, next += 4) {
    sums[i] = {static_cast<const char*>(next[0]) + (batch * stride(1) + row * stride(2)) * stride(3), stride(2)};
  }
  pointwise::Array arrays[kMaxArrays];
  for (int i = 0; i < array_count; ++i, next += 4) {
    arrays[i] = {const_cast<void*>(next[0]), stride(1), stride(2), stride(3)};
  }
  const pointwise::Tile tile{batch, row, 0, std::min(task_rows, rows - row), columns};
  const pointwise::Interpreter program(static_cast<const int64_t*>(arguments[0]), arrays, arrays + scalar(5));
  program.initialize(tile);
  program.run(sums, tile);
}

JAXDNN_ISA_END

JAXDNN_HOST_KERNELS({"pointwise", pointwise_program})
