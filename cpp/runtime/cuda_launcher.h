// The custom call "jaxdnn_cuda": compiles a plan's unit when XLA instantiates the call, and launches its kernels.
#pragma once

#include "xla/ffi/api/c_api.h"

namespace jaxdnn {

extern XLA_FFI_TypeId* const cuda_state_type_id;
extern XLA_FFI_TypeInfo* const cuda_state_type_info;
XLA_FFI_Error* cuda_instantiate(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* cuda_execute(XLA_FFI_CallFrame* frame);

}  // namespace jaxdnn
