// Memory that a thread keeps from one task to the next, so that tasks don't allocate.
#pragma once

#include <cstddef>
#include <cstdlib>

#include "kernel.h"

JAXDNN_ISA_BEGIN

class ThreadMemory {
 public:
  ThreadMemory() = default;
  ~ThreadMemory() { std::free(bytes_); }
  ThreadMemory(const ThreadMemory&) = delete;
  ThreadMemory& operator=(const ThreadMemory&) = delete;

  // At least `size` bytes, aligned to a cache line, of which nothing is known. What was there before is gone.
  char* reserve(size_t size) {
    constexpr size_t kLine = 64;
    if (size > size_) {
      std::free(bytes_);
      size_ = (size + kLine - 1) / kLine * kLine;
      bytes_ = static_cast<char*>(std::aligned_alloc(kLine, size_));
    }
    return bytes_;
  }

 private:
  char* bytes_ = nullptr;
  size_t size_ = 0;
};

JAXDNN_ISA_END
