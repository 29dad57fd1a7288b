// Launches of kernels on the CPU: each block by as many threads as it has, one block after the other.
#pragma once

#include <barrier>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "cuda.h"

#define __global__
#define __launch_bounds__(...)
#define __shared__ static

struct Place3 {
  unsigned x, y, z;
};
inline thread_local Place3 threadIdx;
inline Place3 blockIdx, blockDim;
inline std::unique_ptr<std::barrier<>> block_barrier;

inline void __syncthreads() { block_barrier->arrive_and_wait(); }

template <class... P, std::size_t... kAt>
void launch(unsigned grid, Place3 block, void (*kernel)(P...), void* const* arguments, std::index_sequence<kAt...>) {
  const unsigned count = block.x * block.y * block.z;
  blockDim = block;
  for (unsigned b = 0; b < grid; ++b) {
    blockIdx = {b, 0, 0};
    block_barrier = std::make_unique<std::barrier<>>(count);
    std::vector<std::thread> threads;
    for (unsigned t = 0; t < count; ++t) {
      threads.emplace_back([&, t] {
        threadIdx = {t % block.x, t / block.x % block.y, t / block.x / block.y};
        kernel(*static_cast<std::remove_cv_t<P>*>(arguments[kAt])...);
        block_barrier->arrive_and_drop();
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
}

/// `arguments`: addresses of the kernel's parameters.
template <class... P>
void launch(unsigned grid, Place3 block, void (*kernel)(P...), void* const* arguments) {
  launch(grid, block, kernel, arguments, std::index_sequence_for<P...>());
}
