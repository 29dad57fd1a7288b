// Waiting at barriers in shared memory.
#pragma once

#include "ptx/barrier.cuh"

namespace jaxdnn {

#if __CUDA_ARCH__ >= 900
/// Waits for the end of the phase of parity `parity`.
__device__ __forceinline__ void mbarrier_wait(unsigned barrier, unsigned parity) {
  while (!ptx::mbarrier_try_wait_parity(barrier, parity)) {
  }
}
#endif

}  // namespace jaxdnn
