// A product as its launches describe it, and how it is cut:
//
//                 columns                      A tile of the result is what one piece of work sums and finishes. Along
//               +---------+                    k it is worked through in blocks: those of a and b are packed, hot in
//      k        |  b      | depth              cache or by a launch before, and multiplied panel by panel. A panel of b
//    +-----+    +----+----+                    stays in the L1 cache while the panels of a pass by, a block of a in L2:
//    | a   |    | x  |                         bytes from L2 for each multiplication: 1 / columns of a panel of b.
//    +--+--+    +----+
//    |x |rows   | tile -> epilogue -> results  Where a result has few tiles k is split between pieces of work, which
//    +--+       +----+                         leave their accumulators in memory, for a launch of its own to finish.
#pragma once

#include <algorithm>
#include <cstring>

#include "../pointwise/interpreter.h"
#include "format.h"

JAXDNN_ISA_BEGIN

namespace product {

constexpr int kMaxAccumulators = 2;
// Operands and results of an epilogue; `MAX_ARRAYS` in jaxdnn/engines/product/host/engine.py.
constexpr int kMaxArrays = 32;

// ---- The words of a plan, in the order of `Call` in jaxdnn/engines/product/host/unit.py -----------------------------

// When a matrix is packed.
enum class Packing : int64_t {
  by_tile,      // by each tile that needs it
  ahead,        // by a launch before
  multiplying,  // b by each tile, as it multiplies its first rows; where there is `Format::multiply_packing`
};

struct MatrixWords {
  int64_t dtype;
  int64_t line_stride, depth_stride;  // of rows of a, of columns of b
  int64_t batch_stride;
  Packing packing;
};

struct ArrayWords {
  int64_t batch, row, column;     // strides, in elements
  int64_t tile_row, tile_column;  // bytes between the parts that tiles leave of a reduced result
};

struct CallWords {
  int64_t batch, m, n, k;
  int64_t groups;                // of columns, which tiles don't cross
  int64_t rows, columns, depth;  // of a tile and its blocks
  int64_t splits;                // of k
  int64_t streams;               // whether b is read where it lies
  int64_t plain;                 // whether the result is the accumulators, in their own type
  int64_t group;                 // tiles that a task works on
  int64_t accumulators, operands, results;
  MatrixWords matrices[1 + kMaxAccumulators];  // a, then b of each sum
};

struct Matrix {
  MatrixWords words;
  const char* data;
  char* packed;
  int64_t groups, lines, tile_lines;  // lines of a group

  int64_t tiles() const { return groups * ((lines + tile_lines - 1) / tile_lines); }
  int64_t count(int64_t batch) const { return words.batch_stride == 0 ? 1 : batch; }
  bool ahead() const { return words.packing == Packing::ahead; }
};

// A tile's place.
struct Place {
  int64_t batch, row, column;  // the latter in tiles
  int64_t split;
};

class Call {
 public:
  explicit Call(const void* const* arguments)
      : words_(*static_cast<const CallWords*>(arguments[0])),
        program_(static_cast<const int64_t*>(arguments[1])),
        format_(find_format(Dtype(words_.matrices[0].dtype), Dtype(words_.matrices[1].dtype))) {
    const auto* strides = reinterpret_cast<const ArrayWords*>(&words_ + 1);
    others_ = strides + words_.operands + words_.results;
    const void* const* next = arguments + 2;
    for (int64_t i = 0; i <= words_.accumulators; ++i, next += 2) {
      matrices_[i] = {words_.matrices[i],
                      static_cast<const char*>(next[0]),
                      static_cast<char*>(const_cast<void*>(next[1])),
                      i == 0 ? 1 : words_.groups,
                      i == 0 ? words_.m : words_.n / words_.groups,
                      i == 0 ? words_.rows : words_.columns};
    }
    partial_ = static_cast<char*>(const_cast<void*>(*next++));
    for (int64_t i = 0; i < words_.operands + words_.results; ++i) {
      arrays_[i] = {const_cast<void*>(next[i]), strides[i].batch, strides[i].row, strides[i].column};
      tile_strides_[i] = strides + i;
    }
  }

  const CallWords& words() const { return words_; }
  // The words behind those of a product.
  const void* others() const { return others_; }
  const Format& format() const { return format_; }
  bool sums_integers() const { return words_.matrices[0].dtype == int64_t(Dtype::int8); }
  const Matrix& matrix(int64_t i) const { return matrices_[i]; }

  int64_t row_tiles() const { return matrices_[0].tiles(); }
  int64_t column_tiles() const { return matrices_[1].tiles(); }
  int64_t blocks() const { return (words_.k + words_.depth - 1) / words_.depth; }
  // Where a split begins.
  int64_t first_block(int64_t split) const { return blocks() * split / words_.splits; }
  int64_t tiles() const { return words_.batch * row_tiles() * column_tiles(); }

  // Row after row in bands of a few columns, so that what they have of b stays in a cache that cores share.
  Place place(int64_t index) const {
    constexpr int64_t kBand = 4;
    const int64_t matrix = row_tiles() * column_tiles(), inside = index % matrix;
    const int64_t band = inside / (kBand * row_tiles()) * kBand, width = std::min(kBand, column_tiles() - band);
    const int64_t in_band = inside - band * row_tiles();
    return {index / matrix % words_.batch, in_band / width, band + in_band % width, index / matrix / words_.batch};
  }

  pointwise::Tile tile(const Place& place) const {
    const int64_t of_group = words_.n / words_.groups, tiles = column_tiles() / words_.groups;
    const int64_t row = place.row * words_.rows, column = place.column % tiles * words_.columns;
    return {place.batch, row, place.column / tiles * of_group + column, std::min(words_.rows, words_.m - row),
            std::min(words_.columns, of_group - column)};
  }

  int64_t sums_stride(const pointwise::Tile& tile) const { return format_.padded_columns(tile.columns); }
  int64_t accumulator_bytes(const pointwise::Tile& tile) const {
    return format_.padded_rows(tile.rows) * sums_stride(tile) * format_.sum_bytes;
  }

  // Where the accumulators of one split wait for the others; rows are as far apart as columns are many.
  char* partial(int64_t split, int64_t sum, const pointwise::Tile& tile) const {
    const int64_t matrix = (split * words_.accumulators + sum) * words_.batch + tile.batch;
    return partial_ + (matrix * words_.m * words_.n + tile.row * words_.n + tile.column) * format_.sum_bytes;
  }

  // Bytes of the packed block of `lines` lines.
  int64_t block_bytes(bool is_b, int64_t lines, int64_t depth) const {
    const int64_t padded = is_b ? format_.padded_columns(lines) : format_.padded_rows(lines);
    return padded * format_.units(depth) * format_.unit_bytes;
  }
  int64_t depth(int64_t block) const { return std::min(words_.depth, words_.k - block * words_.depth); }

  // Where a launch packs the block: all matrices of tiles of blocks, as if each were whole.
  char* packed(int64_t i, int64_t batch, int64_t tile, int64_t block) const {
    const Matrix& matrix = matrices_[i];
    return matrix.packed + ((batch % matrix.count(words_.batch) * matrix.tiles() + tile) * blocks() + block) *
                               block_bytes(i > 0, matrix.tile_lines, words_.depth);
  }

  // The lines of matrix i, from this one and this place along k on.
  Lines lines(int64_t i, int64_t batch, int64_t line = 0, int64_t k = 0) const {
    const MatrixWords& words = matrices_[i].words;
    const int64_t first = batch * words.batch_stride + line * words.line_stride + k * words.depth_stride;
    const int64_t size = pointwise::element_bytes(Dtype(words.dtype));
    return {matrices_[i].data + first * size, words.line_stride, words.depth_stride};
  }

  // Packs a block of matrix i, panel after panel, from line `begin` of the tile on.
  void pack(int64_t i, int64_t batch, int64_t tile, int64_t block, int64_t begin, char* to) const {
    const Matrix& matrix = matrices_[i];
    const bool is_b = i > 0;
    const int64_t first = tile * matrix.tile_lines + begin;
    const int64_t lines_used = std::min(matrix.tile_lines - begin, matrix.lines - first);
    if (lines_used == 0) return;  // All are packed as they are multiplied.
    const int64_t width = is_b ? format_.b_width : format_.panel_rows(lines_used),
                  step = is_b ? format_.b_width : format_.a_step;
    const Block part{first, block * words_.depth, lines_used, depth(block), format_.units(depth(block)), width, step};
    (is_b ? format_.pack_b : format_.pack_a)(lines(i, batch), part, to);
  }

  // The panels of a block of matrix i, from line `begin` of the tile on: packed before, or now.
  const char* panels(int64_t i, int64_t batch, int64_t tile, int64_t block, int64_t begin, char* here) const {
    if (matrices_[i].ahead()) return packed(i, batch, tile, block);
    pack(i, batch, tile, block, begin, here);
    return here;
  }

  // Fetches, into the L2 cache, the part of a block of a tile's rows of a that falls to one panel of b: the one at
  // `column` of `columns`.
  void fetch_rows(const pointwise::Tile& tile, int64_t block, int64_t column, int64_t columns) const {
    const MatrixWords& words = matrices_[0].words;
    if (matrices_[0].ahead() || words.depth_stride != 1) return;
    const int64_t size = pointwise::element_bytes(Dtype(words.dtype)), bytes = depth(block) * size;
    const int64_t begin = bytes * column / columns, end = bytes * (column + format_.b_width) / columns;
    const char* row = static_cast<const char*>(lines(0, tile.batch, tile.row, block * words_.depth).data);
    for (int64_t i = 0; i < tile.rows; ++i, row += words.line_stride * size) {
      for (int64_t byte = begin; byte < end; byte += kLineBytes) __builtin_prefetch(row + byte, 0, kL2);
    }
  }

  // Columns of a tile that are packed as their first rows are multiplied: whole panels.
  int64_t packed_multiplying(const pointwise::Tile& tile) const {
    const bool packs = matrices_[1].words.packing == Packing::multiplying;
    return packs ? tile.columns / format_.b_width * format_.b_width : 0;
  }

  // Where a tile's accumulators lie in the result itself, if they can be there as multiplications leave them.
  char* in_result(const pointwise::Tile& tile) const {
    const bool whole = format_.a_step == 1 && tile.columns % format_.b_width == 0;
    if (words_.plain == 0 || words_.splits > 1 || !whole) return nullptr;
    const pointwise::Array& result = arrays_[words_.operands];
    return static_cast<char*>(result.data) +
           (tile.batch * result.batch + tile.row * result.row + tile.column) * format_.sum_bytes;
  }
  int64_t result_stride() const { return arrays_[words_.operands].row; }

  // Runs the epilogue on a tile's accumulators, or leaves those of a split where they wait for the others.
  void leave(const Place& place, const pointwise::Tile& tile, const char* const* accumulators) const {
    const int64_t stride = sums_stride(tile), sum_bytes = format_.sum_bytes;
    if (words_.splits == 1) {
      pointwise::Rows rows[kMaxAccumulators];
      for (int64_t sum = 0; sum < words_.accumulators; ++sum) rows[sum] = {accumulators[sum], stride};
      return finish(place, tile, rows);
    }
    for (int64_t sum = 0; sum < words_.accumulators; ++sum) {
      char* to = partial(place.split, sum, tile);
      for (int64_t row = 0; row < tile.rows; ++row) {
        std::memcpy(to + row * words_.n * sum_bytes, accumulators[sum] + row * stride * sum_bytes,
                    size_t(tile.columns * sum_bytes));
      }
    }
  }

  // Runs the epilogue on a tile.
  void finish(const Place& place, const pointwise::Tile& tile, const pointwise::Rows* accumulators) const {
    pointwise::Array arrays[kMaxArrays];
    for (int64_t i = 0; i < words_.operands + words_.results; ++i) {
      arrays[i] = arrays_[i];
      arrays[i].data = static_cast<char*>(arrays[i].data) + place.row * tile_strides_[i]->tile_row +
                       place.column * tile_strides_[i]->tile_column;
    }
    const pointwise::Interpreter epilogue(program_, arrays, arrays + words_.operands);
    epilogue.initialize(tile);
    epilogue.run(accumulators, tile);
  }

 private:
  const CallWords& words_;
  const int64_t* program_;
  const Format format_;
  Matrix matrices_[1 + kMaxAccumulators];
  char* partial_;
  pointwise::Array arrays_[kMaxArrays];
  const ArrayWords* tile_strides_[kMaxArrays];
  const void* others_;
};

}  // namespace product

JAXDNN_ISA_END
