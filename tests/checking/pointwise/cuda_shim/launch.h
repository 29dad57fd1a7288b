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
inline Place3 blockIdx, blockDim, gridDim;
inline std::unique_ptr<std::barrier<>> block_barrier;

inline void __syncthreads() { block_barrier->arrive_and_wait(); }

template <class... P, std::size_t... kAt>
void launch(Place3 grid, Place3 block, void (*kernel)(P...), void* const* arguments, std::index_sequence<kAt...>) {
  const unsigned count = block.x * block.y * block.z;
  gridDim = grid;
  blockDim = block;
  for (unsigned b = 0; b < grid.x * grid.y * grid.z; ++b) {
    blockIdx = {b % grid.x, b / grid.x % grid.y, b / grid.x / grid.y};
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
void launch(Place3 grid, Place3 block, void (*kernel)(P...), void* const* arguments) {
  launch(grid, block, kernel, arguments, std::index_sequence_for<P...>());
}
