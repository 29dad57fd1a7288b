// Products of matrices: packing ahead, multiplying, and finishing what was split along k. matmul_call.h draws it.
//
// Arguments of each kernel: the words of the call (`CallWords`, then `ArrayWords` for each operand and result of the
// epilogue); the epilogue's program; for a and each b its data and where it is packed; the accumulators of splits; the
// epilogue's operands and results. A buffer that the call doesn't have is replaced by any address.
#include <cstring>

#include "../base/kernel.h"
#include "../base/thread_memory.h"
#include "call.h"
#include "stream.h"

JAXDNN_ISA_BEGIN

namespace product {

// Where a thread works on a tile.
struct Workspace {
  char *a, *b, *panel, *accumulators[kMaxAccumulators];  // panel: of b, which is packed as it is multiplied

  Workspace(const Call& call, const pointwise::Tile& tile) {
    static thread_local ThreadMemory memory;
    constexpr int64_t kApart = 256;
    const int64_t depth = std::min(call.words().depth, call.words().k);
    const bool streams = call.words().streams != 0;
    const int64_t packed = call.packed_multiplying(tile);
    // Streaming wants a as dense rows in the type of the accumulators.
    const int64_t a_panels = call.matrix(0).ahead() ? 0 : call.block_bytes(false, tile.rows, depth);
    const int64_t a_bytes = streams ? tile.rows * depth * call.format().sum_bytes : a_panels;
    const int64_t b_bytes =
        streams || call.matrix(1).ahead() ? 0 : call.block_bytes(true, tile.columns - packed, depth);
    const int64_t panel_bytes = packed > 0 ? call.block_bytes(true, call.format().b_width, depth) : 0;
    const int64_t bytes = a_bytes + b_bytes + panel_bytes + kMaxAccumulators * call.accumulator_bytes(tile);
    char* next = memory.reserve(size_t(bytes + (3 + kMaxAccumulators) * kApart));
    const auto take = [&](int64_t bytes) {
      char* taken = next;
      next += (bytes + kApart - 1) / kApart * kApart;
      return taken;
    };
    a = take(a_bytes);
    b = take(b_bytes);
    panel = take(panel_bytes);
    for (auto& sum : accumulators) sum = take(call.accumulator_bytes(tile));
  }
};

template <typename T>
inline void add_row(const char* from, char* to, int64_t count) {
  const T* x = reinterpret_cast<const T*>(from);
  T* y = reinterpret_cast<T*>(to);
  for (int64_t i = 0; i < count; ++i) y[i] = pointwise::sum(y[i], x[i]);
}

// The accumulators of a tile of few rows over the blocks of its split.
template <typename C>
inline void stream_tile(const Call& call, const Place& place, const pointwise::Tile& tile, const Workspace& space) {
  const CallWords& words = call.words();
  const int64_t stride = call.sums_stride(tile);
  C* a = reinterpret_cast<C*>(space.a);
  for (int64_t sum = 0; sum < words.accumulators; ++sum)
    std::memset(space.accumulators[sum], 0, size_t(call.accumulator_bytes(tile)));
  for (int64_t block = call.first_block(place.split); block < call.first_block(place.split + 1); ++block) {
    const int64_t k = block * words.depth, depth = call.depth(block);
    with_streamed<C>(Dtype(words.matrices[0].dtype), [&](auto element) {
      dense_rows<decltype(element)>(call.lines(0, place.batch), tile.row, k, tile.rows, depth, a);
    });
    for (int64_t sum = 0; sum < words.accumulators; ++sum) {
      const Stream<C> out{a, depth, tile.rows, reinterpret_cast<C*>(space.accumulators[sum]), stride};
      with_streamed<C>(Dtype(words.matrices[1 + sum].dtype), [&](auto element) {
        stream<decltype(element)>(call.lines(1 + sum, place.batch), tile.column, k, tile.columns, depth, out);
      });
    }
  }
}

// The accumulators of a tile over the blocks of its split.
inline void multiply_tile(const Call& call, const Place& place, const pointwise::Tile& tile, const Workspace& space) {
  const Format& format = call.format();
  const CallWords& words = call.words();
  const int64_t stride = call.sums_stride(tile), row_bytes = stride * format.sum_bytes;
  const int64_t panel_rows = format.panel_rows(tile.rows), others = (tile.rows - 1) / panel_rows;
  const int64_t packed = call.packed_multiplying(tile);
  const int64_t first = call.first_block(place.split), end = call.first_block(place.split + 1);
  for (int64_t block = first; block < end; ++block) {
    const int64_t units = format.units(call.depth(block));
    const char* a = call.panels(0, place.batch, place.row, block, 0, space.a);
    for (int64_t sum = 0; sum < words.accumulators; ++sum) {
      const int64_t i = 1 + sum;
      const char* panels = call.panels(i, place.batch, place.column, block, packed, space.b);
      for (int64_t column = 0; column < tile.columns; column += format.b_width) {
        const bool packs = column < packed;
        const Lines lines = call.lines(i, place.batch, tile.column + column, block * words.depth);
        const char* b = packs ? space.panel : panels + (column - packed) * units * format.unit_bytes;
        // Between them, the rows that don't pack this panel of b fetch the next.
        Ahead ahead{b, 0, units};
        if (column + format.b_width < packed && others > 0) {
          const char* next = static_cast<const char*>(lines.data) + format.b_width * format.unit_bytes;
          ahead = {next, lines.depth_stride * format.unit_bytes, others};
        }
        if (packs && sum == 0 && block + 1 < end) call.fetch_rows(tile, block + 1, column, packed);
        char* to = space.accumulators[sum] + column * format.sum_bytes;
        // The rows of a whose multiplication packs.
        const int64_t rows = packs ? std::min(panel_rows, tile.rows) : 0;
        if (packs) {
          format.multiply_packing[rows - 1](units, a, lines.data, lines.depth_stride, space.panel, to, stride,
                                            block > first);
        }
        format.multiply_panels(units, a + rows * units * format.unit_bytes, tile.rows - rows, panel_rows, b,
                               to + rows * row_bytes, stride, block > first, ahead);
      }
    }
  }
}

}  // namespace product

// A task packs one block of one tile of one matrix.
void product_pack(const void* const* arguments, int64_t task) {
  const product::Call call(arguments);
  for (int64_t i = 0; i <= call.words().accumulators; ++i) {
    const product::Matrix& matrix = call.matrix(i);
    if (!matrix.ahead()) continue;
    const int64_t tiles = matrix.tiles(), blocks = call.blocks();
    const int64_t tasks = matrix.count(call.words().batch) * tiles * blocks;
    if (task < tasks) {
      const int64_t block = task % blocks, tile = task / blocks % tiles, batch = task / blocks / tiles;
      return call.pack(i, batch, tile, block, 0, call.packed(i, batch, tile, block));
    }
    task -= tasks;
  }
}

// A task sums `group` tiles, and finishes them unless k is split.
void product_multiply(const void* const* arguments, int64_t task) {
  const product::Call call(arguments);
  const product::TileScope scope(call.format().tiles);
  const int64_t group = call.words().group, end = std::min((task + 1) * group, call.tiles() * call.words().splits);
  for (int64_t index = task * group; index < end; ++index) {
    const product::Place place = call.place(index);
    const pointwise::Tile tile = call.tile(place);
    const product::Workspace space(call, tile);
    if (!call.words().streams) {
      product::multiply_tile(call, place, tile, space);
    } else if (call.format().sum_bytes == 8) {
      product::stream_tile<double>(call, place, tile, space);
    } else if (call.sums_integers()) {
      product::stream_tile<int32_t>(call, place, tile, space);
    } else {
      product::stream_tile<float>(call, place, tile, space);
    }
    call.leave(place, tile, space.accumulators);
  }
}

// A task adds the splits of `group` tiles, in order, and finishes them.
void product_finish(const void* const* arguments, int64_t task) {
  const product::Call call(arguments);
  const int64_t sum_bytes = call.format().sum_bytes;
  const int64_t group = call.words().group, end = std::min((task + 1) * group, call.tiles());
  for (int64_t index = task * group; index < end; ++index) {
    const product::Place place = call.place(index);
    const pointwise::Tile tile = call.tile(place);
    const product::Workspace space(call, tile);
    const int64_t stride = call.sums_stride(tile);
    pointwise::Rows accumulators[product::kMaxAccumulators];
    for (int64_t sum = 0; sum < call.words().accumulators; ++sum) {
      accumulators[sum] = {space.accumulators[sum], stride};
      for (int64_t split = 0; split < call.words().splits; ++split) {
        const char* from = call.partial(split, sum, tile);
        char* to = space.accumulators[sum];
        for (int64_t row = 0; row < tile.rows; ++row) {
          if (split == 0) {
            std::memcpy(to, from, size_t(tile.columns * sum_bytes));
          } else if (sum_bytes == 8) {
            product::add_row<double>(from, to, tile.columns);
          } else if (call.sums_integers()) {
            product::add_row<int32_t>(from, to, tile.columns);
          } else {
            product::add_row<float>(from, to, tile.columns);
          }
          from += call.words().n * sum_bytes;
          to += stride * sum_bytes;
        }
      }
    }
    call.finish(place, tile, accumulators);
  }
}

JAXDNN_ISA_END

JAXDNN_HOST_KERNELS({"product_pack", product_pack}, {"product_multiply", product_multiply},
                    {"product_finish", product_finish})
