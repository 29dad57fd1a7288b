// What the two launchers share: errors at the FFI's boundary, and the addresses of a call's buffers.
#pragma once

#include <string>
#include <utility>

#include "error.h"
#include "plan.h"
#include "xla/ffi/api/ffi.h"

namespace jaxdnn {

namespace ffi = xla::ffi;

// Nothing may be thrown across the FFI. Must be called in a catch block.
inline ffi::Error current_error(const std::string& op) {
  try {
    throw;
  } catch (const PlanError& error) {
    // Decoding names the op itself; the rest is prefixed here.
    std::string message = error.what();
    if (message.compare(0, 6, "jaxdnn") != 0) message = "jaxdnn: " + op + ": " + message;
    return ffi::Error(ffi::ErrorCode::kInvalidArgument, message);
  } catch (const Unavailable& error) {
    return ffi::Error(ffi::ErrorCode::kUnavailable, "jaxdnn: " + op + ": " + error.what());
  } catch (const std::exception& error) {
    return ffi::Error(ffi::ErrorCode::kInternal, "jaxdnn: " + op + ": " + error.what());
  } catch (...) {
    return ffi::Error(ffi::ErrorCode::kInternal, "jaxdnn: " + op + ": unknown exception");
  }
}

// The operands and results of one call.
class CallBuffers {
 public:
  CallBuffers(const ffi::RemainingArgs& operands, const ffi::RemainingRets& results)
      : operands_(operands), results_(results) {}

  // Throws PlanError when the call has fewer buffers than the plan names.
  void check(const Plan& plan) const {
    if (static_cast<int64_t>(operands_.size()) >= plan.operands &&
        static_cast<int64_t>(results_.size()) >= plan.results) {
      return;
    }
    throw PlanError("the plan uses " + std::to_string(plan.operands) + " operands and " + std::to_string(plan.results) +
                    " results, but the call has " + std::to_string(operands_.size()) + " and " +
                    std::to_string(results_.size()));
  }

  void* address(const Buffer& buffer) const {
    if (buffer.is_result) return address(buffer, *results_.get<ffi::AnyBuffer>(buffer.index).value());
    return address(buffer, operands_.get<ffi::AnyBuffer>(buffer.index).value());
  }

 private:
  static void* address(const Buffer& buffer, const ffi::AnyBuffer& data) {
    if (buffer.offset > 0 && buffer.offset > static_cast<int64_t>(data.size_bytes())) {
      throw PlanError("offset " + std::to_string(buffer.offset) + " is beyond the " +
                      std::to_string(data.size_bytes()) + " bytes of " + (buffer.is_result ? "result " : "operand ") +
                      std::to_string(buffer.index));
    }
    return static_cast<char*>(data.untyped_data()) + buffer.offset;
  }

  const ffi::RemainingArgs& operands_;
  const ffi::RemainingRets& results_;
};

}  // namespace jaxdnn
