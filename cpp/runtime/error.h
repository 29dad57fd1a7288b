// What can go wrong, by what the caller should do about it.
#pragma once

#include <stdexcept>

namespace jaxdnn {

// Something outside the package is missing or too old; the message names the remedy.
struct Unavailable : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// NVRTC rejected a translation unit; the message holds its log.
struct CompileError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A plan that the runtime can't execute: a defect of the engine that wrote it.
struct PlanError : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

}  // namespace jaxdnn
