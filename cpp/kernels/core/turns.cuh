// Turns of warp groups that multiply.
#pragma once

#include "ptx/barrier.cuh"

namespace jaxdnn {

/// Turns at starting multiplies, in which the consumers take part as often as each other; none without kTurns.
template <bool kTurns, int kConsumers>
struct ConsumerTurns {
  int consumer;

  /// The first turn is consumer 0's.
  __device__ __forceinline__ void start() const {
    if (consumer == kConsumers - 1) pass_on();
  }

  __device__ __forceinline__ void wait() const {
    if constexpr (kTurns) ptx::barrier_sync(1 + consumer, 256);
  }

  __device__ __forceinline__ void pass_on() const {
    if constexpr (kTurns) ptx::barrier_arrive(1 + (consumer + 1) % kConsumers, 256);
  }
};

}  // namespace jaxdnn
