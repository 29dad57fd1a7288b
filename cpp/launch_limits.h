// What a launch may have at most; `MAX_ARGUMENTS` and `MAX_TENSOR_MAPS` in jaxdnn/engines/base.py.
#pragma once

#include <cstddef>

namespace jaxdnn {

// They let a launch keep its parameters on the stack.
inline constexpr size_t kMaxArguments = 128;
inline constexpr size_t kMaxTensorMaps = 17;

}  // namespace jaxdnn
