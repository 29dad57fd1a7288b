// Values that the compiler is kept from knowing.
#pragma once

namespace jaxdnn {

/// A value that the compiler knows nothing of: an address that it would otherwise compute again each time.
__device__ __forceinline__ void make_opaque(unsigned& value) { asm volatile("" : "+r"(value)); }

}  // namespace jaxdnn
