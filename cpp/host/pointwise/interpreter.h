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

#include "bytecode.h"

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

// The values of a program for the elements of a block, in memory of the thread.
class Registers {
 public:
  Registers(int64_t count, int64_t element_bytes);

  // A register's elements: in its own slot, or where `place` has put them.
  template <typename T>
  const T* at(int64_t index) const {
    return static_cast<const T*>(places_[index]);
  }
  // The register's own slot, to be written.
  template <typename T>
  T* slot(int64_t index) const {
    char* own = slots_ + index * slot_bytes_;
    places_[index] = own;
    return reinterpret_cast<T*>(own);
  }
  void place(int64_t index, const void* elements) const { places_[index] = elements; }

 private:
  int64_t slot_bytes_;
  const void** places_;
  char* slots_;
};

class Interpreter {
 public:
  // `operands` and `results` must live as long as this. A thread has one at a time: its registers are the thread's.
  Interpreter(const int64_t* words, const Array* operands, const Array* results);
  Interpreter(const Interpreter&) = delete;
  Interpreter& operator=(const Interpreter&) = delete;

  // Gives the reduced results of a tile their first values.
  void initialize(const Tile& tile) const;

  // `sums` are the tile's accumulators, in the program's order.
  void run(const Rows* sums, const Tile& tile) const;

 private:
  // Where a block begins in its tile.
  struct Origin {
    int64_t row, column;
  };
  bool overwritten(const Array& operand) const;
  void load(const Instruction& code, const Tile& block, bool steady) const;
  void gather(const Instruction& code, const Tile& block) const;
  void execute(const int64_t* begin, const int64_t* end, const Rows* sums, const Origin& origin,
               const Tile& block) const;
  void store(const Tile& block) const;

  const int64_t* words_;
  const int64_t* literals_;
  const int64_t* steady_;  // instructions whose values are the same in every row
  const int64_t* instructions_;
  const int64_t* outputs_;
  const int64_t* output_end_;
  const Array* operands_;
  const Array* results_;
  const Registers registers_;
};

}  // namespace pointwise

JAXDNN_ISA_END
