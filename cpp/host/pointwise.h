// Runs a pointwise program on tiles of a result, as the epilogue of a host kernel:
//
//     Interpreter epilogue(program, operands, results);
//     Rows sums[] = {{buffer, stride}};  // what the kernel computed
//     epilogue.run(sums, {batch, row, column, rows, columns});
//
// The program's words are those of jaxdnn/pointwise/bytecode.py. A result that the program reduces is combined with
// what its array holds, in the program's own type: each task has its own array, filled with `identity` at first, and
// the kernel combines these in a fixed order when all tasks are done.
#pragma once

#include <cstdint>

#include "host_kernel.h"

JAXDNN_ISA_BEGIN

namespace pointwise {

// An array, and its strides in elements; zero along what it doesn't vary with.
struct Array {
  void* data = nullptr;
  int64_t batch = 0, row = 0, column = 0;

  template <typename T>
  T* at(int64_t b, int64_t r, int64_t c) const {
    return static_cast<T*>(data) + b * batch + r * row + c * column;
  }
};

// The dense rows of a tile in a kernel's own buffer, `stride` elements apart.
struct Rows {
  const void* data;
  int64_t stride;
};

// A part of one matrix of the result.
struct Tile {
  int64_t batch, row, column;  // where it begins
  int64_t rows, columns;
};

class Registers;

class Interpreter {
 public:
  // `operands` and `results` must live as long as this.
  Interpreter(const int64_t* words, const Array* operands, const Array* results);
  ~Interpreter();
  Interpreter(const Interpreter&) = delete;
  Interpreter& operator=(const Interpreter&) = delete;

  // Gives the reduced results of a tile their first values.
  void initialize(const Tile& tile) const;

  // `sums` are the tile's accumulators, in the program's order.
  void run(const Rows* sums, const Tile& tile) const;

 private:
  // Where a block begins in its tile.
  struct Piece {
    int64_t row, column, rows, columns;
  };
  void run_block(const Rows* sums, const Tile& tile, const Piece& piece) const;

  const int64_t* literals_;
  const int64_t* instructions_;
  const int64_t* outputs_;
  const int64_t* output_end_;
  const Array* operands_;
  const Array* results_;
  Registers* registers_;
};

}  // namespace pointwise

JAXDNN_ISA_END
