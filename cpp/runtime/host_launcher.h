// The custom call "jaxdnn_host": runs a plan's kernels on the CPU.
#pragma once

#include "xla/ffi/api/c_api.h"

namespace jaxdnn {

extern XLA_FFI_TypeId* const host_state_type_id;
extern XLA_FFI_TypeInfo* const host_state_type_info;
XLA_FFI_Error* host_instantiate(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* host_execute(XLA_FFI_CallFrame* frame);

}  // namespace jaxdnn
