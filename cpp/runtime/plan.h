// A plan as the runtime holds it: jaxdnn/plan.py, decoded from the custom call's attributes and checked.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "../launch_limits.h"
#include "xla/ffi/api/ffi.h"

namespace jaxdnn {

struct Buffer {
  bool is_result;
  int64_t index;
  int64_t offset;
};

struct TensorMap {
  Buffer buffer;
  int dtype;
  std::vector<uint64_t> dimensions;
  std::vector<uint64_t> strides;  // of all dimensions but the innermost
  std::vector<uint32_t> box;
  std::vector<uint32_t> element_strides;
  int interleave, swizzle, l2_promotion, fill;
  std::vector<int> lower, upper;  // corners, of one that is im2col; its box is channels and places
};

struct Argument {
  enum class Kind { buffer, scalar, tensor_map, constant, scratch, counter };
  Kind kind;
  Buffer buffer;
  int64_t bits;    // the scalar's value, or the number of the counter, at the low end
  int64_t index;   // into the plan's tensor maps or constants; of a counter, how many there are
  int64_t offset;  // into the plan's scratch
};

struct Launch {
  std::string kernel;
  std::vector<Argument> arguments;
  std::array<int64_t, 3> grid, block, cluster;
  int64_t shared_memory;
};

struct Plan {
  std::string op, unit, arch;
  std::vector<Launch> launches;
  std::vector<TensorMap> tensor_maps;
  std::vector<std::vector<int64_t>> constants;
  int64_t scratch = 0;  // bytes that the launcher provides, on the host
  // The fewest operands and results that a call must have.
  int64_t operands = 0, results = 0;
};

// Throws PlanError, which names the op and what is wrong with its plan.
Plan decode_plan(const xla::ffi::Dictionary& attributes);

}  // namespace jaxdnn
